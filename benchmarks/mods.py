"""Time score_mod and mask_mod on a GPU, compared with FlexAttention and attention_varlen.

    python benchmarks/mods.py [--rows 4096 16384] [--head-dims 64 128] [--mods NAME …] [--save]
    python benchmarks/mods.py --parts lists --mods causal documents --rows 16384 --name mods_triton

The parts, all but the last by default:

``table``: forward and backward of seven mods on (16384 / rows, rows, 16, D) in bfloat16, in ms:
medians of CUDA events, pyfa and FlexAttention in alternation. FlexAttention gets the same functions
and a block mask that was built before. ``differs`` is the largest difference between the gradients
of the two, over the largest gradient. ``spread``: the 10th and 90th percentile of the times over
the median, the widest of the four. A process per row compiles; none measures before all have
compiled, and one at a time.

``documents``: the document mask beside ``attention_varlen`` on the same packed documents.
``first_use``: seconds of the first call with a mask that no code was compiled for, in a process
that has run another. ``new_tensor``: host µs of a call whose captured tensor is new at each call,
and of a repeated call. ``lists``: a mask_mod on the triton backend by block lists, and with every
tile visited. ``--save`` writes ``results/NAME_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import machine
import torch

import pyfa

_TOKENS, _HEADS, _DOCUMENT = 16384, 16, 512
Options = dict[str, Any]
Attend = Callable[..., torch.Tensor]
Job = tuple[int, int, str]


def mods(rows: int) -> dict[str, Options]:
    document = torch.arange(rows, device="cuda", dtype=torch.int32) // _DOCUMENT
    table = torch.randn(_HEADS, 2 * rows, device="cuda")
    slopes = torch.tensor([2.0 ** (-(h + 1) / 2) for h in range(_HEADS)], device="cuda")
    return {
        "causal": {"mask_mod": lambda b, h, i, j: i >= j},
        "sliding 1024": {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 1024)},
        "documents": {"mask_mod": lambda b, h, i, j: (document[i] == document[j]) & (i >= j)},
        "prefix 512": {"mask_mod": lambda b, h, i, j: (i >= j) | (j < 512)},
        "alibi": {"score_mod": lambda s, b, h, i, j: s + slopes[h] * (j - i)},
        "softcap": {"score_mod": lambda s, b, h, i, j: 30 * torch.tanh(s / 30)},
        "relative bias": {"score_mod": lambda s, b, h, i, j: s + table[h, i - j + rows]},
    }


PARTS = ("table", "documents", "first_use", "new_tensor", "lists")
NAMES = ("causal", "sliding 1024", "documents", "prefix 512", "alibi", "softcap", "relative bias")


def inputs(rows: int, dim: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = (_TOKENS // rows, rows, _HEADS, dim)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def times(functions: Sequence[Callable[[], Any]], seconds: float = 0.15) -> list[list[float]]:
    """Sorted ms of each function, called in alternation."""
    for function in functions:
        for _ in range(2):
            function()
    found: list[list[float]] = [[] for _ in functions]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(found[0]) < 7:
        for function, each in zip(functions, found, strict=True):
            begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            each.append(begin.elapsed_time(stop))
    return [sorted(each) for each in found]


def spread(found: list[list[float]]) -> list[float]:
    low = min(x[len(x) // 10] / statistics.median(x) for x in found)
    return [
        round(low, 3),
        round(max(x[-1 - len(x) // 10] / statistics.median(x) for x in found), 3),
    ]


def flex_of(rows: int, options: Options) -> Attend:
    """Compiled FlexAttention, whose tensors are (B, H, S, D)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    given = dict(options)
    mask = given.pop("mask_mod", None)
    if mask is not None:
        given["block_mask"] = create_block_mask(mask, None, None, rows, rows, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda *x: compiled(*x, **given)


def row_of(job: Job, backend: str, all_compiled: Any, turn: Any, results: Any) -> None:
    """One row of the table, in a process of its own."""
    rows, dim, name = job
    options = mods(rows)[name]
    q, k, v, dout = inputs(rows, dim)
    theirs_in = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    dout_theirs = dout.transpose(1, 2).contiguous()

    def ours(*x: torch.Tensor) -> torch.Tensor:
        return pyfa.attention(*x, backend=backend, **options)

    row: dict[str, Any] = {"mod": name, "rows": rows, "head_dim": dim}
    try:
        theirs = flex_of(rows, options)
        with torch.no_grad():
            ours(q, k, v)
            theirs(*theirs_in)
        out, out_theirs = ours(q, k, v), theirs(*theirs_in)
        grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        wanted = torch.autograd.grad(out_theirs, theirs_in, dout_theirs, retain_graph=True)
        largest = max(x.abs().max().item() for x in wanted)
        pairs = zip(grads, wanted, strict=True)
        difference = max((x - y.transpose(1, 2)).abs().max().item() for x, y in pairs)
        row["differs"] = round(difference / largest, 5)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    all_compiled.wait()
    if "error" not in row:
        with turn:
            with torch.no_grad():
                forward = times((lambda: ours(q, k, v), lambda: theirs(*theirs_in)))
            backward = times(
                (
                    lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
                    lambda: torch.autograd.grad(
                        out_theirs, theirs_in, dout_theirs, retain_graph=True
                    ),
                )
            )
        for pass_, (own, flex) in (("forward", forward), ("backward", backward)):
            row[pass_] = round(statistics.median(own), 4)
            row[f"flex_{pass_}"] = round(statistics.median(flex), 4)
            row[f"{pass_}_speedup"] = round(statistics.median(flex) / statistics.median(own), 3)
        row["spread"] = spread([*forward, *backward])
    results.put(row)


def by_lists(job: tuple[Job, bool], all_compiled: Any, turn: Any, results: Any) -> None:
    """One mask on the triton backend, by lists or by all tiles, in a process of its own."""
    from pyfa.backends.triton import plans

    (rows, dim, name), listed = job
    if not listed:
        plans.list_tiles = lambda *_: None  # type: ignore[assignment]
    options = mods(rows)[name]
    q, k, v, dout = inputs(rows, dim)

    def attend() -> torch.Tensor:
        return pyfa.attention(q, k, v, backend="triton", **options)

    out = attend()
    grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    row = {"mod": name, "rows": rows, "head_dim": dim, "lists": listed}
    exact = pyfa.attention(q, k, v, backend="cuda", **options)
    expected = torch.autograd.grad(exact, (q, k, v), dout)
    row["differs"] = max(
        ((x - y).abs().max() / y.abs().max()).item()
        for x, y in zip((out, *grads), (exact, *expected), strict=True)
    )
    all_compiled.wait(60)
    with turn:
        with torch.no_grad():
            (forward,) = times((attend,))
        (backward,) = times((lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),))
    row["forward"] = round(statistics.median(forward), 4)
    row["backward"] = round(statistics.median(backward), 4)
    row["spread"] = spread([forward, backward])
    results.put(row)


def in_processes(target: Any, jobs: Sequence[Any], *given: Any) -> list[dict[str, Any]]:
    # Inductor's compile workers would be as many again.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    all_compiled, turn, results = context.Barrier(len(jobs)), context.Lock(), context.Queue()
    processes = [
        context.Process(target=target, args=(job, *given, all_compiled, turn, results))
        for job in jobs
    ]
    for process in processes:
        process.start()
    found = []
    for _ in processes:
        found.append(results.get(timeout=240))
        print(found[-1], flush=True)
    for process in processes:
        process.join()
    return sorted(found, key=lambda row: (row["rows"], row["head_dim"], NAMES.index(row["mod"])))


def documents(rows: int, dim: int, backend: str) -> dict[str, Any]:
    """Documents as a mask beside the same documents packed."""
    q, k, v, dout = (x.detach()[:1] for x in inputs(rows, dim))
    options = mods(rows)["documents"]
    lengths = torch.arange(0, rows + 1, _DOCUMENT, device="cuda", dtype=torch.int32)

    def packed(*x: torch.Tensor) -> torch.Tensor:
        return pyfa.attention_varlen(
            *(each[0] for each in x), lengths, lengths, _DOCUMENT, _DOCUMENT, causal=True,
            backend=backend,
        )  # fmt: skip

    def masked(*x: torch.Tensor) -> torch.Tensor:
        return pyfa.attention(*x, backend=backend, **options)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, out_packed = masked(*leaves), packed(*leaves)
    row: dict[str, Any] = {"rows": rows, "head_dim": dim, "document": _DOCUMENT}
    with torch.no_grad():
        forward = times((lambda: masked(*leaves), lambda: packed(*leaves)))
    backward = times(
        (
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
            lambda: torch.autograd.grad(out_packed, leaves, dout[0], retain_graph=True),
        )
    )
    for pass_, (own, varlen) in (("forward", forward), ("backward", backward)):
        row[pass_] = round(statistics.median(own), 4)
        row[f"varlen_{pass_}"] = round(statistics.median(varlen), 4)
        row[f"{pass_}_speed_of_varlen"] = round(
            statistics.median(varlen) / statistics.median(own), 3
        )
    row["spread"] = spread([*forward, *backward])
    return row


def first_use(dim: int, backend: str) -> list[dict[str, Any]]:
    """Seconds of first calls. Each mask has a number that no other code was compiled with."""
    rows = 4096
    q, k, v, dout = inputs(rows, dim)
    document = torch.arange(rows, device="cuda", dtype=torch.int32) // _DOCUMENT
    new = time.time_ns() % 100_000 + 5000
    masks: dict[str, Options] = {
        "sliding": {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < new)},
        "documents": {"mask_mod": lambda b, h, i, j: (document[i] == document[j]) & (i < j + new)},
        "softcap": {"score_mod": lambda s, b, h, i, j: new * torch.tanh(s / new)},
    }
    pyfa.attention(q, k, v, backend=backend)
    torch.cuda.synchronize()
    found = []
    for name, options in masks.items():
        begin = time.perf_counter()
        out = pyfa.attention(q, k, v, backend=backend, **options)
        torch.cuda.synchronize()
        forward = time.perf_counter() - begin
        begin = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), dout)
        torch.cuda.synchronize()
        backward = time.perf_counter() - begin
        found.append(
            {
                "mod": name, "head_dim": dim, "forward_s": round(forward, 3),
                "backward_s": round(backward, 3),
            }
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


def new_tensor(dim: int, backend: str) -> dict[str, Any]:
    """Host µs of a forward, with lists kept and with a new document map at each call."""
    rows, calls = 4096, 50
    q, k, v, _ = (x.detach() for x in inputs(rows, dim))
    own = torch.arange(rows, device="cuda", dtype=torch.int32) // _DOCUMENT
    maps = [own.clone() for _ in range(calls)]

    def call(document: torch.Tensor) -> None:
        pyfa.attention(
            q, k, v, mask_mod=lambda b, h, i, j: (document[i] == document[j]) & (i >= j),
            backend=backend,
        )  # fmt: skip

    found: dict[str, list[float]] = {"repeated_us": [], "new_us": []}
    for turn in range(7):
        for name, given in (("repeated_us", [own] * calls), ("new_us", maps)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for document in given:
                call(document)
            found[name].append((time.perf_counter() - begin) / calls * 1e6)
            torch.cuda.synchronize()
        for document in maps:
            document.add_(0 * turn)  # of which nobody knows that it changes nothing
    medians = {name: round(statistics.median(each[1:]), 1) for name, each in found.items()}
    more = round(medians["new_us"] - medians["repeated_us"], 1)
    return {"head_dim": dim, **medians, "more_us": more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--mods", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--parts", nargs="+", default=PARTS[:-1], choices=PARTS)
    parser.add_argument("--name", default="mods", help="of the file that --save writes")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    backend, dims, parts = options.backend, options.head_dims, options.parts
    jobs = [(rows, dim, name) for rows in options.rows for dim in dims for name in options.mods]
    results: dict[str, Any] = {"backend": backend}
    if "table" in parts:
        results["rows"] = in_processes(row_of, jobs, backend)
    if "documents" in parts:
        results["documents"] = [documents(n, dim, backend) for n in options.rows for dim in dims]
        print(results["documents"], flush=True)
    if "first_use" in parts:
        results["first_use"] = [row for dim in dims for row in first_use(dim, backend)]
    if "new_tensor" in parts:
        results["new_tensor"] = [new_tensor(dim, backend) for dim in dims]
        print(results["new_tensor"], flush=True)
    if "lists" in parts:
        both = [(job, listed) for job in jobs for listed in (True, False)]
        results["lists"] = in_processes(by_lists, both)
    if options.save:
        gpu = torch.cuda.get_device_name().split()[-1].lower()
        print(machine.save(f"{options.name}_{gpu}", results))


if __name__ == "__main__":
    main()
