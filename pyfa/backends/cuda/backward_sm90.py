"""Hopper's backward: which problems it takes, and its tiles."""

from __future__ import annotations

from typing import NamedTuple

from ...plan import Plan

KERNEL = "cuda/sm90/attn_bwd.cu"
GROUP_KEYS = 64  # of a warpgroup
STAGES = 2  # places for a tile of Q and dO
PANEL_BYTES = 128  # of a row: what TMA and the matrix instruction swizzle


class Tiles(NamedTuple):
    """``groups`` warpgroups take ``block_q`` rows at a time, each for 64 keys of its own, or both
    for the same 64 with a role each (``roles``).

    ``overlap``, of roles: a tile's scores are asked for while the last one's gradient is under way,
    as they always are without roles. ``float_weights``, of roles: P is handed over in float32.
    ``one_sender``, without roles: one thread adds dQ's tiles to memory for all warps.
    """

    groups: int
    block_q: int
    overlap: bool = True
    roles: bool = False
    float_weights: bool = False
    one_sender: bool = False

    @property
    def block_k(self) -> int:
        return GROUP_KEYS * (1 if self.roles else self.groups)


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int) -> int:
    """Of a block: keys and values, the stages with two floats a row, two dS, P where it is handed
    over or else one or two tiles of dQ in float32, barriers."""
    keys, rows = tiles.block_k, tiles.block_q
    states = -(-rows * 4 // 128) * 128
    stage = rows * (head_dim + head_dim_v) * 2 + 2 * states
    ds = keys // GROUP_KEYS * rows * PANEL_BYTES
    if tiles.roles:
        passed_on = rows * GROUP_KEYS * (4 if tiles.float_weights else 2)  # P
    else:
        passed_on = rows * head_dim * 4 * (2 if tiles.one_sender else 1)  # dQ
    return keys * (head_dim + head_dim_v) * 2 + STAGES * stage + 2 * ds + passed_on + 256


# By head dims. More rows at a time need more registers than 240 a thread.
TILES: dict[tuple[int, int], Tiles] = {
    (64, 64): Tiles(2, 128),
    (128, 128): Tiles(2, 64, one_sender=True),
    (192, 128): Tiles(2, 64, roles=True),
    (192, 192): Tiles(2, 64, roles=True),
    (256, 256): Tiles(2, 64, overlap=False, roles=True, float_weights=True),
}


def plan_of(pair: tuple[int, int], dtype: int, deterministic: bool) -> Plan:
    tiles = TILES[pair]
    if deterministic and not tiles.roles:
        tiles = tiles._replace(one_sender=True)
    constants = {
        "BLOCK_K": tiles.block_k,
        "BLOCK_Q": tiles.block_q,
        "DETERMINISTIC": int(deterministic),
        "DTYPE": dtype,
        "FLOAT_WEIGHTS": int(tiles.float_weights),
        "GROUPS": tiles.groups,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "ONE_SENDER": int(tiles.one_sender),
        "OVERLAP": int(tiles.overlap),
        "ROLES": int(tiles.roles),
        "SHARED_BYTES": shared_bytes(tiles, *pair),
    }
    return Plan("cuda", KERNEL, tuple(constants.items()))
