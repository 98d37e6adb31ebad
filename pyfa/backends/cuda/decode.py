"""Decode: conditions beyond ``native/decode.py``, and the number of splits of the keys."""

from __future__ import annotations

from ...plan import Plan
from ...problem import Problem
from ..common.splits import Times, least_time
from ..native import decode as native
from ..native.plans import values_of
from ..native.tiles import GROUP
from . import forward_sm90, forward_sm90_fp8, latent_sm90, plans

FEATURES = native.FEATURES | {"fp8"}
KERNEL = "cuda/sm80/attn_decode.cu"
# Fitted to times on an H200 (docs/kernels/cuda_sm80_decode.md). If there are fewer blocks than SMs,
# each block reads up to 1.8 times as fast: 30 % of the time is latency.
TIMES = Times(start=102400, combine=102400, part=1024, latency=0.3, pieces=4, parts=512)
# Of a latent cache. A block has more queries to load, and a split has more output to combine.
LATENT_TIMES = Times(start=382000, combine=150000, part=4230, latency=0.49, pieces=2, parts=512)


def takes(problem: Problem) -> bool:
    """Return whether ``problem`` runs on the decode kernel rather than the forward kernel."""
    if not native.takes(problem, FEATURES) or _cannot_widen(problem):
        return False
    if forward_sm90.packs(problem):
        return False
    wide = "wide" in problem.features and not native.are_few_lines(problem)
    # For large head dims, only Hopper has another kernel.
    return not (wide and plans.runs_sm90(problem.arch) and not forward_sm90.why_not(problem))


def why_not(problem: Problem) -> list[str]:
    """Return why decode cannot take a few rows over float8 keys, which no forward here supports
    either."""
    reasons = native.why_not(problem)
    if _cannot_widen(problem):
        reasons.append(_no_widening(problem))
    return reasons + forward_sm90_fp8.lacking(problem.features - FEATURES)


def why_not_alone(problem: Problem) -> list[str]:
    """Return the reasons of ``native.decode.why_not_alone``, and what float8 requires of the
    arch."""
    reasons = native.why_not_alone(problem, FEATURES)
    return reasons + ([_no_widening(problem)] if _cannot_widen(problem) else [])


def _no_widening(problem: Problem) -> str:
    return f"{problem.arch} has no instruction that converts float8 to float16 (sm_89 has one)"


def _cannot_widen(problem: Problem) -> bool:
    return "fp8" in problem.features and not plans.widens_float8(problem.arch)


def splits_for(plan: Plan, blocks: int, keys: int, units: int, key_bytes: int) -> int:
    """Return the number of splits of ``keys`` with which ``blocks`` of ``plan`` take the least time
    on ``units`` SMs."""
    if plan.kernel == latent_sm90.KERNEL:
        return latent_sm90.splits_for(blocks, keys, units, key_bytes)
    piece = forward_sm90.PIECE if plan.kernel == forward_sm90.KERNEL else GROUP
    times = LATENT_TIMES if values_of(plan).get("LATENT") else TIMES
    return least_time(blocks, -(-keys // piece), piece * key_bytes, units, times)
