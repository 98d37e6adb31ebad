"""Score terms, user mods and block lists on a GPU, compared with plain attention and FlexAttention.

    python benchmarks/score_terms.py [--head-dims 64 128 256] [--backend cuda] [--save]

Measures forward and backward of each built-in term and of score_mod and mask_mod on (4, 4096, 16,
D) in bfloat16: medians of CUDA events, in ms. FlexAttention is compiled. It runs the same mods,
with softcap, ALiBi and bias written as mods, and its block mask is built before the timing.
``differs`` is the largest difference between the gradients of pyfa and FlexAttention, over the
largest gradient. ``--save`` writes ``results/score_terms_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import machine
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import pyfa

_BATCH, _ROWS, _HEADS = 4, 4096, 16
Options = dict[str, Any]


def built_in() -> dict[str, Options]:
    heads = torch.linspace(0.05, 0.5, _HEADS, device="cuda")
    bias = torch.randn(1, 1, _ROWS, _ROWS, device="cuda", dtype=torch.bfloat16)
    return {
        "full": {},
        "causal": {"causal": True},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": heads},
        "sinks": {"sinks": heads},
        "dropout": {"dropout_p": 0.1, "seed": 1},
        "bias": {"bias": bias},
    }


def mods() -> dict[str, Options]:
    document = torch.arange(_ROWS, device="cuda", dtype=torch.int32) // 512
    table = torch.randn(_HEADS, 2 * _ROWS, device="cuda")
    return {
        "mask_mod causal": {"mask_mod": lambda b, h, i, j: i >= j},
        "mask_mod sliding 512": {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 512)},
        "mask_mod documents": {
            "mask_mod": lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
        },
        "score_mod softcap": {"score_mod": lambda s, b, h, i, j: 30 * torch.tanh(s / 30)},
        "score_mod relative": {"score_mod": lambda s, b, h, i, j: s + table[h, i - j + _ROWS]},
    }


def as_mods(given: dict[str, Options]) -> dict[str, Options]:
    """Return those of the built-in terms that FlexAttention takes as mods."""
    slopes, bias = given["alibi"]["alibi_slopes"], given["bias"]["bias"][0, 0]
    return {
        "softcap": {"score_mod": lambda s, b, h, i, j: 30 * torch.tanh(s / 30)},
        "alibi": {"score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()},
        "bias": {"score_mod": lambda s, b, h, i, j: s + bias[i, j]},
    }


def inputs(dim: int, rows: int = _ROWS, batch: int = _BATCH) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = (batch, rows, _HEADS, dim)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def median_ms(function: Callable[[], Any], seconds: float = 0.06) -> float:
    for _ in range(2):
        function()
    found: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(found) < 5:
        begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(stop))
    return statistics.median(found)


def measured(
    attend: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Milliseconds of forward and backward, and the gradients."""
    with torch.no_grad():
        forward = median_ms(lambda: attend(*leaves))
    out = attend(*leaves)
    grads = list(torch.autograd.grad(out, leaves, dout, retain_graph=True))
    backward = median_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    return {"forward": round(forward, 4), "backward": round(backward, 4)}, grads


def flex(dim: int, options: Options) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The same by PyTorch's compiled FlexAttention, whose tensors are (B, H, S, D)."""
    q, k, v, dout = (x.detach().transpose(1, 2).contiguous() for x in inputs(dim))
    given = dict(options)
    mask = given.pop("mask_mod", None)
    if mask is not None:
        given["block_mask"] = create_block_mask(mask, None, None, _ROWS, _ROWS, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found, grads = measured(lambda *x: compiled(*x, **given), leaves, dout)
    return found, [x.transpose(1, 2) for x in grads]


def _compile(job: tuple[int, str, str]) -> None:
    """Builds the kernels of a row in a process of its own: they stay in the caches. ``flex`` as
    backend: those of FlexAttention."""
    dim, name, backend = job
    if backend == "flex":
        options = {**as_mods(built_in()), **mods()}.get(name)
        if options:
            flex(dim, options)
        return
    options = {**built_in(), **mods()}[name]
    q, k, v, dout = inputs(dim, batch=1)
    out = pyfa.attention(q, k, v, backend=backend, **options)
    torch.autograd.grad(out, (q, k, v), dout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    names = [*built_in(), *mods()]
    backends = [options.backend] + ["flex"] * (not options.no_flex)
    jobs = [(dim, name, each) for dim in options.head_dims for name in names for each in backends]
    # Not multiprocessing.Pool: its workers may not have children, and PyTorch's compiler has.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        list(pool.map(_compile, jobs))
    torch._dynamo.config.recompile_limit = 64
    rows: list[dict[str, Any]] = []
    for dim in options.head_dims:
        terms, own = built_in(), mods()
        theirs_too = {**as_mods(terms), **own}
        for name, asked in {**terms, **own}.items():
            q, k, v, dout = inputs(dim)

            def attend(*x: torch.Tensor, asked: Options = asked) -> torch.Tensor:
                return pyfa.attention(*x, backend=options.backend, **asked)

            times, grads = measured(attend, [q, k, v], dout)
            row: dict[str, Any] = {"head_dim": dim, "call": name, **times}
            if name in theirs_too and not options.no_flex:
                theirs, expected = flex(dim, theirs_too[name])
                largest = max(x.abs().max().item() for x in expected)
                pairs = zip(grads, expected, strict=True)
                difference = max((x - y).abs().max().item() for x, y in pairs)
                row |= {f"flex_{pass_}": ms for pass_, ms in theirs.items()}
                row["differs"] = round(difference / largest, 5)
            rows.append(row)
            print(row, flush=True)
    if options.save:
        gpu = torch.cuda.get_device_name().split()[-1].lower()
        print(machine.save(f"score_terms_{gpu}", {"backend": options.backend, "rows": rows}))


if __name__ == "__main__":
    main()
