"""Make the block lists of a mask_mod by a kernel that is generated from it.

One launch (``kernels/common/block_lists.h``) and no memory but the lists, which may be that of
older lists. If the mask_mod reads a captured tensor by the row alone or by the key alone, as
document masks do, and lists are long, there is a launch before it
(``kernels/common/tile_bounds.h``) and a small table. PyTorch's operators, which make the same
lists, evaluate the mask_mod at every point: 35 to 69 ms at 64k rows on an H200, where the kernel
takes 0.01 to 2.2 ms (``benchmarks/results/block_lists_h200.json``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch

from ... import _torch, abi, blocks, mods
from ..._torch import Empty, Like
from ...blocks import Lists, Tiles
from ...errors import CodeObjectError, CompileError
from ...plan import Plan
from ...problem import Call, Problem
from ..common.program import Launch, Params, Program, like
from .launch import Launcher
from .plans import modified

THREADS = 512
THREADS_OF_BOUNDS, BOUNDED_TILES = 256, 8  # tiles of a workgroup, in tile_bounds.h
_log = logging.getLogger("pyfa")
# Kernels that could not be built, by arch: another try at each new shape would take seconds.
_refused: set[tuple[str, Plan]] = set()


# Takes the places of the captured tensors among the tensors that follow, and lists of such a call
# whose memory is written again.
_Launch = Callable[[int, int, Sequence[torch.Tensor], Lists | None], Lists]


class Maker:
    """Makes the lists of calls that are alike in all but the values of their tensors."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        # None where PyTorch's operators make the lists, because the kernel cannot be built.
        self.bound: dict[Tiles, _Launch | None] = {}

    def prepare(self, call: Call, tiles: Tiles) -> None:
        """Bind the launch for ``tiles``, if it is not yet bound."""
        if tiles not in self.bound:
            with self._launch.on(call.q.device):
                self.bound[tiles] = bind(self._launch, call, tiles)

    def __call__(self, call: Call, tiles: Tiles) -> Lists:
        """Return new lists of ``call``'s mask_mod for ``tiles``, made on the current stream."""
        self.prepare(call, tiles)
        launch = self.bound[tiles]
        if launch is None:
            return blocks.make_lists(call, tiles)
        return launch(0, len(call.captured), call.captured, None)


# Where a list may name up to so many tiles, each workgroup computes the bounds of captured tensors
# itself, of up to so many loads. A launch of tile_bounds would take longer: 4 µs of the host alone.
MOST_OWN, _MOST_LOADS = 128, 4


def plan_of(
    launch: Launcher,
    call: Call | Problem,
    tiles: Tiles,
    kernel: str = "block_lists",
    own_bounds: bool = False,
) -> Plan:
    """Return the plan of the kernel that makes the lists of ``call``'s mask_mod for ``tiles``, or
    of "tile_bounds", which runs before it unless the first kernel has ``own_bounds``."""
    plan = modified(launch.plan(kernel), call.mods)
    more = {"OWN_BOUNDS": MOST_OWN} if own_bounds else {}
    constants = {
        **dict(plan.constants),
        "LISTS": 2,  # it receives lists, but does not use them to skip tiles
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "OWNS_KEYS": int(tiles.owned == "keys"),
        **more,
    }
    return replace(plan, constants=tuple(sorted(constants.items())))


def plans_of(launch: Launcher, problem: Problem, tiles: Tiles) -> list[Plan]:
    """Return the plans of all kernels that make the lists of ``problem``."""
    from ...mods import emit_ranges

    found = mods.of(problem.mods)
    if found.mask is None or not blocks.is_exact(found.mask):
        return []
    loads = emit_ranges.most_tabled(found)
    rows, keys = -(-problem.seqlen_q // tiles.rows), -(-problem.seqlen_k // tiles.keys)
    if has_own_bounds(loads, keys if tiles.owned == "rows" else rows):
        return [plan_of(launch, problem, tiles, own_bounds=True)]
    kernels = ("tile_bounds", "block_lists") if loads else ("block_lists",)
    return [plan_of(launch, problem, tiles, kernel) for kernel in kernels]


def has_own_bounds(loads: int, most: int) -> bool:
    """Return whether the workgroups that make lists of up to ``most`` tiles compute the bounds of
    ``loads`` captured tensors themselves."""
    return 0 < loads <= _MOST_LOADS and most <= MOST_OWN


def bind(launch: Launcher, call: Call, tiles: Tiles) -> _Launch | None:
    """Return a launch for calls like ``call``, or None if the kernel cannot be built."""
    from ...mods import emit_ranges

    arch = launch.device_at(call.q.device).arch
    loads = emit_ranges.most_tabled(mods.of(call.mods))
    own = has_own_bounds(loads, blocks.sizes_of(call, tiles)[3])
    why = None
    for own_bounds in (True, False) if own else (False,):
        plan = plan_of(launch, call, tiles, own_bounds=own_bounds)
        if (arch, plan) not in _refused:
            try:
                return _bind(launch, plan, call, tiles, 0 if own_bounds else loads)
            except (CompileError, CodeObjectError) as error:
                _refused.add((arch, plan))
                why = error
    if why is not None:
        _log.info("PyTorch's operators make the block lists: %s", why)
    return None


def _bind(launch: Launcher, plan: Plan, call: Call, tiles: Tiles, loads: int) -> _Launch:
    """Return ``bind`` for ``plan``, with a table of the bounds of ``loads`` captured tensors."""
    sizes = blocks.sizes_of(call, tiles)
    number = len(call.captured)
    names = tuple(f"captured{slot}" for slot in range(number))
    program = Program(names, call.q)
    made = {"counts": like(sizes[:3], torch.int32), "entries": like(sizes, torch.int32)}
    table = (*sizes[:2], sizes[2] + sizes[3], 2 * loads)
    if loads:
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
    if loads:
        before = plan_of(launch, call, tiles, "tile_bounds")
        workgroups = -(-torch.Size(table[:3]).numel() // BOUNDED_TILES)
        program.add(before, workgroups, THREADS_OF_BOUNDS, params)
    program.add(plan, torch.Size(sizes[:3]).numel(), THREADS, params)
    started = launch.launch_of(program, tuple(call.captured))
    # No size depends on the totals of packed rows.
    likes = cast("list[Like]", program.likes)
    return _run_of(started, launch.empty, program.device, likes)


def _run_of(launch: Launch, empty: Empty, device: torch.device, likes: Sequence[Like]) -> _Launch:
    """Return a function that runs ``launch`` on captured tensors and on new or given lists.
    ``likes``: the two tensors of a list, then others that are allocated for each call."""
    index = device.index if device.type == "cuda" else None
    counts, entries, *others = likes

    def run(first: int, end: int, tensors: Sequence[torch.Tensor], lists: Lists | None) -> Lists:
        if index is not None and _torch.current_device() != index:
            with torch.cuda.device(index):
                return run(first, end, tensors, lists)
        captured = tensors[first:end]
        if lists is None:
            lists = Lists(empty(*counts), empty(*entries))
        made: tuple[torch.Tensor, ...] = lists
        for each in others:
            made += (empty(*each),)
        addresses = []
        for x in captured:
            addresses.append(x.data_ptr())
        for x in made:
            addresses.append(x.data_ptr())
        launch(addresses, captured, made, None)
        return lists

    return run
