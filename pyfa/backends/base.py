"""What a backend is: a module-like object that says what it can do, plans, and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from ..plan import Plan
from ..problem import FEATURES, Append, Call, Problem

if TYPE_CHECKING:
    from ..traffic import Shape, TiledKernel

# Takes the tensors of a call, as ``problem.tensors_of`` gives them, to out and, where it was asked
# for, LSE. What comes behind them in the list is nobody's.
Run = Callable[..., list[torch.Tensor]]


class OtherAlignment(Exception):
    """A bound call was given an address that is a multiple of 16 bytes where none was, or the other
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


# Takes dout, dLSE or None, out, LSE and the tensors of the call to its gradients.
RunBackward = Callable[..., Gradients]


class Backend(Protocol):
    """One way to run attention.

    ``FEATURES`` are the names in ``problem.FEATURES`` that it implements and ``DTYPES`` its input
    dtypes: the dispatcher, the conformance grid and the docs all derive from these two.
    ``why_not`` and ``plan`` are pure functions of the (bucketed) problem; a plan may be used for
    any call whose problem has the same bucket. What ``bind`` returns runs on the current stream,
    without waiting for it.
    """

    NAME: str
    ANY_TOTAL: bool
    """Whether what it binds for a packed call runs with any number of packed rows."""
    FEATURES: frozenset[str]
    DTYPES: tuple[str, ...]

    def why_unavailable(self) -> str | None:
        """What this machine lacks to run the backend at all; None when it is ready."""

    def why_not(self, problem: Problem) -> Sequence[str]:
        """Why it declines ``problem``: one sentence per reason, empty when it can run it."""

    def plan(self, problem: Problem) -> Plan:
        """How it would run ``problem``, which it does not decline."""

    def bind(self, plan: Plan, call: Call, append: Append | None, with_lse: bool) -> Run:
        """``plan`` for ``call``, and for all calls that differ from it by the values and addresses
        of their tensors: shapes, strides, dtypes, devices and numbers are the same.

        The result takes the tensors to out (``Call.out_shape``, ``Call.dtype_of_out``) and, with
        ``with_lse``, LSE (``Call.lse_shape``, float32). It keeps none of them, and raises
        ``OtherAlignment`` where q, k or v begin at a multiple of 16 bytes and did not here, or the
        other way round. ``append`` is given to backends that are ``Appending`` alone.
        """

    def bind_backward(
        self,
        plan: Plan,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        bias_grad: bool,
    ) -> RunBackward:
        """The backward of ``call``, as ``bind``: for all tensors that are like these."""


@runtime_checkable
class Appending(Protocol):
    """A backend that readies a KV cache, and the queries, itself."""

    def why_not_append(self, call: Call, append: Append) -> str | None:
        """Why its ``bind`` cannot take ``append``; None where it can."""


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
    reasons += [
        f"{feature.phrase} is not implemented"
        for name, feature in FEATURES.items()
        if name in lacking
    ]
    if {"fp8", "backward"} <= problem.features:
        reasons.append("float8 has no backward")
    if "batch_invariant" in problem.features and problem.features & {"chunk", "negative_edge"}:
        reasons.append("batch invariance is not implemented for chunks and negative edges")
    if {"latent", "batch_invariant"} <= problem.features:
        reasons.append("latent attention is not batch-invariant: its keys are split by the batch")
    return reasons
