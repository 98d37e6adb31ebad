"""Users' mods as Triton functions, which kernels take as constants and inline."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
import linecache
from typing import Any

import triton
import triton.language as tl

from ... import mods
from ...mods import emit_triton
from .common import tanh


@triton.jit
def mod_index(index, INFO, WRAPS: tl.constexpr):
    """Clamp ``index`` to the dimension that INFO describes; a negative index counts from the
    end."""
    size = tl.load(INFO)
    if WRAPS:
        index = tl.where(index < 0, index + size, index)
        index = tl.maximum(index, 0)
    return tl.minimum(index, size - 1).to(tl.int32) * tl.load(INFO + 4)


@triton.jit
def mod_floordiv(x, y):
    y = tl.where(y == 0, 1, y)
    quotient = x // y
    rest = x - quotient * y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)


@triton.jit
def mod_truncdiv(x, y):
    y = tl.where(y == 0, 1, y)
    quotient = tl.abs(x) // tl.abs(y)
    return tl.where((x < 0) != (y < 0), -quotient, quotient)


@triton.jit
def mod_mod(x, y):
    y = tl.where(y == 0, 1, y)
    return x - mod_floordiv(x, y) * y


@triton.jit
def mod_min(x, y):
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def mod_max(x, y):
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def mod_rsqrt(x):
    return 1.0 / tl.sqrt(x)


@triton.jit
def mod_trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def mod_round(x):
    """Round to integers, with halves to even."""
    up = tl.floor(x + 0.5)
    odd = up * 0.5 != tl.floor(up * 0.5)
    return tl.where((x + 0.5 == up) & odd, up - 1.0, up)


@triton.jit
def mod_tanh(x):
    y, _slope = tanh(x)
    return y


_HELPERS = (
    mod_index, mod_floordiv, mod_truncdiv, mod_mod, mod_min, mod_max, mod_rsqrt, mod_trunc,
    mod_round, mod_tanh,
)  # fmt: skip


@functools.cache
def functions_of(digest: str) -> dict[str, Any]:
    """Return the constants ``SCORE_MOD`` and ``MASK_MOD`` of kernels for ``digest``; None if there
    is no such mod."""
    found: dict[str, Any] = {"SCORE_MOD": None, "MASK_MOD": None}
    if not digest:
        return found
    text = emit_triton.source(mods.of(digest))
    # Triton reads the source of a function again, as of a file.
    name = f"<pyfa mods {digest}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": f"pyfa_mods_{digest}"}
    space |= {f.__name__: f for f in _HELPERS}
    exec(compile(text, name, "exec"), space)
    return found | {key: space.get(key.lower()) for key in found}
