"""Time score_mod and mask_mod on a GPU, compared with FlexAttention and attention_varlen.

    python benchmarks/mods.py [--rows 4096 16384] [--head-dims 64 128] [--mods NAME …] [--save]
    python benchmarks/mods.py --parts lists --mods causal documents --rows 16384 --name mods_triton

The parts, all but the last by default:

``table``: forward and backward of seven mods on (16384 / rows, rows, 16, D) in bfloat16, in ms of
the GPU (``sides.HOW``), beside compiled FlexAttention, which gets the same functions and a block
mask that was built before. ``differs`` is the largest difference between the gradients of the two,
over the largest gradient. A process per row compiles; none measures before all have compiled, and
one at a time.

``documents``: the document mask beside ``attention_varlen`` on the same packed documents.
``first_use``: seconds of the first call with a mask that no code was compiled for, and of its
backward, in a process that has run another call and its backward. ``new_tensor``: host µs of a call
whose captured tensor is new at each call, and of a repeated call. ``lists``: a mask_mod on the
triton backend by block lists, and with every tile visited. ``--save`` writes
``results/NAME_<gpu>.json``. Without a GPU it runs on the CPU, to try the script (``--backend
torch --rows 256``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import machine
import sides
import torch
from sides import Options, Side

import pyfa
from pyfa.bench.timing import Clock

_TOKENS, _HEADS, _DOCUMENT = 16384, 16, 512
_FIRST_ROWS = 4096  # of the calls in first_use and new_tensor
Job = tuple[int, int, str]


def documents_of(rows: int) -> torch.Tensor:
    return torch.arange(rows, device=sides.device(), dtype=torch.int32) // _DOCUMENT


def mods(rows: int) -> dict[str, Options]:
    document = documents_of(rows)
    table = torch.randn(_HEADS, 2 * rows, device=sides.device())
    slopes = torch.tensor([2.0 ** (-(h + 1) / 2) for h in range(_HEADS)], device=sides.device())
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
    shape = (max(_TOKENS // rows, 1), rows, _HEADS, dim)
    made = [torch.randn(shape, device=sides.device(), dtype=torch.bfloat16) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def pyfas(rows: int, dim: int, options: Options, backend: str) -> Side:
    *leaves, dout = inputs(rows, dim)
    return Side(lambda *x: pyfa.attention(*x, backend=backend, **options), leaves, dout)


def row_of(job: Job, backend: str, all_compiled: Any, turn: Any, results: Any) -> None:
    """One row of the table, in a process of its own."""
    rows, dim, name = job
    options = mods(rows)[name]
    row: dict[str, Any] = {"mod": name, "rows": rows, "head_dim": dim}
    try:
        ours = pyfas(rows, dim, options, backend)
        theirs = sides.flex(ours.leaves, ours.dout, options)
        with torch.no_grad():
            ours.attend(*ours.leaves)
            theirs.attend(*theirs.leaves)
        expected = [x.transpose(1, 2) for x in theirs.gradients()]
        row["differs"] = sides.difference(ours.gradients(), expected)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    all_compiled.wait()
    if "error" not in row:
        with turn:
            row |= sides.measured(Clock(sides.device()), {"pyfa": ours, "flex": theirs})
    results.put(row)


def by_lists(job: tuple[Job, bool], all_compiled: Any, turn: Any, results: Any) -> None:
    """One mask on the triton backend, by lists or by all tiles, in a process of its own."""
    from pyfa.backends.triton import plans

    (rows, dim, name), listed = job
    if not listed:
        plans.list_tiles = lambda *_: None  # type: ignore[assignment]
    options = mods(rows)[name]
    side = pyfas(rows, dim, options, "triton")
    exact = pyfas(rows, dim, options, "cuda")
    row = {"mod": name, "rows": rows, "head_dim": dim, "lists": listed}
    found, expected = ([x.attend(*x.leaves), *x.gradients()] for x in (side, exact))
    row["differs"] = max(sides.difference([x], [y]) for x, y in zip(found, expected, strict=True))
    all_compiled.wait(60)
    with turn:
        row |= sides.measured(Clock(sides.device()), {"pyfa": side})
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


def documents(clock: Clock, rows: int, dim: int, backend: str) -> dict[str, Any]:
    """Documents as a mask beside the same documents packed."""
    options = mods(rows)["documents"]
    leaves = [x.detach()[:1].clone().requires_grad_() for x in inputs(rows, dim)[:3]]
    dout = inputs(rows, dim)[3][:1]
    offsets = torch.arange(0, rows + 1, _DOCUMENT, device=clock.device, dtype=torch.int32)

    def packed(*x: torch.Tensor) -> torch.Tensor:
        return pyfa.attention_varlen(
            *(each[0] for each in x), offsets, offsets, _DOCUMENT, _DOCUMENT, causal=True,
            backend=backend,
        )  # fmt: skip

    def masked(*x: torch.Tensor) -> torch.Tensor:
        return pyfa.attention(*x, backend=backend, **options)

    both = {"pyfa": Side(masked, leaves, dout), "varlen": Side(packed, leaves, dout[0])}
    row = {"rows": rows, "head_dim": dim, "document": _DOCUMENT}
    return row | sides.measured(clock, both)


def first_use(clock: Clock, dim: int, backend: str) -> list[dict[str, Any]]:
    """Seconds of first calls. Each mask has a number that no other code was compiled with."""
    rows = _FIRST_ROWS
    q, k, v, dout = inputs(rows, dim)
    document = documents_of(rows)
    new = time.time_ns() % 100_000 + 5000
    masks: dict[str, Options] = {
        "sliding": {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < new)},
        "documents": {"mask_mod": lambda b, h, i, j: (document[i] == document[j]) & (i < j + new)},
        "softcap": {"score_mod": lambda s, b, h, i, j: new * torch.tanh(s / new)},
    }
    # PyTorch's first backward of a process imports 486 modules.
    torch.autograd.grad(pyfa.attention(q, k, v, backend=backend), (q, k, v), dout)
    clock.wait()
    found = []
    for name, options in masks.items():
        begin = time.perf_counter()
        out = pyfa.attention(q, k, v, backend=backend, **options)
        clock.wait()
        forward = time.perf_counter() - begin
        begin = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), dout)
        clock.wait()
        backward = time.perf_counter() - begin
        found.append(
            {
                "mod": name, "head_dim": dim, "forward_s": round(forward, 3),
                "backward_s": round(backward, 3),
            }
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


def new_tensor(clock: Clock, dim: int, backend: str) -> dict[str, Any]:
    """Host µs of a forward, with lists kept and with a new document map at each call."""
    rows, calls = _FIRST_ROWS, 50
    q, k, v, _ = (x.detach() for x in inputs(rows, dim))
    own = documents_of(rows)
    maps = [own.clone() for _ in range(calls)]

    def call(document: torch.Tensor) -> None:
        pyfa.attention(
            q, k, v, mask_mod=lambda b, h, i, j: (document[i] == document[j]) & (i >= j),
            backend=backend,
        )  # fmt: skip

    found: dict[str, list[float]] = {"repeated_us": [], "new_us": []}
    for turn in range(7):
        for name, given in (("repeated_us", [own] * calls), ("new_us", maps)):
            clock.wait()
            begin = time.perf_counter()
            for document in given:
                call(document)
            found[name].append((time.perf_counter() - begin) / calls * 1e6)
            clock.wait()
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
    parser.add_argument("--backend", default="cuda", help="of pyfa, in all parts but lists")
    parser.add_argument("--parts", nargs="+", default=PARTS[:-1], choices=PARTS)
    parser.add_argument("--name", default="mods", help="of the file that --save writes")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    backend, dims, parts = options.backend, options.head_dims, options.parts
    jobs = [(rows, dim, name) for rows in options.rows for dim in dims for name in options.mods]
    results: dict[str, Any] = {"backend": backend, "how": sides.HOW}
    if "table" in parts:
        results["rows"] = in_processes(row_of, jobs, backend)
    clock = Clock(sides.device())
    if "documents" in parts:
        results["documents"] = [
            documents(clock, n, dim, backend) for n in options.rows for dim in dims
        ]
        print(results["documents"], flush=True)
    if "first_use" in parts:
        results["first_use"] = [row for dim in dims for row in first_use(clock, dim, backend)]
    if "new_tensor" in parts:
        results["new_tensor"] = [new_tensor(clock, dim, backend) for dim in dims]
        print(results["new_tensor"], flush=True)
    if "lists" in parts:
        both = [(job, listed) for job in jobs for listed in (True, False)]
        results["lists"] = in_processes(by_lists, both)
    if options.save:
        gpu = machine.gpu()
        print(machine.save(f"{options.name}_{gpu}", results))


if __name__ == "__main__":
    main()
