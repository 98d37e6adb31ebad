"""The protocol of a backend: what it supports, how it plans, and how it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from ..blocks import Tiles, Visits
from ..plan import Plan
from ..problem import FEATURES, Append, Call, Problem, form_of, tensors_of

if TYPE_CHECKING:
    from ..traffic import Shape, TiledKernel


class Run(Protocol):
    """Maps the tensors of a call, as ``problem.tensors_of`` returns them, to a list that begins
    with out and, if requested, LSE. Callers ignore further elements."""

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]: ...


class OtherAlignment(Exception):
    """A bound call received a 16-byte aligned address for a tensor that was not aligned when the
    call was bound, or the reverse. Another plan may be needed. Nothing was computed."""


class MachineReason(str):
    """A reason of ``why_not`` that is due to the machine (something is missing), not to the
    problem."""


class Gradients(NamedTuple):
    """dq, dk, dv, shaped like their inputs; ``dbias`` and ``dsinks`` if requested, else None.
    ``captured``: gradients of the tensors that a score_mod captured, by slot; empty if none was
    requested.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    captured: Sequence[torch.Tensor | None] = ()


# Make ``Gradients`` of its six fields without the Python function that ``Gradients(…)`` would call
# at each backward.
gradients_of: Callable[[tuple[Any, ...]], Gradients] = partial(tuple.__new__, Gradients)


class Saved(NamedTuple):
    """The inputs of a backward: a call, its out and LSE, and their gradients. ``dlse`` is None if
    nothing flows back through the LSE."""

    call: Call
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the arguments of ``RunBackward``: dout, out, lse, the tensors of the call and, if
        there is one, dlse."""
        last = () if self.dlse is None else (self.dlse,)
        return (self.dout, self.out, self.lse, *tensors_of(self.call), *last)

    def filling(self) -> Callable[..., Saved]:
        """Return a function that takes other tensors in the order of ``tensors``."""
        form, has_dlse = form_of(self.call), self.dlse is not None

        def fill(
            dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *others: torch.Tensor
        ) -> Saved:
            tensors, dlse = (others[:-1], others[-1]) if has_dlse else (others, None)
            return Saved(form.fill(tensors)[0], out, lse, dout, dlse)

        return fill


class RunBackward(Protocol):
    """Maps the tensors of a backward, as ``Saved.tensors`` returns them, to the gradients of the
    call."""

    def __call__(self, *tensors: torch.Tensor) -> Gradients: ...


class Backend(Protocol):
    """One way to run attention.

    ``FEATURES`` are the names in ``problem.FEATURES`` that it implements, and ``DTYPES`` its input
    dtypes. The dispatcher, the conformance grid and the docs derive from these two. ``why_not`` and
    ``plan`` are pure functions of the problem with its sizes rounded up to buckets; a plan may be
    used for any call in the same bucket. The callable that ``bind`` returns enqueues on the current
    stream and does not wait for it.
    """

    NAME: str
    FEATURES: frozenset[str]
    DTYPES: tuple[str, ...]

    def why_unavailable(self) -> str | None:
        """Return what this machine lacks to run the backend at all; None if it is ready."""

    def why_not(self, problem: Problem) -> Sequence[str]:
        """Return why the backend refuses ``problem``: one sentence per reason, or nothing."""

    def plan(self, problem: Problem) -> Plan:
        """Return the plan for ``problem``, which the backend does not refuse."""

    def bind(self, plan: Plan, call: Call, append: Append | None, with_lse: bool) -> Run:
        """Bind ``plan`` to ``call``, and to all calls that differ from it only in the values and
        addresses of their tensors, and in the number of packed rows: all other sizes, strides,
        dtypes, devices and numbers are the same.

        The returned function maps the tensors to out (``Call.out_shape``, ``Call.dtype_of_out``)
        and, with ``with_lse``, LSE (``Call.lse_shape``, float32). It keeps no tensor. It raises
        ``OtherAlignment`` if the 16-byte alignment of q, k or v differs from that of ``call``. Only
        backends that are ``Appending`` receive ``append``.
        """

    def bind_backward(self, plan: Plan, given: Saved, bias_grad: bool) -> RunBackward:
        """Bind the backward of a call, as in ``bind``, to all calls with tensors like the given
        ones. ``bias_grad``: with the gradient of the bias."""


@runtime_checkable
class Listing(Protocol):
    """A backend that skips tiles in which a mask_mod masks every key (``pyfa.blocks``)."""

    def visits(self, plan: Plan, call: Call) -> tuple[Tiles, Visits | None] | None:
        """Return, for ``explain``, the tiles of ``plan`` and how many of them its block lists visit
        for ``call``.

        The second value is None if counting them takes too long. The result is None if every tile
        is visited.
        """


@runtime_checkable
class Appending(Protocol):
    """A backend whose kernels append to the KV cache and apply rotary embeddings themselves."""

    def why_not_append(self, call: Call, append: Append) -> str | None:
        """Return why the backend's ``bind`` cannot take ``append``; None if it can."""


@runtime_checkable
class Building(Protocol):
    """A backend that compiles kernels, and may refuse a kernel that contains a user's functions."""

    def begin(self, problem: Problem) -> None:
        """Begin to compile, in threads, the kernels that a call of ``problem`` and its backward
        are sure to launch. The forward's kernels come first."""

    def why_not_built(self, problem: Problem) -> Sequence[str]:
        """Build the kernels of ``problem``, which has mods, and return why they cannot run; empty
        if they can. This takes as long as the compiler. ``why_not`` then knows the reasons."""


@runtime_checkable
class Merging(Protocol):
    """A backend with a kernel for ``pyfa.merge``."""

    def bind_merge(
        self,
        outs: Sequence[torch.Tensor],
        lses: Sequence[torch.Tensor],
        out: torch.Tensor | torch.dtype,
        with_lse: bool,
    ) -> Run | None:
        """Return a launch that merges outs and LSEs like these, or None to leave it to PyTorch.

        The launch takes outs and LSEs in turn, and then ``out`` if that is a tensor; it shares no
        memory with the others. It returns the output if ``out`` is a dtype, and the LSE if
        ``with_lse``."""


@runtime_checkable
class Described(Protocol):
    """A backend that describes its runtime."""

    def describe(self) -> str:
        """Return the runtime in use, for reports. Raises ``RuntimeError`` if there is none."""


class Rounding(NamedTuple):
    """How tensors with ``heads`` KV heads are converted to float8 ``dtype``.

    A scale covers ``block`` rows of a head, all rows of a head if ``block`` is not given, or the
    whole tensor (``per_tensor``). If ``signs`` are given, float32 (D,) of ±1, rows are first
    multiplied by these signs and by Hadamard matrices.
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
        """Convert each of xs (B, rows, H, D) to float8, and return it with its scale: float32 (B,
        Hk), (B, Hk, ⌈rows / block⌉), or (1, 1) ``per_tensor``. xs are q, k and v, or k and v, none
        of them empty; v is never rotated. Return None if the device does not support such numbers.
        """


@runtime_checkable
class Tiled(Protocol):
    """A backend that describes its tiles to ``pyfa plan``."""

    def tiled_kernels(
        self, plan: Plan, problem: Problem, shape: Shape, compiled: bool
    ) -> Sequence[TiledKernel]:
        """Return the kernels of ``plan`` for ``problem`` with its true sizes, not the bucketed
        ones, including backward if the problem has that feature. ``compiled``: with registers and
        shared bytes as reported by the compiler, which may take seconds."""


def missing(backend: Backend, problem: Problem) -> list[str]:
    """Return the reasons that follow from a backend's ``FEATURES`` and ``DTYPES`` alone."""
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
        reasons.append(
            "batch invariance is not implemented for attention_chunk and negative window bounds"
        )
    if {"latent", "batch_invariant"} <= problem.features:
        reasons.append(
            "latent attention is not batch-invariant: the split of its keys depends on the batch"
        )
    return reasons
