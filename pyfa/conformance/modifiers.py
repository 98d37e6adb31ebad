"""The score_mods and mask_mods of the cases, with the tensors that they capture.

Each is made for a case and a device: a function as a user writes it, whose tables hold what
``inputs.integers`` and ``near_normal`` give for the case's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cases import Case
from .inputs import integers, near_normal

Mod = Callable[..., torch.Tensor]


class _Tables:
    """Of a case: made on the CPU, moved to where the call runs."""

    def __init__(self, case: Case, where: torch.device) -> None:
        self.case, self.where = case, where
        self.longest = max((*case.lengths_q, *case.lengths_k, 1))

    def integers(self, name: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
        found = integers(f"{self.case.name}/{name}", torch.Size(shape).numel(), below)
        return torch.tensor(found, dtype=torch.int32).reshape(shape).to(self.where)

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return near_normal(f"{self.case.name}/{name}", shape).to(dtype).to(self.where)


def mods_of(case: Case, where: torch.device) -> dict[str, Mod]:
    """The arguments ``score_mod`` and ``mask_mod`` of ``case``, as far as it has them."""
    made: dict[str, Any] = {}
    tables = _Tables(case, where)
    if case.score_mod:
        made["score_mod"] = SCORES[case.score_mod](tables)
    if case.mask_mod:
        made["mask_mod"] = MASKS[case.mask_mod](tables)
    return made


# ---- masks -------------------------------------------------------------------------------------


def _documents(tables: _Tables) -> Mod:
    """Several documents in a row, each sequence with its own, causal inside."""
    starts = tables.integers("documents", (max(tables.case.batch, 1), tables.longest), 24) == 0
    document = starts.cumsum(1)  # int64, as PyTorch gives it

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)

    return mask


def _prefix(tables: _Tables) -> Mod:
    """Causal behind a prefix of the sequence that all rows see."""
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
    """Every third key of a window, by head another one."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance.abs() <= 60) & (distance % 3 == h % 3)

    return mask


def _natten(tables: _Tables) -> Mod:
    """A 2D neighbourhood of 5 x 3 in rows of 9, moved inside at the borders."""
    width, kernel_x, kernel_y = 9, 5, 3
    height = -(-tables.longest // width)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        x = (q_idx % width).clamp(kernel_x // 2, width - 1 - kernel_x // 2)
        y = (q_idx // width).clamp(kernel_y // 2, max(height - 1 - kernel_y // 2, 1))
        near_x = (x - kv_idx % width).abs() <= kernel_x // 2
        return near_x & ((y - kv_idx // width).abs() <= kernel_y // 2)

    return mask


def _diffusion(tables: _Tables) -> Mod:
    """Block diffusion: noisy blocks see themselves and the clean blocks before them."""
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
    """Answers to one question: all see it, none sees another. A 0-dim tensor says how long."""
    question = tables.integers("question", (), 30)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        answer_q, answer_k = (q_idx - question) // 21, (kv_idx - question) // 21
        return (kv_idx <= q_idx) & ((kv_idx < question) | (answer_q == answer_k))

    return mask


def _tree(tables: _Tables) -> Mod:
    """A tree of drafts: a boolean table says who descends from whom."""
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
    """A table with gaps, read from its end, by bits: what kernels do with sizes and strides."""
    bits = tables.integers("bits", (2, tables.longest, 3), 256).to(torch.uint8)[:, :, 1]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = (q_idx ^ kv_idx) & 7
        return ((bits[h & 1, -1 - kv_idx].int() >> place) & 1).bool() | (q_idx == kv_idx)

    return mask


MASKS: dict[str, Callable[[_Tables], Mod]] = {
    "documents": _documents, "prefix": _prefix, "sliding": _sliding, "dilated": _dilated,
    "natten": _natten, "diffusion": _diffusion, "shared_prefix": _shared_prefix, "tree": _tree,
    "strided": _strided,
}  # fmt: skip


# ---- scores ------------------------------------------------------------------------------------


def _relative(tables: _Tables) -> Mod:
    """A learned bias by distance and head, clamped at either end."""
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
    """The score by itself and by tables, both sides of a branch, and a mask by -inf."""
    gain = tables.normal("gain", (tables.longest,), torch.bfloat16)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        bent = torch.where(score > 0.0, torch.log1p(score.abs()), torch.sigmoid(score) - 0.5)
        bent = torch.where((q_idx + kv_idx) % 5 == h % 2, score * gain[kv_idx], bent)
        return torch.where(kv_idx > q_idx + 30, -float("inf"), bent)

    return score


def _bounded(tables: _Tables) -> Mod:
    """Each side of minimum, maximum and clamp, and a power."""

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        low = torch.minimum(score, (kv_idx - q_idx) * 0.01 + 1.0)
        return torch.maximum(low, -0.3 * score).clamp(-2.0, 2.0) + 0.1 * score**2

    return score


SCORES: dict[str, Callable[[_Tables], Mod]] = {
    "relative": _relative, "alibi": _alibi, "softcap": _softcap, "gated": _gated,
    "bounded": _bounded,
}  # fmt: skip
