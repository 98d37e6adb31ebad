"""Triton's interpreter in less time: ``patch_language_once``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    """Each call of a function inside a kernel patches Triton's language anew, which took a third of
    the time. From now on what is patched stays as it is until the kernel ends."""
    patch, patched = interpreter._patch_lang, set[Any]()

    def once(fn: Callable) -> Any:
        reached = {each for each in (tl, tl.core) for x in fn.__globals__.values() if x is each}
        if reached <= patched:
            return SimpleNamespace(restore=lambda: None)
        kernel, scope = not patched, patch(fn)
        patched.update(reached)
        if kernel and scope is not None:  # before 3.5 Triton restores nothing
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    interpreter._patch_lang = once
