"""FlashAttention-4's block-sparse tensors (``flash_attn.cute.block_sparsity`` and
``compute_block_sparsity``).

pyfa builds its own block lists from a mask_mod. This module is for programs that pass block lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .. import mods
from ..blocks import build
from ..problem import Call
from .fa4_mods import Lengths, pyfas_mods

__all__ = ["BlockSparseTensorsTorch", "compute_block_sparsity", "fast_sampling"]

_Mod = TypeVar("_Mod", bound=Callable[..., Any])


class BlockSparseTensorsTorch(NamedTuple):
    """Lists of the blocks of keys that each block of rows visits: blocks that are partially masked
    (``mask_block_*``) and blocks that are not masked at all (``full_block_*``). For M blocks of
    rows and N blocks of keys, counts are (B, H, M) and indices (B, H, M, N), int32."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: torch.Tensor | None = None
    dq_write_order_full: torch.Tensor | None = None
    spt: bool | None = None


def fast_sampling(mask_mod: _Mod) -> _Mod:
    """Mark ``mask_mod``: version 4 evaluates a marked function at only five points of a block.
    pyfa ignores the mark and evaluates all points."""
    mask_mod.use_fast_sampling = True  # type: ignore[attr-defined]
    return mask_mod


def compute_block_sparsity(
    tile_m: int,
    tile_n: int,
    batch_size: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    mask_mod: Callable[..., Any],
    aux_tensors: list[torch.Tensor] | None,
    device: torch.device | str,
    aux_scalars: tuple[Any, ...] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cu_total_m_blocks: torch.Tensor | None = None,
    cu_block_idx_offsets: torch.Tensor | None = None,
    compute_full_blocks: bool = True,
    use_fast_sampling: bool = False,
) -> BlockSparseTensorsTorch:
    """Return the blocks of ``tile_m`` rows × ``tile_n`` keys that ``mask_mod`` does not mask
    completely.

    The result holds, for each block of rows, the number of these blocks and their indices. For
    packed sequences, the counts are (H, blocks of rows of all sequences), and the indices of a
    sequence begin at its element of ``cu_block_idx_offsets``.
    """
    place = torch.empty(0, device=device).device  # with its index
    tiles = build.Tiles(tile_m, tile_n)

    def states(lengths: Lengths, first: int, batch: int, rows: int, keys: int) -> torch.Tensor:
        """Return the states of ``batch`` sequences, from number ``first`` on."""
        found = pyfas_mods(None, mask_mod, aux_tensors, aux_scalars, lengths)
        digest, captured = mods.resolve(None, found["mask_mod"], place)
        shape = batch, num_heads, -(-rows // tile_m), -(-keys // tile_n)
        mask = mods.of(digest).mask if digest else None
        if mask is None:
            return torch.full(shape, build.WHOLE, dtype=torch.uint8, device=place)
        # Without memory of their own: only their shapes count.
        q, k = (torch.empty((), device=place).expand(batch, n, num_heads, 1) for n in (rows, keys))
        more: dict[str, Any] = {f"captured{slot}": x for slot, x in enumerate(captured)}
        call = Call(
            q, k, k, max_seqlen_q=rows, max_seqlen_k=keys, scale=1.0, mods=digest,
            batch_start=first, **more,
        )  # fmt: skip
        return build.states_of(call, mask, tiles).expand(shape)

    wanted = [build.PARTIAL, build.WHOLE]
    if not compute_full_blocks:
        wanted.pop()
    if all(x is None for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        all_states = states(Lengths(seqlen_q, seqlen_k), 0, batch_size, seqlen_q, seqlen_k)
        made = [x for state in wanted for x in _lists(all_states == state)]
        return _named(made, block_size=(tile_m, tile_n))
    rows_of = _lengths(cu_seqlens_q, seqused_q, batch_size, seqlen_q)
    keys_of = _lengths(cu_seqlens_k, seqused_k, batch_size, seqlen_k)
    parts: list[list[torch.Tensor]] = [[] for _ in range(2 * len(wanted))]
    for b, (rows, keys) in enumerate(zip(rows_of, keys_of, strict=True)):
        offsets = (cu_seqlens_q, cu_seqlens_k)
        lengths = Lengths(rows, keys, *(None if x is None else x.to(place) for x in offsets))
        of_one = states(lengths, b, 1, rows, keys)[0]
        lists = [x for state in wanted for x in _lists(of_one == state)]
        for part, x in zip(parts, lists, strict=True):
            part.append(x.flatten(1))
    return _named(
        [torch.cat(part, dim=1) for part in parts],
        cu_total_m_blocks=cu_total_m_blocks,
        cu_block_idx_offsets=cu_block_idx_offsets,
        block_size=(tile_m, tile_n),
    )


def _lengths(
    offsets: torch.Tensor | None, used: torch.Tensor | None, batch: int, longest: int
) -> Sequence[int]:
    if used is not None:
        return [int(x) for x in used.tolist()]
    return [longest] * batch if offsets is None else [int(x) for x in offsets.diff().tolist()]


def _lists(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts and, in ascending order, the indices of what is chosen along the last
    dimension."""
    order = torch.sort((~chosen).to(torch.uint8), dim=-1, stable=True).indices
    return chosen.sum(-1, dtype=torch.int32), order.int()


def transposed(tensors: Any) -> BlockSparseTensorsTorch:
    """Convert lists of key blocks to lists of row blocks, or the other way round."""
    columns = tensors.mask_block_idx.shape[-1]
    made: list[torch.Tensor] = []
    for counts, indices in (
        (tensors.mask_block_cnt, tensors.mask_block_idx),
        (tensors.full_block_cnt, tensors.full_block_idx),
    ):
        if counts is not None:
            given = torch.arange(columns, device=counts.device) < counts[..., None]
            # Entries beyond the count go to an extra column.
            places = torch.where(given, indices.long(), columns)
            dense = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=counts.device)
            dense.scatter_(-1, places, True)
            made += _lists(dense[..., :columns].transpose(-1, -2))
    size = getattr(tensors, "block_size", None)
    return _named(made, block_size=size)


def _named(lists: Sequence[torch.Tensor], **more: Any) -> BlockSparseTensorsTorch:
    """Return counts and indices, of whole blocks too if there are four, with other fields."""
    given: dict[str, Any] = dict(zip(BlockSparseTensorsTorch._fields, lists, strict=False))
    return BlockSparseTensorsTorch(**given, **more)
