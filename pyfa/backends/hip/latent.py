"""The kernel of latent attention for many rows: which problems it supports, what it is compiled
with, and the number of splits of the keys."""

from __future__ import annotations

from dataclasses import replace

from ...plan import Plan
from ...problem import Problem
from ..common import calls, splits
from ..native.decode import lines
from ..native.plans import notes_of, plan_with, values_of
from ..native.tiles import GROUP
from ..native.tiles.gfx942 import LATENT_TILES, LINES

KERNEL = "hip/attn_latent.hip"
THREADS = 256
_WAVES = 4
_PAIR = (576, 512)
_FEATURES = frozenset(
    ("causal", "sinks", "varlen", "seqused", "paged", "leftpad", "batch_idx", "gqa", "dv", "latent",
     "topk")
)  # fmt: skip
# In the timing model, 16 keys take 3,330 to 3,540 clocks in a block of this kernel, and 608 to 646
# clocks in a block of 16 lines of the decode kernel. So six blocks of the decode kernel take longer
# than one block of this kernel, and five do not.
_LEAST_SMALL_BLOCKS = 6
# From the timing model at 1.7 GHz, in thousandths of the 2 µs of a tile. ``start``: the time to
# start and end a block. ``combine``: the launch of ``combine``. ``part``: for each split of a
# block, 0.5 MB are written and read.
_TIMES = splits.Times(start=6000, combine=2500, part=64, latency=1.0, pieces=4, parts=512)
_TILE = 1000


def takes(problem: Problem) -> bool:
    """Return whether this kernel runs ``problem``, rather than the decode kernel."""
    if (problem.head_dim, problem.head_dim_v) != _PAIR or problem.heads_k != 1:
        return False
    if problem.dtype_k or problem.features - _FEATURES or not problem.aligned:
        return False
    rows = lines(problem)
    return -(-rows // LINES) >= _LEAST_SMALL_BLOCKS * -(-rows // block_rows(LATENT_TILES))


def block_rows(tiles: int) -> int:
    """Return the lines of a workgroup whose wavefronts have ``tiles`` products each."""
    return _WAVES * LINES * tiles


def rows_of(plan: Plan) -> int:
    return block_rows(values_of(plan)["TILES"])


def splits_for(blocks: int, keys: int, units: int) -> int:
    """Return the number of splits of ``keys`` with which ``blocks`` take the least time on
    ``units`` CUs."""
    times = _TIMES._replace(part=_TIMES.part * blocks)
    return splits.least_time(blocks, -(-keys // GROUP), _TILE, units, times)


def plan(problem: Problem) -> Plan | None:
    """Return the plan of ``problem`` if this kernel runs it, else None."""
    return (
        _plan(calls.DTYPE_CODES[problem.dtype], tuple(notes_of(problem, _PAIR)))
        if takes(problem)
        else None
    )


def _plan(dtype: int, notes: tuple[str, ...] = ()) -> Plan:
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": _PAIR[0],
        "HEAD_DIM_V": _PAIR[1],
        "TILES": LATENT_TILES,
    }
    return plan_with("hip", KERNEL, constants, notes)


def all_plans(backend: str) -> list[Plan]:
    return [replace(_plan(dtype), backend=backend) for dtype in calls.DTYPE_CODES.values()]
