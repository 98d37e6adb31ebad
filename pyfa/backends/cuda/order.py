"""The order of work tiles: which heads run side by side, and what kernels divide by to find a tile.

A division takes a GPU about 100 cycles, and a block has to find its work tile before it can load
anything. So kernels multiply by inverses that the host computes (``abi.inverse_of``).
"""

from __future__ import annotations

from collections.abc import Mapping

from ... import abi
from ...plan import Plan
from ...sizes import Extent, Size
from ..native.plans import values_of
from . import backward, forward, forward_sm90

# Of K and V of a section of the forward: 16 MB, which the L2 holds.
_SECTION_ELEMENTS = 8 << 20


def order_of(plan: Plan, values: Mapping[str, float | Size], blocks: Extent) -> dict[str, int]:
    """Return the members of ``Params`` that give ``plan``'s kernel its order, or none if it has no
    order or takes its work tiles from a table. ``values``: the other members. ``blocks``: the
    number of work tiles, with one split of the keys."""
    if plan.kernel not in (backward.SM90, forward_sm90.KERNEL, forward.KERNEL):
        return {}
    if isinstance(blocks, int) and not blocks:
        return {}
    sizes = {name: value for name, value in values.items() if isinstance(value, int)}
    heads_k, group = sizes["heads_k"], sizes["heads_q"] // sizes["heads_k"]
    by_keys, by_group = plan.kernel == backward.SM90, "PACKED" in values_of(plan)
    heads = heads_k if by_keys or by_group else sizes["heads_q"]
    pairs, splits = heads * sizes["batch"], sizes["num_splits"]
    found = {
        "group": group,
        "group_inverse": abi.inverse_of(group),
        "splits_inverse": abi.inverse_of(splits),
    }
    if not isinstance(blocks, int):
        return found
    if by_keys:
        section, tiles = backward.heads_together(plan, sizes), blocks // pairs
    else:
        fitting = _SECTION_ELEMENTS // (sizes["head_dim"] + sizes["head_dim_v"])
        fitting = max(1, fitting // max(1, sizes["seqlen_k"]))
        section, tiles = min(fitting * (heads // heads_k), pairs), blocks // pairs * splits
    return found | {
        "section": section,
        "section_tiles_inverse": abi.inverse_of(section * tiles),
        "section_inverse": abi.inverse_of(section),
        "last_section_inverse": abi.inverse_of((pairs - 1) % section + 1),
        "heads_inverse": abi.inverse_of(heads),
    }
