"""Chooses the backend of a call, explains the choice, and keeps it."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from . import _torch, blocks, env, mods, validate_values
from .backends import AUTOMATIC, BACKENDS, NAMES
from .backends.base import (
    Backend,
    Building,
    Gradients,
    Listing,
    MachineReason,
    Run,
    RunBackward,
    Saved,
)
from .context import Context
from .device import Device, of
from .errors import PerformanceWarning, UnsupportedProblem
from .plan import Plan
from .problem import (
    MAY_HAVE_BOOLS,
    STEPS,
    WITH_VALUES,
    Append,
    Call,
    Problem,
    bias_fours,
    bucket,
    form_of,
    has_bias_tiles,
    is_aligned,
    is_low,
    is_positive,
    is_uneven,
    problem_of,
    scales_of,
    tensors_of,
    window_of,
)

_log = logging.getLogger("pyfa")
_context: Context[str] = Context("pyfa_backend")
_check_on_device: bool = env.get("PYFA_CHECK")


def _joined(names: str | Sequence[str]) -> str:
    """Check backend names and join them into one string: ``"triton,torch"``."""
    if not isinstance(names, (str, list, tuple)):
        raise TypeError(f"backend: expected a name or names; got {type(names).__name__}")
    if not names:
        raise ValueError("backend: expected at least one name, or None for the automatic choice")
    if isinstance(names, str):
        if names in NAMES:
            return names
        names = [part.strip() for part in names.split(",")]
    for name in names:
        if name not in NAMES:
            raise ValueError(f"backend: expected one of {', '.join(NAMES)}; got {name!r}")
    return ",".join(names)


@contextlib.contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Use only these backends, in this order, inside the ``with`` block.

    The ``backend`` argument of a call takes precedence over the context, and the context over
    ``PYFA_BACKEND``. A backward runs on the backend of its forward, even outside the block and on
    another thread. If activation checkpointing recomputes a forward, that forward uses the context
    that is active when ``backward()`` is called. Raises ``ValueError`` for an unknown name.

    >>> with pyfa.use_backend("triton", "torch"):
    ...     out = pyfa.attention(q, k, v)
    """
    if not names:
        raise ValueError("use_backend: expected at least one name")
    with _context.set(_joined(names)):
        yield


@functools.cache
def _from_environment() -> str:
    named: str = env.get("PYFA_BACKEND")
    return _joined(named) if named else ""


def preference(argument: str | Sequence[str] | None) -> str:
    """Return the backends that may run a call: the argument, else the context, else "" for any."""
    if argument is not None:
        return _joined(argument)
    return _context.get() or ""


class Prepared(NamedTuple):
    """A backend with its plan, ready for every call whose problem falls into the same bucket.

    ``check`` says whether the tensors hold values that must be checked before a run, such as
    offsets or lengths.
    """

    backend: Backend
    plan: Plan
    check: bool

    def validate(self, call: Call, append: Append | None = None) -> None:
        """Raise ``ValueError`` if offsets, lengths or page numbers point outside their tensors."""
        if self.check and _torch.has_values(call.q):
            validate_values.check(call, append)

    def bind(self, call: Call, append: Append | None = None, with_lse: bool = True) -> Run:
        """Call ``Backend.bind``. The bound call raises ``ValueError`` if offsets, lengths or page
        numbers point outside their tensors, before anything is written."""
        run = self.backend.bind(self.plan, call, append, with_lse)
        if not self.check:
            return run
        form = form_of(call, append)

        def checked(*tensors: torch.Tensor) -> list[torch.Tensor]:
            self.validate(*form.fill(tensors))
            return run(*tensors)

        return checked

    def forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and LSE of ``call``."""
        out, lse, *_ = self.bind(call)(*tensors_of(call))
        return out, lse

    def bind_backward(self, given: Saved, bias_grad: bool) -> RunBackward:
        """Implement ``Backend.bind_backward``."""
        return self.backend.bind_backward(self.plan, given, bias_grad)

    def backward(
        self,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None = None,
    ) -> Gradients:
        """Return the gradients of ``call``, whose forward returned ``out`` and ``lse``, without the
        gradient of the bias."""
        # A gradient that flows back through a complex number may have the negative bit, which
        # kernels would ignore, because they read from the address.
        dout, dlse = dout.resolve_neg(), None if dlse is None else dlse.resolve_neg()
        given = Saved(call, out, lse, dout, dlse)
        return self.bind_backward(given, False)(*given.tensors())


# Sizes enter the key as ``Problem.bucketed`` rounds them, so what can be in here is bounded by the
# kinds of problem.
_prepared: dict[tuple[object, ...], Prepared] = {}
_lock = threading.Lock()


def prepare(call: Call, wanted: str, needs_grad: bool, bias_grad: bool) -> Prepared:
    """Return the backend and plan for ``call``; ``wanted`` is the result of ``preference``.

    Raises ``UnsupportedProblem`` with every candidate's reasons if none can run it.
    """
    (
        q, k, v, bias, alibi_slopes, sinks, _seed, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        page_table, cache_batch_idx, cache_leftpad, _q_descale, k_descale, _v_descale,
        _captured0, _captured1, _captured2, _captured3, _captured4, _captured5, _captured6,
        _captured7, rows, keys, scale, left, right, softcap, dropout_p, deterministic, return_lse,
        _num_splits, batch_invariant, out_dtype, q_start, k_start, *_rest,
    ) = call  # fmt: skip
    device, q_shape = q.device, q.shape
    # Alignment decides nothing on a CPU, and reading it costs 2 µs.
    aligned = device.type == "cpu" or is_aligned(call)
    batch = q_shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    steps = 1 if is_uneven(call) else STEPS
    key = (
        wanted,
        needs_grad,
        bias_grad,
        aligned,
        device,
        q.dtype,
        *q_shape[-2:],
        *k.shape[-2:],
        v.shape[-1],
        bucket(batch, steps),
        bucket(rows, steps),
        bucket(keys, steps),
        rows == keys and q_start == k_start,
        is_positive(scale),
        left >= 0,
        # Unlimited, causal, or a window's right edge: three kinds.
        min(right, 1),
        bucket(window_of(call), STEPS),
        call.window_shift != 0,
        call.attention_chunk != 0,
        softcap != 0.0,
        is_low(softcap),
        dropout_p != 0.0,
        deterministic,
        batch_invariant,
        return_lse,
        alibi_slopes is None,
        bias is None,
        bias is not None and has_bias_tiles(call),
        "" if bias is None else bias_fours(call),
        call.tree,
        sinks is None,
        cu_seqlens_q is None,
        cu_seqlens_k is None,
        seqused_q is None,
        seqused_k is None,
        cache_leftpad is None,
        cache_batch_idx is None,
        None if page_table is None else k.shape[1],
        k.dtype,
        out_dtype,
        None if k_descale is None else scales_of(k_descale, k),
        call.mods,
        call.latent,
        call.topk,
    )
    found = _prepared.get(key)
    if found is None:
        problem = problem_of(call, needs_grad, bias_grad, of(device), aligned)
        with _lock:
            found = _prepared.get(key) or _choose(problem, wanted)
            _prepared[key] = found
    return found


@dataclass(frozen=True)
class Answer:
    """One backend's answer for a problem: its reasons to refuse, or its plan."""

    backend: str
    reasons: tuple[str, ...]
    plan: Plan | None = None


def candidates(wanted: str, device: Device) -> tuple[str, ...]:
    """Return the backends to try, in order. ``wanted`` is what the call or the context names. If it
    is empty, ``PYFA_BACKEND`` decides. If that is not set, the order is the default of the device's
    vendor."""
    wanted = wanted or _from_environment()
    return tuple(wanted.split(",")) if wanted else AUTOMATIC[device.vendor]


def ask(name: str, problem: Problem, *, hypothetical: bool = False) -> Answer:
    """Return one backend's answer. With ``hypothetical``, the device need not be in this
    machine."""
    backend = BACKENDS[name]
    reasons = list(backend.why_not(problem.bucketed()))
    unavailable = None if hypothetical else backend.why_unavailable()
    if unavailable:
        reasons.append(unavailable)
    if reasons:
        return Answer(name, tuple(reasons))
    return Answer(name, (), backend.plan(problem.bucketed()))


def _ask_and_build(name: str, problem: Problem) -> Answer:
    """Return the answer of a backend that is about to run ``problem``, whose kernels it begins to
    compile. Whether the compiled code of a user's functions can run is known only after it is
    built, so it is built here."""
    answer, backend = ask(name, problem), BACKENDS[name]
    if answer.plan is None or not isinstance(backend, Building):
        return answer
    backend.begin(problem.bucketed())
    if not problem.mods:
        return answer
    reasons = tuple(backend.why_not_built(problem.bucketed()))
    return Answer(name, reasons) if reasons else answer


def _choose(problem: Problem, wanted: str) -> Prepared:
    refused: dict[str, Sequence[str]] = {}
    order = candidates(wanted, problem.device)
    for name in order:
        answer = _ask_and_build(name, problem)
        if answer.plan is not None:
            if order == AUTOMATIC[problem.device.vendor]:
                _warn_if_lost(refused, order)
            if env.get("PYFA_LOG") == "plan":
                _log.info("plan for %s: %s %s", problem.described, name, answer.plan)
            read = WITH_VALUES if problem.arch == "cpu" else frozenset()
            if _check_on_device:
                read = WITH_VALUES | MAY_HAVE_BOOLS
            check = not read.isdisjoint(problem.features)
            return Prepared(BACKENDS[name], answer.plan, check)
        refused[name] = answer.reasons
    raise UnsupportedProblem(problem.described, refused)


_lost: set[str] = set()


def _warn_if_lost(refused: dict[str, Sequence[str]], candidates: Sequence[str]) -> None:
    """Warn once if this machine, not the problem, keeps the vendor's backend from running."""
    first = candidates[0]
    if first not in refused:
        return
    lacking = (reason for reason in refused[first] if isinstance(reason, MachineReason))
    why = BACKENDS[first].why_unavailable() or next(lacking, None)
    if why is None or first in _lost:
        return
    message = f"the {first} backend cannot run here and a slower one was chosen: {why}"
    if env.get("PYFA_STRICT"):
        raise PerformanceWarning(message)
    _lost.add(first)
    warnings.warn(message, PerformanceWarning, stacklevel=2)


@dataclass(frozen=True)
class Explanation:
    """Every backend's answer for one problem. ``str()`` gives a table, ``as_dict`` plain data."""

    problem: Problem
    answers: tuple[Answer, ...]
    chosen: str | None

    def __str__(self) -> str:
        width = max(len(answer.backend) for answer in self.answers)
        lines = [self.problem.described]
        for answer in self.answers:
            mark = "*" if answer.backend == self.chosen else " "
            if answer.plan is not None:
                texts = [f"plan: {answer.plan}", *answer.plan.notes]
            else:
                texts = list(answer.reasons)
            for index, text in enumerate(texts):
                name = answer.backend if index == 0 else ""
                lines.append(f"{mark if index == 0 else ' '} {name:<{width}}  {text}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        return {
            "problem": self.problem.described,
            "arch": self.problem.arch,
            "device": self.problem.device.name,
            "chosen": self.chosen,
            "backends": [
                {
                    "name": answer.backend,
                    "reasons": list(answer.reasons),
                    "plan": answer.plan.as_dict() if answer.plan else None,
                }
                for answer in self.answers
            ],
        }


def _with_visits(answer: Answer, call: Call) -> Answer:
    """Return ``answer`` with a note on how many tiles its plan skips for ``call``."""
    if answer.plan is None or not call.mods or mods.of(call.mods).mask is None:
        return answer
    backend = BACKENDS[answer.backend]
    found = backend.visits(answer.plan, call) if isinstance(backend, Listing) else None
    if not blocks.is_exact(blocks.mask_of(call)):
        note = "mask_mod: every tile is visited, because its arithmetic is not exact"
    elif found is None:
        note = "mask_mod: every tile is visited"
    else:
        tiles, visits = found
        note = f"mask_mod: tiles of {tiles.rows} x {tiles.keys} by block list"
        if visits is not None:
            left = visits.partial + visits.full
            note += f": {left} of {visits.tiles} are visited, {visits.partial} of them are partial"
    return replace(answer, plan=replace(answer.plan, notes=(*answer.plan.notes, note)))


def explain(
    call: Call, wanted: str, needs_grad: bool, bias_grad: bool, device: Device | None
) -> Explanation:
    """Ask every backend; ``device`` replaces the device of the tensors."""
    here = device is None
    problem = problem_of(call, needs_grad, bias_grad, device or of(call.q.device), is_aligned(call))
    answers = [_with_visits(ask(name, problem, hypothetical=not here), call) for name in NAMES]
    able = {answer.backend for answer in answers if answer.plan is not None}
    order = candidates(wanted, problem.device)
    chosen = next((name for name in order if name in able), None)
    return Explanation(problem, tuple(answers), chosen)
