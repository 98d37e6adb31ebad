"""Binds a call to the arguments of a public function, and finds it again by these arguments.

A key contains the arguments that are not tensors, and which tensors are given. The first call with
a key is checked, planned and bound. Later calls with this key run the bound call.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _torch, context, dispatch, mods, ops, sharding, validate
from . import request as requests
from .backends.base import Appending, OtherAlignment
from .blocks import given as blocks_given
from .bound import Bound, Table, bound_of, modes
from .problem import Append, Call, tensors_of
from .request import Request

_log = logging.getLogger("pyfa")
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# A key begins with the function and which tensors there are. Score terms add 1 to 7, a seed 8,
# scales 16 to 128; from 256 on each function has its own. All that is rare comes behind.
DENSE, PACKED, CACHE, LATENT = 0, 1 << 20, 2 << 20, 3 << 20


def of_rare(window: Any, attention_chunk: Any, dropout_p: Any, out_dtype: Any) -> tuple[Any, ...]:
    """Return the last part of a key. It lists each bound of the window, also those inside an
    ``Edge``, because the types of the bounds matter."""
    edges = window if isinstance(window, tuple) else ()
    exact = tuple(x.keys for x in edges if isinstance(x, validate.Edge))
    return (attention_chunk, dropout_p, out_dtype, *edges, *exact)


def of_terms(bias: Any, alibi_slopes: Any, sinks: Any) -> tuple[tuple[Any, ...], int]:
    """Return the tensors that are given, and a number from 1 to 7 that says which."""
    tensors: tuple[Any, ...] = ()
    given = 0
    if bias is not None:
        tensors += (bias,)
        given += 1
    if alibi_slopes is not None:
        tensors += (alibi_slopes,)
        given += 2
    if sinks is not None:
        tensors += (sinks,)
        given += 4
    return tensors, given


def of_mods(
    score_mod: Any, mask_mod: Any, block_mask: Any, q: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Return the tensors that mods capture, and the last part of their key. The checks report a q
    that is no tensor."""
    if not isinstance(q, torch.Tensor):
        return (), ()
    if block_mask is not None:
        mask_mod = blocks_given.as_mask_mod(block_mask, mask_mod, q.device)
    digest, captured = mods.resolve(score_mod, mask_mod, q.device)
    if not digest:
        return (), ()
    if block_mask is None:
        return captured, (digest, "mods")
    return captured, (digest, *blocks_given.lengths_of(block_mask), "mods")


def of_dropout(dropout_p: Any, seed: Any, q: Any) -> tuple[float, Any]:
    """Return ``dropout_p`` and ``seed`` as kernels read them. The checks report an invalid seed or
    q."""
    if type(dropout_p) is not float:
        dropout_p = validate.number("dropout_p", dropout_p)
    if not dropout_p:
        if seed is not None and not isinstance(seed, torch.Tensor):
            validate.seed_number(seed)
    elif isinstance(q, torch.Tensor) and not isinstance(seed, torch.Tensor):
        seed = validate.seed(seed, q.device)
    return dropout_p, seed


def of_scales(descale: Any) -> tuple[tuple[Any, ...], int]:
    """Return the scales that are given, and a number from 1 to 8 that says which. The checks report
    a ``descale`` that is no triple: no call with one is ever bound."""
    if type(descale) is not tuple or len(descale) != 3:
        return (descale,), 1
    of_q, of_k, of_v = descale
    which = 1 + (of_q is not None) + 2 * (of_k is not None) + 4 * (of_v is not None)
    return tuple(x for x in descale if x is not None), which


# Calls by the arguments of the public functions: of a bound call, checks, normalized arguments,
# choice and launch are functions of its key and of what ``Fitting`` compares. To find it takes
# 1.5 µs where request and choice alone take 10.
calls = Table()
# Whatever else compiles (``torch.export`` that is not strict) has modes and subclasses, which no
# bound call fits.
_is_compiling = torch.compiler.is_dynamo_compiling


def again(key: tuple[Any, ...], tensors: tuple[Any, ...]) -> Result | None:
    """Return the result of the program that an earlier call with such arguments bound; None if
    there is no such program."""
    if _is_compiling() or forward_ad._current_level >= 0:
        return None
    if context.used:
        key += context.values()
    try:
        for x in tensors:
            if x.is_nested:  # asked for strides, PyTorch's guards would end the process
                return None
        last = calls.recent(*key).bound
        fits = last.fitting.fits(*tensors) and (last.modes is None or last.modes == modes())
        bound = last if fits else calls.find(key, tensors)
    except KeyError:
        return None
    except (TypeError, AttributeError):  # a list: a window, names of backends, or no tensor
        return None
    while bound is not None:
        try:
            if bound.needs_grad:
                result: Result = ops.attend(bound, *tensors)
                return result
            found = bound.run(*tensors)
        except OtherAlignment:
            other = calls.find(key, tensors)
            bound = None if other is bound else other
            continue
        if bound.writes:
            torch.autograd.graph.increment_version(tensors[1:3])
        return (found[0], found[1]) if bound.returns_lse else found[0]
    return None


def first(key: tuple[Any, ...], tensors: tuple[Any, ...], request: Request) -> Result:
    """Run a call that has no cached binding: choose a backend, run it, and keep the bound call for
    the next time."""
    call, who, append = request.call, request.who, request.append
    if torch.compiler.is_compiling():
        if append is not None:
            call = requests.appended(call, append)
        out, lse = torch.ops.pyfa.forward(*call, *who)
        return (out, lse) if call.return_lse else out
    _refuse_transforms(call, append)
    plain = _torch.is_plain(call.q)
    if append is not None:
        backend = _ready(call, append, who)
        why_not = "a mode or a tensor subclass intercepts the call" if not plain else backend
        if why_not is not None:
            _log.debug("a call that appends is not bound: %s", why_not)
            call, append = requests.appended(call, append), None
    if call.q.is_neg() or call.k.is_neg() or call.v.is_neg():
        # Kernels go by the address, where a tensor with the negative bit has the wrong sign.
        q, k, v = (x.resolve_neg() for x in call[:3])
        call = call._replace(q=q, k=k, v=v)
    if not plain:
        out, lse = torch.ops.pyfa.forward(*sharding.prepared(call), *who)
        return (out, lse) if call.return_lse else out
    given = tensors_of(call, append)
    bound = bound_of(call, append, who, call.return_lse or request.needs_grad)
    if len(given) == len(tensors) and all(x is y for x, y in zip(given, tensors, strict=True)):
        _keep(key, tensors, bound)
    if bound.needs_grad:
        result: Result = ops.attend(bound, *given)
        return result
    found = bound.run(*given)
    if bound.writes:
        torch.autograd.graph.increment_version((call.k, call.v))
    return (found[0], found[1]) if call.return_lse else found[0]


def attend(request: Request) -> Result:
    """Return the result of ``request``, without keeping the bound call by its arguments."""
    return first((), (), request)


def _ready(call: Call, append: Append, who: tuple[str, bool, bool]) -> str | None:
    """Return why the backend of ``call`` does not append itself; None if it does. Any error in the
    call is raised before anything is written."""
    prepared = dispatch.prepare(call, *who)
    if isinstance(prepared.backend, Appending):
        why_not = prepared.backend.why_not_append(call, append)
        if why_not is not None:
            prepared.validate(call, append)
        return why_not
    prepared.validate(call, append)
    return f"the {prepared.backend.NAME} backend leaves it to PyTorch's operators"


def _keep(key: tuple[Any, ...], tensors: tuple[torch.Tensor, ...], bound: Bound) -> None:
    """Let ``again`` find a call by its arguments."""
    if context.used:
        key += context.values()
    with contextlib.suppress(TypeError):  # a window or names of backends given as a list
        hash(key)
        if _torch.is_unwatched(*tensors):
            calls.keep(key, tensors, bound)


def _refuse_transforms(call: Call, append: Append | None) -> None:
    """Raise under transforms: an operator with a registered gradient would silently drop tangents
    and batch dimensions."""
    if _torch.in_transform():
        raise NotImplementedError("attention under torch.func transforms (grad, vjp, jvp, vmap)")
    if _torch.in_forward_mode():
        for x in tensors_of(call, append):
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError("attention has no forward-mode derivative")
