"""The score_mods and mask_mods of the cases, with the tensors that they capture.

Each of them is made for a case and a device, and is a function as a user would write it.
``inputs.integers`` and ``inputs.near_normal`` fill its tables, seeded by the case's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import mods
from . import modifiers_more
from .cases import Case
from .tables import Mod
from .tables import Tables as _Tables


def mods_of(case: Case, where: torch.device) -> dict[str, Mod]:
    """Return the ``score_mod`` and the ``mask_mod`` of ``case``, if it has them. If the case has a
    block_mask, the mask_mod computes the same mask."""
    made: dict[str, Any] = {}
    tables = _Tables(case, where)
    if case.score_mod:
        made["score_mod"] = SCORES[case.score_mod](tables)
    if case.mask_mod:
        made["mask_mod"] = MASKS[case.mask_mod](tables)
    if case.block_mask:
        made["mask_mod"] = _of_blocks(tables)
    return made


def captured_by(
    made: dict[str, Any], where: torch.device, grad: bool
) -> tuple[str, dict[str, torch.Tensor], list[str]]:
    """Return the digest of the mods that ``mods_of`` made, the captured tensors by field, and the
    fields that get a gradient. With ``grad``, these are the fields of all floating-point tensors
    that the score_mod captured."""
    given = {"score_mod": None, "mask_mod": None, **made}
    digest, captured = mods.resolve(**given, device=where)
    if grad:
        with torch.enable_grad():
            _, of_score = mods.resolve(given["score_mod"], None, where)
            for x in of_score:
                x.requires_grad_(x.is_floating_point())
            digest, captured = mods.resolve(**given, device=where)
    names = {f"captured{number}": x for number, x in enumerate(captured)}
    return digest, names, [name for name, x in names.items() if x.requires_grad]


def arguments_of(case: Case, where: torch.device) -> dict[str, Any]:
    """Return those of the arguments ``score_mod``, ``mask_mod`` and ``block_mask`` that ``case``
    has."""
    made: dict[str, Any] = mods_of(case, where)
    if case.block_mask:
        del made["mask_mod"]
        made["block_mask"] = _block_mask(_Tables(case, where))
    return made


# ---- a BlockMask -------------------------------------------------------------------------------

_ABSENT, _MASKED, _FULL = range(3)


def _blocks(tables: _Tables) -> torch.Tensor:
    """Return the state of each block, per head. The second row of blocks is fully masked."""
    case = tables.case
    rows, keys = (-(-max((*n, 1)) // case.block_mask) for n in (case.lengths_q, case.lengths_k))
    blocks = tables.integers("blocks", (1, case.heads_q, rows, keys), 3)
    blocks[:, :, 1:2] = _ABSENT
    return blocks


def _seen_in_part(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + 2 * kv_idx) % 3 != 0


def _of_blocks(tables: _Tables) -> Mod:
    blocks, size = _blocks(tables), tables.case.block_mask

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        block = blocks[0, h, q_idx // size, kv_idx // size]
        return (block == _FULL) | ((block == _MASKED) & _seen_in_part(b, h, q_idx, kv_idx))

    return mask


def _block_mask(tables: _Tables) -> Any:
    """Return PyTorch's BlockMask."""
    from torch.nn.attention.flex_attention import BlockMask

    case, blocks = tables.case, _blocks(tables)
    lists: list[torch.Tensor] = []
    for kind in (_MASKED, _FULL):
        there = blocks == kind
        lists += [
            there.sum(-1, dtype=torch.int32),
            torch.sort((~there).int(), dim=-1, stable=True).indices.int(),
        ]
    lengths = max((*case.lengths_q, 1)), max((*case.lengths_k, 1))
    make: Any = BlockMask.from_kv_blocks
    return make(*lists, BLOCK_SIZE=case.block_mask, mask_mod=_seen_in_part, seq_lengths=lengths)


# ---- masks -------------------------------------------------------------------------------------


def _documents(tables: _Tables) -> Mod:
    """Return a mask of several documents per sequence, different in each sequence; causal inside a
    document. In the second half, a few tokens belong to another document, or to one below 0, as
    padding often does: a tile's bounds depend on single tokens there."""
    shape = (max(tables.case.batch, 1), tables.longest)
    document = (tables.integers("documents", shape, 24) == 0).cumsum(1)  # int64, as in PyTorch
    strangers = tables.integers("strangers", shape, 40) == 0
    strangers[:, : tables.longest // 2] = False
    document = torch.where(strangers, tables.integers("others", shape, 6) - 3, document)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)

    return mask


def _prefix(tables: _Tables) -> Mod:
    """Return a prefix-LM mask: all rows see the prefix, and the rest is causal."""
    length = tables.integers("prefix", (max(tables.case.batch, 1),), 40)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < length[b]) | (kv_idx <= q_idx)

    return mask


def _sliding(tables: _Tables) -> Mod:
    size = 19

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx <= size) & (q_idx >= kv_idx)

    return mask


def _dilated(tables: _Tables) -> Mod:
    """Return a mask of every third key of a window, shifted by head."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance.abs() <= 60) & (distance % 3 == h % 3)

    return mask


def _natten(tables: _Tables) -> Mod:
    """Return the mask of a 2D neighborhood of 5 x 3 in rows of 9, clamped at the borders."""
    width, kernel_x, kernel_y = 9, 5, 3
    height = -(-tables.longest // width)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        x = (q_idx % width).clamp(kernel_x // 2, width - 1 - kernel_x // 2)
        y = (q_idx // width).clamp(kernel_y // 2, max(height - 1 - kernel_y // 2, 1))
        near_x = (x - kv_idx % width).abs() <= kernel_x // 2
        return near_x & ((y - kv_idx // width).abs() <= kernel_y // 2)

    return mask


def _diffusion(tables: _Tables) -> Mod:
    """Return the mask of block diffusion: noisy blocks see themselves and the clean blocks before
    them."""
    half, block = tables.longest // 2, 8

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        clean_q, clean_k = q_idx >= half, kv_idx >= half
        block_q = torch.where(clean_q, q_idx - half, q_idx) // block
        block_k = torch.where(clean_k, kv_idx - half, kv_idx) // block
        diagonal = (block_q == block_k) & (clean_q == clean_k)
        earlier = (block_q > block_k) & clean_k & ~clean_q
        return diagonal | earlier | ((block_q >= block_k) & clean_k & clean_q)

    return mask


def _shared_prefix(tables: _Tables) -> Mod:
    """Return a mask of answers to one question: all see the question, none sees another answer. A
    0-dim tensor holds the question's length."""
    question = tables.integers("question", (), 30)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        answer_q, answer_k = (q_idx - question) // 21, (kv_idx - question) // 21
        return (kv_idx <= q_idx) & ((kv_idx < question) | (answer_q == answer_k))

    return mask


def _tree(tables: _Tables) -> Mod:
    """Return the mask of a tree of drafted tokens: a boolean table holds the ancestors."""
    size = 48
    ancestor = torch.eye(size, dtype=torch.bool)
    for node, parent in enumerate(tables.integers("tree", (size,), size).tolist()):
        if node:
            ancestor[node] |= ancestor[parent % node]
    ancestor = ancestor.to(tables.where)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        inside = ancestor[q_idx.clamp(max=size - 1), kv_idx.clamp(max=size - 1)]
        return torch.where((q_idx < size) & (kv_idx < size), inside, kv_idx <= q_idx)

    return mask


def _strided(tables: _Tables) -> Mod:
    """Return a mod with a strided table, indexed from its end, with bit operations: tests sizes and
    strides in kernels."""
    bits = tables.integers("bits", (2, tables.longest, 3), 256).to(torch.uint8)[:, :, 1]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = (q_idx ^ kv_idx) & 7
        return ((bits[h & 1, -1 - kv_idx].int() >> place) & 1).bool() | (q_idx == kv_idx)

    return mask


def _patches(tables: _Tables) -> Mod:
    """Return a mask of visible, partly visible and masked patches, different per head, with some
    fully masked rows."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = (q_idx // 100 + kv_idx // 80 * 2 + h) % 3
        some = (kind == 2) | ((kind == 1) & ((q_idx ^ kv_idx) % 7 != 3))
        return some & ((q_idx < 130) | (q_idx >= 149))

    return mask


MASKS: dict[str, Callable[[_Tables], Mod]] = {
    "documents": _documents, "prefix": _prefix, "sliding": _sliding, "dilated": _dilated,
    "natten": _natten, "diffusion": _diffusion, "shared_prefix": _shared_prefix, "tree": _tree,
    "strided": _strided, "patches": _patches, **modifiers_more.MASKS,
}  # fmt: skip
OF_LENGTHS = frozenset(("documents", "tree", "strided", *modifiers_more.OF_LENGTHS))
"""Masks whose tables end with the lengths, numbers of sequences or heads of the case."""


# ---- scores ------------------------------------------------------------------------------------


def _relative(tables: _Tables) -> Mod:
    """Return a learned bias by distance and head, clamped at both ends."""
    far = 20
    table = tables.normal("relative", (tables.case.heads_q, 2 * far + 1), torch.float32)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, (q_idx - kv_idx).clamp(-far, far) + far]

    return score


def _alibi(tables: _Tables) -> Mod:
    slopes = (tables.integers("slopes", (tables.case.heads_q,), 64) + 1).float() / 128.0

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return score


def _softcap(tables: _Tables) -> Mod:
    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 3.0 * torch.tanh(score / 3.0)

    return score


def _gated(tables: _Tables) -> Mod:
    """Return a mod that multiplies the score by itself and by tables, has both sides of a branch,
    and masks by -inf."""
    gain = tables.normal("gain", (tables.longest,), torch.bfloat16)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        bent = torch.where(score > 0.0, torch.log1p(score.abs()), torch.sigmoid(score) - 0.5)
        bent = torch.where((q_idx + kv_idx) % 5 == h % 2, score * gain[kv_idx], bent)
        return torch.where(kv_idx > q_idx + 30, -float("inf"), bent)

    return score


def _bounded(tables: _Tables) -> Mod:
    """Return a mod with both sides of minimum, maximum and clamp, and a power."""

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        low = torch.minimum(score, (kv_idx - q_idx) * 0.01 + 1.0)
        return torch.maximum(low, -0.3 * score).clamp(-2.0, 2.0) + 0.1 * score**2

    return score


SCORES: dict[str, Callable[[_Tables], Mod]] = {
    "relative": _relative, "alibi": _alibi, "softcap": _softcap, "gated": _gated,
    "bounded": _bounded, **modifiers_more.SCORES,
}  # fmt: skip
