"""Runs a mod once on scalars that record every operation, into a ``Function`` of ``ir``.

PyTorch's dispatcher passes every operator to ``_Recorder``, so a mod may use any spelling of the
operations in ``operators``. Captured tensors stay ordinary tensors; indexing one with a traced
scalar is a load. An operation that is not supported raises ``ModError``, which names the line.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import operators, side_effects
from .ir import INPUTS, Builder, Function, TooLarge

MOST_CAPTURED = 8
MOST_RANK = 4

TYPES = {
    torch.bool: "b", torch.uint8: "i", torch.int8: "i", torch.int16: "i", torch.int32: "i",
    torch.int64: "l", torch.float16: "f", torch.bfloat16: "f", torch.float32: "f",
    torch.float64: "f",
}  # fmt: skip
_DTYPES = {"b": torch.bool, "i": torch.int32, "l": torch.int64, "f": torch.float32}

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def _is_of_users(file: str) -> bool:
    return not file.startswith((_HERE, _TORCH, "<frozen"))


class ModError(ValueError):
    """A mod uses an operation that cannot be traced, or that kernels cannot compute."""


class Traced(torch.Tensor):
    """A traced scalar; ``number`` is the index of its operation.

    With a ``base``, the object is a partly indexed captured tensor instead: only the first
    dimensions of ``base`` have an index so far.
    """

    number: int
    base: torch.Tensor | None
    at: tuple[int, ...]

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: torch.device, shape: Sequence[int] = ()) -> Traced:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Traced = make(cls, tuple(shape), dtype=dtype, device=device)
        made.number, made.base, made.at = -1, None, ()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Traced({self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ModError(f"{func} is used after its mod was traced")


class Traces(NamedTuple):
    """The result of tracing a mod. ``captured``: the tensors that its loads read, by slot.
    ``reads_sizes``: whether the mod read a size of a captured tensor, which is a constant in the
    function."""

    function: Function
    captured: tuple[torch.Tensor, ...]
    reads_sizes: bool


def trace(kind: str, mod: Callable[..., Any], device: torch.device) -> Traces:
    """Trace ``mod`` for tensors on ``device``. ``kind`` is "score_mod" or "mask_mod"."""
    names = tuple(INPUTS) if kind == "score_mod" else tuple(INPUTS)[1:]
    write = side_effects.write_in(mod)
    if write:
        raise ModError(
            f"{kind} {write}; a mod is run once, to be traced, and may only return a value"
        )
    recorder = _Recorder(kind, mod, device)
    _refuse_other_arguments(recorder, names)
    inputs = []
    for name in names:
        made = Traced(_DTYPES[INPUTS[name]], device)
        made.number = recorder.make.input(name)
        inputs.append(made)
    before = side_effects.containers(mod)
    try:
        with torch.no_grad(), _whole(), _Functions(recorder), recorder:
            result = mod(*inputs)
        number = _result(recorder, kind, result)
        function = recorder.make.function(number)
    except ModError:
        raise
    except TooLarge:
        raise ModError(
            f"{recorder.where()}: more than 512 operations; precompute part of it as a tensor and "
            "capture that"
        ) from None
    except Exception as error:  # of the mod's own code, whose line nothing else would name
        raise ModError(
            f"{recorder.where(error.__traceback__)}: raises {type(error).__name__}: {error}"
        ) from error
    if side_effects.containers(mod) != before:
        raise ModError(
            f"{recorder.where()}: it changes a list, dict or set outside of it; a mod is run once, "
            "to be traced, and may only return a value"
        )
    # Slots in the order of the loads that are left.
    slots = dict.fromkeys(op.value for op in function.ops if op.name == "load")
    places = {old: new for new, old in enumerate(slots)}
    ops = tuple(
        op._replace(value=places[op.value]) if op.name == "load" else op for op in function.ops
    )
    captured = tuple(recorder.captured[int(old)] for old in slots)  # type: ignore[arg-type]
    return Traces(Function(ops, function.results), captured, recorder.reads_sizes)


_CALLED = {"score": "score", "b": "b", "h": "h", "q": "q_idx", "kv": "kv_idx"}


def _refuse_other_arguments(recorder: _Recorder, names: Sequence[str]) -> None:
    try:
        signature = inspect.signature(recorder.mod)
    except (ValueError, TypeError):  # a function of C's tells none
        return
    try:
        signature.bind(*names)
    except TypeError:
        wanted = ", ".join(_CALLED[name] for name in names)
        raise TypeError(
            f"{recorder.where()}: takes {signature}, expected ({wanted}); capture other values, "
            "or bind them with functools.partial"
        ) from None


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Disable autocast, whose casts would be recorded."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _result(recorder: _Recorder, kind: str, result: object) -> int:
    wanted = "a bool" if kind == "mask_mod" else "a floating-point number"
    if isinstance(result, (bool, int, float)):
        dtype = torch.bool if isinstance(result, bool) else None
        if dtype is None:
            dtype = torch.float32 if isinstance(result, float) else torch.int32
        number = recorder.make.constant(result, TYPES[dtype])
    elif isinstance(result, torch.Tensor):
        if result.dim():
            raise ModError(
                f"{recorder.where()}: returns a tensor of shape {tuple(result.shape)}, expected a "
                "scalar: a mod gets one score, and indexes every dimension of what it captures"
            )
        dtype, number = result.dtype, recorder.number_of(result)
    else:
        raise ModError(f"{recorder.where()}: returns {type(result).__name__}, expected {wanted}")
    if kind == "mask_mod" and dtype is not torch.bool:
        raise ModError(
            f"{recorder.where()}: returns {dtype}, expected torch.bool; compare it, as in `x != 0`"
        )
    if kind == "score_mod" and not dtype.is_floating_point:
        raise ModError(
            f"{recorder.where()}: returns {dtype}, expected the new score, a floating-point "
            "number; convert it, as in `x.float()`, or add it to the score"
        )
    return recorder.make.cast(number, "b" if kind == "mask_mod" else "f")


class _Recorder(TorchDispatchMode):
    """Records every operator while a mod runs."""

    def __init__(self, kind: str, mod: Callable[..., Any], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind, self.mod, self.device = kind, mod, device
        self.make = Builder()
        self.captured: list[torch.Tensor] = []
        self.reads_sizes = False
        self.asks = ""
        """The method that asks for a value, of those in ``_INSTEAD``."""
        self.constants: dict[int, torch.Tensor] = {}
        """0-dim tensors that the mod itself made, by id; kept, so that ids stay theirs."""
        self.own: dict[int, torch.Tensor] = {}
        """All tensors that the mod itself made, which it may change."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. With True, PyTorch hides the mode from torch.compile, and for that imports
        torch.compile before the first operator (1 to 4 s)."""
        return False

    def where(self, raised: types.TracebackType | None = None) -> str:
        """Return the mod's kind and name, with the line of the user's code that is running, or that
        ``raised``; the mod's first line if none is."""
        name = getattr(self.mod, "__name__", type(self.mod).__name__)
        frame = sys._getframe(1)
        code = None
        line = 0
        while frame is not None:
            file = frame.f_code.co_filename
            if file == __file__ and frame.f_code.co_name == "trace":
                break
            if _is_of_users(file):
                code, line = frame.f_code, frame.f_lineno
                break
            frame = frame.f_back  # type: ignore[assignment]
        while raised is not None:
            here = raised.tb_frame.f_code
            if _is_of_users(here.co_filename):
                code, line = here, raised.tb_lineno
            raised = raised.tb_next
        if code is None:
            code = getattr(self.mod, "__code__", None)
            line = 0 if code is None else code.co_firstlineno
        place = "" if code is None else f", {code.co_filename}:{line}"
        return f"{self.kind} {name}{place}"

    def error(self, message: str) -> ModError:
        return ModError(f"{self.where()}: {message}")

    def result(self, number: int, dtype: torch.dtype) -> Traced:
        made = Traced(dtype, self.device)
        made.number = number
        return made

    def slot(self, x: torch.Tensor) -> int:
        """Return the slot of a captured tensor."""
        for number, other in enumerate(self.captured):
            if other is x:
                return number
        if x.device != self.device:
            raise self.error(
                f"captures a tensor on {x.device}, expected {self.device}, where q is; move it "
                "there first" + (", or capture a Python number" if not x.dim() else "")
            )
        if x.dtype not in TYPES:
            raise self.error(f"captures a tensor of {x.dtype}; expected bool, integers or floats")
        if x.dim() > MOST_RANK:
            raise self.error(
                f"captures a tensor of {x.dim()} dimensions, expected at most {MOST_RANK}"
            )
        if x.layout is not torch.strided or x.is_nested or x.is_neg() or x.is_conj():
            raise self.error("captures a tensor that is not dense")
        if x.numel() == 0:
            raise self.error(f"captures an empty tensor, shape {tuple(x.shape)}")
        self.captured.append(x)
        return len(self.captured) - 1

    def load(self, base: torch.Tensor, indices: Sequence[int]) -> Traced:
        """Load from ``base``, at as many indices as are given."""
        rest = base.shape[len(indices) :]
        if rest:
            made = Traced(base.dtype, self.device, rest)
            made.base, made.at = base, tuple(indices)
            return made
        number = self.make.load(self.slot(base), TYPES[base.dtype], tuple(indices))
        return self.result(number, base.dtype)

    def index(self, base: torch.Tensor, asked: object) -> Traced:
        """Return ``base[asked]``."""
        items = asked if isinstance(asked, tuple) else (asked,)
        indices = list(base.at) if isinstance(base, Traced) else []
        if isinstance(base, Traced):
            if base.base is None:
                raise self.error("indexes a scalar")
            base = base.base
        for item in items:
            if isinstance(item, torch.Tensor) and not item.dim():
                if item.dtype is torch.bool or item.dtype.is_floating_point:
                    raise self.error(
                        f"indexes with {item.dtype}, expected an integer; convert it by .int()"
                    )
                indices.append(self.number_of(item))
            elif isinstance(item, int) and not isinstance(item, bool):
                indices.append(self.make.constant(item, "i"))
            else:
                raise self.error(
                    f"indexes with {type(item).__name__}, expected one integer for each dimension"
                )
        if len(indices) > base.dim():
            raise self.error(f"has {len(indices)} indices for a tensor of {base.dim()} dimensions")
        return self.load(base, indices)

    def number_of(self, x: object, type: str | None = None) -> int:
        """Return the operation whose result is ``x``, a scalar that was traced, captured or a
        number."""
        if isinstance(x, Traced):
            if x.base is not None:
                raise self.error(
                    f"uses a captured tensor of which {len(x.at)} of {x.base.dim()} "
                    "dimensions are indexed; index all of them"
                )
            number = x.number
        elif isinstance(x, torch.Tensor):
            if x.dim():
                raise self.error(
                    f"uses a whole captured tensor, shape {tuple(x.shape)}; index every dimension "
                    "of it by b, h, q_idx or kv_idx"
                )
            if id(x) in self.constants:
                number = self.make.constant(x.item(), TYPES[x.dtype])
            else:
                number = self.make.load(self.slot(x), TYPES[x.dtype], ())
        elif isinstance(x, (bool, int, float)):
            number = self.make.constant(x, type or _type_of_number(x))
        else:
            raise self.error(f"uses a {x.__class__.__name__}")
        return number if type is None else self.make.cast(number, type)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in _flat((args, kwargs)) if isinstance(x, torch.Tensor)]
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.error(
                f"draws random numbers ({name}); draw them before the call, as a tensor"
            )
        if name in ("_local_scalar_dense", "is_nonzero", "item", "equal"):
            self._refuse_value(any(isinstance(x, Traced) for x in tensors))
        if not any(isinstance(x, Traced) for x in tensors):
            return self._untraced(func, name, tensors, args, kwargs)
        if func._schema.is_mutable:
            raise self.error(
                f"changes a tensor in place ({name}); a mod may only return a value: use "
                "torch.where"
            )
        if name == "index":
            items = tuple(args[1])
            if any(item is None for item in items):
                raise self.error("indexes with None or a slice, expected one integer per dimension")
            return self.index(args[0], items)
        for x in tensors:
            if x.dim():
                self.number_of(x)  # says what is wrong with it
        if name in operators.SHAPES:
            self.number_of(args[0])
            return self.result(self.number_of(args[0]), args[0].dtype)
        if name not in operators.TABLE:
            raise self.error(
                f"uses {func}, which kernels of mods do not have; they have arithmetic, "
                "comparisons, bitwise and logical operators, where, minimum, maximum, clamp, abs, "
                "exp, log, sqrt, tanh, sigmoid, pow, sin, cos, floor, round and indexing"
            )
        dtype = self._dtype_of(func, args, kwargs)
        if dtype not in TYPES:
            raise self.error(f"{func} makes {dtype}; expected bool, integers or floats")
        common = self._common(args, kwargs)
        number = operators.TABLE[name](self, TYPES[dtype], common, args, kwargs)
        narrow = (torch.uint8, torch.int8, torch.int16)
        if dtype in narrow and name not in operators.EXACT:
            raise self.error(
                f"computes in {dtype}, whose overflow kernels do not reproduce; convert with .int()"
            )
        if name not in operators.OWN_TYPE:
            number = self.make.cast(number, TYPES[dtype])
        return self.result(number, dtype)

    def _refuse_value(self, traced: bool) -> None:
        if traced:
            raise self.error(
                "needs a value that is only known when the kernel runs: " + _INSTEAD[self.asks]
            )
        raise self.error(
            "asks for the value of a captured tensor, which would be a constant in the kernel; use "
            "it as a tensor, or capture a Python number"
        )

    def _untraced(
        self, func: Any, name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Run an operator on untraced arguments. If it makes a scalar from numbers only, the scalar
        is a constant."""
        schema = func._schema
        given = zip(schema.arguments, args, strict=False)
        named = ((x, kwargs[x.name]) for x in schema.arguments if x.name in kwargs)
        for argument, x in (*given, *named):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(x, torch.Tensor) and id(x) not in self.own:
                raise self.error(
                    f"changes a captured tensor in place ({name}); a mod is run once, to be "
                    "traced, and may only return a value: change the tensor before the call"
                )
        result = func(*args, **kwargs)
        is_view = any(x.alias_info is not None for x in schema.returns)
        of_own = name.startswith("lift") or all(id(x) in self.own for x in tensors)
        if isinstance(result, torch.Tensor) and (of_own or not is_view):
            self.own[id(result)] = result
        made = isinstance(result, torch.Tensor) and not result.dim()
        if made and all(id(x) in self.constants for x in tensors):
            self.constants[id(result)] = result
        elif name in ("lift_fresh", "lift_fresh_copy", "lift") and made:
            self.constants[id(result)] = result  # torch.tensor(5)
        return result

    def _real(self, x: object) -> object:
        """Return a 1 in place of x, from which an operator's result dtype is determined. It is on
        the CPU, because some operators on the meta device are in Python and import torch.compile (1
        to 4 s)."""
        if isinstance(x, (list, tuple)):
            return type(x)(self._real(each) for each in x)
        if isinstance(x, torch.Tensor):
            return torch.ones((), dtype=x.dtype)
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def _dtype_of(self, func: Any, args: Any, kwargs: Any) -> torch.dtype:
        given = {name: self._real(x) for name, x in kwargs.items()}
        result = func(*(self._real(x) for x in args), **given)
        if not isinstance(result, torch.Tensor):
            raise self.error(f"uses {func}, which makes more than one scalar")
        if result.dim():
            raise self.error(
                f"makes a tensor of shape {tuple(result.shape)} by {func}; a mod computes scalars"
            )
        return result.dtype

    def _common(self, args: Any, kwargs: Any) -> str:
        """Return the type to which operands are converted before they are compared or computed
        with."""
        numbers = [x for x in args[:2] if isinstance(x, (torch.Tensor, int, float))]
        if not numbers:
            return "f"
        dtype: torch.dtype | None = None
        given: list[Any] = [self._real(x) for x in numbers]
        if len(given) == 2:
            dtype = torch.result_type(*given)
        elif isinstance(given[0], torch.Tensor):
            dtype = given[0].dtype
        return TYPES.get(dtype, "f") if dtype is not None else "f"


class _Functions(TorchFunctionMode):
    """Intercepts functions before PyTorch asks for values: indexing, and reads of sizes."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self.recorder, kwargs or {}
        if func is torch.Tensor.__getitem__:
            base, asked = args
            items = asked if isinstance(asked, tuple) else (asked,)
            if isinstance(base, Traced) or any(isinstance(x, Traced) for x in items):
                return recorder.index(base, asked)
        elif func in _SIZES and getattr(args[0], "base", args[0]) is not None:
            recorder.reads_sizes = True
        elif func in (torch.Tensor.__setitem__,):
            raise recorder.error(
                "writes into a tensor; a mod may only return a value: use torch.where"
            )
        elif func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            recorder._refuse_value(isinstance(args[0], Traced))
        name = getattr(func, "__name__", "")
        recorder.asks = name if name in _INSTEAD else ""
        return func(*args, **kwargs)


_BRANCH = (
    "a branch (`if`, `and`, `or`, `not`, `min`, `max`, `in` or a chained comparison); use "
    "torch.where, `&`, `|`, `~`, torch.minimum and torch.maximum"
)
_NUMBER = (
    "`int()`, `float()` or a function of math or numpy; use `.int()`, `.float()` and torch's "
    "functions"
)
# For each method that needs a value: the code that calls the method, and what to write instead.
_INSTEAD = {
    "": "`.item()`, a slice or a function of numpy; use the scalar as it is, and torch's functions",
    "__bool__": _BRANCH, "is_nonzero": _BRANCH, "__contains__": _BRANCH,
    "__int__": _NUMBER, "__float__": _NUMBER, "__array__": _NUMBER,
    "__index__": "`range()`, a slice, or the index of a list or an array; capture a torch tensor, "
    "and index each dimension of it",
}  # fmt: skip
_OF_TENSORS: Any = torch.Tensor
_SIZES = {
    _OF_TENSORS.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__,
    torch.Tensor.nelement, torch.numel,
}  # fmt: skip


def _flat(x: Any) -> Iterator[object]:
    if isinstance(x, (list, tuple)):
        for each in x:
            yield from _flat(each)
    elif isinstance(x, dict):
        for each in x.values():
            yield from _flat(each)
    else:
        yield x


def _type_of_number(x: object) -> str:
    return "b" if isinstance(x, bool) else "i" if isinstance(x, int) else "f"
