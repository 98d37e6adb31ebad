"""Apply the MI300X timing model to packed batches (model, not measured).

python benchmarks/mi300x_packed.py        # writes results/mi300x_packed.json

Models the forward and the backward of packed batches, with every workgroup of every launch. *By the
longest*: each sequence has as many workgroups as the longest one, and an XCD gets all heads of
neighboring sequences (``kernels/hip/schedule.h``). *By length*: ``kernels/hip/packed.h``. The
clocks of a workgroup without work, and those to find the work, come from the emulator, as those
of a tile do. The bytes of HBM are left out; they are the same in both.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import machine
import torch

from pyfa._torch import Empty
from pyfa.backends.base import Saved
from pyfa.backends.common.program import Step
from pyfa.backends.hip import code, plans, runtime_timing, samples
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime, program
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import backward as native_backward
from pyfa.backends.native import forward as native_forward
from pyfa.backends.native.plans import name_of
from pyfa.backends.native.tiles import Pair
from pyfa.cli.inspect_timing import WORDS
from pyfa.device import by_name
from pyfa.emulator.timing import constants, device, issue
from pyfa.plan import Plan
from pyfa.problem import Call, Problem, tensors_of

UNITS, DIES, SUM_ROWS = 304, 8, 16


def lognormal(count: int) -> list[int]:
    draw = random.Random(0)
    return [max(16, min(8192, int(draw.lognormvariate(5.8, 0.8)))) for _ in range(count)]


BATCHES = {
    "64 lognormal": lognormal(64),
    "documents of 1 to 8,192": [1, 8192, 17, 511, 2900, 64, 4096, 300, 1024, 33, 7000, 129],
    "one of 8,192, 63 of 256": [256] * 40 + [8192] + [256] * 23,
    "8 of 2,048": [2048] * 8,
}
# heads, KV heads, head_dim
MODELS = {"Llama 8B": (32, 8, 128), "Llama 70B": (64, 8, 128), "64/8 heads of 64": (64, 8, 64)}


class Kind(NamedTuple):
    """What a workgroup of a kernel costs at one end of the range: a tile, the rest, a diagonal, one
    without work, finding the work, and the matrix clocks of a tile and of the rest."""

    tile: float
    fixed: float
    masked: float
    empty: float
    finding: float
    matrix_of_tile: float
    fixed_matrix: float
    resident: int


def traced(wanted: Plan, run: Callable[[Launcher], object], group: int) -> Any:
    """The turns of workgroup ``group`` of the one launch of ``wanted`` that ``run`` makes."""
    found: list[Any] = []

    class Watching(EmulatorRuntime):
        @property
        def empty(self) -> Empty:
            return samples.empty

        def run(self, step: Step, *rest: Any) -> None:
            super().run(step, *rest)
            if (step.plan.kernel, step.plan.constants) == (wanted.kernel, wanted.constants):
                found.append(self.counters)

    run(Launcher(Watching(trace=(group,))))
    (one,) = found
    facts = code.load(wanted, plans.EMULATED)
    return issue.turns_of(program(facts.data).code, one.traces, 1)


def run_of(plan: Plan, call: Call) -> Callable[[Launcher], object]:
    if name_of(plan) == "attn_fwd":
        return lambda launch: native_forward.bind(launch, plan, call)(*tensors_of(call))
    out = torch.zeros(call.out_shape(), dtype=call.q.dtype)
    lse = torch.zeros(call.lse_shape())
    given = Saved(call, out, lse, out)
    return lambda launch: native_backward.bind(launch, given)(*given.tensors())


def dense(pair: Pair, rows: int, keys: int, **more: Any) -> Call:
    sizes = (rows, pair[0]), (keys, pair[0]), (keys, pair[1])
    q, k, v = (torch.zeros(1, n, 1, dim, dtype=torch.bfloat16) for n, dim in sizes)
    return Call(q, k, v, max_seqlen_q=rows, max_seqlen_k=keys, num_splits=1, **more)


def packed(pair: Pair, lengths: Sequence[int]) -> Call:
    total, dims = sum(lengths), (pair[0], *pair)
    q, k, v = (torch.zeros(total, 1, dim, dtype=torch.bfloat16) for dim in dims)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return Call(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths), num_splits=1,
    )  # fmt: skip


def kinds_of(plan: Plan, pair: Pair) -> list[Kind]:
    """What the kernel of ``plan`` costs, at both ends."""
    block, kernel = TARGET.block_of(plan), runtime_timing.kernel(plan)
    size = block.rows or block.keys
    used = torch.tensor([1], dtype=torch.int32)
    side = {"seqused_q": used} if block.rows else {"seqused_k": used}
    # Of two blocks the one beyond the sequence's length. The forward has a head's last block first.
    beyond = 0 if name_of(plan) == "attn_fwd" else 1
    empty = traced(plan, run_of(plan, dense(pair, 2 * size, 2 * size, **side)), beyond)
    # The first workgroup, which visits as many tiles of the first of 64 sequences as of one alone.
    apart = traced(plan, run_of(plan, packed(pair, [2 * size] + [1] * 63)), 0)
    alone = traced(plan, run_of(plan, dense(pair, 2 * size, 2 * size)), 0)
    kinds = []
    for number, end in enumerate(constants.ends()):
        clocks = {
            name: issue.simulate(turns, end).clocks
            for name, turns in (("empty", empty), ("apart", apart), ("alone", alone))
        }
        finding = max(0.0, clocks["apart"] - clocks["alone"])
        if kernel is None:
            resident = 8
            kinds.append(Kind(0, clocks["alone"], 0, clocks["empty"], finding, 0, 0, resident))
            continue
        cost = kernel.cost(number)
        kinds.append(
            Kind(cost.tile, cost.fixed, cost.masked, clocks["empty"], finding, cost.matrix_of_tile,
                 cost.fixed_matrix, kernel.resident)
        )  # fmt: skip
    return kinds


def tiles_of(
    block: int, size: int, length: int, step: int, of_keys: bool, causal: bool = True
) -> int:
    """Tiles of ``step`` that a block of ``size`` visits."""
    if not causal:
        return -(-length // step)
    if of_keys:
        return -(-(length - block * size // step * step) // step)
    return -(-min((block + 1) * size, length) // step)


def by_longest(
    lengths: Sequence[int], heads: int, size: int, clocks: Callable[[int, int], float],
    empty: float, of_keys: bool,
) -> list[float]:  # fmt: skip
    """The clocks of the workgroups in the order of ``schedule.h``."""
    blocks = -(-max(lengths) // size)
    order = range(blocks) if of_keys else range(blocks - 1, -1, -1)
    of_pair = [
        [clocks(n, length) if n * size < length else empty for n in order] for length in lengths
    ]
    pairs = [of_pair[n // heads] for n in range(len(lengths) * heads)]
    spare = len(pairs) % DIES
    found = [pairs[n][piece] for piece in range(blocks) for n in range(spare)]
    share = (len(pairs) - spare) // DIES
    for place in range(share * blocks):
        found += [
            pairs[spare + die * share + place // blocks][place % blocks] for die in range(DIES)
        ]
    return found


def by_length(
    lengths: Sequence[int], heads: int, group: int, size: int,
    clocks: Callable[[int, int], float], finding: float, empty: float, of_keys: bool,
) -> list[float]:  # fmt: skip
    """The clocks of the workgroups in the order of ``packed.h``."""
    pieces = []
    for first in range(0, len(lengths), 64):
        counted = [(-(-length // size), length) for length in lengths[first : first + 64]]
        for top in range(max(n for n, _ in counted), 0, -1):
            pieces += [
                clocks(n - top if of_keys else top - 1, length)
                for n, length in counted if n >= top
            ]  # fmt: skip
    pieces = [one + finding for one in pieces]
    spare, of_die = heads % DIES, heads // DIES
    found = [one for one in pieces for _ in range(spare)]
    beside = 1 if of_keys else group
    beside = beside if of_die % beside == 0 else of_die if of_die and beside % of_die == 0 else 1
    for _ in range(of_die // beside):
        found += [one for one in pieces for _ in range(beside * DIES)]
    launched = (sum(lengths) // size + len(lengths)) * heads
    return found + [empty + finding] * (launched - len(found))


def launches(
    plan: Plan, kind: Kind, lengths: Sequence[int], heads_q: int, heads_k: int,
    causal: bool = True,
) -> tuple[device.Launch, device.Launch]:  # fmt: skip
    """A kernel's launch by the longest sequence, and by length."""
    block, name = TARGET.block_of(plan), name_of(plan)
    of_keys, size = not block.rows, block.rows or block.keys
    heads = heads_k if of_keys else heads_q
    again = heads_q // heads_k if of_keys else 1
    step = block.keys if name == "attn_fwd" else SUM_ROWS
    of_rows = kind.tile == 0

    def clocks(number: int, length: int) -> float:
        if of_rows:
            return kind.fixed
        tiles = tiles_of(number, size, length, step, of_keys, causal) * again
        return kind.fixed + kind.tile * tiles + (kind.masked if causal and not of_keys else 0)

    matrix = 0.0
    if not of_rows:
        matrix = heads * sum(
            kind.fixed_matrix
            + kind.matrix_of_tile * tiles_of(n, size, length, step, of_keys, causal) * again
            for length in lengths for n in range(-(-length // size))
        )  # fmt: skip
    old = by_longest(lengths, heads, size, clocks, kind.empty, of_keys)
    if of_rows:
        real = heads * sum(-(-length // size) for length in lengths)
        launched = heads * (sum(lengths) // size + len(lengths))
        new = [kind.fixed + kind.finding] * real
        new += [kind.empty + kind.finding] * (launched - real)
        random.Random(0).shuffle(new)
    else:
        group = heads_q // heads_k
        new = by_length(lengths, heads, group, size, clocks, kind.finding, kind.empty, of_keys)
    return device.Launch(old, matrix, kind.resident), device.Launch(new, matrix, kind.resident)


def plans_of(dim: int) -> list[Plan]:
    problem = Problem(
        batch=64, seqlen_q=4096, seqlen_k=4096, heads_q=32, heads_k=8, head_dim=dim,
        head_dim_v=dim, dtype="bfloat16", features=frozenset({"causal", "varlen", "backward"}),
        device=by_name("MI300X"), square=True,
    )  # fmt: skip
    return [TARGET.forward_plan("hip", problem), *native_backward.plans_for(TARGET, "hip", problem)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    kinds: dict[tuple[int, str], list[Kind]] = {}
    rows: list[dict[str, Any]] = []
    for model, (heads_q, heads_k, dim) in MODELS.items():
        chain = plans_of(dim)
        for plan in chain:
            key = dim, name_of(plan)
            if key not in kinds:
                kinds[key] = kinds_of(plan, (dim, dim))
                print(key, kinds[key], flush=True)
        for batch, lengths in BATCHES.items():
            for way, of_way in (("forward", chain[:1]), ("backward", chain[1:])):
                row: dict[str, Any] = {
                    "model": model, "heads": [heads_q, heads_k], "head_dim": dim, "batch": batch,
                    "rows": sum(lengths), "way": way, "launches": {},
                }  # fmt: skip
                for plan in of_way:
                    us: list[list[float]] = [[], []]
                    for end, kind in zip(constants.ends(), kinds[dim, name_of(plan)], strict=True):
                        pair = launches(plan, kind, lengths, heads_q, heads_k)
                        for to, one in zip(us, pair, strict=True):
                            to.append(round(device.time([one], end).seconds * 1e6, 1))
                    row["launches"][name_of(plan)] = {
                        "us_by_longest": us[0], "us_by_length": us[1]
                    }  # fmt: skip
                sums = [
                    [sum(one[name][end] for one in row["launches"].values()) for end in (0, 1)]
                    for name in ("us_by_longest", "us_by_length")
                ]
                row["gain"] = [round(a / b, 2) for a, b in zip(*sums, strict=True)]
                print(model, batch, way, row["launches"], row["gain"], flush=True)
                rows.append(row)
    costs = [
        {"head_dim": dim, "kernel": name, "empty_clocks": [round(k.empty) for k in both],
         "finding_clocks": [round(k.finding) for k in both]}
        for (dim, name), both in kinds.items()
    ]  # fmt: skip
    found = {"what": WORDS, "batches": BATCHES, "costs": costs, "rows": rows}
    print("wrote", machine.save("mi300x_packed", found))


if __name__ == "__main__":
    main()
