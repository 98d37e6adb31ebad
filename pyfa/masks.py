"""Ready masks for ``mask_mod``: functions that make one, with FlexAttention's signature.

    mask = pyfa.masks.documents(ids)
    out = pyfa.attention(q, k, v, mask_mod=mask)

Each returns a function of (b, h, q_idx, kv_idx), which FlexAttention takes as well. Tensors that it
is given are on q's device; their values may differ from call to call without a new kernel. Indices
count from the top left: query i and key i are one token where the lengths agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = [
    "all_of", "any_of", "block_diffusion", "blocks", "causal", "dilated", "documents",
    "global_tokens", "media", "natten", "not_", "padding", "prefix", "shared_prefix", "sliding",
    "sliding_tile", "spatial", "streaming", "temporal", "tree",
]  # fmt: skip

Mask = Callable[[Any, Any, Any, Any], Any]
Number = int | torch.Tensor
"""An int, a 0-dim tensor, or one for each sequence (B,)."""


def _of(x: Number, b: Any) -> Any:
    return x[b] if isinstance(x, torch.Tensor) and x.dim() else x


def _at(table: torch.Tensor, b: Any, i: Any) -> Any:
    """Of a table (S,), or (B, S) with one row for each sequence."""
    return table[b, i] if table.dim() == 2 else table[i]


# ---- together ------------------------------------------------------------------------------------


def all_of(*masks: Mask) -> Mask:
    """Sees what every one of ``masks`` sees."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = masks[0](b, h, q_idx, kv_idx)
        for each in masks[1:]:
            seen = seen & each(b, h, q_idx, kv_idx)
        return seen

    return mask


def any_of(*masks: Mask) -> Mask:
    """Sees what at least one of ``masks`` sees."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = masks[0](b, h, q_idx, kv_idx)
        for each in masks[1:]:
            seen = seen | each(b, h, q_idx, kv_idx)
        return seen

    return mask


def not_(other: Mask) -> Mask:
    """Sees what ``other`` hides."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ~other(b, h, q_idx, kv_idx)

    return mask


# ---- by distance ---------------------------------------------------------------------------------


def causal(shift: Number = 0) -> Mask:
    """Keys up to the query's own, moved by ``shift``: seqlen_k − seqlen_q aligns it to the bottom
    right, as ``causal=True`` is, which is faster."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + _of(shift, b) >= kv_idx

    return mask


def sliding(left: int, right: int = 0) -> Mask:
    """Keys from ``left`` before the query's own to ``right`` behind it (Longformer, Mistral)."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return mask


def dilated(left: int, right: int = 0, *, step: int) -> Mask:
    """Every ``step``-th key of a window, counted from the query's own (Longformer)."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance <= left) & (-distance <= right) & (distance % step == 0)

    return mask


def streaming(sinks: int, left: int) -> Mask:
    """The first ``sinks`` keys and a causal window of ``left`` (StreamingLLM)."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx <= left) | (kv_idx < sinks))

    return mask


# ---- by what tokens belong to --------------------------------------------------------------------


def padding(lengths: torch.Tensor) -> Mask:
    """Keys before the end of each sequence: ``lengths`` is (B,)."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < lengths[b]

    return mask


def documents(ids: torch.Tensor, inside: Mask | None = None) -> Mask:
    """Tokens of one document see each other: ``ids`` is (S,) or (B, S), equal and without gaps for
    the tokens of one.

    ``inside`` masks further, causal by default; its indices count inside the document.
    """
    # Where each token stands in its document.
    place = torch.arange(ids.shape[-1], device=ids.device, dtype=torch.int32).expand(ids.shape)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    place = place - torch.where(begins, place, 0).cummax(-1).values
    within = inside or causal()

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = _at(ids, b, q_idx) == _at(ids, b, kv_idx)
        return same & within(b, h, _at(place, b, q_idx), _at(place, b, kv_idx))

    return mask


def prefix(length: Number) -> Mask:
    """Causal, and all see the first ``length`` keys (prefix LM, T5, PaliGemma)."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < _of(length, b)) | (kv_idx <= q_idx)

    return mask


def shared_prefix(length: Number, answers: torch.Tensor) -> Mask:
    """Several answers to one prompt of ``length`` tokens: each sees the prompt and itself, causal.

    ``answers`` is (S,) or (B, S): the number of the answer that a token belongs to.
    """

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = _at(answers, b, q_idx) == _at(answers, b, kv_idx)
        return (kv_idx <= q_idx) & ((kv_idx < _of(length, b)) | same)

    return mask


def tree(parents: torch.Tensor, past: Number = 0) -> Mask:
    """Drafts of speculative decoding: a node sees the ``past`` keys, its ancestors and itself.

    Queries are the nodes, keys the past and then the nodes. ``parents`` is (N,): the number of each
    node's parent, which is smaller than its own, or −1.
    """
    nodes = parents.tolist()
    ancestor = torch.eye(len(nodes), dtype=torch.bool)
    for node, parent in enumerate(nodes):
        if not -1 <= parent < node:
            raise ValueError(
                f"parents: expected −1 or an earlier node for node {node}; got {parent}"
            )
        if parent >= 0:
            ancestor[node] |= ancestor[parent]
    descends = ancestor.to(parents.device)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        node = kv_idx - _of(past, b)
        return (node < 0) | descends[q_idx, node.clamp(min=0)]

    return mask


def global_tokens(is_global: torch.Tensor, otherwise: Mask) -> Mask:
    """Global tokens see all and are seen by all (Longformer); the others as ``otherwise`` says.

    ``is_global`` is (S,) or (B, S), boolean.
    """

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        either = _at(is_global, b, q_idx) | _at(is_global, b, kv_idx)
        return either | otherwise(b, h, q_idx, kv_idx)

    return mask


def media(begins: torch.Tensor, ends: torch.Tensor, tokens: int) -> Mask:
    """Text that sees images beside it (Flamingo): keys are images of ``tokens`` keys each, and
    image n is seen by the queries from ``begins[n]`` to before ``ends[n]``."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        image = kv_idx // tokens
        return (q_idx >= begins[image]) & (q_idx < ends[image])

    return mask


def block_diffusion(length: int, block: int) -> Mask:
    """Noisy tokens and then the same tokens clean, ``length`` of each (block diffusion, BD3-LM).

    A noisy block sees itself and the clean blocks before it; a clean block sees the clean blocks up
    to its own.
    """

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        clean_q, clean_k = q_idx >= length, kv_idx >= length
        block_q = torch.where(clean_q, q_idx - length, q_idx) // block
        block_k = torch.where(clean_k, kv_idx - length, kv_idx) // block
        itself = ~clean_q & ~clean_k & (block_q == block_k)
        before = ~clean_q & clean_k & (block_k < block_q)
        return itself | before | (clean_q & clean_k & (block_k <= block_q))

    return mask


# ---- by place in an image or a video -------------------------------------------------------------


def _near(x: Any, y: Any, size: int, kernel: int) -> Any:
    """Whether y is in the ``kernel`` places around x, which are moved inside at the borders."""
    half = kernel // 2
    middle = x.clamp(half, max(size - 1 - (kernel - 1 - half), half))
    return (y - middle >= -half) & (y - middle <= kernel - 1 - half)


def natten(sizes: Sequence[int], kernel: int | Sequence[int]) -> Mask:
    """Neighbourhood attention (NATTEN): each token sees the ``kernel`` around it.

    Tokens are in rows of an array of ``sizes``: (width,), (height, width) or (frames, height,
    width). At the borders the neighbourhood is moved inside.
    """
    kernels = (kernel,) * len(sizes) if isinstance(kernel, int) else tuple(kernel)
    if len(kernels) != len(sizes):
        raise ValueError(f"kernel: expected one size for each of {tuple(sizes)}; got {kernels}")
    dims = tuple(zip(sizes, kernels, strict=True))

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = None
        for size, wide in dims[:0:-1]:
            near = _near(q_idx % size, kv_idx % size, size, wide)
            seen = near if seen is None else seen & near
            q_idx, kv_idx = q_idx // size, kv_idx // size
        near = _near(q_idx, kv_idx, *dims[0])
        return near if seen is None else seen & near

    return mask


def sliding_tile(tiles: Sequence[int], tokens: int, kernel: int | Sequence[int]) -> Mask:
    """Sliding tile attention (STA): ``natten`` of tiles, each of ``tokens`` tokens in a row.

    ``tiles`` is how many there are along each dimension, ``kernel`` how many a tile sees.
    """
    of_tiles = natten(tiles, kernel)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return of_tiles(b, h, q_idx // tokens, kv_idx // tokens)

    return mask


def spatial(tokens: int, frames: int = 0) -> Mask:
    """A video's frames of ``tokens`` tokens each: a token sees its own frame and ``frames`` on each
    side (Sparse VideoGen's spatial heads)."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // tokens - kv_idx // tokens).abs() <= frames

    return mask


def temporal(tokens: int, places: int = 0) -> Mask:
    """A token sees its own place in every frame of ``tokens`` tokens, and ``places`` on each side
    (Sparse VideoGen's temporal heads)."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx % tokens - kv_idx % tokens).abs() <= places

    return mask


# ---- by a table ----------------------------------------------------------------------------------


def blocks(table: torch.Tensor, rows: int, keys: int) -> Mask:
    """Blocks of ``rows`` queries by ``keys`` keys, seen where ``table`` is not 0.

    ``table`` is (blocks of rows, blocks of keys), with heads, or batch and heads, before them.
    """
    rank = table.dim()
    if not 2 <= rank <= 4:
        raise ValueError(f"table: expected 2 to 4 dimensions; got shape {tuple(table.shape)}")
    # What has a size of 1 is for all.
    shared = [size == 1 for size in table.shape[: rank - 2]]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        outer = [x * (not alike) for x, alike in zip((b, h)[4 - rank :], shared, strict=True)]
        place = (*outer, q_idx // rows, kv_idx // keys)
        return table[place] != 0

    return mask
