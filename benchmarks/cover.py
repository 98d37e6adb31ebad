"""Search for cases that execute instructions of the shipped code that no case executes yet.

``python benchmarks/cover.py --ran FILE [--minutes M] [--jobs N] [--out FILE]``. ``FILE`` is what
``coverage.py --level full --ran FILE`` keeps. Cases are drawn at random, or made of one
that has executed something new by taking a few fields of another; where most instructions of a
kernel are left, its cases are tried most. What executes ``--least`` new instructions is kept: in
``--out``, a line each, for ``pyfa/conformance/grid_cover.jsonl``. Every case is judged as in
conformance, so that what fails is printed.

With ``--quick N`` nothing is drawn or run. ``FILE`` is what ``coverage.py --level full --all --ran
FILE`` keeps. N of the full level's cases are written to ``--out``, as lines of the quick level: the
next one is always the one worth the most in its time, until they take ``--seconds``. What a case is
worth is what it executes, in all code objects in the wheel: 1 for an instruction that no case of
the quick level executes, 0.8 for one that a single case executes, and 0.2 for one of two cases.
Most planted faults that survive are in code that a single case executes.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import heapq
import itertools
import json
import os
import random
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import executed
import mutations
import numpy as np
from executed import Ran
from processes import Processes

from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.conformance import grid, grid_fp8
from pyfa.conformance.cases import BIASES, LAYOUTS, RECIPES, ROTARIES, Case
from pyfa.conformance.report import CRASHED, FAILED, PASSED
from pyfa.emulator import Covered
from pyfa.problem import FEATURES

_LENGTHS = (0, 1, 7, 16, 17, 33, 63, 64, 65, 96, 127, 128, 129, 200, 256, 257, 300, 513)
_LONG = (16, 100, 300, 513, 640, 1000, 1024, 1300, 2048, 2100, 3000, 4100)
_DIMS = (64, 64, 128, 128, 40, 59, 32, 8, 1, 111, 72, 96)
# What an instruction is worth to a case that executes it: by how many others do, none to three.
_WORTH = np.array([1.0, 0.8, 0.2, 0.0])
_SECONDS_OF_ANY = 1.0  # that any case counts beside its own: the number of cases is limited as well
_HEADS = ((1, 1), (2, 2), (4, 2), (8, 1), (16, 1), (16, 2), (32, 1), (64, 1), (6, 2))


def drawn(draw: random.Random) -> Case:
    def often(share: float) -> bool:
        return draw.random() < share

    kind = draw.choice(("dense", "varlen", "varlen", "kvcache", "kvcache", "kvcache"))
    cache = kind == "kvcache"
    lone = cache and often(0.7)
    batch = draw.choice((1, 1, 2, 3))
    rows = [draw.choice((1, 1, 2, 3, 4, 9) if lone else _LENGTHS) for _ in range(batch)]
    keys = [draw.choice(_LONG if cache and often(0.7) else _LENGTHS) for _ in range(batch)]
    packed_q = cache and often(0.15)
    if kind == "dense" or (cache and not packed_q):
        rows = rows[:1] * batch
    if kind == "dense":
        keys = keys[:1] * batch
    heads_q, heads_k = draw.choice(_HEADS)
    dtype = draw.choice(("bfloat16", "float16", "bfloat16", "float16", "float8_e4m3fnuz"))
    float8 = dtype.startswith("float8")
    cache_dtype = "float8_e4m3fnuz" if cache and not float8 and often(0.15) else ""
    any8 = float8 or bool(cache_dtype)
    dim = draw.choice(_DIMS)
    backward = not cache and not any8 and often(0.6)
    causal = often(0.4)
    bias = draw.choice(BIASES) if often(0.2) else ""
    edge = (-1, 0, 5, 63, 64, 130, 700, -3)
    return Case(
        kind=kind, dtype=dtype, lengths_q=tuple(rows), lengths_k=tuple(keys), heads_q=heads_q,
        heads_k=heads_k, head_dim=dim, head_dim_v=dim if often(0.85) else draw.choice(_DIMS),
        backward=backward, dlse=draw.choice(("both", "only")) if backward and often(0.2) else "",
        causal=causal,
        window=(draw.choice(edge), draw.choice((0, -1) if causal else edge)) if often(0.25)
        else None,
        attention_chunk=draw.choice((40, 64, 200)) if often(0.1) else 0,
        softcap=draw.choice((2.0, 30.0)) if often(0.2) else 0.0,
        bias=bias, bias_grad=backward and bias not in ("", "bool") and often(0.5),
        alibi=draw.choice(("heads", "batch")) if often(0.2) else "", sinks=often(0.2),
        dropout_p=0.3 if not cache and often(0.1) else 0.0,
        deterministic=backward and often(0.4),
        used_q=kind == "varlen" and often(0.3), used_k=kind != "dense" and often(0.4),
        slack=draw.choice((0, 3, 64, 300)) if kind != "dense" else 0,
        page_size=draw.choice((16, 32, 48, 64, 128)) if kind != "dense" and often(0.35) else 0,
        leftpad=cache and often(0.2), batch_idx=cache and often(0.2), packed_q=packed_q,
        new_keys=draw.choice((1, 2, 5, 16, 70)) if cache and often(0.4) else 0,
        rotary=draw.choice(ROTARIES) if cache and often(0.3) else "",
        num_splits=draw.choice((1, 2, 3, 5, 8, 17, 40, 70)) if cache and often(0.5) else 0,
        recipe=draw.choice(RECIPES) if often(0.4) and not any8 else "plain",
        layout=draw.choice(LAYOUTS) if often(0.4) else "contiguous",
        cache_dtype=cache_dtype,
        scales=draw.choice(("tensor", "head", 16, 64)) if any8 and often(0.7) else "",
        out_dtype="float16" if float8 and often(0.4) else "",
        batch_invariant=often(0.06),
    )  # fmt: skip


def crossed(draw: random.Random, one: Case) -> Case:
    """``one`` with a few fields of another case."""
    other = drawn(draw)
    names = draw.sample([item.name for item in fields(Case) if item.name != "kind"], 4)
    if {"lengths_q", "lengths_k"} & set(names):
        names += ["lengths_q", "lengths_k"]
    return replace(one, **{name: getattr(other, name) for name in names})


class Search:
    def __init__(self, ran: list[Ran], static: dict[str, Covered], seed: int) -> None:
        self.static, self.draw = static, random.Random(f"cover/{seed}")
        self.executed: dict[str, set[int]] = collections.defaultdict(set)
        self.by_object: dict[str, list[Case]] = collections.defaultdict(list)
        self.kept: list[tuple[Ran, int]] = []
        self.bad: list[tuple[str, str]] = []
        for one in ran:
            self.add(one)

    def add(self, one: Ran) -> int:
        """How many instructions of shipped objects it executed that nothing had."""
        new = 0
        for digest, (_, addresses) in one.executed.items():
            if digest in self.static:
                found = set(addresses) - self.executed[digest]
                self.executed[digest] |= found
                new += len(found)
                if found or len(self.by_object[digest]) < 3:
                    self.by_object[digest].append(one.case)
        return new

    def next(self) -> Case:
        known, emulator = list(self.static), mutations.EMULATOR
        weights = [x.static - len(self.executed[digest]) + 1 for digest, x in self.static.items()]
        while True:
            if self.draw.random() < 0.35:
                case = drawn(self.draw)
            else:
                of = self.by_object[self.draw.choices(known, weights)[0]]
                case = crossed(self.draw, self.draw.choice(of)) if of else drawn(self.draw)
            work = max(case.lengths_q, default=0) * max(case.lengths_k, default=0) * case.heads_q
            if not case.flaws() and case.features <= emulator.FEATURES and work < 3_000_000:
                return case


def added(
    ran: list[Ran], quick: set[str], static: dict[str, Covered], most: int, seconds: float
) -> tuple[list[Ran], np.ndarray[Any, Any]]:
    """Up to ``most`` cases to add to those named ``quick``, of no more than ``seconds`` together;
    and of each instruction that both execute, how many cases do. The next one is always the one
    worth the most in its time."""
    passed = [one for one in ran if one.status == PASSED]
    sizes = collections.Counter[str]()  # in words
    for one in passed:
        for digest, (_, pcs) in one.executed.items():
            if digest in static:
                sizes[digest] = max(sizes[digest], max(pcs, default=0) // 4 + 1)
    begins = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    count = np.zeros(sum(sizes.values()), np.uint16)

    def places_of(one: Ran) -> np.ndarray[Any, Any]:
        here = [np.asarray(pcs, np.int64) // 4 + begins[digest]
                for digest, (_, pcs) in one.executed.items() if digest in static]  # fmt: skip
        return np.concatenate(here) if here else np.zeros(0, np.int64)

    left = [one for one in passed if one.case.name not in quick]
    places = [places_of(one) for one in left]
    for one in passed:
        if one.case.name in quick:
            count[places_of(one)] += 1

    def place(number: int) -> tuple[float, int]:
        worth = _WORTH[np.minimum(count[places[number]], len(_WORTH) - 1)].sum()
        return -worth / (left[number].seconds + _SECONDS_OF_ANY), number

    # A case is never worth more than before: the first one that is still the first when it is
    # counted again is the best.
    heap = [place(number) for number in range(len(left))]
    heapq.heapify(heap)
    found: list[Ran] = []
    while len(found) < most and heap:
        again = place(heap[0][1])
        if again != heap[0]:
            heapq.heapreplace(heap, again)
            continue
        if not again[0]:
            break
        heapq.heappop(heap)
        one = left[again[1]]
        if one.seconds <= seconds:
            seconds -= one.seconds
            count[places[again[1]]] += 1
            found.append(one)
    return found, count[count > 0]


def line_of(case: Case, level: str) -> str:
    default = asdict(Case())
    row = {name: x for name, x in asdict(case).items() if x != default[name]}
    return json.dumps({"level": level, **row}) + "\n"


def add_to_quick(options: argparse.Namespace, ran: list[Ran], static: dict[str, Covered]) -> None:
    dtypes = mutations.EMULATOR.DTYPES
    quick = {case.name for case in grid.cases("quick", mutations.EMULATOR.FEATURES, dtypes)}
    # Other backends may have the case in another float8 format: the line has that of the grid.
    all_dtypes = tuple(dict.fromkeys((*dtypes, *grid_fp8.FORMATS)))
    every = grid.cases("full", frozenset(FEATURES), all_dtypes)
    in_grid = {grid._in_their_float8(case, dtypes).name: case for case in every}
    ran = [one for one in ran if one.case.name in in_grid]
    total = sum(each.static for each in static.values())
    _, before = added(ran, quick, static, 0, 0.0)
    found, after = added(ran, quick, static, options.quick, options.seconds)
    for name, count in (("before", before), ("with them", after)):
        once = int((count == 1).sum())
        print(f"{name}: {len(count) / total:.2%} executed, {once / total:.2%} by a single case")
    print(f"{len(found)} more cases of {sum(one.seconds for one in found):.0f} s")
    lines = (line_of(in_grid[one.case.name], "quick") for one in found)
    options.out.write_text("".join(lines))


def run(search: Search, options: argparse.Namespace, end: float) -> int:
    processes = Processes(options.jobs, end, mutations.start)
    running: dict[Any, int] = {}
    tried = 0
    try:
        while time.monotonic() < end:
            for number, process in enumerate(processes.each):
                if number not in running.values():
                    future = process.submit(mutations.run_plainly, search.next(), False)
                    running[future] = number
            done = concurrent.futures.wait(
                running, max(0.0, end - time.monotonic()),
                concurrent.futures.FIRST_COMPLETED,
            ).done  # fmt: skip
            for future in done:
                del running[future]
                one = future.result()
                tried += 1
                if one.status in (FAILED, CRASHED):
                    search.bad.append((one.case.name, one.status))
                elif one.status == PASSED:
                    new = search.add(one)
                    if new >= options.least:
                        search.kept.append((one, new))
    finally:
        processes.close()
    return tried


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ran", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("cover.jsonl"))
    parser.add_argument("--quick", type=int, metavar="N", help="cases to add to the quick level")
    parser.add_argument("--seconds", type=float, default=50.0, help="of those of --quick together")
    options = parser.parse_args()
    end = time.monotonic() + options.minutes * 60
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        plans = (catalog.all_plans if options.quick else catalog.common_plans)(
            TARGET, executed.ARCH
        )
        static = dict(pool.map(executed.static_of, plans))
    ran = executed.read(options.ran)
    if options.quick:
        add_to_quick(options, ran, static)
        return
    search = Search(ran, static, options.seed)
    print("left to look:", round(end - time.monotonic()), "s", flush=True)
    tried = run(search, options, end)
    for row in executed.coverage([*ran, *(one for one, _ in search.kept)], static):
        print(row)
    print(f"{tried} cases tried, {len(search.kept)} kept, bad: {search.bad}")
    for one, new in search.kept:
        print(f"{new} instructions in {one.seconds:.2f} s: {one.case.name}")
    options.out.write_text("".join(line_of(one.case, "full") for one, _ in search.kept))
    executed.write(options.out.with_suffix(".xz"), [one for one, _ in search.kept])


if __name__ == "__main__":
    main()
