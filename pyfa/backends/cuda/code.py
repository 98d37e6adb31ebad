"""From a plan to the cubin that runs it: the cache, then the compiler."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from ... import cubin
from ...errors import CodeObjectError, CompileError
from ...plan import Plan
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


@functools.cache
def load(plan: Plan, arch: str) -> Code:
    """Return the cubin of ``plan`` for ``arch``, such as "sm_80". Raises ``CompileError`` or
    ``CodeObjectError``."""
    from ... import cache

    missing = runtime_compiler.why_unavailable()
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
    return Code(entry.code, hashlib.sha256(entry.code).hexdigest(), entry.origin)


def build(plan: Plan, arch: str) -> bytes:
    """Compile ``plan``; refuse it if it needs more shared memory than a block may have."""
    data, _ = runtime_compiler.compile_cuda(source_of(plan), arch=arch)
    limit = plans.limits_of(arch).shared_bytes_per_block
    taken = plans.shared_bytes(plan)
    if taken > limit:
        raise CodeObjectError(f"{plan} on {arch} takes {taken} B of shared memory, of {limit}")
    return data
