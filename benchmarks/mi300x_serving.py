"""Steps of a server on one MI300X by the timing model: a model, not measured.

python benchmarks/mi300x_serving.py [--against FILE] [--only TEXT]

Decode and chunked prefill, with every workgroup of every launch. The emulator runs one workgroup of
each kernel with several numbers of keys; between them, clocks are interpolated. ``combine`` is
modeled, too. Unlike ``mi300x_own.py`` this takes lengths that differ, windows and pages.
``--against FILE`` adds the times of another run, of other code, as ``us_before``.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np
import torch

from pyfa._torch import Empty
from pyfa.backends import BACKENDS
from pyfa.backends.common import program as programs
from pyfa.backends.common import splits
from pyfa.backends.hip import code, decode, plans, samples
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime, program
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import combine
from pyfa.backends.native import decode as native_decode
from pyfa.backends.native import forward as native_forward
from pyfa.backends.native.plans import name_of, values_of
from pyfa.backends.native.tiles import GROUP
from pyfa.cli.inspect_timing import WORDS
from pyfa.device import by_name
from pyfa.emulator.timing import constants, device, issue
from pyfa.plan import Plan
from pyfa.problem import Call, Problem, tensors_of

UNITS, DIES = 304, 8
FLOAT8 = torch.float8_e4m3fnuz
LEAST_GROUPS = 8  # of a part: kLeastGroups of attn_decode.hip
TRACED = (8, 16, 32, 64, 128, 256)  # groups of 16 keys of a workgroup


class Step(NamedTuple):
    """One step of a server. ``lengths``: the keys of each sequence; ``capacity``: the most that the
    cache holds of one. ``page``: 0 for a dense cache. ``narrow``: a float8 cache."""

    name: str
    lengths: tuple[int, ...]
    rows: int = 1
    heads_q: int = 32
    heads_k: int = 8
    dim: int = 128
    page: int = 64
    window: int = -1
    narrow: bool = False
    invariant: bool = False
    capacity: int = 0

    @property
    def most(self) -> int:
        return max(self.capacity, *self.lengths)

    def seen(self, keys: int) -> int:
        """Keys that the rows of one sequence see."""
        return keys if self.window < 0 else min(keys, self.window + self.rows)

    @property
    def causal(self) -> bool:
        return self.rows > 1

    def bytes_needed(self) -> float:
        """Read every key and value that is seen once, and q; write the output."""
        size = 1 if self.narrow else 2
        cache = 2.0 * size * self.dim * self.heads_k * sum(map(self.seen, self.lengths))
        return cache + 2.0 * 2 * self.dim * self.heads_q * self.rows * len(self.lengths)

    def flops(self) -> float:
        """Products of scores that are seen, twice."""
        pairs = 0.0
        for keys in self.lengths:
            for row in range(self.rows):
                last = keys - self.rows + row + 1 if self.causal else keys
                pairs += last if self.window < 0 else min(last, self.window + 1)
        return 4.0 * self.dim * self.heads_q * pairs

    def problem(self) -> Problem:
        needs = {"seqused"} | ({"causal"} if self.causal else set())
        needs |= {"paged"} if self.page else set()
        needs |= {"window"} if self.window >= 0 else set()
        needs |= {"fp8"} if self.narrow else set()
        needs |= {"gqa"} if self.heads_q != self.heads_k else set()
        needs |= {"batch_invariant"} if self.invariant else set()
        return Problem(
            batch=len(self.lengths), seqlen_q=self.rows, seqlen_k=self.most, heads_q=self.heads_q,
            heads_k=self.heads_k, head_dim=self.dim, head_dim_v=self.dim, dtype="bfloat16",
            features=frozenset(needs), device=by_name("MI300X"), square=False,
            dtype_k="float8_e4m3fnuz" if self.narrow else "",
        )  # fmt: skip


# ---- what a workgroup costs ---------------------------------------------------------------------


class Curve(NamedTuple):
    """Clocks of the workgroups on a compute unit by steps of the loop, at one end, and the matrix
    clocks of one workgroup."""

    at: tuple[float, ...]
    clocks: tuple[float, ...]
    matrix: tuple[float, ...]
    resident: int

    def of(self, steps: float) -> tuple[float, float]:
        found = []
        for values in (self.clocks, self.matrix):
            x = float(np.interp(steps, self.at, values))
            if steps > self.at[-1]:
                slope = (values[-1] - values[-2]) / (self.at[-1] - self.at[-2])
                x = values[-1] + (steps - self.at[-1]) * slope
            found.append(x)
        return found[0], found[1]


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return samples.empty(shape, like.stride(), dtype)


def recorded(wanted: str, run: Callable[[Launcher], object], group: int = 0) -> Any:
    """The trace of workgroup ``group`` of the one launch of the kernel ``wanted``, and its code."""
    found: list[Any] = []

    class Watching(EmulatorRuntime):
        @property
        def empty(self) -> Empty:
            return samples.empty

        def run(self, step: programs.Step, *rest: Any) -> None:
            super().run(step, *rest)
            if name_of(step.plan) == wanted:
                found.append((step, self.counters))

    run(Launcher(Watching(trace=(group,))))
    ((step, counters),) = found
    facts = code.load(step.plan, plans.EMULATED)
    fits = device.resident(facts.kernel, step.threads)
    return program(facts.data).code, counters.traces, fits


def cache_call(
    rows: int, keys: int, dim: int, page: int, narrow: bool, causal: bool, **more: Any
) -> Call:
    """One sequence of one KV head, whose keys fill ``keys``."""
    q = zeros(1, rows, 1, dim)
    shape = (-(-keys // page), page) if page else (1, keys)
    k, v = (zeros(*shape, 1, dim, dtype=FLOAT8 if narrow else torch.bfloat16) for _ in range(2))
    call = Call(q, k, v, max_seqlen_q=rows, max_seqlen_k=keys, num_splits=1)._replace(**more)
    call = call._replace(seqused_k=torch.tensor([keys], dtype=torch.int32))
    if page:
        call = call._replace(page_table=torch.arange(shape[0], dtype=torch.int32)[None])
    return call._replace(window_right=0) if causal else call


@functools.cache
def one_of(plan: Plan, steps: int, dim: int, page: int, causal: bool, split: bool = False) -> Any:
    """One workgroup of ``plan`` with so many steps of its loop, the first of two if ``split``."""
    block, values = TARGET.block_of(plan), values_of(plan)
    keys = steps * block.keys * (1 + split)
    call = cache_call(
        block.rows, keys, dim, page, "KEY_DTYPE" in values, causal, num_splits=1 + split
    )
    bind = native_decode.bind if plan.kernel == decode.KERNEL else native_forward.bind
    return recorded(name_of(plan), lambda launch: bind(launch, plan, call)(*tensors_of(call)))


@functools.cache
def curve(
    plan: Plan, dim: int, page: int, causal: bool, split: bool, resident: int, end: str
) -> Curve:
    at, clocks, matrix = [], [], []
    for steps in TRACED if plan.kernel == decode.KERNEL else (8, 16):
        of_code, traces, fits = one_of(plan, steps, dim, page, causal, split)
        resident = min(resident, fits)
        found = issue.simulate(issue.turns_of(of_code, traces, resident), end)
        at.append(float(steps))
        clocks.append(found.clocks)
        matrix.append(found.matrix_clocks / resident)
    return Curve(tuple(at), tuple(clocks), tuple(matrix), resident)


@functools.cache
def empty(plan: Plan, dim: int, page: int, resident: int, end: str) -> float:
    """The clocks of a workgroup whose part has no keys: the second of two, which comes first."""
    narrow = "KEY_DTYPE" in values_of(plan)
    call = cache_call(TARGET.block_of(plan).rows, GROUP, dim, page, narrow, False)
    call = call._replace(num_splits=2, max_seqlen_k=2 * GROUP)
    of_code, traces, _ = recorded(
        name_of(plan), lambda launch: native_decode.bind(launch, plan, call)(*tensors_of(call))
    )
    return issue.simulate(issue.turns_of(of_code, traces, resident), end).clocks


@functools.cache
def combining(parts: int, dim: int, count: int, end: str) -> tuple[float, int]:
    """The clocks of the workgroups of ``combine`` on a compute unit, and how many there are, of
    ``count`` in all."""
    of_code, traces, fits = of_combine(parts, dim)
    fits = min(fits, -(-count // UNITS))
    return issue.simulate(issue.turns_of(of_code, traces, fits), end).clocks, fits


@functools.cache
def of_combine(parts: int, dim: int) -> Any:
    call = cache_call(16, parts * GROUP, dim, 0, False, False, num_splits=parts)
    problem = Step("", (parts * GROUP,), rows=16, heads_q=1, heads_k=1, dim=dim, page=0).problem()
    plan = hip().plan(problem)
    return recorded(
        "combine", lambda launch: native_decode.bind(launch, plan, call)(*tensors_of(call))
    )


def hip() -> Any:
    return BACKENDS["hip"]


# ---- the workgroups of a step -------------------------------------------------------------------


def order_of(blocks: int, parts: int, heads: int, batch: int) -> list[tuple[int, int, int]]:
    """Block, part and sequence of each workgroup, in the order of ``kernels/hip/schedule.h``."""
    pairs, pieces = heads * batch, blocks * parts
    spare = pairs % DIES
    found = []
    for at in range(pairs * pieces):
        if at < spare * pieces:
            pair, piece = at % spare, at // spare
        else:
            place = (at - spare * pieces) // DIES
            pair = spare + at % DIES * (pairs // DIES) + place // pieces
            piece = place % pieces
        found.append((blocks - 1 - piece // parts, piece % parts, pair // heads))
    return found


def decode_order(blocks: int, parts: int, heads: int, batch: int) -> list[tuple[int, int, int]]:
    """The same of ``decode_work`` in ``kernels/hip/schedule.h``."""
    count = heads * batch
    falling = range(parts - 1, -1, -1)
    pairs = [((n - part) % count // heads, part) for part in falling for n in range(count)]
    whole = len(pairs) // DIES * DIES
    found = []
    for first in range(0, whole, DIES):
        found += [(b, part, s) for b in range(blocks) for s, part in pairs[first : first + DIES]]
    return found + [(b, part, s) for b in range(blocks) for s, part in pairs[whole:]]


class Launches(NamedTuple):
    """The launches of a step, what limits it, and its splits."""

    launches: tuple[device.Launch, ...]
    splits: int
    workgroups: int


def decode_step(step: Step, plan: Plan, end: str) -> Launches:
    """Decode: every sequence in the same number of parts, of which short ones leave some empty."""
    block, group = TARGET.block_of(plan), step.heads_q // step.heads_k
    blocks = -(-step.rows * group // block.rows)
    all_blocks = blocks * step.heads_k * len(step.lengths)
    seen = step.seen(step.most)
    parts = decode.splits_for(all_blocks, seen, UNITS)
    if len(step.lengths) > 1:
        parts = decode.splits_of_lengths(parts, all_blocks, seen, UNITS)
    shares = []
    for keys in step.lengths:
        groups = -(-step.seen(keys) // GROUP)
        share = max(-(-groups // parts), LEAST_GROUPS)
        shares.append([max(0, min(share, groups - part * share)) for part in range(parts)])
    order = decode_order(blocks, parts, step.heads_k, len(shares))
    work = [shares[s][part] for _, part, s in order]
    written = sum(groups > 0 for groups in work) / (all_blocks or 1)
    return Launches(with_combine(step, plan, work, blocks, parts, written, end), parts, len(work))


def with_combine(
    step: Step, plan: Plan, work: Sequence[int], blocks: int, parts: int, written: float, end: str
) -> tuple[device.Launch, ...]:
    """The launch of decode whose workgroups have ``work`` groups, and of ``combine``. ``written``:
    parts of a sequence that leave an output, on average."""
    resident = max(1, -(-len(work) // UNITS))
    cost = curve(plan, step.dim, step.page, False, parts > 1, resident, end)
    without = empty(plan, step.dim, step.page, cost.resident, end) if 0 in work else 0.0
    found = [cost.of(groups) if groups else (without, 0.0) for groups in work]
    clocks = [one for one, _ in found]
    matrix = sum(one for _, one in found)
    lines = len(step.lengths) * step.rows * step.heads_q
    partial = lines * step.dim * 4.0 * written if parts > 1 else 0.0
    needed = step.bytes_needed()
    first = device.Launch(clocks, matrix, cost.resident, needed + partial, needed * blocks)
    if parts == 1:
        return (first,)
    count = -(-lines // combine.rows_of(parts, step.dim))
    of_one, fits = combining(parts, step.dim, count, end)
    second = device.Launch([of_one] * count, 0.0, fits, partial, partial)
    return first, second


def forward_step(step: Step, plan: Plan, end: str) -> Launches:
    """Prefill, or any step on the forward kernel: blocks of rows of each query head."""
    block = TARGET.block_of(plan)
    # Batch invariance makes the heads of a group rows of one head, if each sequence has one row.
    alone = step.invariant and step.rows == 1 and step.window < 0
    heads, rows = (
        (step.heads_k, step.heads_q // step.heads_k) if alone else (step.heads_q, step.rows)
    )
    blocks, batch = -(-rows // block.rows), len(step.lengths)
    parts = 1
    if not step.invariant:
        parts = splits.of_prefill(
            blocks * heads * batch, step.most, UNITS * block.per_unit, rows * heads * batch,
            block.costs, None,
        )  # fmt: skip
    cost = curve(plan, step.dim, step.page, step.causal, parts > 1, 1, end)
    clocks, matrix = [], 0.0
    for number, part, sequence in order_of(blocks, parts, heads, batch):
        keys = step.lengths[sequence]
        last = min(rows, (number + 1) * block.rows)
        high = keys - rows + last if step.causal else keys
        low = max(0, keys - rows + number * block.rows - step.window) if step.window >= 0 else 0
        tiles = -(-high // block.keys) - low // block.keys
        share = -(-tiles // parts)
        mine = max(0, min(share, tiles - part * share))
        one, of_matrix = cost.of(mine)
        clocks.append(one)
        matrix += of_matrix
    needed = step.bytes_needed()
    lines = batch * step.rows * step.heads_q
    partial = lines * step.dim * 4.0 * parts if parts > 1 else 0.0
    asked = needed * blocks * (heads // step.heads_k)
    launches = [device.Launch(clocks, matrix, cost.resident, needed + partial, asked)]
    if parts > 1:
        count = -(-lines // combine.rows_of(parts, step.dim))
        of_one, fits = combining(parts, step.dim, count, end)
        launches.append(device.Launch([of_one] * count, 0.0, fits, partial, partial))
    return Launches(tuple(launches), parts, len(clocks))


def modeled(step: Step) -> dict[str, Any]:
    """A row of the results."""
    plan = hip().plan(step.problem())
    is_decode = plan.kernel == decode.KERNEL
    row: dict[str, Any] = {
        "step": step.name, "batch": len(step.lengths), "keys": sum(step.lengths),
        "longest": max(step.lengths), "capacity": step.most, "rows": step.rows,
        "heads": [step.heads_q, step.heads_k], "head_dim": step.dim, "page": step.page,
        "window": step.window, "cache": "float8" if step.narrow else "bfloat16",
        "batch_invariant": step.invariant, "kernel": name_of(plan),
        "bytes_needed": step.bytes_needed(), "flops": step.flops(),
    }  # fmt: skip
    us, share, bound = [], [], []
    for end in constants.ends():
        found = (decode_step if is_decode else forward_step)(step, plan, end)
        took = device.time(found.launches, end)
        of = constants.of(constants.DEVICE, end)
        hbm = step.bytes_needed() / of["hbm_bytes"]
        # Dense products at the peak; the clock that power leaves is lower.
        matrix = step.flops() / (UNITS * 4 * 512 * of["peak_hz"])
        us.append(round(took.seconds * 1e6, 1))
        share.append(round(max(hbm, matrix) / took.seconds, 3))
        launching = of["launch_seconds"] * len(found.launches)
        ways = {
            "launches": launching,
            "combine": device.time(found.launches[1:], end).seconds - launching / 2
            if len(found.launches) > 1 else 0.0,
            took.bound: device.time(found.launches[:1], end).seconds - of["launch_seconds"],
        }  # fmt: skip
        bound.append(max(ways, key=lambda name: ways[name]))
        row |= {"splits": found.splits, "workgroups": found.workgroups}
    row |= {
        "us": us,
        "share": share,
        "limit": "HBM" if hbm > matrix else "products",
        "bound": bound,
    }
    return row


# ---- the steps ----------------------------------------------------------------------------------


def lognormal(count: int, median: int) -> tuple[int, ...]:
    draw = random.Random(count)
    return tuple(
        max(16, min(16 * median, int(draw.lognormvariate(0, 1) * median))) for _ in range(count)
    )


def one_long(count: int, short: int, long: int) -> tuple[int, ...]:
    """The long one in the middle."""
    half = count // 2
    return (short,) * half + (long,) + (short,) * (count - half - 1)


def equal(count: int, keys: int) -> tuple[int, ...]:
    return (keys,) * count


def steps() -> list[Step]:
    found = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        found += [Step(f"batch {batch} x {keys}", equal(batch, keys)) for keys in (1024, 8192)]
    found.append(Step("batch 1 x 131072", equal(1, 131072)))
    for batch in (8, 64):
        keys = equal(batch, 8192)
        for rows in (2, 4, 8, 16):
            found.append(Step(f"batch {batch}, {rows} rows", keys, rows=rows))
        for heads in ((8, 8), (32, 32), (40, 8), (28, 4), (64, 8), (64, 4), (32, 1)):
            found.append(
                Step(f"batch {batch}, heads {heads}", keys, heads_q=heads[0], heads_k=heads[1])
            )
        for dim in (64, 80, 96, 256):
            found.append(
                Step(
                    f"batch {batch}, head_dim {dim}",
                    keys,
                    dim=dim,
                    page=0 if dim in (80, 96) else 64,
                )
            )
        for page in (0, 16, 32, 256):
            found.append(Step(f"batch {batch}, page {page}", keys, page=page))
        for window in (128, 1024, 4096):
            found.append(
                Step(f"batch {batch}, window {window}", equal(batch, 32768), window=window)
            )
        found.append(Step(f"batch {batch}, float8", keys, narrow=True))
        found.append(Step(f"batch {batch}, float8, 4 rows", keys, rows=4, narrow=True))
        found.append(Step(f"batch {batch}, float8, head_dim 64", keys, dim=64, narrow=True))
    for batch in (8, 64, 256):
        found.append(Step(f"lognormal {batch}", lognormal(batch, 1024), capacity=16384))
        found.append(Step(f"one long of {batch}", one_long(batch, 256, 32768), capacity=32768))
        found.append(
            Step(
                f"one long of {batch}, MQA", one_long(batch, 256, 32768), heads_k=1, capacity=32768
            )
        )
        found.append(
            Step(
                f"one long of {batch}, 4 rows", one_long(batch, 256, 32768), rows=4, capacity=32768
            )
        )
        found.append(
            Step(
                f"one long of {batch}, float8",
                one_long(batch, 256, 32768),
                narrow=True,
                capacity=32768,
            )
        )
        found.append(Step(f"{batch} x 1024 of 131072", equal(batch, 1024), capacity=131072))
    for chunk in (512, 2048):
        for context in (8192, 32768):
            for page in (0, 16, 64):
                for batch in (1, 4):
                    name = f"chunk {chunk} of {context}, batch {batch}, page {page}"
                    found.append(Step(name, equal(batch, context), rows=chunk, page=page))
    for dim in (64, 256):
        for page in (0, 64):
            name = f"chunk 2048 of 8192, head_dim {dim}, page {page}"
            found.append(Step(name, equal(1, 8192), rows=2048, page=page, dim=dim))
    for page in (0, 64):
        for batch in (1, 8, 64, 256):
            name = f"batch_invariant {batch} x 8192, page {page}"
            found.append(Step(name, equal(batch, 8192), page=page, invariant=True))
        name = f"batch_invariant chunk 2048 of 8192, page {page}"
        found.append(Step(name, equal(1, 8192), rows=2048, page=page, invariant=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, help="a run of other code")
    parser.add_argument(
        "--only", metavar="TEXT", help="steps with TEXT in their names; keep others"
    )
    options = parser.parse_args()
    kept = {}
    if options.only:
        old = json.loads((machine.RESULTS / "mi300x_serving.json").read_text())
        kept = {row["step"]: row for row in old["rows"]}
    before = {name: row["us_before"] for name, row in kept.items() if "us_before" in row}
    if options.against:
        of_other = json.loads(options.against.read_text())["rows"]
        before |= {row["step"]: row["us"] for row in of_other}
    rows = []
    for step in steps():
        if options.only and options.only not in step.name:
            rows.append(kept[step.name])
            continue
        row = modeled(step)
        if step.name in before:
            row["us_before"] = before[step.name]
        rows.append(row)
        print(row["step"], row["kernel"], row["splits"], row.get("us_before", ""), row["us"],
              row["share"], row["limit"], row["bound"], flush=True)  # fmt: skip
    print("wrote", machine.save("mi300x_serving", {"what": WORDS, "rows": rows}))


if __name__ == "__main__":
    main()
