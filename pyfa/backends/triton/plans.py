"""Tiles per arch, head-dim bucket and dtype, with the reason beside each row. Pure functions."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...plan import Plan
from ...problem import Problem

Value = int | str | bool


class Tiles(NamedTuple):
    """What one kernel is compiled with. ``tma``: K and V through Hopper's copy engine; ``matrix``
    and ``waves``: AMD's ``matrix_instr_nonkdim`` and ``waves_per_eu``, 0 for Triton's choice."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    matrix: int = 0
    waves: int = 0


class Kernels(NamedTuple):
    """The tiles of each kernel of a problem; m is rows and n is keys everywhere. With ``dv`` the
    gradients of V and of K are two kernels, and ``dk`` is for K's alone."""

    forward: Tiles
    dk: Tiles
    dq: Tiles
    dv: Tiles | None = None


# Per family: widest head dim → 16-bit tiles.
# H200, bf16, 16,384 rows in all, 2,048 = heads · head_dim, TFLOP/s (torch's flash beside it).
_HOPPER = {
    # Forward 432 causal, 428 full (300, 308); 128 rows a block: 415, 427.
    64: Kernels(Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 2, tma=True), Tiles(64, 64, 4, 3)),
    # Forward 492 causal (331); 478 without the copy engine, which 1,024 keys do not repay.
    128: Kernels(Tiles(64, 64, 4, 3, tma=True), Tiles(64, 64, 4, 2, tma=True),
                 Tiles(128, 64, 8, 3)),
    # Forward 528 causal, 535 full (294, 333); 64 rows a block: 470.
    256: Kernels(Tiles(128, 64, 8, 2, tma=True), Tiles(32, 64, 8, 2, tma=True),
                 Tiles(128, 64, 8, 1)),
}  # fmt: skip
_AMPERE = {
    64: Kernels(Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Kernels(Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    256: Kernels(Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(64, 32, 8, 2)),
}
_ADA = {
    64: Kernels(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Kernels(Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    256: Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 4, 1)),
}
_CDNA = {
    64: Kernels(Tiles(128, 64, 4, 1), Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    128: Kernels(Tiles(128, 64, 4, 1), Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    256: Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
}
_RDNA = {
    64: Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    128: Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    256: Kernels(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
# float32 runs on the vector units: small tiles that fit the registers.
_FLOAT32 = {
    64: Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    128: Kernels(Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    256: Kernels(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
# The interpreter: two tiles and more in every loop at lengths that take milliseconds.
_INTERPRETED = Kernels(Tiles(64, 32, 1, 1), Tiles(32, 64, 1, 1), Tiles(64, 32, 1, 1))

_FAMILIES = {
    "sm_80": _AMPERE,
    "sm_86": _ADA,
    "sm_89": _ADA,
    "sm_90": _HOPPER,
    "sm_90a": _HOPPER,
    "sm_100": _HOPPER,
    "sm_120": _ADA,
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
    "gfx1100": _RDNA,
}

# What makes the runtime look at more than q, k, v and the window.
_OPTIONS = frozenset(
    {"softcap", "alibi", "bias", "sinks", "dropout", "varlen", "seqused", "paged", "leftpad",
     "batch_idx"}
)  # fmt: skip

# Rows of all heads of a group in one block, up to this many: decode, speculative decode.
_PACKED_ROWS = 64


def power_of_two(size: int, least: int = 16) -> int:
    """``size`` rounded up; matrix instructions want 16."""
    return max(least, 1 << (size - 1).bit_length())


def _divisor(size: int) -> int:
    """The largest power of two up to 16 that divides ``size``."""
    return min(16, size & -size)


def kernels_of(problem: Problem) -> Kernels:
    """The tiles of a problem's kernels."""
    if problem.arch == "cpu":
        return _INTERPRETED
    widest = power_of_two(max(problem.head_dim, problem.head_dim_v))
    table = _FLOAT32 if problem.dtype == "float32" else _FAMILIES.get(problem.arch, _ADA)
    return table[max(64, widest)]


def packs(problem: Problem) -> bool:
    """Whether a block holds the rows of all heads of a group."""
    group = problem.heads_q // problem.heads_k
    return group > 1 and group * problem.seqlen_q <= _PACKED_ROWS


def forward_tiles(problem: Problem) -> Tiles:
    """The forward kernel's tiles: a smaller block where there are few rows."""
    tiles = kernels_of(problem).forward
    rows = problem.seqlen_q
    if packs(problem):
        rows *= problem.heads_q // problem.heads_k
    if rows < tiles.block_m:
        block = power_of_two(rows)
        tiles = tiles._replace(block_m=block, warps=max(1, min(tiles.warps, block // 16, 4)))
        if problem.arch != "cpu":
            tiles = tiles._replace(warps=4)
    return tiles


def plan(problem: Problem, name: str) -> Plan:
    """Everything that the kernels of ``problem`` are compiled with."""
    kernels = kernels_of(problem)
    features = problem.features
    block_d, block_dv = power_of_two(problem.head_dim), power_of_two(problem.head_dim_v)
    forward = forward_tiles(problem)
    amd = problem.device.vendor == "amd"
    element = 4 if problem.dtype == "float32" else 2
    constants: dict[str, Value] = {
        "dtype": {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[problem.dtype],
        "plain": not features & _OPTIONS,
        "block_d": block_d,
        "block_dv": block_dv,
        "even_d": block_d == problem.head_dim,
        "even_dv": block_dv == problem.head_dim_v,
        "general": bool(features & {"softcap", "alibi", "bias"}),
        "dropout": "dropout" in features,
        "pack": packs(problem),
        "reversed": "causal" in features or "window" in features,
        "dies": problem.device.dies,
        # Programs that fill the device once: small tiles fit twice on a unit.
        "part_tiles": max(1, (256 if forward.block_m < 64 else 512) // forward.block_n),
        "slots": max(1, problem.device.units) * (2 if forward.block_m <= 64 else 1),
        # K and V of the heads that run together should leave room in the L2 for q and out.
        "near_bytes": (problem.device.l2_bytes or 4 << 20) // 2,
        "align": 16 // element if problem.aligned else 1,
        "div_d": _divisor(problem.head_dim),
        "div_dv": _divisor(problem.head_dim_v),
    }
    roles = [("fwd", forward)]
    if "backward" in features:
        roles += [("dk", kernels.dk), ("dq", kernels.dq)]
        if kernels.dv is not None:
            roles.append(("dv", kernels.dv))
    for role, tiles in roles:
        values: dict[str, Value] = tiles._asdict()
        if not amd:
            del values["matrix"], values["waves"]
        if not (problem.aligned and problem.arch in ("sm_90", "sm_90a", "sm_100")):
            values["tma"] = False
        values["paged"] = _paging(problem, tiles.block_n)
        constants |= {f"{role}_{key}": value for key, value in values.items()}
    return Plan(name, "attention_forward", tuple(sorted(constants.items())), _notes(problem))


def _paging(problem: Problem, block_n: int) -> int:
    if "paged" not in problem.features:
        return 0
    whole = problem.page_size % block_n == 0 and "leftpad" not in problem.features
    return 2 if whole else 1


def _notes(problem: Problem) -> tuple[str, ...]:
    notes = []
    if not problem.aligned:
        notes.append("rows that are not multiples of 16 bytes are read element by element")
    if {"paged", "backward"} <= problem.features:
        notes.append("gradients of pages pass through a dense float32 buffer of batch × max_seqlen")
    return tuple(notes)


@functools.lru_cache(4096)
def splits_for(programs: int, tiles: int, slots: int, part_tiles: int) -> int:
    """Into how many parts to split the keys so that ``programs`` fill ``slots`` of the device.

    The fewest parts whose last round is at least 85 % as full as the best choice's, as
    FlashAttention-2 decides. A part has at least ``part_tiles``: shorter ones cost more in the
    combination than they save.
    """
    if programs >= 0.8 * slots:
        return 1
    most = max(1, min(128, slots, tiles // part_tiles))
    full = {}
    for parts in range(1, most + 1):
        # Only counts that change the tiles of the longest part are worth a look.
        if parts > 1 and -(-tiles // parts) == -(-tiles // (parts - 1)):
            continue
        rounds = programs * parts / slots
        full[parts] = rounds / -(-programs * parts // slots)
    best = max(full.values())
    return next(parts for parts, share in full.items() if share >= 0.85 * best)
