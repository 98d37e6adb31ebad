"""Steps of a server on one MI300X by the timing model: a model, not measured.

python benchmarks/mi300x_serving.py        # writes results/mi300x_serving.json

Decode and chunked prefill, with every workgroup of every launch. The emulator runs one workgroup of
each kernel with several numbers of keys; between them, clocks are interpolated. ``combine`` is
modeled, too. Unlike ``mi300x_own.py`` this takes lengths that differ, windows and pages.

*By capacity*: every sequence's keys are cut into the same number of parts, as the longest possible
sequence needs. *By length*: a part is a share of all keys of the call (``kernels/hip/parts.h``).
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable, Sequence
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
TRACED = (4, 8, 16, 32, 64, 128, 256)  # groups of 16 keys of a workgroup


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
            **({"dtype_k": "float8_e4m3fnuz"} if self.narrow else {}),
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
def one_of(plan: Plan, steps: int, dim: int, page: int, causal: bool) -> Any:
    """One workgroup of ``plan`` with so many steps of its loop."""
    block, values = TARGET.block_of(plan), values_of(plan)
    keys = steps * block.keys
    call = cache_call(block.rows, keys, dim, page, "KEY_DTYPE" in values, causal)
    bind = native_decode.bind if plan.kernel == decode.KERNEL else native_forward.bind
    return recorded(name_of(plan), lambda launch: bind(launch, plan, call)(*tensors_of(call)))


@functools.cache
def curve(plan: Plan, dim: int, page: int, causal: bool, resident: int, end: str) -> Curve:
    at, clocks, matrix = [], [], []
    for steps in TRACED if plan.kernel == decode.KERNEL else (8, 16):
        of_code, traces, fits = one_of(plan, steps, dim, page, causal)
        resident = min(resident, fits)
        found = issue.simulate(issue.turns_of(of_code, traces, resident), end)
        at.append(float(steps))
        clocks.append(found.clocks)
        matrix.append(found.matrix_clocks / resident)
    return Curve(tuple(at), tuple(clocks), tuple(matrix), resident)


@functools.cache
def combining(parts: int, dim: int, end: str) -> tuple[float, int]:
    """The clocks of the workgroups of ``combine`` on a compute unit, and how many there are."""
    of_code, traces, fits = of_combine(parts, dim)
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


class Launches(NamedTuple):
    """The launches of a step, what limits it, and its splits."""

    launches: tuple[device.Launch, ...]
    splits: int
    workgroups: int


def decode_step(step: Step, plan: Plan, end: str) -> Launches:
    """Every sequence in the same number of parts."""
    block, group = TARGET.block_of(plan), step.heads_q // step.heads_k
    blocks = -(-step.rows * group // block.rows)
    all_blocks = blocks * step.heads_k * len(step.lengths)
    parts = decode.splits_for(all_blocks, step.seen(step.most), UNITS)
    shares = []
    for keys in step.lengths:
        groups = -(-step.seen(keys) // GROUP)
        share = -(-groups // parts)
        shares.append([max(0, min(share, groups - part * share)) for part in range(parts)])
    work = [shares[s][part] for _, part, s in order_of(blocks, parts, step.heads_k, len(shares))]
    return Launches(with_combine(step, plan, work, blocks, parts, parts, end), parts, len(work))


def with_combine(
    step: Step, plan: Plan, work: Sequence[float], blocks: int, parts: int, written: float,
    end: str, extra: float = 0.0, empty: float | None = None,
) -> tuple[device.Launch, ...]:  # fmt: skip
    """The launch of decode whose workgroups have ``work`` groups, and of ``combine``. ``written``:
    parts of a sequence that leave an output, on average."""
    resident = max(1, -(-len(work) // UNITS))
    cost = curve(plan, step.dim, step.page, False, resident, end)
    found = [cost.of(groups) for groups in work]
    clocks = [one + extra for one, _ in found]
    matrix = sum(one for _, one in found)
    lines = len(step.lengths) * step.rows * step.heads_q
    partial = lines * step.dim * 4.0 * written if parts > 1 else 0.0
    needed = step.bytes_needed()
    first = device.Launch(clocks, matrix, cost.resident, needed + partial, needed * blocks)
    if parts == 1:
        return (first,)
    of_one, fits = combining(parts, step.dim, end)
    count = -(-lines // combine.rows_of(parts, step.dim))
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
    cost = curve(plan, step.dim, step.page, step.causal, 1, end)
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
        of_one, fits = combining(parts, step.dim, end)
        count = -(-lines // combine.rows_of(parts, step.dim))
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
