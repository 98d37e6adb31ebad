"""From a plan to the code object that runs it: the bundle, then the cache, then the compiler."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ... import bundle, cache, codeobject
from ...arch import ARCHS
from ...errors import CodeObjectError, CompileError
from ...plan import Plan
from ..base import MachineReason
from ..native import bundled
from ..native.builds import Builds
from ..native.plans import name_of, source_of
from . import compiler, forward

# -fno-math-errno and the contraction of a·b + c are what these kernels are written for; nothing
# that would let the compiler forget NaN and infinities.
OPTIONS = (
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=fast",
    # Loops over registers are unrolled whatever their size: 16 slots with a Philox each pass 16384.
    "-mllvm=-pragma-unroll-threshold=1000000",
)


@dataclass(frozen=True)
class Code:
    """A code object: its bytes, their sha256, where it was found, and its one kernel's metadata."""

    data: bytes
    digest: str
    origin: str
    kernel: codeobject.Kernel


@functools.cache
def key_of(plan: Plan, arch: str, by: str = compiler.PINNED) -> str:
    """Return the cache key of the code object that compiler ``by`` makes of ``plan``."""
    return cache.key(source_of(plan), OPTIONS, by, arch)


def _load(plan: Plan, arch: str) -> Code:
    """Return the code object of ``plan``. Raises ``CompileError`` or ``CodeObjectError``."""
    key = key_of(plan, arch)
    data, found = bundle.find(arch, key), bundle.entry(arch, key)
    if data is not None and found is not None:
        return Code(data, found["sha256"], "bundle", codeobject.Kernel.of(found["kernel"]))
    return compiled(plan, arch)


load = _builds = Builds(_load)


def begin(wanted: Iterable[Plan], arch: str) -> None:
    """Begin to compile those of ``wanted`` that are not bundled. Does nothing without a
    compiler."""
    lacking = [plan for plan in wanted if not bundle.has(arch, key_of(plan, arch))]
    if lacking and not compiler.why_unavailable():
        _builds.begin((plan, arch) for plan in lacking)


def compiled(plan: Plan, arch: str) -> Code:
    """Return the code object of ``plan`` from the cache or the compiler, whatever the bundle
    holds."""
    missing = compiler.why_unavailable()
    if missing:
        raise CompileError(f"no code for {plan} on {arch}: {missing}", "", plan.kernel)
    meta: Mapping[str, str] = {
        "arch": arch,
        "compiler": compiler.version(),
        "options": " ".join(OPTIONS),
        "plan": str(plan),
    }
    entry = cache.get_or_build(
        name_of(plan),
        key_of(plan, arch, compiler.version()),
        suffix=".hsaco",
        source=source_of(plan),
        meta=meta,
        build=lambda: build(plan, arch),
    )
    kernel = codeobject.parse(entry.code).kernel(name_of(plan))
    digest = hashlib.sha256(entry.code).hexdigest()
    return Code(entry.code, digest, entry.origin, kernel)


def why_unavailable() -> str | None:
    """Return why there is no code on this machine; None if there is a bundle or a compiler."""
    has_code = any(arch.startswith("gfx") for arch in bundle.archs())
    return None if has_code else compiler.why_unavailable()


def why_missing(wanted: Sequence[Plan], arch: str) -> MachineReason | None:
    """Return why some of ``wanted`` are not available here; None if each is bundled or compiled."""
    missing = compiler.why_unavailable()
    if missing is None:
        return None
    return bundled.why_missing(wanted, lambda plan: bundle.has(arch, key_of(plan, arch)), missing)


_refused: dict[tuple[Plan, str], str] = {}


def why_refused(wanted: Sequence[Plan], arch: str) -> str | None:
    """Return why one of ``wanted`` was refused because of a user's mod; None if none was refused or
    tried."""
    return next(filter(None, (_refused.get((plan, arch)) for plan in wanted)), None)


def why_not_built(wanted: Sequence[Plan], arch: str) -> str | None:
    """Build ``wanted``, in order. Return why the first that fails cannot run; None if all can.

    If a plan of a mod breaks the rules, its fallbacks are tried. The launcher then uses the first
    that keeps them.
    """
    for plan in wanted:
        for each in forward.fallbacks(plan):
            try:
                load(each, arch)
                break
            except CodeObjectError as error:
                reason = (
                    f"with this score_mod or mask_mod {error}; precompute part of it as a tensor, "
                    "or capture fewer tensors, or tensors of fewer dimensions"
                )
        else:
            _refused[plan, arch] = reason
            return reason
    return None


def build(plan: Plan, arch: str) -> bytes:
    """Compile ``plan``, and refuse code that breaks the rules its kernel is written to."""
    data = compiler.compile_hip(source_of(plan), arch=arch, options=OPTIONS)
    kernel = codeobject.parse(data).kernel(name_of(plan))
    if kernel.vgpr_spills or kernel.sgpr_spills or kernel.scratch_bytes:
        spilled = kernel.vgpr_spills + kernel.sgpr_spills
        raise CodeObjectError(
            f"{plan} on {arch} spills {spilled} registers, {kernel.scratch_bytes} B of scratch"
        )
    if kernel.lds_bytes > ARCHS[arch].shared_bytes_per_block:
        raise CodeObjectError(f"{plan} on {arch} takes {kernel.lds_bytes} B of LDS")
    return data
