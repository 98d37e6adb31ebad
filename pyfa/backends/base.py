"""What a backend is: a module-like object that says what it can do, plans, and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from ..plan import Plan
from ..problem import FEATURES, Call, Problem
from ..traffic import Shape, TiledKernel

# From q, k, v and the offsets of packed ones, as ``problem.changing`` gives them, to out and, where
# it was asked for, LSE.
Repeat = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
# From dout, q, k, v, out, LSE and offsets to dq, dk and dv.
RepeatBackward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class OtherAlignment(Exception):
    """A ``Repeat`` was given an address that is a multiple of 16 bytes where none was, or the other
    way round: that may be another plan's. Nothing was done."""


class MachineReason(str):
    """A reason of ``why_not`` that is not the problem's: something is missing on this machine."""


class Gradients(NamedTuple):
    """dq, dk, dv as their inputs; ``dbias`` and ``dsinks`` where they were asked for, else None."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None


class Rotary(NamedTuple):
    """Rotary embedding of queries and of new keys.

    ``cos`` and ``sin`` are (max_position, R). The new keys of sequence b stand at ``start[b]`` and
    behind, ``start`` being int32 (B,); so do its queries, or all at ``start[b]`` unless they are
    ``moving``.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    start: torch.Tensor
    interleaved: bool
    moving: bool


class Backend(Protocol):
    """One way to run attention.

    ``FEATURES`` are the names in ``problem.FEATURES`` that it implements and ``DTYPES`` its input
    dtypes: the dispatcher, the conformance grid and the docs all derive from these two.
    ``why_not`` and ``plan`` are pure functions of the (bucketed) problem; a plan may be used for
    any call whose problem has the same bucket. ``forward`` returns out (``Call.out_shape``,
    ``Call.dtype_of_out``) and LSE (``Call.lse_shape``, float32), on the current stream, without
    waiting for it.
    """

    NAME: str
    FEATURES: frozenset[str]
    DTYPES: tuple[str, ...]

    def why_unavailable(self) -> str | None:
        """What this machine lacks to run the backend at all; None when it is ready."""

    def why_not(self, problem: Problem) -> Sequence[str]:
        """Why it declines ``problem``: one sentence per reason, empty when it can run it."""

    def plan(self, problem: Problem) -> Plan:
        """How it would run ``problem``, which it does not decline."""

    def forward(self, plan: Plan, call: Call) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self,
        plan: Plan,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        bias_grad: bool,
    ) -> Gradients: ...


@runtime_checkable
class Repeating(Protocol):
    """A backend with a shorter way for a call that comes again with other tensors."""

    def repeat(self, plan: Plan, call: Call, with_lse: bool) -> Repeat | None:
        """``forward`` of calls that share all with ``call`` but the addresses of q, k, v and
        offsets, and what is in them: shapes, strides, dtypes and devices, and all options. ``call``
        has run, and has no other tensors. None where there is no such way. Results are contiguous.
        Raises ``OtherAlignment``."""


@runtime_checkable
class RepeatingBackward(Protocol):
    """A backend with a shorter way for the backward of a call that comes again."""

    def repeat_backward(
        self, plan: Plan, call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
    ) -> RepeatBackward | None:
        """``backward``, without a gradient of LSE or bias, of calls that share all with ``call``
        but addresses; shapes, strides, dtypes and devices are those of ``call``, ``out``, ``lse``
        and ``dout``, which are aligned to 16 bytes. None where there is no such way.
        Raises ``OtherAlignment`` where one is not aligned."""


@runtime_checkable
class Appending(Protocol):
    """A backend that readies a KV cache, and the queries, itself."""

    def append(
        self,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotary: Rotary | None,
    ) -> bool:
        """Write k and v (B, new, Hk, D), which ``call.seqused_k`` counts, into the cache that is
        ``call.k`` and ``call.v``, and with ``rotary`` q, turned, into ``call.q``. As the operators
        ``append_kv`` and ``rotary`` do it, on the current stream. False, with nothing written,
        where there is no such way."""


class Rounding(NamedTuple):
    """How rows of ``heads`` key heads become float8 ``dtype``.

    A scale is for ``block`` rows of a head, without it for all of them, or for the whole tensor
    (``per_tensor``). Rows are turned first where there are ``signs``, float32 (D,), each ±1: by
    these and Hadamard matrices.
    """

    heads: int
    block: int | None
    per_tensor: bool
    signs: torch.Tensor | None
    dtype: torch.dtype


@runtime_checkable
class Quantizing(Protocol):
    """A backend with a kernel for ``pyfa.quantize``."""

    def quantize(
        self, xs: Sequence[torch.Tensor], how: Rounding
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Each of xs (B, rows, H, D) in float8, and what to multiply it by: float32 (B, Hk),
        (B, Hk, ⌈rows / block⌉), or (1, 1) ``per_tensor``. They are q, k and v, or k and v: the last
        is never turned. None is empty. None where their device has no such numbers."""


@runtime_checkable
class Tiled(Protocol):
    """A backend that tells its tiles, for ``pyfa plan``."""

    def tiled_kernels(
        self, plan: Plan, problem: Problem, shape: Shape, compiled: bool
    ) -> Sequence[TiledKernel]:
        """The kernels of ``plan`` for ``problem`` with its true sizes, not the bucketed ones; those
        of backward where it has the feature. ``compiled``: with registers and shared bytes as the
        compiler reports them, which may take seconds."""


def missing(backend: Backend, problem: Problem) -> list[str]:
    """The reasons that follow from a backend's ``FEATURES`` and ``DTYPES`` alone."""
    reasons = []
    lacking = problem.features - backend.FEATURES
    if "fp8" not in lacking:
        dtypes = dict.fromkeys((problem.dtype, problem.dtype_k or problem.dtype))
        reasons += [f"{name} is not implemented" for name in dtypes if name not in backend.DTYPES]
    reasons += [f"{FEATURES[name]} is not implemented" for name in FEATURES if name in lacking]
    if {"fp8", "backward"} <= problem.features:
        reasons.append("float8 has no backward")
    return reasons
