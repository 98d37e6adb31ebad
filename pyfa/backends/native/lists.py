"""Passes block lists to kernels, as two more tensors after those that the mods captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ... import abi, blocks, mods
from ...blocks import Tiles
from ...plan import Plan
from ...problem import Call, Form
from ..common.program import Params
from . import block_lists
from .launch import Launcher

_ListsOf = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


def listed(plan: Plan) -> Plan:
    """Return ``plan`` changed to visit tiles by block list, if its mods contain a mask_mod."""
    digest = dict(plan.constants).get("MOD")
    if not isinstance(digest, str) or mods.of(digest).mask is None:
        return plan
    return replace(plan, constants=tuple(sorted((*plan.constants, ("LISTS", 1)))))


def unlisted(plan: Plan) -> Plan:
    """Return ``plan`` changed to receive block lists but visit every tile. The result is the
    same, because the kernel evaluates the mask_mod in every tile."""
    constants = ((name, 2 if name == "LISTS" else value) for name, value in plan.constants)
    return replace(plan, constants=tuple(constants))


def is_unlisted(plan: Plan) -> bool:
    """Return whether the plan's kernel receives block lists and visits every tile."""
    return dict(plan.constants).get("LISTS") == 2


def is_listed(plan: Plan) -> bool:
    """Return whether the plan's kernel receives block lists."""
    return "LISTS" in dict(plan.constants)


class Lists:
    """The block lists of the ``plans`` of one program.

    They are the program's last inputs, with ``names``; ``bound`` returns them for each call.
    """

    def __init__(self, launch: Launcher, plans: Sequence[Plan]) -> None:
        self.tiles: dict[Plan, Tiles] = {
            plan: launch.target.list_tiles(plan) for plan in plans if is_listed(plan)
        }
        self._make = block_lists.Maker(launch) if self.tiles else None
        self.names = tuple(
            name
            for number in range(len(self.tiles))
            for name in (f"list_counts{number}", f"list_entries{number}")
        )

    def of(self, call: Call) -> tuple[torch.Tensor, ...]:
        """Return the lists of ``call``, in the order of ``names``."""
        return tuple(x for tiles in self.tiles.values() for x in self._lists(call, tiles))

    def bound(self, call: Call, form: Form) -> _ListsOf:
        """Return ``of`` as a function of the tensors of ``form``, for calls that are like ``call``
        in all but their values and addresses."""
        bound = [self._bound(call, form, tiles) for tiles in self.tiles.values()]
        if len(bound) == 1:
            return bound[0]
        return lambda tensors: tuple(x for each in bound for x in each(tensors))

    def _bound(self, call: Call, form: Form, tiles: Tiles) -> _ListsOf:
        maker = self._make
        assert maker is not None
        first = form.names.index("captured0") if call.captured else 0
        end = first + len(call.captured)
        launch = maker.bound.get(tiles)

        def make(tensors: Sequence[torch.Tensor], made: blocks.Lists | None) -> blocks.Lists:
            launch = maker.bound.get(tiles)
            if launch is None:  # not yet prepared, or not built
                return maker(form.fill(tensors)[0], tiles)
            return launch(first, end, tensors, made)

        given = make if launch is None else functools.partial(launch, first, end)
        return blocks.bound_lists(call, form, tiles, given)

    def _lists(self, call: Call, tiles: Tiles) -> blocks.Lists:
        return blocks.lists_of(call, tiles, self._make)

    def params_of(self, plan: Plan, call: Call, params: Params) -> Params:
        """Return ``params`` with the addresses and strides of the lists of ``plan``."""
        if plan not in self.tiles:
            return params
        if self._make is not None and blocks.is_exact(blocks.mask_of(call)):
            # Prepare the kernel now. No code can be loaded while a graph is captured, and until
            # then cached lists may hide that the kernel is needed.
            self._make.prepare(call, self.tiles[plan])
        number = list(self.tiles).index(plan)
        first = len(call.captured)
        values = dict(params.values)
        for slot, x in enumerate(self._lists(call, self.tiles[plan])):
            # If all sequences or heads share one list, the stride between them is 0.
            shared = (x.stride(dim) if x.shape[dim] > 1 else 0 for dim in range(2))
            values |= abi.captured_values(first + slot, x.shape, (*shared, *x.stride()[2:]))
        pointers = {
            **params.pointers,
            f"captured{first}": self.names[2 * number],
            f"captured{first + 1}": self.names[2 * number + 1],
        }
        return Params(values, pointers)
