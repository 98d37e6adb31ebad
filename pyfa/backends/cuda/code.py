"""From a plan to the cubin that runs it: the bundle, then the cache, then the compiler."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ... import bundle, cache, cubin
from ...errors import CodeObjectError, CompileError
from ...plan import Plan
from ..base import MachineReason
from ..common import libcuda
from ..native import bundled
from ..native.builds import Builds
from ..native.plans import name_of, source_of
from . import plans, runtime_compiler


@dataclass(frozen=True)
class Code:
    """A cubin: its bytes, their sha256, and where it was found."""

    data: bytes
    digest: str
    origin: str

    @property
    def kernel(self) -> cubin.Cubin:
        """Return the metadata of its one kernel. Needs pyelftools; running the kernel does not."""
        return cubin.parse(self.data)


@functools.cache  # of the first call too: why_missing asks before load does
def key_of(plan: Plan, arch: str) -> str:
    """Return the key of ``plan`` in the bundle, whose manifest names the NVRTC that built it."""
    return cache.key(source_of(plan), (), "nvrtc", arch)


def _load(plan: Plan, arch: str) -> Code:
    """Return the cubin of ``plan`` for ``arch``, such as "sm_80". Raises ``CompileError`` or
    ``CodeObjectError``."""
    key = key_of(plan, arch)
    data = bundle.find(arch, key) if _is_bundled(arch, key) else None
    return compiled(plan, arch) if data is None else _code(data, "bundle")


load = _builds = Builds(_load)


def begin(wanted: Iterable[Plan], arch: str) -> None:
    """Begin to compile those of ``wanted`` that are not bundled, for a device of ``arch``. Does
    nothing without a compiler."""
    targets = [(plan, plans.compiled_for(arch, plan)) for plan in wanted]
    lacking = [key for key in targets if not _is_bundled(key[1], key_of(*key))]
    if lacking and not why_no_compiler():
        _builds.begin(lacking)


def compiled(plan: Plan, arch: str) -> Code:
    """Return the cubin of ``plan`` from the cache or the compiler; otherwise as ``load``."""
    missing = why_no_compiler()
    if missing:
        raise CompileError(f"no code for {plan} on {arch}: {missing}", "", plan.kernel)
    source, compiler = source_of(plan), runtime_compiler.version()
    entry = cache.get_or_build(
        name_of(plan),
        cache.key(source, (), compiler, arch),
        suffix=".cubin",
        source=source,
        meta={"arch": arch, "compiler": compiler, "options": "", "plan": str(plan)},
        build=lambda: build(plan, arch),
    )
    return _code(entry.code, entry.origin)


def why_unavailable() -> str | None:
    """Return why there is no code on this machine; None if it has a bundle or a compiler."""
    has_code = any(arch.startswith("sm_") for arch in bundle.archs())
    return None if has_code else why_no_compiler()


def why_missing(wanted: Sequence[Plan], arch: str, no_compiler: str) -> MachineReason | None:
    """Return why some of ``wanted`` are not available for a device of ``arch``; None if each is
    bundled. ``no_compiler`` is why they cannot be compiled."""

    def has(plan: Plan) -> bool:
        target = plans.compiled_for(arch, plan)
        return _is_bundled(target, key_of(plan, target))

    return bundled.why_missing(wanted, has, no_compiler)


@functools.cache
def why_no_compiler() -> str | None:
    """Return why nothing can be compiled for this machine's driver; None without a driver if it
    can be compiled at all."""
    missing = runtime_compiler.why_unavailable()
    if missing is not None:
        return missing
    driver, compiler = libcuda.version()[0], runtime_compiler.major()
    if driver and compiler > driver:
        return (
            f"NVRTC {compiler} generates code that this driver (CUDA {driver}) cannot load: "
            f"install cuda-bindings and NVRTC {driver}"
        )
    return None


def _is_bundled(arch: str, key: str) -> bool:
    """Return whether the bundle has this cubin, and this machine's driver, if any, can load it."""
    found = bundle.entry(arch, key)
    driver = libcuda.version()[0]
    return found is not None and (not driver or _major(found["compiler"]) <= driver)


def _major(compiler: str) -> int:
    """Return the CUDA major version of a compiler such as ``nvrtc 12.9.86``."""
    return int(compiler.removeprefix("nvrtc ").split(".")[0])


def _code(data: bytes, origin: str) -> Code:
    return Code(data, hashlib.sha256(data).hexdigest(), origin)


def build(plan: Plan, arch: str) -> bytes:
    """Compile ``plan``; refuse it if it needs more shared memory than a block may have."""
    data, _ = runtime_compiler.compile_cuda(source_of(plan), arch=arch)
    limit = plans.limits_of(arch).shared_bytes_per_block
    taken = plans.shared_bytes(plan)
    if taken > limit:
        raise CodeObjectError(
            f"{plan} on {arch} needs {taken} B of shared memory; the limit is {limit} B"
        )
    return data
