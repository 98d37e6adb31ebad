"""Decode on every device: few query rows over many keys.

The rows of a workgroup (its lines) come from all query heads that share a KV head, so K and V are
read once for the group. The keys are split over as many workgroups as are needed to fill the
device.
"""

from __future__ import annotations

from dataclasses import replace

from ...plan import Plan
from ...problem import FEATURES as EVERY_FEATURE
from ...problem import Append, Call, Problem, is_aligned
from ..base import Run
from ..common import calls
from . import attend
from .launch import Launcher
from .plans import plan_with
from .target import DecodeTiles, Target
from .tiles import GROUP, Pair, constants_of

FEATURES = frozenset(
    (
        "causal", "window", "negative_edge", "chunk", "softcap", "alibi", "bias", "sinks", "varlen",
        "seqused", "paged", "leftpad", "batch_idx", "gqa", "dv", "wide", "latent", "topk", "tree",
    )
)  # fmt: skip
# Decode is chosen up to this number of rows or lines. The tiles of the forward hold more rows, of
# one head each. In decode, the heads of a KV group share the keys that are read; without groups
# nothing is shared. On an H200, 16 rows of groups of 4 to 16 heads take 0.44 to 0.63 of the
# forward's time in batches, and 32 rows take 1.05 to 1.15 of it.
MOST_ROWS = 16
MOST_LINES = 64
MOST_LINES_ALONE = 32
# Terms that no function for latent attention takes: its kernels leave them out.
_NOT_OF_LATENT = frozenset({"alibi", "bias"})
# Features that no other kernel of ``native`` has. With them, prefill also runs on decode.
ALONE = frozenset({"latent", "wide"})


def lines(problem: Problem) -> int:
    """Return the number of query rows of all heads of a group."""
    return problem.seqlen_q * (problem.heads_q // problem.heads_k)


def are_few(problem: Problem) -> bool:
    """Return whether ``problem`` has so few rows that decode is preferred. Problems with a feature
    in ``ALONE`` run on decode with any number of rows."""
    return bool(problem.features & ALONE) or are_few_lines(problem)


def are_few_lines(problem: Problem) -> bool:
    """Return whether decode is faster than a forward kernel that supports the problem, too."""
    if problem.heads_q == problem.heads_k:
        return lines(problem) <= MOST_LINES_ALONE
    if lines(problem) <= MOST_LINES:
        return True
    # The conversion of keys to 16 bits does not limit the forward of float8 queries either.
    float8 = "fp8" in problem.features and not problem.dtype_k
    return problem.seqlen_q <= (1 if float8 else MOST_ROWS)


def takes(problem: Problem, features: frozenset[str] = FEATURES) -> bool:
    """Return whether decode, which has ``features``, runs ``problem``, rather than forward."""
    return are_few(problem) and has_all(problem, features) and not why_not(problem)


def has_all(problem: Problem, features: frozenset[str]) -> bool:
    """Return whether decode, which has ``features``, has the features of ``problem``."""
    return not _lacking(problem, features)


def _lacking(problem: Problem, features: frozenset[str]) -> frozenset[str]:
    """Return the features of ``problem`` that are not in ``features``. Float8 is always one of them
    if the problem also has the feature ``wide``."""
    if "wide" in problem.features:
        features -= {"fp8"}
    if "latent" in problem.features:
        features -= _NOT_OF_LATENT
    return problem.features - features


def why_not(problem: Problem) -> list[str]:
    """Return why the cache cannot be read without a copy, which would be too slow at every step.

    With wide heads there is no other kernel, so the copy is made (``readable``).
    """
    reasons: list[str] = []
    if "wide" in problem.features:
        return reasons
    if problem.head_dim % problem.unit or problem.head_dim_v % problem.unit:
        reasons.append(f"decode needs a head_dim that is a multiple of {problem.unit}")
    if not problem.aligned:
        reasons.append("decode needs rows aligned to 16 bytes")
    return reasons


def why_not_alone(problem: Problem, features: frozenset[str]) -> list[str]:
    """Return why decode, which has ``features``, does not support a problem of ``ALONE``. Every
    backend gives the reason that latent attention is not batch-invariant."""
    latent = "latent" in problem.features
    lacking = _lacking(problem, features) - ({"batch_invariant"} if latent else set())
    what = EVERY_FEATURE["latent" if latent else "wide"].phrase
    reasons = [
        f"{what} with {feature.phrase} is not implemented"
        for name, feature in EVERY_FEATURE.items()
        if name in lacking
    ]
    return reasons + why_not(problem)


def keys_seen(call: Call) -> int:
    """Return the most keys that the rows of one sequence can see."""
    seen, rows = call.max_seqlen_k, call.max_seqlen_q
    if call.window_left >= 0 and call.window_right >= 0:
        seen = min(seen, call.window_left + call.window_right + rows)
    if call.attention_chunk:
        # At most one chunk more than all rows but one fill: the first row may be the last of its
        # chunk.
        chunks = 1 + -(-max(rows - 1, 0) // call.attention_chunk)
        seen = min(seen, chunks * call.attention_chunk)
    return seen


def forced_parts(call: Call) -> int:
    """Return the splits that ``num_splits`` requests, at most one per group of keys; 0 if it
    requests none."""
    return max(1, min(call.num_splits, -(-keys_seen(call) // GROUP))) if call.num_splits else 0


def readable(call: Call) -> Call:
    """Return ``call`` as the kernel reads it. Float8 queries are converted exactly to the dtype of
    out."""
    if call.q.element_size() == 1:
        call = call._replace(q=call.q.to(call.dtype_of_out()))
    unit = 16 // call.k.element_size()
    if is_aligned(call) and not any(x.shape[-1] % unit for x in (call.k, call.v)):
        return call
    # A plan is for aligned tensors. Only the tensors of an empty call may be misaligned.
    call = calls.with_readable(call)
    # Float8 keys were padded to a multiple of 16 elements, and queries to a multiple of 8.
    more = call.k.shape[-1] - call.q.shape[-1]
    return call._replace(q=calls.padded(call.q, more)) if more else call


def plan(target: Target, backend: str, problem: Problem) -> Plan:
    """Return the plan of ``problem``: its kernel and what it is compiled with."""
    float8 = "fp8" in problem.features
    latent = "latent" in problem.features
    own = target.latent_plan(problem) if latent else None
    if own is not None:
        return replace(own, backend=backend)
    table = (target.latent_tiles if latent else target.decode_tiles)(problem.arch, float8)
    pair = calls.bucket_of(table, problem.head_dim, problem.head_dim_v)
    sizes = table[pair]
    tiles = next((each for each in sizes if each.lines >= lines(problem)), sizes[-1])
    dtype = calls.DTYPE_CODES[problem.dtype_out or problem.dtype]
    found = _plan(target, backend, pair, dtype, tiles, float8, latent)
    return replace(found, notes=tuple(target.notes_of(problem, pair)))


def _plan(
    target: Target, backend: str, pair: Pair, dtype: int, tiles: DecodeTiles, float8: bool,
    latent: bool,
) -> Plan:  # fmt: skip
    constants = {
        "DTYPE": dtype,
        "HEAD_DIM": pair[0],
        "HEAD_DIM_V": pair[1],
        **constants_of(tiles),
    }
    if latent:
        constants["LATENT"] = 1
    # With latent attention, V is a part of K.
    shared = tiles.shared_bytes(pair, float8, latent)
    if shared:
        constants["SHARED_BYTES"] = shared
    if float8:
        constants["KEY_DTYPE"] = target.float8
    return plan_with(backend, target.decode, constants)


def all_plans(target: Target, backend: str, arch: str) -> list[Plan]:
    """Return every decode plan that a problem on a device with the tiles of ``arch`` can get."""
    return [
        _plan(target, backend, pair, dtype, tiles, float8, latent)
        for latent, table in ((False, target.decode_tiles), (True, target.latent_tiles))
        for float8 in (False, True)
        for pair, sizes in table(arch, float8).items()
        for tiles in sizes
        for dtype in calls.DTYPE_CODES.values()
    ]


def bind(
    launch: Launcher, plan: Plan, call: Call, append: Append | None = None, with_lse: bool = True
) -> Run:
    """Implement ``Backend.bind``."""
    target = launch.target
    block = target.block_of(plan)

    def grid_of(call: Call) -> attend.Grid:
        blocks = attend.blocks_of(target, plan, call)
        num_splits = forced_parts(call)
        if not num_splits:
            units = launch.device_at(call.q.device).units
            elements = call.k.shape[-1] + (0 if call.latent else call.v.shape[-1])
            key_bytes = call.k.element_size() * elements
            seen = keys_seen(call)
            num_splits = target.decode_splits(plan, blocks, seen, units, key_bytes)
            if call.has_spare_k and call.batch > 1:
                num_splits = target.splits_of_lengths(plan, num_splits, blocks, seen, units)
        return attend.Grid(blocks, block.threads, num_splits)

    return attend.bind(launch, plan, call, append, with_lse, readable, grid_of)
