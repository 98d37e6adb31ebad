"""Make the block lists of a mask_mod by a kernel that is generated from it.

One launch (``kernels/common/block_lists.h``) and no memory but the lists. If the mask_mod reads a
captured tensor by the row alone or by the key alone, as document masks do, there is a launch before
it (``kernels/common/tile_bounds.h``) and a small table. PyTorch's operators, which make the same
lists, evaluate the mask_mod at every point: 35 to 69 ms at 64k rows on an H200, where the kernel
takes 0.01 to 2.2 ms (``benchmarks/results/block_lists_h200.json``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ... import abi, blocks, mods
from ...blocks import Lists, Tiles
from ...errors import CodeObjectError, CompileError
from ...plan import Plan
from ...problem import Call, Problem
from ..common.program import Params, Program, like, run_of
from .launch import Launcher
from .plans import modified

THREADS = 512
THREADS_OF_BOUNDS, BOUNDED_TILES = 256, 8  # tiles of a workgroup, in tile_bounds.h
_log = logging.getLogger("pyfa")
# Kernels that could not be built, by arch: another try at each new shape would take seconds.
_refused: set[tuple[str, Plan]] = set()


_Launch = Callable[[Sequence[torch.Tensor]], Lists]  # of the captured tensors


class Maker:
    """Makes the lists of calls that are alike in all but the values of their tensors."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._bound: dict[Tiles, _Launch | None] = {}

    def prepare(self, call: Call, tiles: Tiles) -> None:
        """Bind the launch for ``tiles``, if it is not yet bound."""
        if tiles not in self._bound:
            with self._launch.on(call.q.device):
                self._bound[tiles] = bind(self._launch, call, tiles)

    def launch_for(self, tiles: Tiles) -> _Launch | None:
        """Return the launch for ``tiles``; None if it is not prepared, or if PyTorch's operators
        make the lists, because the kernel cannot be built."""
        return self._bound.get(tiles)

    def __call__(self, call: Call, tiles: Tiles) -> Lists:
        """Return new lists of ``call``'s mask_mod for ``tiles``, made on the current stream."""
        self.prepare(call, tiles)
        launch = self._bound[tiles]
        return blocks.make_lists(call, tiles) if launch is None else launch(call.captured)


def plan_of(
    launch: Launcher, call: Call | Problem, tiles: Tiles, kernel: str = "block_lists"
) -> Plan:
    """Return the plan of the kernel that makes the lists of ``call``'s mask_mod for ``tiles``, or
    of "tile_bounds", which runs before it."""
    plan = modified(launch.plan(kernel), call.mods)
    constants = {
        **dict(plan.constants),
        "LISTS": 2,  # it receives lists, but does not use them to skip tiles
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "OWNS_KEYS": int(tiles.owned == "keys"),
    }
    return replace(plan, constants=tuple(sorted(constants.items())))


def plans_of(launch: Launcher, problem: Problem, tiles: Tiles) -> list[Plan]:
    """Return the plans of all kernels that make the lists of ``problem``."""
    from ...mods import emit_ranges

    found = mods.of(problem.mods)
    if found.mask is None or not blocks.is_exact(found.mask):
        return []
    has_bounds = emit_ranges.most_tabled(found) > 0
    kernels = ("tile_bounds", "block_lists") if has_bounds else ("block_lists",)
    return [plan_of(launch, problem, tiles, kernel) for kernel in kernels]


def bind(launch: Launcher, call: Call, tiles: Tiles) -> _Launch | None:
    """Return a launch for calls like ``call``, or None if the kernel cannot be built."""
    from ...mods import emit_ranges

    plan = plan_of(launch, call, tiles)
    wanted = (launch.device_at(call.q.device).arch, plan)
    if wanted in _refused:
        return None
    sizes = blocks.sizes_of(call, tiles)
    number = len(call.captured)
    names = tuple(f"captured{slot}" for slot in range(number))
    program = Program(names, call.q)
    made = {"counts": like(sizes[:3], torch.int32), "entries": like(sizes, torch.int32)}
    bounds = 2 * emit_ranges.most_tabled(mods.of(call.mods))
    table = (*sizes[:2], sizes[2] + sizes[3], bounds)
    if bounds:
        made["table"] = like(table, torch.int64)
    values: abi.Values = {
        "seqlen_q": call.max_seqlen_q,
        "seqlen_k": call.max_seqlen_k,
        "q_start": call.q_start,
        "k_start": call.k_start,
        "head_start": call.head_start,
        "batch_start": call.batch_start,
    }
    for slot, x in enumerate(call.captured):
        values |= abi.captured_values(slot, x.shape, x.stride())
    pointers = {name: name for name in names}
    for slot, (name, each) in enumerate(made.items(), number):
        program.make(name, each)
        values |= abi.captured_values(slot, *each[:2])
        pointers[f"captured{slot}"] = name
    params = Params(values, pointers)
    if bounds:
        before = plan_of(launch, call, tiles, "tile_bounds")
        workgroups = -(-torch.Size(table[:3]).numel() // BOUNDED_TILES)
        program.add(before, workgroups, THREADS_OF_BOUNDS, params)
    program.add(plan, torch.Size(sizes[:3]).numel(), THREADS, params)
    try:
        started = launch.launch_of(program, tuple(call.captured))
    except (CompileError, CodeObjectError) as error:
        _refused.add(wanted)
        _log.info("PyTorch's operators make the block lists: %s", error)
        return None
    run = run_of(program, started, launch.empty, None)(None)
    return lambda captured: Lists(*run(*captured)[:2])
