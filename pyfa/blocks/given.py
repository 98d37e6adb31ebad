"""Converts ``block_mask=``, FlexAttention's BlockMask or an object with its attributes, to a
mask_mod.

The mask_mod looks up the block first. A block that is not listed is masked, a full block is
visible. In the other blocks the BlockMask's own mask_mod decides. So every backend supports a
BlockMask, and block lists for its own tiles follow as for any other mask_mod.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from .. import env
from ..mods import Mod
from ..validate import a_tensor, wrong
from . import kept
from .build import EMPTY, PARTIAL, WHOLE

_check_on_device: bool = env.get("PYFA_CHECK")


class Sizes(NamedTuple):
    """The sizes that a BlockMask must fit: batch, query heads, rows and keys."""

    batch: int
    heads: int
    rows: int
    keys: int


def lengths_of(block_mask: Any) -> tuple[Any, ...]:
    """Return the lengths that a BlockMask was made for. A bound call depends on them, and on the
    shapes of the tensors that ``as_mask_mod`` captures."""
    return tuple(getattr(block_mask, "seq_lengths", ()))


def as_mask_mod(
    block_mask: Any, mask_mod: Mod | None, device: torch.device, sizes: Sizes | None = None
) -> Mod:
    """Return the mask_mod that is equivalent to ``block_mask``.

    Partial blocks are masked by the BlockMask's own mask_mod, or by ``mask_mod`` if it has none.

    Raises ``ValueError`` or ``TypeError`` for an invalid BlockMask, or, with ``sizes``, for one
    that does not fit them.
    """
    parts = _parts_of(block_mask, device)
    own = _own_mod(block_mask)
    if own is not None and mask_mod is not None and own is not mask_mod:
        raise ValueError(
            "mask_mod: expected None, as block_mask has a mask_mod of its own; "
            f"got {getattr(mask_mod, '__name__', mask_mod)}"
        )
    if sizes is not None:
        _check_sizes(block_mask, parts, sizes)
    return _looking_up(_states_of(parts), parts.block, own or mask_mod)


class _Parts(NamedTuple):
    counts: torch.Tensor
    indices: torch.Tensor
    full_counts: torch.Tensor | None
    full_indices: torch.Tensor | None
    block: tuple[int, int]
    columns: int


def _parts_of(block_mask: Any, device: torch.device) -> _Parts:
    for name in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE"):
        if not hasattr(block_mask, name):
            raise TypeError(
                "block_mask: expected a BlockMask (kv_num_blocks, kv_indices, full_kv_num_blocks, "
                f"full_kv_indices, BLOCK_SIZE, mask_mod); got {type(block_mask).__name__}"
            )
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    full_counts = getattr(block_mask, "full_kv_num_blocks", None)
    full_indices = getattr(block_mask, "full_kv_indices", None)
    if (full_counts is None) is not (full_indices is None):
        wrong("block_mask", "full_kv_num_blocks and full_kv_indices, or neither", "one of them")
    given = {"kv_num_blocks": counts, "kv_indices": indices}
    if full_counts is not None:
        given |= {"full_kv_num_blocks": full_counts, "full_kv_indices": full_indices}
    for name, x in given.items():
        a_tensor(f"block_mask.{name}", x)
        if x.dtype not in (torch.int32, torch.int64):
            wrong(f"block_mask.{name}", "dtype int32", x)
        if x.device != device:
            wrong(f"block_mask.{name}", f"q's device {device}", x)
        dims, names = (3, "rows") if name.endswith("num_blocks") else (4, "rows, columns")
        if x.dim() != dims:
            wrong(f"block_mask.{name}", f"{dims} dimensions (B | 1, H | 1, {names})", x)
    for name, x in given.items():
        if x.shape[:3] != counts.shape[:3]:
            wrong(f"block_mask.{name}", f"kv_num_blocks' shape {tuple(counts.shape)} first", x)
    size = block_mask.BLOCK_SIZE
    block = (size, size) if isinstance(size, int) else tuple(size)
    if len(block) != 2 or not all(isinstance(x, int) and x > 0 for x in block):
        wrong("block_mask.BLOCK_SIZE", "two positive integers (rows, keys)", size)
    lengths = lengths_of(block_mask)
    widest = max(indices.shape[-1], 0 if full_indices is None else full_indices.shape[-1])
    columns = -(-int(lengths[1]) // block[1]) if len(lengths) == 2 else widest
    return _Parts(counts, indices, full_counts, full_indices, block, columns)


def _own_mod(block_mask: Any) -> Mod | None:
    mod: Mod | None = getattr(block_mask, "mask_mod", None)
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    # A BlockMask that was made without a mask_mod has this one, under which everything is visible.
    return None if mod is getattr(flex, "noop_mask", None) else mod


def _check_sizes(block_mask: Any, parts: _Parts, sizes: Sizes) -> None:
    for name, dim, want in (("B", 0, sizes.batch), ("H", 1, sizes.heads)):
        if parts.counts.shape[dim] not in (1, want):
            wrong("block_mask.kv_num_blocks", f"{name} of 1 or {want}", parts.counts)
    lengths = lengths_of(block_mask)
    blocks = -(-sizes.rows // parts.block[0]), -(-sizes.keys // parts.block[1])
    if lengths and tuple(lengths) != (sizes.rows, sizes.keys):
        hint = f"({sizes.rows}, {sizes.keys}), the rows and keys of this call"
        wrong("block_mask", f"one of seq_lengths {hint}", tuple(lengths))
    if parts.counts.shape[2] != blocks[0] or (not lengths and parts.columns != blocks[1]):
        have = parts.counts.shape[2], parts.columns
        wrong("block_mask", f"{blocks[0]} x {blocks[1]} blocks of {parts.block}", have)


def _check_values(parts: _Parts) -> None:
    for counts, indices in (parts[:2], parts[2:4]):
        if counts is None or indices is None:
            continue
        most = indices.shape[-1]
        over = (counts < 0) | (counts > most)
        if over.any():
            wrong("block_mask", f"counts from 0 to {most}", int(counts[over][0]))
        listed = torch.arange(most, device=indices.device) < counts[..., None]
        beyond = listed & ((indices < 0) | (indices >= parts.columns))
        if beyond.any():
            worst = int(indices[beyond][0])
            wrong("block_mask.kv_indices", f"blocks from 0 to {parts.columns - 1}", worst)


def _states_of(parts: _Parts) -> torch.Tensor:
    """Return the state of each block, uint8 (B', H', rows, columns), cached until the BlockMask
    changes."""

    def make() -> torch.Tensor:
        # Here, so that a repeated call checks values that are new.
        if parts.counts.device.type == "cpu" or _check_on_device:
            _check_values(parts)
        found = torch.full(
            (*parts.counts.shape, parts.columns + 1), EMPTY, dtype=torch.uint8,
            device=parts.counts.device,
        )  # fmt: skip
        for counts, indices, state in (
            (parts.counts, parts.indices, PARTIAL),
            (parts.full_counts, parts.full_indices, WHOLE),
        ):
            if counts is None or indices is None:
                continue
            place = torch.arange(indices.shape[-1], device=indices.device)
            listed = (place < counts[..., None]) & (indices >= 0) & (indices < parts.columns)
            # Entries that are not listed go to an extra column.
            found.scatter_(-1, torch.where(listed, indices, parts.columns).long(), state)
        return found[..., : max(parts.columns, 1)].contiguous()

    if torch.compiler.is_compiling():
        return make()
    used = [x for x in parts[:4] if isinstance(x, torch.Tensor)]
    return kept.keep(("blocks", parts.block, parts.columns), used[0].device, used, make)


def _looking_up(states: torch.Tensor, block: tuple[int, int], mask_mod: Mod | None) -> Mod:
    rows, keys = block
    by_b, by_h = states.shape[0] > 1, states.shape[1] > 1
    if mask_mod is None:

        def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            state = states[b if by_b else 0, h if by_h else 0, q_idx // rows, kv_idx // keys]
            return state != EMPTY

        return listed

    def masked(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        state = states[b if by_b else 0, h if by_h else 0, q_idx // rows, kv_idx // keys]
        seen = mask_mod(b, h, q_idx, kv_idx)
        return (state == WHOLE) | ((state != EMPTY) & seen)

    return masked
