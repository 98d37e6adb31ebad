"""Converts FlashAttention-4's ``score_mod``, ``mask_mod`` and block-sparse tensors to pyfa's.

Version 4's functions have more parameters than pyfa's: ``score_mod(score, b, h, q_idx, kv_idx,
seqlen_info, aux)`` and ``mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux)``, followed by
``aux_scalars`` if the call has them. Here the functions must be plain Python on PyTorch scalars. A
function in the CuTe DSL, which only NVIDIA's compiler understands, raises ``NotImplementedError``.
With a mask_mod, ``causal`` and ``window_size`` are ignored, as in version 4.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import validate

Mod = Callable[..., Any]
# The keys of a block if block_size does not say; flash-attention uses its kernel's tile.
_BLOCK_K = 128


class Lengths(NamedTuple):
    """The lengths from which ``seqlen_info`` is made: ints or, for packed sequences, int32 lengths
    (B,) or offsets (B+1,)."""

    rows: int | torch.Tensor
    keys: int | torch.Tensor
    offsets_q: torch.Tensor | None = None
    offsets_k: torch.Tensor | None = None


class SeqlenInfo:
    """The lengths of a sequence and its offsets in the packed tensors, as a mod sees them."""

    def __init__(self, lengths: Lengths, b: Any) -> None:
        self._lengths, self._b = lengths, b

    def _of(self, x: int | torch.Tensor | None) -> Any:
        if x is None:
            return 0
        return x[self._b] if isinstance(x, torch.Tensor) else x

    @property
    def seqlen_q(self) -> Any:
        return self._of(self._lengths.rows)

    @property
    def seqlen_k(self) -> Any:
        return self._of(self._lengths.keys)

    @property
    def offset_q(self) -> Any:
        return self._of(self._lengths.offsets_q)

    @property
    def offset_k(self) -> Any:
        return self._of(self._lengths.offsets_k)


def pyfas_mods(
    score_mod: Mod | None,
    mask_mod: Mod | None,
    aux_tensors: Sequence[torch.Tensor] | None,
    aux_scalars: Sequence[Any] | None,
    lengths: Lengths,
) -> dict[str, Mod]:
    """Return the arguments ``score_mod`` and ``mask_mod`` of ``pyfa.attention`` that are equivalent
    to version 4's, without those that the call does not have.

    Raises ``NotImplementedError`` for a function in the CuTe DSL, ``TypeError`` for anything that
    is not a function.
    """
    tensors = tuple(aux_tensors or ())
    for number, x in enumerate(tensors):
        validate.a_tensor(f"aux_tensors[{number}]", x)
    more = (tensors,) if aux_scalars is None else (tensors, tuple(aux_scalars))
    found: dict[str, Mod] = {}
    if score_mod is not None:
        _refuse_cute("score_mod", score_mod)
        theirs = score_mod

        def of_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return theirs(score, b, h, q_idx, kv_idx, SeqlenInfo(lengths, b), *more)

        found["score_mod"] = of_score
    if mask_mod is not None:
        _refuse_cute("mask_mod", mask_mod)
        masks = mask_mod

        def of_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return masks(b, h, q_idx, kv_idx, SeqlenInfo(lengths, b), *more)

        found["mask_mod"] = of_mask
    return found


def _refuse_cute(name: str, mod: Any) -> None:
    """Raise ``NotImplementedError`` for a function that uses NVIDIA's CuTe DSL."""
    if not callable(mod):
        raise TypeError(f"{name}: expected a function; got {type(mod).__name__}")
    kinds = [type(mod)]
    plain = mod
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
        kinds.append(type(plain))
    code, known = getattr(plain, "__code__", None), getattr(plain, "__globals__", {})
    names = code.co_names if isinstance(code, types.CodeType) else ()
    modules = [kind.__module__ for kind in kinds]
    for each in (known[x] for x in names if x in known):
        modules.append(
            each.__name__ if isinstance(each, types.ModuleType) else
            str(getattr(each, "__module__", ""))
        )  # fmt: skip
    if any(x.split(".")[0] in ("cutlass", "cute") for x in modules):
        title = getattr(plain, "__name__", type(plain).__name__)
        place = "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"
        raise NotImplementedError(
            f"{name} {title}{place}: is written in NVIDIA's CuTe DSL, which only its own compiler "
            "understands; write it as plain Python on PyTorch scalars, as in "
            "`lambda score, b, h, q_idx, kv_idx, seqlen_info, aux: score + aux[0][h]`"
        )


class Blocks:
    """Block-sparse tensors with the attributes of FlexAttention's BlockMask."""

    mask_mod = None

    def __init__(self, tensors: Any, rows: int, keys: int) -> None:
        counts: Any = getattr(tensors, "mask_block_cnt", None)
        indices: Any = getattr(tensors, "mask_block_idx", None)
        for name, x in (("mask_block_cnt", counts), ("mask_block_idx", indices)):
            validate.a_tensor(f"block_sparse_tensors.{name}", x)
        if counts.dim() != 3 or indices.dim() != 4:
            raise ValueError(
                "block_sparse_tensors: expected mask_block_cnt (B | 1, H | 1, M) and "
                f"mask_block_idx (B | 1, H | 1, M, N); got {tuple(counts.shape)} and "
                f"{tuple(indices.shape)}"
            )
        size = getattr(tensors, "block_size", None)
        if size is None:
            size = (_rows_of_a_block(rows, indices.shape[2]), _BLOCK_K)
        self.BLOCK_SIZE = tuple(size)
        self.seq_lengths = rows, keys
        self.kv_num_blocks, self.kv_indices = counts, indices
        self.full_kv_num_blocks = getattr(tensors, "full_block_cnt", None)
        self.full_kv_indices = getattr(tensors, "full_block_idx", None)


def _rows_of_a_block(rows: int, blocks: int) -> int:
    least = -(-rows // max(blocks, 1))
    most = rows if blocks <= 1 else (rows - 1) // (blocks - 1)
    if least != most:
        raise ValueError(
            f"block_sparse_tensors: expected a block_size, since each of {blocks} blocks of {rows} "
            f"rows may have {least} to {most}; got None"
        )
    return least
