"""Which problems the HIP kernels take, and with which tiles."""

from __future__ import annotations

from ...plan import Plan
from ...problem import Problem

ARCHS = ("gfx942",)
FEATURES = frozenset({"causal", "gqa"})
DTYPES = ("float16", "bfloat16")

# A head dim to its workgroup: 4 wavefronts of 32 query rows against tiles of 64 keys. LDS holds one
# K and one V tile, 34,304 B at 128; 214 registers there, where 256 would still leave two wavefronts
# on a SIMD.
HEAD_DIMS = (64, 128)
BLOCK_Q = 128
BLOCK_K = 64
THREADS = 256
MAX_BATCH = 65536  # hipModuleLaunchKernel refuses more workgroups in y and in z

_DTYPE_CODES = {"float16": 0, "bfloat16": 1}


def why_not(problem: Problem) -> list[str]:
    """What the kernels lack for ``problem``, beyond features and dtypes."""
    reasons = []
    if problem.head_dim not in HEAD_DIMS:
        dims = ", ".join(str(dim) for dim in HEAD_DIMS)
        reasons.append(f"head_dim {problem.head_dim} is not one of {dims}")
    if problem.batch > MAX_BATCH:
        reasons.append(f"more than {MAX_BATCH} sequences do not fit into the grid")
    return reasons


def plan(backend: str, problem: Problem) -> Plan:
    """The kernel of ``problem`` and what it is compiled with."""
    constants = {
        "CAUSAL": int("causal" in problem.features),
        "DTYPE": _DTYPE_CODES[problem.dtype],
        "HEAD_DIM": problem.head_dim,
    }
    notes = () if problem.aligned else ("q, k and v are copied once: not aligned to 16 bytes",)
    return Plan(backend, "hip/attn_fwd.hip", tuple(sorted(constants.items())), notes)


def all_plans(backend: str) -> list[Plan]:
    """Every plan that any problem can get: what is bundled."""
    return [
        Plan(
            backend,
            "hip/attn_fwd.hip",
            (("CAUSAL", causal), ("DTYPE", dtype), ("HEAD_DIM", dim)),
        )
        for dim in HEAD_DIMS
        for dtype in _DTYPE_CODES.values()
        for causal in (0, 1)
    ]


def grid(rows: int, heads: int, batch: int) -> tuple[int, int, int]:
    """Workgroups of a forward: blocks of query rows, heads, sequences."""
    return (-(-rows // BLOCK_Q), heads, batch)
