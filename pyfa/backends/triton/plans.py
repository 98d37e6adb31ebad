"""Tiles per arch, head-dim bucket and dtype, with the reason next to each row. Pure functions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from ... import blocks, mods
from ...plan import Plan
from ...problem import Call, Problem, is_banded
from ..common import splits

Value = int | str | bool

# torch's and Triton's name of a dtype, and the bytes of an element.
KINDS = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "uint8": "u8",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8e4nv": 1, "fp8e4b8": 1}


class Tiles(NamedTuple):
    """The tiles and options of one kernel. ``tma``: K and V through Hopper's copy engine;
    ``matrix`` and ``waves``: AMD's ``matrix_instr_nonkdim`` and ``waves_per_eu``, 0 for Triton's
    choice."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    matrix: int = 0
    waves: int = 0


class Kernels(NamedTuple):
    """The tiles of each kernel of a problem; m is rows and n is keys everywhere. With ``dv`` the
    gradients of V and of K are two kernels, and ``dk`` is for K only."""

    forward: Tiles
    dk: Tiles
    dq: Tiles
    dv: Tiles | None = None


# Per family: widest head dim → 16-bit tiles.
# H200, bf16, heads · head_dim = 2,048, batch · rows = 16,384; TFLOP/s at 16,384 / 4,096 / 1,024
# rows, counting every product that a kernel makes. torch's FlashAttention-2 forward causal:
# 300/275/208, 331/305/247, 294/284/248.
_HOPPER = {
    # Forward causal 432/377/262, full 428/428/366; 128 rows a block: 415/352/241. dK and dV 504
    # causal; 128 rows: 464. 2 stages: 440. dQ 617; 128 keys: 506.
    64: Kernels(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3, tma=True), Tiles(64, 64, 4, 3)),
    # Forward: see forward_tiles. dK and dV 605/528/322 causal; without the copy engine 521/448/280,
    # as one kernel each 515. dQ 650; 64 rows a block: 568.
    128: Kernels(Tiles(64, 64, 4, 3, tma=True), Tiles(64, 64, 4, 2, tma=True),
                 Tiles(128, 64, 8, 3)),
    # Forward 528/432/282 causal. dK and dV are two kernels: their accumulators of 128 keys do not
    # fit the registers together, and one of 64 keys took 5.5 ms at 16,384 causal where the two take
    # 4.8. Three stages of 32: dK 3.05 ms, with one of 64 rows 3.42, full 6.10 and 7.97; dQ 2.67,
    # with one of 64 keys 3.47, full 5.57 and 7.12.
    256: Kernels(Tiles(128, 64, 8, 2, tma=True), Tiles(32, 128, 8, 3, tma=True),
                 Tiles(128, 32, 8, 3, tma=True), Tiles(64, 128, 8, 2, tma=True)),
    # Accumulators of 64 rows are half of the registers of 8 warps. Forward at 8,192 keys, causal:
    # 186; with the copy engine 183, 64 keys in one stage 179, 32 rows on 4 warps 154. Gradients:
    # the largest that spill nothing at 512 without mods (64 rows or keys: 700 to 2,300 bytes).
    512: Kernels(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1),
                 Tiles(32, 32, 8, 1)),
}  # fmt: skip
_AMPERE = {
    64: Kernels(Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Kernels(Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    256: Kernels(Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(64, 32, 8, 2)),
    512: Kernels(
        Tiles(64, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1)
    ),
}
_ADA = {
    64: Kernels(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Kernels(Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    256: Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 4, 1)),
    512: Kernels(
        Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1), Tiles(32, 16, 8, 1), Tiles(16, 16, 8, 1)
    ),
}
# Not measured, because no such GPU was available. Chosen by the compiler's reports for gfx942: at
# most 256 registers per lane, which leaves room for two waves on each SIMD, and no spills in the
# forward. 16×16 matrix instructions keep fewer results in flight than 32×32.
_CDNA = {
    # The forward has 243 registers, with the loads of the next tile in flight.
    64: Kernels(Tiles(128, 64, 4, 2, matrix=16, waves=2), Tiles(32, 64, 4, 1, matrix=16),
                Tiles(64, 32, 4, 1, matrix=16)),
    # The forward has 249 registers, and two blocks fit in the LDS; with 64 keys it has 270
    # registers, or 256 and spills 260 bytes. dK and dV have 246 registers; with 64 keys on four
    # waves 260.
    128: Kernels(Tiles(128, 32, 4, 2, matrix=16, waves=2), Tiles(32, 128, 8, 1, matrix=16),
                 Tiles(64, 32, 4, 1, matrix=16)),
    # One wave per SIMD: the forward has 327 registers, dK and dV have 374; with 32 rows they have
    # 512 and spill 44 bytes.
    256: Kernels(Tiles(64, 32, 4, 1, matrix=16), Tiles(16, 64, 4, 1, matrix=16),
                 Tiles(32, 32, 4, 1, matrix=16)),
    # Registers: forward 417, dK 490, dV 345, dQ 358. Each uses the whole LDS; dK of 576 elements
    # spills 396 bytes.
    512: Kernels(Tiles(64, 32, 4, 1, matrix=16), Tiles(16, 64, 4, 1, matrix=16),
                 Tiles(32, 16, 4, 1, matrix=16), Tiles(16, 64, 4, 1, matrix=16)),
}  # fmt: skip
# Not measured either. With waves of 32 lanes, a lane has 256 registers. From head_dim 128 on, the
# accumulators do not fit. The tiles spill these bytes on gfx1100: forward 36 (400 on four waves);
# dK and dV 516 instead of 1,540; dQ 472 instead of 1,212. Fewer spills would be faster.
_RDNA = {
    64: Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(64, 16, 4, 1)),
    128: Kernels(Tiles(64, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(32, 16, 8, 1)),
    256: Kernels(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    512: Kernels(
        Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)
    ),
}
# float32 runs on the vector units: small tiles that fit the registers.
_FLOAT32 = {
    64: Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    128: Kernels(Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)),
    256: Kernels(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    512: Kernels(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
# For the interpreter: every loop has two or more tiles, at lengths that take milliseconds.
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

# Features for which the runtime looks at more than q, k, v and the window.
_OPTIONS = frozenset(
    {"softcap", "alibi", "bias", "score_mod", "mask_mod", "sinks", "dropout", "varlen", "seqused",
     "paged", "leftpad", "batch_idx", "fp8", "tree"}
)  # fmt: skip

# The archs whose matrix units, and therefore Triton, support a float8 format. The interpreter
# supports all.
FLOAT8 = {
    "float8_e4m3fn": ("cpu", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "gfx950"),
    "float8_e4m3fnuz": ("cpu", "gfx942"),
}

# Hopper and later archs, whose tables say where the copy engine is used.
_COPY_ENGINE = ("sm_90", "sm_90a", "sm_100")
# Archs whose shared memory holds three tiles of 128 keys.
_LARGE_SHARED = ("sm_80", "sm_90", "sm_90a", "sm_100")

# The widest tile. The head_dim is at most 576; the elements beyond this width are a separate tile
# with its own product.
_WIDEST = 512
# The most rows of all heads of a group in one block: decode, speculative decode.
_PACKED_ROWS = 64


def has_float8(arch: str, dtype: str) -> bool:
    """Return whether kernels for ``arch`` support the float8 ``dtype``."""
    return arch in FLOAT8[dtype]


def power_of_two(size: int, least: int = 16) -> int:
    """Return ``size`` rounded up to a power of two; matrix instructions need at least 16."""
    return max(least, 1 << (size - 1).bit_length())


def _blocks(problem: Problem) -> tuple[int, int, int]:
    """Return the widths of three tiles: K, the elements of K beyond ``_WIDEST``, and V.

    Hopper's matrix unit reads shared memory through descriptors, which encode the swizzle: the
    tile's width, up to 64. If V is not prefetched, its tile reuses the memory of K's. If the two
    descriptors then differ, ptxas 12.8 (Triton 3.6) derives the descriptors of V's rows from 16 on
    from an uninitialized register, and the kernel reads wrong rows or out of bounds. So there V is
    as wide as K.
    """
    # Matrix units take 32 float8 elements at a time.
    least = 32 if "fp8" in problem.features else 16
    block_d = power_of_two(min(problem.head_dim, _WIDEST), least)
    rest = problem.head_dim - block_d
    block_e = power_of_two(rest, least) if rest > 0 else 0
    block_dv = power_of_two(problem.head_dim_v)
    if problem.dtype != "float32" and _FAMILIES.get(problem.arch) is _HOPPER:
        block_dv = max(block_dv, min(block_d, 64))
    return block_d, block_e, block_dv


def _widest(problem: Problem) -> int:
    """Return the width of the widest tile, by which the tables are ordered."""
    return min(_WIDEST, power_of_two(max(problem.head_dim, problem.head_dim_v)))


def _divisor(size: int) -> int:
    """Return the largest power of two up to 16 that divides ``size``."""
    return min(16, size & -size)


def kernels_of(problem: Problem) -> Kernels:
    """Return the tiles of a problem's kernels."""
    if problem.arch == "cpu":
        return _INTERPRETED
    table = _FLOAT32 if problem.dtype == "float32" else _FAMILIES.get(problem.arch, _ADA)
    return table[max(64, _widest(problem))]


def is_invariant(problem: Problem) -> bool:
    """Return whether tiles may depend only on head dims, dtypes and features."""
    return "batch_invariant" in problem.features


def packs(problem: Problem) -> bool:
    """Return whether a block holds the rows of all heads of a group."""
    group = problem.heads_q // problem.heads_k
    if is_invariant(problem):
        return group > 1
    return group > 1 and group * problem.seqlen_q <= _PACKED_ROWS


def forward_tiles(problem: Problem) -> Tiles:
    """Return the forward kernel's tiles: a smaller block if there are few rows."""
    tiles = kernels_of(problem).forward
    if "bias" in problem.features and tiles.matrix and tiles.block_m == 128:
        # Pointers into a float32 bias cost 64 registers at 128 × 64: 384 bytes of spills.
        tiles = tiles._replace(block_m=64, block_n=64, stages=1, waves=0)
    if is_invariant(problem):
        return tiles._replace(tma=False)
    rows = problem.seqlen_q
    if packs(problem):
        rows *= problem.heads_q // problem.heads_k
    if "fp8" in problem.features and rows >= tiles.block_m:
        # Larger tiles, as 16-bit inputs have them, would spill: V passes the registers on its way
        # to bfloat16.
        return tiles
    if rows < tiles.block_m:
        return _few_rows(problem, tiles, power_of_two(rows))
    if "latent" in problem.features and tiles.matrix:
        # V is made of K in registers: with 32 keys 336 bytes of spills.
        return tiles._replace(block_n=16)
    if tiles.tma and _widest(problem) == 128:
        # The copy engine's descriptors cost 1.5 µs a block: 275 against 283 at 1,024 keys.
        if problem.seqlen_k <= 1024:
            return tiles._replace(tma=False)
        # 525 against 490 at 16,384 keys, 495 against 508 at 4,096; causal 405 against 492.
        if problem.seqlen_k > 8192 and not problem.features & {"causal", "window", "chunk"}:
            return tiles._replace(block_m=128, stages=2)
    elif tiles.tma:
        # 535 against 519 at 16,384 keys, 420 against 432 at 4,096.
        return tiles._replace(tma=problem.seqlen_k > 8192)
    elif tiles == _HOPPER[64].forward and _long_rows(problem):
        # At 16,384 keys 2.38 ms against 2.75, full 4.93 and 5.61; at 4,096 full 1.26 and 1.37, but
        # causal 0.79 and 0.78.
        return tiles._replace(block_n=128, tma=True)
    return tiles


def _long_rows(problem: Problem) -> bool:
    """Return whether rows see so many keys that larger tiles through the copy engine pay off."""
    if problem.features & {"softcap", "alibi", "bias", "score_mod", "mask_mod", "dropout"}:
        return False  # their registers would spill
    masked = problem.features & {"causal", "window", "chunk"}
    return problem.seqlen_k > (8192 if masked else 1024)


def _rows_tiles(problem: Problem, tiles: Tiles) -> Tiles:
    """Return the tiles of dQ's kernel."""
    if tiles == _HOPPER[64].dq and not is_invariant(problem) and _long_rows(problem):
        # At 16,384 keys 2.41 ms against 2.60, full 4.71 and 5.61; at 1,024 full 0.43 and 0.38.
        return tiles._replace(block_n=128, tma=True)
    return tiles


def _few_rows(problem: Problem, tiles: Tiles, block: int) -> Tiles:
    """Return the tiles for decode and similar calls, where the bytes of K and V in flight matter
    most."""
    tiles = tiles._replace(block_m=block, tma=False)
    if problem.arch == "cpu" or problem.dtype == "float32":
        return tiles
    tiles = tiles._replace(warps=4)
    widest = _widest(problem)
    if block > 32 or problem.arch not in _LARGE_SHARED or widest > 256:
        return tiles
    if widest > 128 or "fp8" in problem.features:
        return tiles._replace(block_n=64, stages=3)
    # H200, TB/s, 32/8 heads of 128, (batch, keys): (12, 16,384) 4.25 with 128 keys and 3 stages,
    # 3.67 with 64 and 4; (8, 32,768) 4.18 and 4.20; (64, 8,192) 4.35, with 128 and 2 stages 4.39.
    return tiles._replace(block_n=128, stages=2 if problem.batch * problem.heads_k > 256 else 3)


def list_tiles(constants: Mapping[str, Any], role: str, call: Call) -> blocks.Tiles | None:
    """Return the tiles for the block lists by which the kernel ``role`` visits keys (or rows) under
    ``call``'s mask_mod. Return None if the kernel visits all tiles without lists. It does so with
    batch_invariant, because lists put full tiles first, and which tiles are full depends on the
    rows that share a block. It also does so if the result of the mask_mod depends on the compiler,
    or differs between heads that share a block.
    """
    mask = mods.of(call.mods).mask if call.mods else None
    if mask is None or constants["ordered"] or not blocks.is_exact(mask):
        return None
    rows, keys = constants[f"{role}_block_m"], constants[f"{role}_block_n"]
    if role == "fwd" and constants["pack"]:
        # A block has the rows of all heads of a group.
        group = call.q.shape[-2] // call.k.shape[-2]
        if blocks.asks_for(mask, "h") or rows % group:
            return None
        rows //= group
    return blocks.Tiles(rows, keys, "keys" if role in ("dk", "dv") else "rows")


def plan(problem: Problem, name: str) -> Plan:
    """Return everything that the kernels of ``problem`` are compiled with."""
    kernels = kernels_of(problem)
    features = problem.features
    block_d, block_e, block_dv = _blocks(problem)
    forward = forward_tiles(problem)
    amd = problem.device.vendor == "amd"
    constants: dict[str, Value] = {
        "dtype": KINDS[problem.dtype],
        "dtype_k": KINDS[problem.dtype_k or problem.dtype],
        "dtype_out": KINDS[problem.dtype_out or problem.dtype],
        "plain": not features & _OPTIONS,
        "block_d": block_d,
        "block_e": block_e,
        "block_dv": block_dv,
        "even_d": block_d == problem.head_dim or block_e > 0,
        "even_e": block_d + block_e == problem.head_dim,
        "even_dv": block_dv == problem.head_dim_v,
        "general": bool(features & {"softcap", "alibi", "bias", "score_mod"}),
        "shared_v": "latent" in features and block_d == block_dv,
        "mods": problem.mods,
        "dropout": "dropout" in features,
        "banded": is_banded(features),
        "tree": "tree" in features,
        "ordered": is_invariant(problem),
        "pack": packs(problem),
        # Triton's dot takes tf32 everywhere on NVIDIA, on AMD only for some archs.
        "tf32": problem.dtype == "float32" and problem.device.vendor == "nvidia",
        "reversed": "causal" in features or "window" in features,
        "dies": problem.device.dies,
        # Programs that fill the device once. Those of few rows want all of a unit's shared memory
        # for K and V on their way.
        "streams": forward.block_m < 64,
        # The combination is launched while the parts still run (programmatic dependent launch).
        "ahead": problem.arch in _COPY_ENGINE,
        "part_tiles": max(1, (256 if forward.block_m < 64 else 512) // forward.block_n),
        "slots": max(1, problem.device.units) * (2 if forward.block_m == 64 else 1),
        # K and V of the heads that run together should leave room in the L2 for q and out.
        "near_bytes": (problem.device.l2_bytes or 4 << 20) // 2,
        "aligned": problem.aligned,
        "div_d": _divisor(problem.head_dim),
        "div_dv": _divisor(problem.head_dim_v),
    }
    roles = [("fwd", forward)]
    if "backward" in features:
        roles += [("dk", kernels.dk), ("dq", _rows_tiles(problem, kernels.dq))]
        if kernels.dv is not None:
            roles.append(("dv", kernels.dv))
    for role, tiles in roles:
        values: dict[str, Value] = tiles._asdict()
        if not amd:
            del values["matrix"], values["waves"]
        # The copy engine wants rows at multiples of 16 bytes, dO's and O's too.
        whole = problem.aligned and not (problem.head_dim | problem.head_dim_v) % problem.unit
        values["tma"] = (
            tiles.tma and whole and problem.arch in _COPY_ENGINE and not is_invariant(problem)
            and not block_e
        )  # fmt: skip
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
    if is_invariant(problem):
        notes.append(
            "batch_invariant: the tiles of a prefill, no TMA, and keys are not split; a few "
            "sequences with long caches do not fill the device"
        )
    if {"paged", "backward"} <= problem.features:
        notes.append("gradients of pages pass through a dense float32 buffer of batch × max_seqlen")
    return tuple(notes)


@functools.lru_cache(4096)
def splits_for(programs: int, tiles: int, slots: int, part_tiles: int, streams: bool) -> int:
    """Return the number of splits of the keys with which ``programs`` fill ``slots`` of the device.

    ``streams``: the programs have few rows each and wait for memory; 72 % of the slots use all of
    its bandwidth. With more than one round, a mostly empty last round costs time as usual. TB/s of
    K and V on an H200 (132 slots): 96 programs with one split 4.25, with four 4.03; 48 with two
    3.72, with five 3.59; 160 with three 4.21, with one 3.26.

    Otherwise, or if there are too few keys for that, the result is the smallest number whose last
    round is at least 85 % as full as that of the best number, as in FlashAttention-2. Splits
    shorter than ``part_tiles`` cost more to combine than they save.
    """
    if not streams and programs >= 0.8 * slots:
        return 1
    most = max(1, min(128, slots, tiles // part_tiles))

    def enough(rounds: float, best: float) -> float:
        return (0.72 if rounds <= 1.0 else 0.9) if streams else 0.85 * best

    return splits.fewest_to_fill(programs, tiles, slots, most, enough)
