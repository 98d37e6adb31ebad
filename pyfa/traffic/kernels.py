"""Tiled kernels in the byte model: their role in attention, tiles and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ..shape import Shape


class Tiling(NamedTuple):
    """The iteration of a kernel: a workgroup has ``block_q`` rows of one head, or owns ``block_k``
    keys.

    ``splits``: the number of splits of a block's keys, with equally many tiles and one workgroup
    each. A split begins with a whole tile; the last one ends with the last key that any row sees.
    ``packed``: the query heads of one KV head whose rows share a workgroup, as in decode.
    """

    block_q: int
    block_k: int
    splits: int = 1
    packed: int = 1


class Role(NamedTuple):
    """The role of a kernel. ``owns_keys``: a workgroup keeps keys and iterates over rows, otherwise
    the reverse.

    A workgroup reads ``held`` tensors once and ``streamed`` tensors tile by tile. It writes
    ``written`` tensors, and adds to ``added`` tensors in memory, tile by tile; an atomic addition
    counts its bytes once. ``products_d`` and ``products_dv``: the number of matrix products per
    tile whose third size is head_dim, or V's.
    """

    owns_keys: bool
    held: tuple[str, ...]
    streamed: tuple[str, ...]
    written: tuple[str, ...]
    products_d: int
    products_dv: int
    added: tuple[str, ...] = ()


_STATE = ("lse", "delta")
# Forward is FlashAttention-2's algorithm 1, backward its algorithm 2 (Dao 2023): in two kernels or
# three that need no atomics, or in one that adds dQ up in float32. Each makes S again, and dP where
# it needs dS.
ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "forward": Role(False, ("q",), ("k", "v"), ("out", "lse"), 1, 1),
        "dk_dv": Role(True, ("k", "v"), ("q", "dout", *_STATE), ("dk", "dv"), 2, 2),
        "dk": Role(True, ("k", "v"), ("q", "dout", *_STATE), ("dk",), 2, 1),
        "dv": Role(True, ("k", "v"), ("q", "dout", *_STATE), ("dv",), 1, 1),
        "gradients": Role(
            True, ("k", "v"), ("q", "dout", *_STATE), ("dk", "dv"), 3, 2, ("dq_sum",)
        ),
        "dq": Role(False, ("q", "dout", *_STATE), ("k", "v"), ("dq",), 2, 1),
    }
)


@dataclass(frozen=True)
class TiledKernel:
    """One kernel of a plan, for one problem.

    ``role`` is a name in ``ROLES``. ``dims``: head dims to which its products are padded.
    ``buffers``: bytes of LDS or shared memory of a workgroup, by content. ``threads``: per
    workgroup. ``whole_tiles``: the last streamed tile is requested as a whole, even if it is partly
    masked. ``ahead``: tiles that are requested after the last one. ``group_splits``: parts into
    which the query heads of a KV head are divided, if a workgroup owns keys. ``registers``: per
    lane, 0 if nothing was compiled. ``compiled_bytes``: LDS or shared memory as compiled, likewise.
    """

    role: str
    tiling: Tiling
    dims: tuple[int, int]
    threads: int
    buffers: Mapping[str, int] = field(default_factory=dict)
    whole_tiles: bool = False
    ahead: int = 0
    group_splits: int = 1
    registers: int = 0
    compiled_bytes: int = 0

    def divided(self, shape: Shape) -> Shape:
        """Return ``shape`` with a KV head for each part of a group, as the kernel sees it."""
        return shape._replace(heads_k=shape.heads_k * self.group_splits)

    @property
    def shared_bytes(self) -> int:
        """Return LDS or shared memory of a workgroup: as compiled if that is known."""
        return self.compiled_bytes or sum(self.buffers.values())
