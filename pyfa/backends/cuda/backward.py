"""Backward: which kernels, and what they are compiled with.

They are: delta of every row and zeros for dQ, one kernel that owns keys and adds dQ up in float32,
its rounding. ``deterministic`` makes blocks wait for their turn to add; otherwise dQ's last bits
may differ from run to run, while dK's and dV's never do.
"""

from __future__ import annotations

from ...plan import Plan
from ...problem import Problem
from ..common import calls
from ..native.backward import is_general_problem
from ..native.plans import modified, plan_with
from ..native.tiles import Pair, constants_of, sm90
from . import plans

KERNEL = "cuda/sm80/attn_bwd.cu"


SM90 = "cuda/sm90/attn_bwd.cu"


def plans_of(arch: str, pair: Pair, dtype: int, general: bool) -> tuple[Plan, Plan, Plan]:
    """row_sums, attn_bwd and dq_convert."""
    tiles = plans.tiles_of(arch).backward[pair][general]
    constants = {
        "DTYPE": dtype,
        "GENERAL": int(general),
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "SHARED_BYTES": tiles.shared_bytes(pair, general),
        **constants_of(tiles),
        "CHUNK_Q": tiles.chunk_q or tiles.block_q // tiles.warps_q,
    }
    return around(plan_with("cuda", KERNEL, constants), transposed=False)


def around(over_keys: Plan, transposed: bool) -> tuple[Plan, Plan, Plan]:
    """attn_bwd with what runs before and behind it, by tiles of as many rows."""
    constants = dict(over_keys.constants)
    tile = tuple((name, constants[name]) for name in ("BLOCK_Q", "DTYPE", "HEAD_DIM"))
    of_sums = (*tile, ("HEAD_DIM_V", constants["HEAD_DIM_V"]))
    return (
        Plan("cuda", "cuda/row_sums.cu", of_sums),
        over_keys,
        Plan("cuda", "cuda/sm80/dq_convert.cu", (*tile, ("TRANSPOSED", int(transposed)))),
    )


def sm90_plans_of(pair: Pair, dtype: int, deterministic: bool) -> tuple[Plan, Plan, Plan]:
    """The same of Hopper's own."""
    tiles = sm90.BACKWARD[pair]
    if deterministic and not tiles.roles:
        tiles = tiles._replace(one_sender=True)
    constants = {
        "BLOCK_K": tiles.block_k,
        "DETERMINISTIC": int(deterministic),
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        "SHARED_BYTES": tiles.shared_bytes(pair),
        **constants_of(tiles),
    }
    return around(plan_with("cuda", SM90, constants), transposed=True)


def is_sm90(arch: str, general: bool) -> bool:
    """Whether the kernels are Hopper's own."""
    return plans.runs_sm90(arch) and not general


def plans_for(
    arch: str, dims: Pair, dtype: int, general: bool, deterministic: bool, mods: str = ""
) -> tuple[Plan, Plan, Plan]:
    """row_sums, attn_bwd and dq_convert for these heads on a device of ``arch``."""
    if is_sm90(arch, general):
        return sm90_plans_of(calls.bucket_of(sm90.BACKWARD, *dims), dtype, deterministic)
    pair = calls.bucket_of(plans.tiles_of(arch).backward, *dims)
    sums, gradients, convert = plans_of(arch, pair, dtype, general)
    return sums, modified(gradients, mods) if mods else gradients, convert


def notes_of(problem: Problem) -> list[str]:
    """What ``explain`` adds to the plan of a problem with a backward."""
    if "backward" not in problem.features or not plans.runs_sm90(problem.arch):
        return []
    if not is_general_problem(problem):
        return []
    return ["backward is sm80's kernel: sm90's has no score terms, sinks or dropout"]


def all_plans(arch: str) -> list[Plan]:
    found: list[Plan] = []
    for dtype in calls.DTYPE_CODES.values():
        for general in (False, True):
            if is_sm90(arch, general):
                for pair in sm90.BACKWARD:
                    for deterministic in (False, True):
                        found += sm90_plans_of(pair, dtype, deterministic)
            else:
                for pair in plans.tiles_of(arch).backward:
                    found += plans_of(arch, pair, dtype, general)
    return list(dict.fromkeys(found))
