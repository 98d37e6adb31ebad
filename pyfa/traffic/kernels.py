"""Tiled kernels as the byte model sees them: their part in attention, tiles and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple


class Tiling(NamedTuple):
    """How a kernel walks: a workgroup has ``block_q`` rows of one head, or owns ``block_k`` keys.

    ``splits``: parts of equally many tiles that a block's keys are cut into, each with a workgroup
    of its own. A part begins with a whole tile, and ends with the last key that any row sees.
    ``packed``: query heads of one key head whose rows share a workgroup, as decode has them.
    """

    block_q: int
    block_k: int
    splits: int = 1
    packed: int = 1


class Role(NamedTuple):
    """A kernel's part. ``owns_keys``: a workgroup keeps keys and walks rows, otherwise the reverse.

    ``held`` tensors are read once by a workgroup, ``streamed`` ones pass by it tile by tile,
    ``written`` ones are what it makes, and ``added`` ones are added to in memory, tile by tile:
    an atomic addition counts as its bytes once. ``products_d`` and ``products_dv`` are matrix
    products of a tile whose third size is head_dim, or that of V.
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

    ``role`` is a name in ``ROLES``. ``dims``: head dims that its products are padded to.
    ``buffers``: bytes of LDS or shared memory of a workgroup by what they hold. ``threads`` of a
    workgroup. ``whole_tiles``: the last streamed tile is asked for to its end, seen or not.
    ``ahead``: tiles that are asked for behind the last one. ``registers`` a lane, 0 where nothing
    was compiled; ``compiled_bytes`` of LDS or shared memory as compiled, likewise.
    """

    role: str
    tiling: Tiling
    dims: tuple[int, int]
    threads: int
    buffers: Mapping[str, int] = field(default_factory=dict)
    whole_tiles: bool = False
    ahead: int = 0
    registers: int = 0
    compiled_bytes: int = 0

    @property
    def shared_bytes(self) -> int:
        """LDS or shared memory of a workgroup: as compiled where that is known."""
        return self.compiled_bytes or sum(self.buffers.values())
