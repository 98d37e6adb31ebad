"""Score terms, user mods and block lists on a GPU, compared with plain attention and FlexAttention.

    python benchmarks/score_terms.py [--head-dims 64 128 256] [--backend cuda] [--save]

Measures forward and backward of each built-in term and of score_mod and mask_mod on (4, 4096, 16,
D) in bfloat16, in ms of the GPU (``sides.HOW``). FlexAttention is compiled and takes turns with
pyfa. It runs the same mods, with softcap, ALiBi and bias written as mods, and its block mask is
built before the timing. ``differs`` is the largest difference between the gradients of pyfa and
FlexAttention, over the largest gradient. ``--save`` writes ``results/score_terms_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import machine
import sides
import torch
from sides import Options, Side

import pyfa
from pyfa.bench.timing import Clock

_BATCH, _ROWS, _HEADS = 4, 4096, 16


def built_in() -> dict[str, Options]:
    heads = torch.linspace(0.05, 0.5, _HEADS, device=sides.device())
    bias = torch.randn(1, 1, _ROWS, _ROWS, device=sides.device(), dtype=torch.bfloat16)
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
    document = torch.arange(_ROWS, device=sides.device(), dtype=torch.int32) // 512
    table = torch.randn(_HEADS, 2 * _ROWS, device=sides.device())
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


def pyfas(dim: int, options: Options, backend: str, batch: int = 0) -> Side:
    torch.manual_seed(0)
    shape = (batch or _BATCH, _ROWS, _HEADS, dim)
    made = [torch.randn(shape, device=sides.device(), dtype=torch.bfloat16) for _ in range(4)]
    *leaves, dout = [x.requires_grad_() for x in made[:3]] + made[3:]
    return Side(lambda *x: pyfa.attention(*x, backend=backend, **options), leaves, dout)


def row_of(clock: Clock, dim: int, name: str, backend: str, with_flex: bool) -> dict[str, Any]:
    terms, own = built_in(), mods()
    ours = pyfas(dim, {**terms, **own}[name], backend)
    both, row = {"pyfa": ours}, {"head_dim": dim, "call": name}
    options = {**as_mods(terms), **own}.get(name)
    if with_flex and options is not None:
        theirs = sides.flex(ours.leaves, ours.dout, options)
        try:
            expected = [x.transpose(1, 2) for x in theirs.gradients()]
        except RuntimeError as error:  # no configuration of it fits the device
            row["flex_error"] = f"{type(error).__name__}: {error}"[:300]
        else:
            both["flex"] = theirs
            row["differs"] = sides.difference(ours.gradients(), expected)
    return row | sides.measured(clock, both)


def _compile(job: tuple[int, str, str]) -> None:
    """Builds the kernels of a row in a process of its own: they stay in the caches. ``flex`` as
    backend: those of FlexAttention."""
    dim, name, backend = job
    if backend == "flex":
        options = {**as_mods(built_in()), **mods()}.get(name)
        if options:
            ours = pyfas(dim, {}, backend)
            side = sides.flex(ours.leaves, ours.dout, options)
            # ``row_of`` reports errors, which need not fit through a pipe.
            with torch.no_grad(), contextlib.suppress(RuntimeError):
                side.attend(*side.leaves)
            with contextlib.suppress(RuntimeError):
                side.gradients()
        return
    pyfas(dim, {**built_in(), **mods()}[name], backend, batch=1).gradients()


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
    clock, rows = Clock(sides.device()), []
    for dim in options.head_dims:
        for name in names:
            rows.append(row_of(clock, dim, name, options.backend, not options.no_flex))
            print(rows[-1], flush=True)
    if options.save:
        gpu = machine.gpu()
        print(
            machine.save(
                f"score_terms_{gpu}", {"backend": options.backend, "how": sides.HOW, "rows": rows}
            )
        )


if __name__ == "__main__":
    main()
