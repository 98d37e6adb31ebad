"""Check that a row's bits do not depend on its batch, and time batch invariance.

    python benchmarks/batch_invariance.py --backend cuda [--rows 500] [--save]
    python benchmarks/batch_invariance.py --backend cuda --cost [--save]

Random rows, each in a call of its own, against batches, chunks of a prefill, other capacities,
pages, packed and padded batches, appended keys; gradients of sequences alone against batches.
``--without`` runs the same without ``batch_invariant``: what it finds is what the test can find.
``--plant`` leaves it out of caches of more than 2 sequences, and no other company may differ.
Exit status 1 where something differs. ``--cost`` times calls with ``batch_invariant`` beside the
same without. The first run compiles kernels, with ``--jobs 16`` beside each other; ``--models 4``
draws from fewer. ``--parts DIR`` keeps what each pool of rows found in a file of its own, and takes
from there what the same commit has compared before.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import invariance_cases as cases
import machine
import torch
from invariance_cases import Failure, Model, Sizes, Tally

import pyfa
from pyfa import bench

HALF, SINGLE = torch.float16, torch.float32
_MODELS = (
    Model(8, 2, 128, 128, longest=1500),
    Model(4, 4, 64, 64, HALF),
    Model(4, 1, 64, 64, window=300),
    Model(8, 8, 128, 128, HALF, window=100, sinks=True),
    Model(2, 2, 96, 96),
    Model(6, 2, 128, 128, softcap=20.0, alibi=True),
    Model(2, 1, 256, 256),
    Model(2, 1, 192, 128),
    Model(3, 3, 80, 80, HALF),
    # Long caches.
    Model(8, 2, 128, 128, longest=6000, gradient=False),
    Model(4, 1, 64, 64, HALF, window=3000, longest=6000, gradient=False),
    Model(4, 2, 128, 128, sinks=True, softcap=20.0, longest=5000, gradient=False),
    Model(2, 1, 256, 256, longest=5000, gradient=False),
    Model(2, 1, 192, 128, HALF, longest=5000, gradient=False),
    Model(2, 2, 96, 96, sinks=True, longest=5000, gradient=False),
)
_SINGLE = (Model(4, 2, 64, 64, SINGLE), Model(2, 1, 128, 128, SINGLE, window=70))
_SMALL = Sizes((2, 3), (16, 50, 1000), (16, 48), (2,), (2,))
# Options that do not tell what is compared.
_NOT_ASKED = ("jobs", "show", "save", "cost", "parts")
# batch, rows, keys, heads, heads_k, head_dim, page size
_COSTS = (
    ("decode", 8, 1, 8192, 32, 8, 128, 0), ("decode", 64, 1, 8192, 32, 8, 128, 0),
    ("decode", 64, 1, 8192, 32, 8, 128, 64), ("decode", 8, 1, 32768, 64, 8, 128, 64),
    ("decode", 32, 1, 4096, 32, 32, 128, 0), ("decode", 32, 1, 4096, 32, 8, 64, 0),
    ("decode", 8, 1, 8192, 32, 8, 64, 0), ("decode", 8, 1, 8192, 32, 8, 64, 16),
    ("decode", 8, 1, 8192, 16, 2, 256, 0), ("decode", 32, 1, 8192, 16, 2, 256, 0),
    ("decode", 64, 1, 2048, 16, 8, 256, 0), ("decode", 32, 1, 4096, 16, 1, 128, 0),
    ("decode", 24, 1, 8192, 32, 8, 128, 0), ("decode", 8, 1, 8192, 16, 1, 128, 0),
    ("decode", 8, 4, 8192, 32, 8, 128, 0),
    ("prefill", 8, 512, 8192, 32, 8, 64, 64), ("prefill", 8, 512, 8192, 32, 8, 128, 16),
    ("prefill", 8, 2048, 2048, 16, 4, 256, 0),
    ("prefill", 8, 2048, 2048, 32, 8, 128, 0), ("prefill", 8, 4096, 4096, 16, 16, 64, 0),
    ("prefill", 8, 4096, 4096, 32, 8, 128, 0), ("prefill", 8, 512, 8192, 32, 8, 128, 64),
    ("training", 8, 2048, 2048, 16, 16, 128, 0), ("training", 8, 2048, 2048, 16, 16, 64, 0),
)  # fmt: skip


def models_of(backend: str, small: bool) -> list[Model]:
    found = list(_MODELS)
    if backend in ("triton", "torch"):
        found += _SINGLE
    return [model._replace(longest=min(model.longest, 300)) for model in found] if small else found


def device_of(backend: str) -> str:
    return "cuda" if torch.cuda.is_available() and backend != "emulator" else "cpu"


def part(options: argparse.Namespace, number: int, of: int = 0) -> Tally:
    """What job ``number`` of ``of`` compares, by default of ``--jobs``."""
    device = device_of(options.backend)
    small = device == "cpu"
    if small or options.jobs > 1:
        torch.set_num_threads(1)  # small products wait longer for a second one than they gain
    return cases.run(
        models_of(options.backend, small)[: options.models], rows=options.rows, device=device,
        backend=options.backend, sizes=_SMALL if small else Sizes(), seed=options.seed,
        invariant=not options.without, at_once=options.at_once, share=(number, of or options.jobs),
        plant=options.plant,
    )  # fmt: skip


def in_parts(options: argparse.Namespace) -> tuple[Tally, float]:
    """Every pool of rows, and the seconds that they took, of those that a file has, too."""
    pools, found, seconds = -(-options.rows // options.at_once), Tally(), 0.0
    asked = {name: value for name, value in vars(options).items() if name not in _NOT_ASKED}
    asked |= {"commit": bench.environment()["commit"]}
    options.parts.mkdir(parents=True, exist_ok=True)
    for number in range(pools):
        path = options.parts / f"{number}-of-{pools}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("asked") != asked:
            begin = time.perf_counter()
            tally = part(options, number, pools)
            kept = {"asked": asked, "seconds": time.perf_counter() - begin, **vars(tally)}
            kept["failures"] = [failure._asdict() for failure in tally.failures]
            path.write_text(json.dumps(kept))
            print(f"pool {number + 1} of {pools}: {tally.rows} rows, "
                  f"{len(tally.failures)} differ, {kept['seconds']:.0f} s", flush=True)  # fmt: skip
        again = Tally()
        again.rows, again.compared, again.differed = (
            kept[name] for name in ("rows", "compared", "differed")
        )
        again.failures = [Failure(**one) for one in kept["failures"]]
        found.add(again)
        seconds += kept["seconds"]
    return found, seconds


def check(options: argparse.Namespace) -> int:
    device = device_of(options.backend)
    small = device == "cpu"
    begin, found, seconds = time.perf_counter(), Tally(), 0.0
    if options.parts:
        found, seconds = in_parts(options)
    elif options.jobs == 1:
        found = part(options, 0)
    else:
        # Most of a first run is compilation, which processes do beside each other.
        with multiprocessing.get_context("spawn").Pool(options.jobs) as jobs:
            for tally in jobs.imap(functools.partial(part, options), range(options.jobs)):
                found.add(tally)
    seconds = seconds or time.perf_counter() - begin
    table = [
        {"company": kind, "compared": count, "differed": found.differed.get(kind, 0)}
        for kind, count in sorted(found.compared.items())
    ]
    for line in table:
        print(f"{line['company']:32} {line['compared']:6} compared {line['differed']:6} differed")
    for failure in found.failures[: options.show]:
        print(f"  {failure.company}: {failure.what} of {failure.row} by {failure.apart:.3g}; "
              f"{failure.model}")  # fmt: skip
    kind = "without batch_invariant" if options.without else "batch_invariant"
    kind += ", a dependence on the batch planted" if options.plant else ""
    compared, differed = sum(found.compared.values()), len(found.failures)
    print(f"{options.backend}, {kind}: {found.rows} rows, {compared:,} comparisons, "
          f"{differed:,} differ, {seconds:.0f} s")  # fmt: skip
    if options.save:
        results: dict[str, Any] = {
            "title": f"Bits of rows alone and in company, {options.backend}, {kind}",
            "how": "Equal bits of output, LSE and gradients: benchmarks/batch_invariance.py.",
            "backend": options.backend, "device": device, "seed": options.seed,
            "rows": found.rows, "compared": compared, "differed": differed,
            "seconds": round(seconds, 1), "companies": table,
            "failures": [failure._asdict() for failure in found.failures[:50]],
        }  # fmt: skip
        name = f"batch_invariance_{options.backend}"
        name += "_interpreted" if small and options.backend == "triton" else ""
        name += "_without" if options.without else "_planted" if options.plant else ""
        print(machine.save(name, results))
    return 1 if differed else 0


def _inputs(case: tuple[Any, ...]) -> tuple[Callable[..., Any], list[torch.Tensor], dict[str, Any]]:
    """The function of a case, its tensors and its other arguments."""
    kind, batch, rows, keys, heads, heads_k, dim, page = case

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, more = normal(batch, rows, heads, dim), {"causal": True}
    if kind == "training":
        x = [q, normal(batch, keys, heads_k, dim), normal(batch, keys, heads_k, dim)]
        return pyfa.attention, [one.requires_grad_() for one in x], more
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    outer = (batch, keys)
    if page:
        each = keys // page
        order = torch.randperm(batch * each, device="cuda").int().view(batch, each)
        outer, more["page_table"] = (batch * each, page), order
    k, v = normal(*outer, heads_k, dim), normal(*outer, heads_k, dim)
    if kind == "prefill" and not page:
        return pyfa.attention, [q, k, v], more
    return pyfa.attention_kvcache, [q, k, v], {**more, "cache_seqlens": lengths}


def _seconds(call: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Medians of two calls that take turns, on the device."""
    for one in (call, other):
        for _ in range(3):
            one()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(15):
        for to, one in zip(times, (call, other), strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the host is ahead: no gaps between launches
            begin.record()
            one()
            end.record()
            end.synchronize()
            to.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times[0]), statistics.median(times[1])


def cost(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    lines = []
    for case in _COSTS:
        kind, batch, rows, keys, heads, heads_k, dim, page = case
        function, x, more = _inputs(case)

        def call(
            invariant: bool,
            function: Any = function, x: Any = x, more: Any = more, kind: str = kind,
        ) -> None:  # fmt: skip
            out = function(*x, backend=options.backend, batch_invariant=invariant, **more)
            if kind == "training":
                torch.autograd.grad(out, x, out)

        try:
            default, invariant = _seconds(lambda: call(False), lambda: call(True))
        except pyfa.UnsupportedProblem as error:
            print(error)
            continue
        lines.append({
            "kind": kind, "batch": batch, "rows": rows, "keys": keys, "heads": heads,
            "heads_k": heads_k, "head_dim": dim, "page_size": page, "default_seconds": default,
            "invariant_seconds": invariant, "ratio": round(invariant / default, 3),
        })  # fmt: skip
        shape = f"batch {batch:3}, {rows:5} rows, {keys:6} keys, {heads:2}/{heads_k:<2} heads"
        times = f"{default * 1e6:8.0f} µs, {invariant * 1e6:8.0f} µs, {invariant / default:.2f}"
        print(f"{kind:8} {shape} of {dim:3}, page {page:3}: {times}", flush=True)
        del x, function, more
    if options.save:
        results = {
            "title": f"Cost of batch_invariant, {options.backend}",
            "how": "Median of 15 calls on the device, the two in turn, with a warm cache.",
            "backend": options.backend, "costs": lines,
        }  # fmt: skip
        print(machine.save(f"batch_invariance_cost_{options.backend}", results))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, help="only so many of them (default: all)")
    parser.add_argument("--at-once", type=int, default=20, help="rows of one pool of sequences")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the pools")
    parser.add_argument("--parts", type=Path, help="a folder for what each pool of rows found")
    parser.add_argument("--show", type=int, default=20, help="failures that are printed")
    parser.add_argument("--without", action="store_true", help="without batch_invariant")
    parser.add_argument("--plant", action="store_true", help="plant a dependence on the batch")
    parser.add_argument("--cost", action="store_true", help="time it instead; needs a GPU")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    return cost(options) if options.cost else check(options)


if __name__ == "__main__":
    sys.exit(main())
