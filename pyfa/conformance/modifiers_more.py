"""More score_mods and mask_mods of the cases: patterns that people write with FlexAttention.

``modifiers`` includes them. ``grid_mods.everywhere`` has the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .tables import Mod, Tables

# ---- masks -------------------------------------------------------------------------------------


def _causal(tables: Tables) -> Mod:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    return mask


def _document_prefix(tables: Tables) -> Mod:
    """Return a mask of documents that each have a prefix that all of its rows see."""
    starts = tables.integers("starts", (tables.longest,), 20) == 0
    document = starts.cumsum(0).int()
    place = torch.arange(tables.longest, dtype=torch.int32, device=tables.where)
    first = torch.where(starts, place, 0).cummax(0).values.int()

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = document[q_idx] == document[kv_idx]
        return same & ((kv_idx <= q_idx) | (kv_idx - first[kv_idx] < 5))

    return mask


def _jagged(tables: Tables) -> Mod:
    """Return a mask of sequences of one jagged row: by the first and last place of each token's
    sequence."""
    starts = tables.integers("starts", (tables.longest,), 20) == 0
    place = torch.arange(tables.longest, dtype=torch.int32, device=tables.where)
    first = torch.where(starts, place, 0).cummax(0).values.int()
    after = torch.where(starts, place, tables.longest).roll(-1, 0)
    after[-1] = tables.longest
    end = after.flip(0).cummin(0).values.flip(0).int()

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= first[q_idx]) & (kv_idx < end[q_idx])

    return mask


def _global_tokens(tables: Tables) -> Mod:
    """Return a mask of tokens that see all and are seen by all, among a window."""
    special = tables.integers("special", (tables.longest,), 16) == 0

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return special[q_idx] | special[kv_idx] | ((q_idx - kv_idx).abs() <= 4)

    return mask


def _streaming(tables: Tables) -> Mod:
    """Return a causal window with four keys that all rows see."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((kv_idx < 4) | (q_idx - kv_idx <= 11)) & (kv_idx <= q_idx)

    return mask


def _checkerboard(tables: Tables) -> Mod:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // 8 + kv_idx // 8 + h) % 2 == 0

    return mask


def _fixed_sparse(tables: Tables) -> Mod:
    """Return the mask of a sparse transformer: the own block, and the last keys of each block
    before it."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((q_idx // 16 == kv_idx // 16) | (kv_idx % 16 >= 13)) & (kv_idx <= q_idx)

    return mask


def _head_windows(tables: Tables) -> Mod:
    size = tables.integers("windows", (tables.case.heads_q,), 40)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() <= size[h]

    return mask


def _lengths(tables: Tables) -> Mod:
    """Return a mask of padding behind each sequence."""
    length = tables.integers("lengths", (max(tables.case.batch, 1),), max(tables.longest, 1))

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= length[b]) & (q_idx <= length[b] + 20)

    return mask


def _transfusion(tables: Tables) -> Mod:
    """Return a causal mask in which the tokens of one image see each other. There are two images
    per sequence."""
    first = tables.integers("images", (max(tables.case.batch, 1), 2), 30)
    first[:, 1] += 40
    size = tables.integers("sizes", (max(tables.case.batch, 1), 2), 9) + 1

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = q_idx >= kv_idx
        for image in range(2):
            begin = first[b, image]
            end = begin + size[b, image]
            both = (q_idx >= begin) & (q_idx < end) & (kv_idx >= begin) & (kv_idx < end)
            seen = seen | both
        return seen

    return mask


def _vision(tables: Tables) -> Mod:
    """Return the mask of cross-attention to images, as in Flamingo: text sees the tokens of the
    images between whose bounds it is."""
    images = tables.longest // 8 + 1
    begin = tables.integers("begin", (images,), max(tables.longest, 1))
    end = begin + tables.integers("text", (images,), 40)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        image = kv_idx // 8
        return (begin[image] <= q_idx) & (q_idx < end[image])

    return mask


def _tiled_natten(tables: Tables) -> Mod:
    """Return a 2D neighborhood of 5 x 5 on a canvas 12 wide whose tokens lie in tiles of 4 x 3."""

    def x_and_y(at: Any) -> tuple[Any, Any]:
        tile, inside = at // 12, at % 12
        return tile % 3 * 4 + inside % 4, tile // 3 * 3 + inside // 4

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_x, q_y), (k_x, k_y) = x_and_y(q_idx), x_and_y(kv_idx)
        near_x = (q_x.clamp(2, 9) - k_x).abs() <= 2
        return near_x & ((q_y.clamp(min=2) - k_y).abs() <= 2)

    return mask


def _morton_natten(tables: Tables) -> Mod:
    """Return a 2D neighborhood whose tokens lie in Morton order: bits of x and y in turns."""

    def evens(at: Any) -> Any:
        at = at & 0x5555
        at = (at | (at >> 1)) & 0x3333
        at = (at | (at >> 2)) & 0x0F0F
        return (at | (at >> 4)) & 0x00FF

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near_x = (evens(q_idx) - evens(kv_idx)).abs() <= 3
        return near_x & ((evens(q_idx >> 1) - evens(kv_idx >> 1)).abs() <= 2)

    return mask


def _sliding_tile(tables: Tables) -> Mod:
    """Return a neighborhood of tiles of 4 tokens in a video of 2 x 3 tiles a frame, moved inside at
    its borders."""
    frames = max(-(-tables.longest // 24), 1)

    def cell(at: Any) -> tuple[Any, Any, Any]:
        tile = at // 4
        return tile // 6, tile // 3 % 2, tile % 3

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_t, q_y, q_x), (k_t, k_y, k_x) = cell(q_idx), cell(kv_idx)
        near = (q_t.clamp(1, max(frames - 2, 1)) - k_t).abs() <= 1
        return near & (q_y == k_y) & ((q_x.clamp(1, 1) - k_x).abs() <= 1)

    return mask


def _either(tables: Tables) -> Mod:
    """Return a mask made of others, by or, and, and not."""
    prefix, window, board = (made(tables) for made in (_streaming, _head_windows, _checkerboard))

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = b, h, q_idx, kv_idx
        return prefix(*at) | (window(*at) & ~board(*at))

    return mask


MASKS: dict[str, Callable[[Tables], Mod]] = {
    "causal": _causal, "document_prefix": _document_prefix, "jagged": _jagged,
    "global_tokens": _global_tokens, "streaming": _streaming, "checkerboard": _checkerboard,
    "fixed_sparse": _fixed_sparse, "head_windows": _head_windows, "lengths": _lengths,
    "transfusion": _transfusion, "vision": _vision, "tiled_natten": _tiled_natten,
    "morton_natten": _morton_natten, "sliding_tile": _sliding_tile, "either": _either,
}  # fmt: skip
# Mods whose tables have the size of the case's lengths, or of its number of sequences or heads.
OF_LENGTHS = (
    "document_prefix", "jagged", "global_tokens", "head_windows", "lengths", "transfusion",
    "vision", "either",
)  # fmt: skip


# ---- scores ------------------------------------------------------------------------------------


def _rope(tables: Tables) -> Mod:
    """Return the positional part of a latent attention's score: a product of two more vectors, one
    of them shared by the heads."""
    case = tables.case
    batch, dim = max(case.batch, 1), 4
    rows = tables.normal("q_rope", (batch, case.heads_q, tables.longest, dim), torch.bfloat16)
    keys = tables.normal("k_rope", (batch, tables.longest, dim), torch.bfloat16)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for each in range(dim):
            score = score + 0.25 * (rows[b, h, q_idx, each] * keys[b, kv_idx, each].float())
        return score

    return score


def _activation(tables: Tables) -> Mod:
    """Return an activation of the score, with a kink and exponentials."""

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * torch.sigmoid(1.7 * score) + torch.relu(score - 0.5)

    return score


def _t5(tables: Tables) -> Mod:
    """Return T5's bias: buckets of distances that grow, by integers alone."""
    table = tables.normal("t5", (tables.case.heads_q, 12), torch.float32)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = (q_idx - kv_idx).abs()
        wide = torch.where(distance < 16, 4, 5)
        bucket = torch.where(distance < 4, distance, wide)
        return score + table[h, bucket + torch.where(kv_idx > q_idx, 6, 0)]

    return score


def _table(tables: Tables) -> Mod:
    """Return a captured bias for every score, whose last dimension is not contiguous."""
    case = tables.case
    shape = (max(case.batch, 1), tables.longest, case.heads_q, tables.longest)
    bias = tables.normal("table", shape, torch.float16).permute(0, 2, 3, 1)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[b, h, q_idx, kv_idx]

    return score


def _inside(tables: Tables) -> Mod:
    """Return ALiBi by the places inside documents, and a temperature by head that is learned."""
    place = tables.integers("places", (tables.longest,), 24)
    gain = 1.0 + tables.integers("gain", (tables.case.heads_q,), 8).float() / 16.0

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * gain[h] - 0.05 * (place[q_idx] - place[kv_idx]).abs()

    return score


def _distance(tables: Tables) -> Mod:
    """Return a bias by the logarithm of the distance, weighted by a 0-dim tensor."""
    weight = tables.normal("weight", (), torch.float32)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - weight * torch.log1p((q_idx - kv_idx).abs().float())

    return score


SCORES: dict[str, Callable[[Tables], Mod]] = {
    "rope": _rope, "activation": _activation, "t5": _t5, "table": _table, "inside": _inside,
    "distance": _distance,
}  # fmt: skip
