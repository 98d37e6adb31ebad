"""Code that all CUDA kernels share: archs, choice of tiles, launch of blocks."""

from __future__ import annotations

from collections.abc import Mapping

from ... import abi, env
from ...arch import ARCHS, Arch
from ...plan import Plan
from ...problem import Problem
from ...sizes import Extent, Size
from ..native import plans, tiles
from ..native.plans import values_of
from ..native.tiles import Pair, sm80

# Archs with a file of tiles. Any other arch uses the tiles of the nearest lower arch of its major
# version. The code is still compiled for the device's arch.
TILED = tiles.archs("sm")
SMALL_THREADS = 256  # threads per block of combine, append, gaps, row_sums and dq_convert


def compiled_for(arch: str, plan: Plan | None = None) -> str:
    """Return the target that ``plan`` is compiled for on a device of ``arch``.

    Hopper's kernels use instructions that only the target sm_90a has. All others are compiled
    for the arch without the suffix.
    """
    own = plan is not None and plan.kernel.startswith("cuda/sm90/")
    return "sm_90a" if own else arch.rstrip("a")


# Kernels whose blocks stay on their SMs and take one work tile after the other from a counter that
# the launch is given. Of Hopper's backward the kernel before it leaves a counter.
COUNTED = frozenset({"cuda/sm90/attn_fwd.cu"})


def grid_of(plan: Plan, blocks: Extent, units: int) -> Extent:
    """Return the number of blocks to launch for ``blocks`` work tiles."""
    values = values_of(plan)
    most = values.get("BLOCKS", 1) * units
    if values.get("PERSISTENT"):
        return blocks.at_most(most) if isinstance(blocks, Size) else min(blocks, most)
    if plan.kernel in COUNTED and isinstance(blocks, int):
        return min(blocks, most)
    return blocks


# Kernels that are launched while the previous kernel still runs, and that wait for it themselves
# (``kernels/cuda/ahead.h``).
AHEAD = frozenset(
    {
        "cuda/combine.cu",
        "cuda/sm80/attn_decode.cu",
        "cuda/sm80/dq_convert.cu",
        "cuda/sm90/attn_bwd.cu",
    }
)


def starts_ahead(plan: Plan, arch: str) -> bool:
    """Return whether ``plan``, compiled for ``arch``, is launched before the previous kernel
    ends."""
    # A merge of the caller's parts has no previous kernel in its call.
    return plan.kernel in AHEAD and _number(arch) >= 90 and "MERGED" not in dict(plan.constants)


def tiled_arch(arch: str) -> str:
    """Return the arch whose tiles a device of ``arch`` uses; ``PYFA_ARCH_TILES`` overrides it."""
    forced: str = env.get("PYFA_ARCH_TILES")
    if forced:
        if forced not in TILED:
            expected = f"expected one of {', '.join(TILED)}"
            raise ValueError(f"environment variable PYFA_ARCH_TILES={forced!r}: {expected}")
        return forced
    mine = _number(arch)
    below = [name for name in TILED if _number(name) // 10 == mine // 10 and _number(name) <= mine]
    return below[-1] if below else TILED[0]


def tiles_of(arch: str) -> sm80.Tiles:
    """Return the tile sizes that the Ampere kernels use on a device of ``arch``."""
    found: sm80.Tiles = tiles.of(tiled_arch(arch))
    return found


def why_not(arch: str) -> str | None:
    """Return why the kernels do not run on ``arch``; None if they do."""
    if not arch.startswith("sm_"):
        return "the device is a CPU" if arch == "cpu" else f"the device is AMD ({arch})"
    return None if _number(arch) >= 80 else f"{arch} is older than sm_80"


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("a"))


def runs_sm90(arch: str) -> bool:
    """Return whether ``arch`` runs Hopper's kernels; no other arch has their instructions."""
    return arch.removesuffix("a") == "sm_90" and tiled_arch(arch) == "sm_90"


def widens_float8(arch: str) -> bool:
    """Return whether one instruction converts two float8 numbers to float16."""
    return arch.startswith("sm_") and _number(arch) >= 89


def limits_of(arch: str) -> Arch:
    """Return the limits of ``arch`` as it is compiled for; without a row, the limits of the arch of
    its tiles."""
    names = (arch, arch + "a", tiled_arch(arch), tiled_arch(arch) + "a")
    return next(ARCHS[name] for name in names if name in ARCHS)


def notes_of(problem: Problem, pair: Pair, chunk: int = 0) -> list[str]:
    """Return ``native.plans.notes_of``, and which arch's tiles are used if another's were
    requested."""
    notes = plans.notes_of(problem, pair, chunk)
    forced: str = env.get("PYFA_ARCH_TILES")
    if forced:
        notes.append(f"tiles of {forced} on {problem.arch} (PYFA_ARCH_TILES)")
    return notes


def plan_of(kernel: str, dtype: int | None = None) -> Plan:
    """Return the plan of a kernel whose only constant, if any, is a number format."""
    return plans.plan_with("cuda", f"cuda/{kernel}.cu", {} if dtype is None else {"DTYPE": dtype})


def shared_bytes(plan: Plan) -> int:
    """Return the dynamic shared memory of a block."""
    return values_of(plan).get("SHARED_BYTES", 0)


def threads_of(plan: Plan) -> int:
    """Return the number of threads of a block."""
    constants = values_of(plan)
    if "GROUPS" in constants:
        return 128 * (1 + constants["GROUPS"])  # one more copies
    if "WARPS" in constants:
        return 32 * constants["WARPS"]
    if "WARPS_K" in constants:
        return 2 * 32 * constants["WARPS_K"] * constants["WARPS_Q"]  # of both kinds
    return SMALL_THREADS


def blocks_per_sm(plan: Plan, arch: str, registers: int, shared: int) -> int:
    """Return how many blocks fit on an SM, by registers, shared memory and warps.

    Registers are allocated to warps in steps of 256, shared memory in steps of 128 bytes. The
    system reserves another 1 KiB per block. Source: CUDA's occupancy calculator, compute capability
    8.x.
    """
    limits, warps = limits_of(arch), threads_of(plan) // 32
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = limits.register_bytes // 4 // per_warp // warps
    by_shared = limits.shared_bytes // (-(-(shared + 1024) // 128) * 128)
    return min(by_registers, by_shared, limits.waves // warps)


# Kernels that compute the order of their work tiles with divisors that the host has prepared: a
# division takes a GPU about 100 cycles, and a block must know its work tile before it can load
# anything. Their blocks own keys, or rows.
_ORDERED_BY_KEYS = "cuda/sm90/attn_bwd.cu"
_ORDERED_BY_ROWS = ("cuda/sm90/attn_fwd.cu", "cuda/sm80/attn_fwd.cu")
# The most heads whose blocks, which own keys, run together: with KV groups, and with as many query
# heads as KV heads.
_MOST_TOGETHER, _MOST_EQUAL = 16, 4
_L2_SHARE = 24 << 20  # of 50 MB
# The size of K and V of a section of the forward: 16 MB, and up to twice as much where sections are
# equal then. The L2 holds that.
_SECTION_ELEMENTS = 8 << 20
_MOST_TRIED = 32  # sizes of a section of the forward


def heads_together(plan: Plan, sizes: Mapping[str, int]) -> int:
    """Return the number of heads in a *section*: heads whose blocks alternate in the order of work
    tiles, so that they run at the same time. ``sizes``: members of ``Params``.

    If blocks add to dQ in turn, the last keys of a head come first, and several heads run together.
    So only a few of the blocks that run at the same time belong to one head and wait for each
    other. But then fewer blocks read the same rows at the same time: without a mask, 4 heads are
    best with 4k rows or more, and 16 heads with 1k rows. With a causal mask, the blocks of a head
    are at different rows, which should all stay in the L2.

    If blocks add in any order, the first keys of a head come first, because most rows see them
    under a causal mask. Without a mask, heads run one by one. With a mask, blocks take different
    times. Several heads together shorten the tail, in which only a few long blocks still run. A
    backward then takes 0.85 to 1.01 times as long as with heads that run one by one, with as many
    query heads as KV heads and up to four heads together, if their rows fit in the L2. With KV
    groups and up to 16 heads together, it takes 0.82 to 0.97 times as long.
    """
    constants = values_of(plan)
    dim, in_turn = constants["HEAD_DIM"], constants["DETERMINISTIC"]
    row_bytes = 2 * (dim + constants["HEAD_DIM_V"]) + 4 * dim  # of q, dout and dq_accum
    group = sizes["heads_q"] // sizes["heads_k"]
    masked = sizes["window_left"] >= 0 or sizes["window_right"] >= 0
    if not in_turn and not masked:
        return 1
    equal = not in_turn and group * sizes["num_splits"] == 1
    rows = max(1, sizes["seqlen_q"] * (group if in_turn else 1))
    least = 1 if in_turn or equal else 2
    fitting = max(least, _L2_SHARE // row_bytes // rows) if masked else max(4, (16 << 10) // rows)
    # The sections are equal: a last section of one or two heads would start its longest blocks when
    # the other sections end.
    heads = sizes["heads_k"] * sizes["batch"]
    sections = max(1, heads // min(_MOST_EQUAL if equal else _MOST_TOGETHER, fitting))
    return -(-heads // sections)


def kv_heads_together(pairs: int, fitting: int) -> int:
    """Return the number of KV heads in a section of the forward, of ``pairs`` KV heads of all
    sequences: at least ``fitting``, so that the last section lacks the smallest share.

    The longest work tiles of a section come first. A last section of few heads has less work than
    the SMs, and its longest work tiles would start when the other sections end: 16 heads of 8,192
    tokens in sections of 3 took 1.15 times as long as in sections of 4.
    """
    least = min(fitting, pairs)
    tried = range(least, least + min(least, _MOST_TRIED) + 1)
    return min(tried, key=lambda size: -pairs % size / size)


def order_of(plan: Plan, values: Mapping[str, float | Size], blocks: Extent) -> dict[str, int]:
    """Return the members of ``Params`` that give ``plan``'s kernel its order, or none if it has no
    order or takes its work tiles from a table. ``values``: the other members. ``blocks``: the
    number of work tiles, with one split of the keys."""
    sizes = {name: value for name, value in values.items() if isinstance(value, int)}
    heads_k, none = sizes["heads_k"], isinstance(blocks, int) and not blocks
    by_keys = plan.kernel == _ORDERED_BY_KEYS
    if not (by_keys or plan.kernel in _ORDERED_BY_ROWS) or none or not heads_k:
        return {}
    group = sizes["heads_q"] // heads_k
    heads = heads_k if by_keys or "PACKED" in values_of(plan) else sizes["heads_q"]
    pairs, splits = heads * sizes["batch"], sizes["num_splits"]
    found = {
        "group": group,
        "group_inverse": abi.inverse_of(group),
        "splits_inverse": abi.inverse_of(splits),
    }
    if not isinstance(blocks, int):
        return found
    tiles = blocks // pairs
    if by_keys:
        section = heads_together(plan, sizes)
    else:
        fitting = _SECTION_ELEMENTS // (sizes["head_dim"] + sizes["head_dim_v"])
        fitting = max(1, fitting // max(1, sizes["seqlen_k"]))
        section = kv_heads_together(heads_k * sizes["batch"], fitting) * (heads // heads_k)
        tiles *= splits
    return found | {
        "section": section,
        "section_tiles_inverse": abi.inverse_of(section * tiles),
        "section_inverse": abi.inverse_of(section),
        "last_section_inverse": abi.inverse_of((pairs - 1) % section + 1),
        "heads_inverse": abi.inverse_of(heads),
    }
