"""Block lists on the host: made by a kernel that looks at all points, kept until values change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import blocks
from ...blocks import Lists, Tiles
from ...problem import Call, Form
from . import specs
from .kernel import Kernel, Slot

if TYPE_CHECKING:
    from .runtime import Runner


class ByLists:
    """The block lists of the kernels of one pass, by role.

    The lists are the last inputs of the pass. ``names`` holds their names, and ``bound`` returns
    the lists of each call in the same order.
    """

    def __init__(self, runner: Runner, call: Call, roles: Sequence[str]) -> None:
        self._runner = runner
        found = {role: runner.list_tiles(role, call) for role in roles}
        self._tiles = {role: tiles for role, tiles in found.items() if tiles is not None}
        self._states: dict[Tiles, _States] = {}
        self.names = tuple(
            f"{role}_{part}" for role in self._tiles for part in ("counts", "entries")
        )
        for tiles in self._tiles.values():
            # Now: while a graph is captured no code can be loaded.
            self._states[tiles] = _States(runner, call, tiles)

    def __contains__(self, role: str) -> bool:
        return role in self._tiles

    def arguments(self, role: str, call: Call) -> tuple[Any, ...]:
        """Return the block-list arguments of the kernel ``role``; none if it visits every tile."""
        if role not in self._tiles:
            return ()
        batch, heads, owned, most = blocks.sizes_of(call, self._tiles[role])
        # One list for all sequences or heads has no stride between them.
        strides = heads * owned if batch > 1 else 0, owned if heads > 1 else 0
        return Slot(f"{role}_counts"), Slot(f"{role}_entries"), *strides, most

    def bound(self, call: Call, form: Form) -> Callable[[Sequence[torch.Tensor]], Sequence[Any]]:
        """Return a function of the tensors of ``form``: the lists of calls that are like ``call``
        in all but values and addresses, in the order of ``names``."""

        def lists_for(tiles: Tiles) -> Callable[[Sequence[torch.Tensor]], Lists]:
            def make(tensors: Sequence[torch.Tensor], _: Lists | None) -> Lists:
                return self._make(form.fill(tensors)[0], tiles)

            return blocks.bound_kept_lists(call, form, ("full first", tiles), make)

        found = [lists_for(tiles) for tiles in self._tiles.values()]
        if len(found) == 1:
            return found[0]
        return lambda tensors: [x for each in found for x in each(tensors)]

    def _make(self, call: Call, tiles: Tiles) -> Lists:
        """Return counts (B', H', tiles, 2), those of full tiles and of all, and entries."""
        states = self._states[tiles](call)
        if tiles.owned == "keys":
            states = states.transpose(2, 3)
        counts = torch.stack([(states == 2).sum(-1), (states != 0).sum(-1)], -1)
        entries = torch.sort(states, dim=-1, descending=True, stable=True).indices
        return Lists(counts.int(), entries.int().contiguous())


class _States:
    """The kernel ``tile_states`` for calls that are alike in all but the values of tensors."""

    def __init__(self, runner: Runner, call: Call, tiles: Tiles) -> None:
        batch, heads, *sizes = blocks.sizes_of(call, tiles)
        rows, keys = sizes if tiles.owned == "rows" else reversed(sizes)
        self._shape = (batch, heads, rows, keys)
        self._programs = batch * heads * rows * -(-keys // specs.TILES_AT_ONCE)
        key = ("states", tiles.rows, tiles.keys, call.q.device.index)
        kernel: Kernel = runner.kernel(key, lambda: specs.states_spec(runner.constants, tiles))
        captured = runner.given(call).captured
        self._names = tuple(f"captured{slot}" for slot in range(len(call.captured)))
        numbers = {name: number for number, name in enumerate((*self._names, "states"))}
        arguments = (
            Slot("states"), rows, keys, heads, call.max_seqlen_q, call.max_seqlen_k, call.q_start,
            call.k_start, call.head_start, call.batch_start, *captured,
        )  # fmt: skip
        self._launch = kernel.bind(self._programs, arguments, numbers)

    def __call__(self, call: Call) -> torch.Tensor:
        states = torch.empty(self._shape, dtype=torch.uint8, device=call.q.device)
        given = (*call.captured, states)
        if self._programs:
            self._launch(given if specs.INTERPRETED else [x.data_ptr() for x in given], None)
        return states
