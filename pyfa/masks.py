"""Ready-made masks: functions that return a ``mask_mod`` with FlexAttention's signature.

    mask = pyfa.masks.documents(ids)
    out = pyfa.attention(q, k, v, mask_mod=mask)

A mask is a function of (b, h, q_idx, kv_idx), which FlexAttention accepts as well. Indices count
from the first query and the first key. Tensor arguments must be on q's device; a tensor with other
values needs no new kernel. A wrong argument raises a ``ValueError`` or ``TypeError`` that names it.
In the docstrings, B is the batch size and S the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import validate
from . import validate_mods as check

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
    """Return entry i of ``table``: (S,), or (B, S) with one row per sequence."""
    return table[b, i] if table.dim() == 2 else table[i]


# ---- together ------------------------------------------------------------------------------------


def _some(masks: tuple[Mask, ...]) -> None:
    check.functions("masks", *masks)
    if not masks:
        validate.wrong("masks", "at least one mask", "none")


def all_of(*masks: Mask) -> Mask:
    """Return the intersection of ``masks``: a key is visible if it is visible under every mask."""
    _some(masks)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = masks[0](b, h, q_idx, kv_idx)
        for each in masks[1:]:
            seen = seen & each(b, h, q_idx, kv_idx)
        return seen

    return mask


def any_of(*masks: Mask) -> Mask:
    """Return the union of ``masks``: a key is visible if it is visible under at least one mask."""
    _some(masks)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = masks[0](b, h, q_idx, kv_idx)
        for each in masks[1:]:
            seen = seen | each(b, h, q_idx, kv_idx)
        return seen

    return mask


def not_(other: Mask) -> Mask:
    """Return the opposite of the mask ``other``: queries see the keys that it hides."""
    check.functions("other", other)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ~other(b, h, q_idx, kv_idx)

    return mask


# ---- by distance ---------------------------------------------------------------------------------


def causal(shift: Number = 0) -> Mask:
    """Return a causal mask: query i sees the keys up to i + ``shift``. By default the mask is
    aligned to the top left; a shift of seqlen_k − seqlen_q aligns it to the bottom right. The
    argument ``causal=True`` gives the mask aligned to the bottom right, and is faster."""
    check.per_sequence(shift=shift)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + _of(shift, b) >= kv_idx

    return mask


def sliding(left: int, right: int = 0) -> Mask:
    """Return a sliding window (Longformer, Mistral): from ``left`` keys before the query's position
    to ``right`` keys after it."""
    check.numbers(left=left, right=right)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return mask


def dilated(left: int, right: int = 0, *, step: int) -> Mask:
    """Return a dilated window (Longformer): a sliding window with only the keys whose distance from
    the query is a multiple of ``step``."""
    check.numbers(left=left, right=right)
    check.numbers(1, step=step)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance <= left) & (-distance <= right) & (distance % step == 0)

    return mask


def streaming(sinks: int, left: int) -> Mask:
    """Return a causal window plus the first keys, the attention sinks (StreamingLLM).

    The window has ``left`` keys before the query. ``sinks`` is the number of first keys that every
    query sees.
    """
    check.numbers(0, sinks=sinks, left=left)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx <= left) | (kv_idx < sinks))

    return mask


# ---- by what tokens belong to --------------------------------------------------------------------


def padding(lengths: torch.Tensor) -> Mask:
    """Return a padding mask: queries see the keys before the end of their sequence. ``lengths``
    (B,) holds the lengths of the sequences."""
    check.table("lengths", lengths, {1: "(B,)"}, check.INTEGERS)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < lengths[b]

    return mask


def documents(ids: torch.Tensor, inside: Mask | None = None) -> Mask:
    """Return a document mask: tokens see only their own document, by default causally.

    ``ids``, (S,) or (B, S), gives the id of each token's document. The tokens of a document must be
    contiguous. ``inside`` replaces the causal mask inside each document; its indices count from the
    document's first token.
    """
    check.table("ids", ids, check.PER_TOKEN, check.IDS)
    within = causal() if inside is None else inside
    check.functions("inside", within)
    # Where each token stands in its document.
    place = torch.arange(ids.shape[-1], device=ids.device, dtype=torch.int32).expand(ids.shape)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    place = place - torch.where(begins, place, 0).cummax(-1).values

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = _at(ids, b, q_idx) == _at(ids, b, kv_idx)
        return same & within(b, h, _at(place, b, q_idx), _at(place, b, kv_idx))

    return mask


def prefix(length: Number) -> Mask:
    """Return a causal mask with a prefix that every query sees (prefix LM, T5, PaliGemma).

    The prefix has ``length`` keys.
    """
    check.per_sequence(0, length=length)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < _of(length, b)) | (kv_idx <= q_idx)

    return mask


def shared_prefix(length: Number, answers: torch.Tensor) -> Mask:
    """Return a causal mask for several answers to a prompt: each answer sees the prompt and itself.

    The prompt has ``length`` tokens. ``answers`` is (S,) or (B, S): the index of the answer that
    each token belongs to. The index of a token of the prompt may have any value.
    """
    check.per_sequence(0, length=length)
    check.table("answers", answers, check.PER_TOKEN, check.IDS)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = _at(answers, b, q_idx) == _at(answers, b, kv_idx)
        return (kv_idx <= q_idx) & ((kv_idx < _of(length, b)) | same)

    return mask


def tree(parents: torch.Tensor, past: Number = 0) -> Mask:
    """Return the mask of a tree of draft tokens (speculative decoding): a node sees all past keys,
    its ancestors and itself.

    The queries are the N nodes. The keys are the ``past`` keys, followed by the nodes. ``parents``
    (N,) is the index of each node's parent, or −1 for a root. Parents must come before their
    children; otherwise ``ValueError`` is raised.
    """
    check.table("parents", parents, {1: "(N,)"}, check.INTEGERS)
    check.per_sequence(0, past=past)
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
    """Return a mask in which global tokens see all tokens, and all tokens see the global tokens
    (Longformer).

    ``is_global``, boolean (S,) or (B, S), marks the global tokens. The mask ``otherwise`` decides
    for all other pairs of tokens.
    """
    check.table("is_global", is_global, check.PER_TOKEN, ("bool",))
    check.functions("otherwise", otherwise)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        either = _at(is_global, b, q_idx) | _at(is_global, b, kv_idx)
        return either | otherwise(b, h, q_idx, kv_idx)

    return mask


def media(begins: torch.Tensor, ends: torch.Tensor, tokens: int) -> Mask:
    """Return the mask of text that attends to images (Flamingo). Each image has ``tokens`` keys.
    Queries ``begins[n]`` to ``ends[n]`` − 1 see image n."""
    check.table("begins", begins, {1: "(N,)"}, check.INTEGERS)
    check.table("ends", ends, {1: "(N,)"}, check.INTEGERS)
    if check.is_known(ends.shape) and begins.shape != ends.shape:
        validate.wrong("ends", f"the shape of begins {tuple(begins.shape)}", ends)
    check.numbers(1, tokens=tokens)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        image = kv_idx // tokens
        return (q_idx >= begins[image]) & (q_idx < ends[image])

    return mask


def block_diffusion(length: int, block: int) -> Mask:
    """Return the mask of block diffusion (BD3-LM) for noisy tokens that are followed by the same
    tokens without noise.

    There are ``length`` tokens of each kind, in blocks of ``block`` tokens. A block of noisy tokens
    sees itself and the clean blocks before it. A clean block sees itself and the clean blocks
    before it.
    """
    check.numbers(0, length=length)
    check.numbers(1, block=block)

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
    """Return whether y is one of the ``kernel`` positions around x. At the borders the
    neighborhood is shifted inward."""
    half = kernel // 2
    middle = x.clamp(half, max(size - 1 - (kernel - 1 - half), half))
    return (y - middle >= -half) & (y - middle <= kernel - 1 - half)


def natten(sizes: Sequence[int], kernel: int | Sequence[int]) -> Mask:
    """Return a neighborhood mask (NATTEN): each token sees the ``kernel`` tokens nearest to
    it in each dimension.

    Tokens are the elements of a row-major array of ``sizes``: (width,), (height, width) or (frames,
    height, width). At the borders the neighborhood is shifted inward. Raises ``ValueError`` if
    ``kernel`` does not have one size per dimension.
    """
    sizes = check.sizes("sizes", sizes)
    kernel = kernel if isinstance(kernel, Iterable) else (kernel,) * len(sizes)
    kernels = check.sizes("kernel", kernel)
    if len(kernels) != len(sizes):
        validate.wrong("kernel", f"one size for each of {sizes}", kernels)
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
    """Return the mask of sliding tile attention (STA): a neighborhood mask over tiles of tokens.

    A tile has ``tokens`` consecutive tokens. For each dimension, ``tiles`` is the number of tiles,
    and ``kernel`` the number of tiles that a tile sees.
    """
    of_tiles = natten(check.sizes("tiles", tiles), kernel)
    check.numbers(1, tokens=tokens)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return of_tiles(b, h, q_idx // tokens, kv_idx // tokens)

    return mask


def spatial(tokens: int, frames: int = 0) -> Mask:
    """Return a spatial mask for video (Sparse VideoGen): a token sees its own frame and
    ``frames`` frames on each side. A frame has ``tokens`` tokens."""
    check.numbers(1, tokens=tokens)
    check.numbers(0, frames=frames)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // tokens - kv_idx // tokens).abs() <= frames

    return mask


def temporal(tokens: int, places: int = 0) -> Mask:
    """Return a temporal mask for video (Sparse VideoGen): in every frame a token sees its own
    position and ``places`` positions on each side. A frame has ``tokens`` tokens."""
    check.numbers(1, tokens=tokens)
    check.numbers(0, places=places)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx % tokens - kv_idx % tokens).abs() <= places

    return mask


# ---- by a table ----------------------------------------------------------------------------------


def blocks(table: torch.Tensor, rows: int, keys: int) -> Mask:
    """Return a block mask: a block is visible if its entry in the table is not 0.

    A block has ``rows`` queries and ``keys`` keys. ``table`` is (blocks of queries, blocks of
    keys), with a leading dimension for heads, or two for batch and heads, if needed. A leading
    dimension may be 1. Raises ``ValueError`` if ``table`` has another number of dimensions.
    """
    check.kind("table", table, ("bool", *check.NUMBERS))
    check.numbers(1, rows=rows, keys=keys)
    rank = table.dim()
    if not 2 <= rank <= 4:
        validate.wrong("table", "2 to 4 dimensions", table)
    # A dimension of size 1 broadcasts.
    shared = [size == 1 for size in table.shape[: rank - 2]]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        outer = [x * (not alike) for x, alike in zip((b, h)[4 - rank :], shared, strict=True)]
        place = (*outer, q_idx // rows, kv_idx // keys)
        return table[place] != 0

    return mask
