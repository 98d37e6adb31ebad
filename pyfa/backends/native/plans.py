"""Code that all plans of ``kernels/`` share, for any vendor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ... import mods, sources
from ...plan import Plan
from ...problem import Problem, is_banded
from ..common.calls import DROPOUT, DROPOUT_TERM

COMMON_HEAD_DIMS = (64, 128)


def plan_with(
    backend: str,
    kernel: str,
    constants: Mapping[str, int],
    notes: Iterable[str] = (),
    digest: str = "",
) -> Plan:
    """Return ``kernel`` compiled with ``constants``, in any order, and with the mods of a
    ``digest``."""
    plan = Plan(backend, kernel, tuple(sorted(constants.items())), tuple(notes))
    return modified(plan, digest) if digest else plan


def modified(plan: Plan, digest: str) -> Plan:
    """Return ``plan`` with the mods that ``digest`` stands for."""
    captured = len(mods.of(digest).kinds)
    more = {**dict(plan.constants), "MOD": digest, "MOD_CAPTURED": captured}
    return replace(plan, constants=tuple(sorted(more.items())))


def source_of(plan: Plan) -> str:
    """Return the self-contained source that ``plan`` is compiled from."""
    constants = dict(plan.constants)
    digest = constants.get("MOD")
    if not isinstance(digest, str):
        return sources.flatten(plan.kernel, constants)
    from ...mods import emit, emit_ranges  # 5 ms, and only for mods

    pair = mods.of(digest)
    generated = {
        "mod_functions.h": emit.source(pair),
        "mask_range.h": emit_ranges.source(pair),
    }
    return sources.flatten(plan.kernel, constants, generated)


# The kernels whose code contains masks.
_MASKING = frozenset({"attn_fwd", "attn_decode", "attn_bwd", "attn_bwd_onepass", "bias_grad"})


def banded(plan: Plan) -> Plan:
    """Return ``plan`` for calls with chunks or a shifted window (``problem.is_banded``), if it
    masks."""
    if name_of(plan) not in _MASKING:
        return plan
    notes = (*plan.notes, "compiled for chunks, or for a shifted window with ALiBi or dropout")
    return replace(plan, constants=tuple(sorted((*plan.constants, ("BANDED", 1)))), notes=notes)


def masking(plan: Plan, features: frozenset[str]) -> Plan:
    """Return ``plan`` compiled for the masks in ``features`` that ordinary plans do not support."""
    if is_banded(features):
        plan = banded(plan)
    if "tree" in features:
        notes = (*plan.notes, "compiled for a mask over the new rows")
        plan = replace(plan, constants=tuple(sorted((*plan.constants, ("TREE", 1)))), notes=notes)
    return plan


def is_packed(plan: Plan, *kernels: str) -> bool:
    """Return whether a workgroup has the rows of all query heads of a KV head: in ``kernels``, and
    in plans of a forward that say so."""
    return plan.kernel in kernels or "PACKED" in dict(plan.constants)


def values_of(plan: Plan) -> dict[str, int]:
    """Return the numbers among the constants of a plan: all but the digest of its mods."""
    return {name: int(value) for name, value in plan.constants if name != "MOD"}


def name_of(plan: Plan) -> str:
    """Return the kernel's name: the stem of its file, and the symbol in it."""
    return plan.kernel.rsplit("/", 1)[-1].split(".")[0]


def is_common(plan: Plan, head_dims: Collection[int] = COMMON_HEAD_DIMS) -> bool:
    """Return whether ``plan`` is one that most problems of these head dims need: no dropout, no
    pages in prefill, no float8 caches in decode."""
    constants = dict(plan.constants)
    if constants.get("PAGED") or constants.get("PAGE_ROWS") or "KEY_DTYPE" in constants:
        return False
    if constants.get("SCORE") == DROPOUT or constants.get("TERM") == DROPOUT_TERM:
        return False
    dim = constants.get("HEAD_DIM")
    return is_for(plan, head_dims) and constants.get("HEAD_DIM_V", dim) == dim


def is_for(plan: Plan, head_dims: Collection[int]) -> bool:
    """Return whether a problem of one of these head dims can need ``plan``."""
    dim = dict(plan.constants).get("HEAD_DIM")
    # A kernel without a head_dim, or with 0, is for any head_dim.
    return not dim or dim in head_dims


def notes_of(problem: Problem, pair: tuple[int, int], chunk: int = 0) -> list[str]:
    """Return what ``explain`` adds to a plan compiled for the head dims ``pair``, with chunks of
    ``chunk`` keys (``target.Block``)."""
    notes = []
    unit = problem.unit
    if problem.head_dim % unit or problem.head_dim_v % unit:
        notes.append(f"q, k and v are copied once: head dims padded to a multiple of {unit}")
    elif not problem.aligned:
        notes.append("q, k and v are copied once: not aligned to 16 bytes")
    if "batch_invariant" in problem.features and chunk:
        notes.append(
            f"batch_invariant: no decode kernel; keys are split only into chunks of {chunk}"
        )
    elif "batch_invariant" in problem.features:
        notes.append(
            "batch_invariant: no decode kernel, and keys are not split; a few sequences with long "
            "caches do not fill the device"
        )
    if pair != (problem.head_dim, problem.head_dim_v):
        notes.append(f"compiled for head dims {pair[0]} and {pair[1]}")
    return notes
