"""Runs PyTorch's FlexAttention on pyfa, for every caller of ``flex_attention`` in the process.

    from pyfa.integrations import flex
    flex.activate()          # torch.nn.attention.flex_attention.flex_attention now runs pyfa
    ...
    flex.restore()           # PyTorch's own again
    with flex.activated():   # the same for one block
        ...

Arguments, results and their layout are PyTorch's: (batch, heads, length, head_dim), a natural-log
LSE, −inf for a fully masked row. ``score_mod`` and the ``mask_mod`` of a ``BlockMask`` are compiled
into pyfa's kernels. Blocks that the BlockMask does not list are masked. In full blocks the
``mask_mod`` is not evaluated. ``kernel_options`` tune PyTorch's kernels and are ignored.

Calls that pyfa does not support run PyTorch's own function, with one warning per reason. Under
``torch.compile`` the call is a graph break. The replacement also affects references to the function
that were imported or compiled before.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.attention.flex_attention as theirs

from .. import api
from ..errors import CodeObjectError, CompileError, UnsupportedProblem

__all__ = ["activate", "activated", "flex_attention", "restore"]

_Mod = Callable[..., Any]


class _Body(NamedTuple):
    """Everything that determines a function's behavior and can be set on it."""

    code: types.CodeType
    defaults: tuple[Any, ...] | None
    keywords: dict[str, Any] | None


def _body_of(function: Any) -> _Body:
    return _Body(function.__code__, function.__defaults__, function.__kwdefaults__)


def _put(function: Any, body: _Body) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = body


_function: Any = theirs.flex_attention
_own = types.FunctionType(
    _function.__code__, _function.__globals__, "flex_attention", _function.__defaults__
)
_own.__kwdefaults__ = _function.__kwdefaults__
_original = _body_of(_function)


def activate() -> None:
    """Run PyTorch's ``flex_attention`` on pyfa in this process, until ``restore``.

    Raises ``RuntimeError`` if PyTorch's ``flex_attention`` is not a plain Python function: only the
    body of such a function can be replaced.
    """
    if _function.__closure__ or not isinstance(_function, types.FunctionType):
        raise RuntimeError(f"flex_attention of PyTorch {torch.__version__} cannot be replaced")
    # The body, not the name in its module: most users have imported the name from there, and hold
    # torch.compile(flex_attention), by the time anybody can activate this.
    _put(_function, _body_of(_stand_in))


def restore() -> None:
    """Restore PyTorch's own ``flex_attention``."""
    _put(_function, _original)


@contextlib.contextmanager
def activated() -> Iterator[None]:
    """Replace PyTorch's function inside the ``with`` block, then restore the previous state."""
    before = _body_of(_function)
    activate()
    try:
        yield
    finally:
        _put(_function, before)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: _Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute PyTorch's ``flex_attention`` on pyfa, whether or not ``activate`` was called.

    Takes query (B, Hq, L, E), key (B, Hkv, S, E) and value (B, Hkv, S, Ev). Returns (B, Hq, L, Ev),
    with query's memory layout, and if requested the LSE (B, Hq, L) or an ``AuxOutput``. Calls that
    pyfa does not support run PyTorch's function, with one warning per reason.
    """
    reason = _why_not(
        query, key, value, block_mask, enable_gqa, return_lse, kernel_options, return_aux
    )
    with_lse = return_lse or bool(return_aux is not None and return_aux.lse)
    if reason is None:
        try:
            found: Any = api.attention(
                query.transpose(1, 2), _turned(key, query), _turned(value, query),
                scale=scale, return_lse=with_lse,
                score_mod=None if score_mod is theirs._identity else score_mod,
                **_masks(block_mask),
            )  # fmt: skip
        except UnsupportedProblem as error:
            reason = "; ".join(
                f"{name}: {why}" for name, whys in error.reasons.items() for why in whys
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            reason = str(error)
        except (CompileError, CodeObjectError) as error:
            reason = str(error).splitlines()[0]
    if reason is not None:
        given = {} if return_aux is None else {"return_aux": return_aux}
        result = _own(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            **given,
        )  # fmt: skip
        _warn(reason)  # calls that PyTorch rejects have raised its error by now
        return result
    out, lse = found if with_lse else (found, None)
    out = _laid_out_as(query, out.transpose(1, 2))
    if return_aux is not None:
        return out, theirs.AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


# Runs with the globals of PyTorch's module: what it calls, it has as a default.
def _stand_in(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False,
    return_lse=False, kernel_options=None, *, return_aux=None, _attend=flex_attention,
):  # fmt: skip
    return _attend(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux=return_aux,
    )  # fmt: skip


_INSIDE = (__file__, str(Path(torch.__file__).parent))
_warned: set[str] = set()


def _warn(reason: str) -> None:
    reason = reason.partition("; got ")[0]  # shapes would make a reason of every call
    if reason and reason not in _warned:
        _warned.add(reason)
        message = f"flex_attention runs PyTorch's own kernels, not pyfa's: {reason}"
        warnings.warn(message, stacklevel=_levels_to_the_user())


def _levels_to_the_user() -> int:
    """Return how many frames above its caller the first frame outside this file and PyTorch is."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level + 1


def _why_not(
    query: Any, key: Any, value: Any, block_mask: Any, enable_gqa: bool, return_lse: bool,
    kernel_options: Any, return_aux: Any,
) -> str | None:  # fmt: skip
    """Return why PyTorch's own function must run: "" if it will reject the call, None if pyfa
    supports it."""
    tensors = query, key, value
    if any(not isinstance(x, torch.Tensor) or x.is_nested or x.dim() != 4 for x in tensors):
        return ""
    if return_aux is not None and return_aux.max_scores:
        return "max_scores are not computed"
    if kernel_options and not set(kernel_options) <= _KNOWN_OPTIONS:
        return ""
    heads, heads_k = query.shape[1], key.shape[1]
    fits = key.shape[:3] == value.shape[:3] and query.shape[3] == key.shape[3]
    if heads != heads_k:
        fits = fits and enable_gqa and heads_k > 0 and heads % heads_k == 0
    if block_mask is not None:
        fits = fits and block_mask.mask_mod is not theirs._sliced_mask_mod_error
        fits = fits and block_mask.kv_num_blocks.device == query.device
        if not _is_whole(block_mask):
            fits = fits and tuple(block_mask.shape[-2:]) == (query.shape[2], key.shape[2])
    if query.shape[0] != key.shape[0]:
        fits = fits and key.shape[0] == 1 and block_mask is not None
        fits = fits and block_mask.kv_num_blocks.size(0) == query.shape[0]
    return None if fits and not (return_lse and return_aux is not None) else ""


_KNOWN_OPTIONS = frozenset(getattr(theirs, "FlexKernelOptions", type).__annotations__)


def _is_whole(block_mask: Any) -> bool:
    """Return whether the BlockMask has one block larger than any sequence, which is how PyTorch
    says that there is no mask."""
    large = theirs._LARGE_SPARSE_BLOCK_SIZE
    return tuple(block_mask.BLOCK_SIZE) == (large, large)


def _turned(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return x as (B, S, H, D), with query's batch size."""
    if x.shape[0] != query.shape[0]:
        x = x.expand(query.shape[0], -1, -1, -1)
    return x.transpose(1, 2)


def _laid_out_as(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return ``out`` with the memory order of query's dimensions, as PyTorch's kernels do."""
    if query.stride() == out.stride() or not out.numel():
        return out
    strides = query.stride()
    order = sorted(range(4), key=lambda i: -strides[i])
    inverse = [order.index(i) for i in range(4)]
    return out.permute(order).contiguous().permute(inverse)


def _masks(block_mask: Any) -> dict[str, Any]:
    """Return pyfa's arguments for a BlockMask."""
    if block_mask is None or not _is_whole(block_mask):
        return {"block_mask": block_mask}
    own = block_mask.mask_mod
    return {} if own is theirs.noop_mask else {"mask_mod": own}
