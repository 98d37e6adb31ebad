"""Hopper's kernel of latent attention for many rows: which problems it supports, and what it is
compiled with."""

from __future__ import annotations

from collections.abc import Iterable

from ...plan import Plan
from ...problem import FEATURES as EVERY_FEATURE
from ...problem import Problem
from ..common import calls
from ..common.calls import PLAIN
from ..common.splits import Times, least_time
from ..native.decode import lines
from ..native.plans import plan_with
from ..native.tiles.sm90 import LATENT
from . import forward_sm90, plans

KERNEL = "cuda/sm90/attn_latent.cu"
_FEATURES = frozenset(
    ("causal", "window", "sinks", "varlen", "seqused", "paged", "batch_idx", "gqa", "dv", "latent")
)
# With at most 16 rows of all heads, sm80's decode kernel is faster: its blocks have 8 or 16 rows.
# With 16 rows it is not if all sequences together have a million keys. Its blocks of 32 rows take
# longer than this kernel's blocks of 64 (docs/kernels/cuda_sm90_latent.md).
_LEAST_LINES, _OF_MANY_KEYS, _MANY_KEYS = 17, 9, 1 << 20
_PAIR = (576, 512)
# Fitted to times on an H200 of 1 to 128 sequences and 1 to 128 splits. ``part`` is of the rows of
# a block.
_TIMES = Times(start=234000, combine=30000, part=360, latency=0.055, pieces=1, parts=128)


def takes(problem: Problem) -> bool:
    """Return whether this kernel runs ``problem``, rather than sm80's decode kernel."""
    return "latent" in problem.features and plans.runs_sm90(problem.arch) and not why_not(problem)


def least_lines(problem: Problem) -> int:
    """Return from how many query rows on, counted over all heads, this kernel is faster than
    sm80's."""
    many = problem.batch * problem.seqlen_k >= _MANY_KEYS
    return _OF_MANY_KEYS if many else _LEAST_LINES


def why_not(problem: Problem) -> list[str]:
    """Return the reasons why ``problem``, which is latent, runs on the sm80 kernel on Hopper."""
    least = least_lines(problem)
    if lines(problem) < least:
        return [f"sm80's kernel: it is faster for less than {least} query rows of all heads"]
    found = [
        EVERY_FEATURE[name].phrase for name in sorted(problem.features - _FEATURES)
    ] + forward_sm90.without_pages(problem)
    if not problem.positive:
        found.append("a scale of 0 or less")
    if problem.heads_k != 1:
        found.append("more than one KV head")
    return [f"sm80's kernel: sm90's has no {words}" for words in found]


def splits_for(blocks: int, keys: int, units: int, key_bytes: int) -> int:
    """Return the number of splits of ``keys`` with which ``blocks`` take the least time on
    ``units`` SMs."""
    tile, times = LATENT.block_k, _TIMES._replace(part=_TIMES.part * (1 + blocks))
    return least_time(blocks, -(-keys // tile), tile * key_bytes, units, times)


def plan(problem: Problem) -> Plan:
    notes = plans.notes_of(problem, _PAIR)
    return _plan(calls.DTYPE_CODES[problem.dtype], problem.page_size, notes)


def _plan(dtype: int, page_size: int, notes: Iterable[str] = ()) -> Plan:
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": _PAIR[0],
        "HEAD_DIM_V": _PAIR[1],
        "SCORE": PLAIN,
        "SHARED_BYTES": LATENT.shared_bytes_of_latent(_PAIR),
        **forward_sm90.constants_of_own(LATENT),
        **forward_sm90.page_rows(page_size, LATENT),
    }
    return plan_with("cuda", KERNEL, constants, notes)


def all_plans() -> list[Plan]:
    return [
        _plan(dtype, page_size)
        for dtype in calls.DTYPE_CODES.values()
        for page_size in (*forward_sm90.PAGE_SIZES, LATENT.block_k)
    ]
