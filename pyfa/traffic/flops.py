"""FLOPs of matrix products: for the visible pairs, and as computed by tiles. A multiply-add counts
2."""

from __future__ import annotations

from ..shape import Shape
from .kernels import ROLES, TiledKernel
from .requested import blocks


def attention_flops(shape: Shape, backward: bool = False) -> int:
    """Return the FLOPs of exactly the visible pairs. Forward: 2·(d + dv) per pair (S = QKᵀ, O =
    PV).

    Backward: 2·(3·d + 2·dv) for recomputed S, dP, dV, dQ and dK; for d = dv this is the usual 2.5
    times a forward. A backward in two passes computes S and dP twice, which ``tile_flops`` counts.
    """
    per_pair = 3 * shape.head_dim + 2 * shape.head_dim_v
    if not backward:
        per_pair = shape.head_dim + shape.head_dim_v
    return 2 * per_pair * shape.batch_heads * shape.visible_pairs()


def tile_pairs(shape: Shape, kernel: TiledKernel) -> int:
    """Return the (query, key) pairs in all tiles that a kernel processes, for all heads: whole
    tiles, even if the mask or an edge leaves only a part. A kernel that skips inside a tile
    computes less."""
    tiling = kernel.tiling
    tile = tiling.block_q * tiling.block_k
    step = tiling.block_q if ROLES[kernel.role].owns_keys else tiling.block_k
    tiles = sum(int((-(-(part.end - part.begin) // step)).sum()) for part in blocks(shape, kernel))
    per_group = shape.group // tiling.packed if not ROLES[kernel.role].owns_keys else shape.group
    return tiles * tile * shape.batch * shape.heads_k * per_group


def tile_flops(shape: Shape, kernel: TiledKernel) -> int:
    """Return the FLOPs that ``kernel`` computes: whole tiles, head dims as compiled."""
    role = ROLES[kernel.role]
    per_pair = role.products_d * kernel.dims[0] + role.products_dv * kernel.dims[1]
    return 2 * per_pair * tile_pairs(shape, kernel)
