"""What flash-attention 4's tests of mods use of NVIDIA's CuTe DSL, computed on PyTorch scalars.

Their score_mods and mask_mods are written in that language, which only NVIDIA's compiler
understands. Here ``cute.jit`` gives a function that runs the same body on what pyfa's tracer passes
it. A vector of the language has one lane. ``install`` puts the modules where Python imports them.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_inside = contextvars.ContextVar("inside", default=False)


class Numeric:
    """A dtype of the language, which also converts: ``Int32(x)``."""

    def __init__(self, name: str, dtype: torch.dtype, mask: int = 0) -> None:
        self.name, self.dtype, self.mask = name, dtype, mask

    def __call__(self, x: Any) -> Any:
        if isinstance(x, (int, float, bool)):
            return int(x) & self.mask if self.mask else x
        x = value_of(x)
        x = (x != 0) if self.dtype is torch.bool else x.to(self.dtype)
        return Ssa(x & self.mask if self.mask else x, self)


BOOLEAN = Numeric("Boolean", torch.bool)
INT32 = Numeric("Int32", torch.int32)
# In 64 bits, of which the lower 32 count.
UINT32 = Numeric("Uint32", torch.int64, 0xFFFFFFFF)
FLOAT32 = Numeric("Float32", torch.float32)
_NUMERICS = {torch.float16: FLOAT32, torch.bfloat16: FLOAT32, torch.float32: FLOAT32}


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Ssa) else x


class Ssa:
    """A scalar, and a vector of one lane of it."""

    shape = (1,)

    def __init__(self, value: Any, shape: Any = None, dtype: Any = None) -> None:
        self.value = value_of(value)
        self.kind = shape if isinstance(shape, Numeric) else dtype

    @property
    def dtype(self) -> Any:
        return self.kind

    def __getitem__(self, lane: int) -> Ssa:
        assert lane == 0
        return self

    def to(self, numeric: Numeric) -> Any:
        return numeric(self)

    def __neg__(self) -> Ssa:
        return Ssa(-self.value)

    def __invert__(self) -> Ssa:
        return Ssa(~self.value)

    __hash__ = None  # type: ignore[assignment]


def _operator(name: str) -> None:
    apply = getattr(operator, name)
    setattr(Ssa, f"__{name.strip('_')}__", lambda x, y: Ssa(apply(x.value, value_of(y)), x.kind))
    if name in ("lt", "le", "gt", "ge", "eq", "ne"):
        return
    setattr(Ssa, f"__r{name.strip('_')}__", lambda x, y: Ssa(apply(value_of(y), x.value), x.kind))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lt", "le",
              "gt", "ge", "eq", "ne"):  # fmt: skip
    _operator(_name)


class Fragment:
    """A tensor in registers, of one lane."""

    def __init__(self, shape: Any, dtype: Numeric | None = None) -> None:
        self.dtype, self._value = dtype, None

    shape = (1,)

    def store(self, x: Any) -> None:
        self._value = x

    def __setitem__(self, lane: int, x: Any) -> None:
        assert lane == 0
        self._value = x

    def __getitem__(self, lane: int) -> Any:
        assert lane == 0
        return self._value

    def load(self) -> Ssa:
        assert self._value is not None
        made = self.dtype(self._value) if self.dtype is not None else self._value
        return made if isinstance(made, Ssa) else Ssa(torch.as_tensor(made), self.dtype)


class Aux:
    """A tensor in memory."""

    def __init__(self, x: torch.Tensor) -> None:
        self.tensor, self.element_type = x, _NUMERICS.get(x.dtype, INT32)
        self.shape = tuple(x.shape)

    def __getitem__(self, index: Any) -> Ssa:
        each = index if isinstance(index, tuple) else (index,)
        return Ssa(self.tensor[tuple(value_of(x) for x in each)], self.element_type)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on scalars of the tracer; on those of another function here as it is."""
    function.__globals__.setdefault("max", _largest)

    def run(*args: Any) -> Any:
        if _inside.get():
            return function(*args)
        token = _inside.set(True)
        try:
            result = function(*map(_given, args))
        finally:
            _inside.reset(token)
        value = value_of(result)
        # The bits of 32 lanes, of which this is the first.
        return (value & 1) != 0 if result.kind is UINT32 else value

    run.__name__ = function.__name__
    return run


def _given(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Ssa(x, FLOAT32 if x.is_floating_point() else INT32)
    if isinstance(x, tuple):
        return [Aux(each) if isinstance(each, torch.Tensor) and each.dim() else each for each in x]
    return x


def _largest(*args: Any) -> Any:
    if not any(isinstance(x, Ssa) for x in args):
        return max(*args)
    return functools.reduce(
        lambda x, y: Ssa(torch.maximum(*map(torch.as_tensor, (value_of(x), value_of(y))))), args
    )


def _smallest(x: Any, y: Any) -> Any:
    return Ssa(torch.minimum(*map(torch.as_tensor, (value_of(x), value_of(y)))))


def _where(condition: Any, x: Any, y: Any) -> Ssa:
    return Ssa(torch.where(*map(value_of, (condition, x, y))), getattr(x, "kind", None))


def _full_like(x: Any, value: Any) -> Ssa:
    value = value_of(value)
    if isinstance(value, (int, float)) and x.value.is_floating_point():
        value = float(value)
    return Ssa(value if isinstance(value, torch.Tensor) else torch.as_tensor(value), x.kind)


def _shifted(left: bool) -> Callable[[Any, Any], Ssa]:
    def shift(x: Any, by: Any) -> Ssa:
        x, by = torch.as_tensor(value_of(x)).to(torch.int64), value_of(by)
        by = torch.as_tensor(by).to(torch.int64)
        inside = torch.clamp(by, 0, 31)
        moved = (x << inside if left else x >> inside) & UINT32.mask
        return Ssa(torch.where(by > 31, 0, moved), UINT32)

    return shift


def _refusing(name: str) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name}: pyfa has no such function")

    return refuse


def install() -> None:
    """Make ``cutlass`` and what the tests import beside flash-attention's interface importable."""
    from flash_attn.cute import block_sparsity, interface

    modules = {
        "cutlass": {
            "Int32": INT32, "Uint32": UINT32, "Float32": FLOAT32, "Boolean": BOOLEAN,
            "range_constexpr": range, "min": _smallest, "max": _largest,
        },
        "cutlass.cute": {
            "jit": jit, "TensorSSA": Ssa, "where": _where, "full_like": _full_like,
            "make_rmem_tensor": Fragment, "size": lambda shape: 1,
        },
        "cutlass.cute.math": {
            "exp2": lambda x: Ssa(torch.exp2(x.value), FLOAT32),
            "exp": lambda x: Ssa(torch.exp(x.value), FLOAT32),
        },
        "cutlass._mlir": {},
        "cutlass._mlir.dialects": {},
        "cutlass._mlir.dialects.math": {"absi": lambda x: Ssa(x.value.abs(), x.kind)},
        "flash_attn.cute.utils": {
            "scalar_to_ssa": lambda x, numeric: (
                numeric(x) if isinstance(x, Ssa) else Ssa(torch.as_tensor(x), numeric)
            ),
            "ssa_to_scalar": lambda x: x[0], "shr_u32": _shifted(False), "shl_u32": _shifted(True),
        },
        "flash_attn.cute.cache_utils": {x: _refusing(x) for x in ("JITCache", "get_jit_cache")},
    }  # fmt: skip
    for name, contents in modules.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(contents)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for module, names in (
        (block_sparsity, ("block_sparse_bwd_supports_2cta", "get_kv_subtile_factor",
                          "normalize_block_sparse_config_bwd", "compute_dq_write_order",
                          "compute_dq_write_order_from_block_mask")),
        (interface, ("_tile_size_bwd_sm90",)),
    ):  # fmt: skip
        for name in names:
            setattr(module, name, _refusing(name))
