"""Runs one case on a backend and checks all its results."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import api, blocks, latent, reference
from ..problem import Call
from . import float8, rotary
from .cases import Case
from .inputs import Inputs, Placed
from .modifiers import arguments_of, captured_by
from .recompute import (
    InOrder,
    error_in_order,
    gradients_deviation,
    in_order,
    out_deviation,
    recomputed_gradients,
    recomputed_out,
    sinks_deviation,
    stored_out,
)
from .tolerances import Check, judge, judge_lse, judge_rotated

_FUNCTIONS = {
    "dense": api.attention,
    "varlen": api.attention_varlen,
    "kvcache": api.attention_kvcache,
    "latent": latent.attention_latent,
}
_CACHES = ("k_cache", "v_cache")


@dataclass
class Findings:
    checks: list[Check] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def require(self, name: str, holds: bool, otherwise: str) -> None:
        """Record a check that either holds or does not, without an error and a bound."""
        self.checks.append(Check(name, message="" if holds else f"{name}: {otherwise}"))


@dataclass
class _Run:
    """The results of one run of the API, on the CPU, and the buffers it ran on."""

    results: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


class Expected:
    """The expected results of a case. They are computed only when first needed, because
    that takes longer than the case itself.

    ``ref`` is the reference in float64, ``naive`` eager attention in the problem's dtype, and
    ``recomputed`` the reference with the roundings that no kernel can avoid (``recompute.py``).
    Eager PyTorch does not support float8. For float8 queries, ``naive`` is in float32, with P
    rounded to as many bits as float8 has, and ``recomputed`` comes from ``float8.py``.
    ``lse_slack`` is the error of the LSE that float8 queries and rotary embedding may cause, or
    None in cases without these. ``deviation`` is the standard deviation of a float32 output, or
    None for other dtypes.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    @functools.cached_property
    def ref(self) -> dict[str, torch.Tensor]:
        return self._of(self.inputs.spec, torch.float64)

    @functools.cached_property
    def naive(self) -> dict[str, torch.Tensor]:
        if self.inputs.spec.q.itemsize == 1:
            out, lse = reference.attention(self.inputs.naive, torch.float32, float8.round_p)
            return {"out": out.to(self.inputs.spec.dtype_of_out()), "lse": lse}
        return self._of(self.inputs.naive, getattr(torch, self.inputs.case.dtype))

    @functools.cached_property
    def recomputed(self) -> dict[str, torch.Tensor | None]:
        inputs, found = self.inputs, dict[str, torch.Tensor | None]()
        if inputs.case.backward:
            out, lse = self.ref["out"], self.ref["lse"]
            exact = inputs.spec.q.dtype != torch.float32
            stored = stored_out(inputs.spec) if exact else self._stored(out)
            flows = _dout(inputs), _dlse(inputs)
            found |= recomputed_gradients(inputs, self.scores, out, stored, lse, *flows)
        if inputs.spec.q.itemsize == 1:
            found["out"] = float8.recomputed_out(inputs.spec)
        else:
            found["out"] = recomputed_out(inputs, self.scores)
        return found

    @functools.cached_property
    def scores(self) -> list[InOrder] | None:
        return in_order(self.inputs)

    @functools.cached_property
    def lse_slack(self) -> torch.Tensor | None:
        spec, unsure, lse = self.inputs.spec, self.inputs.unsure, self.ref["lse"]
        slacks = [float8.lse_slack(spec, lse)] if spec.q.dtype.itemsize == 1 else []
        slacks += [] if unsure is None else [rotary.lse_slack(spec, unsure, lse)]
        return torch.stack(slacks).sum(0) if slacks else None

    @functools.cached_property
    def deviation(self) -> torch.Tensor | None:
        return None if self.scores is None else out_deviation(self.inputs, self.scores)

    @functools.cached_property
    def deviations(self) -> dict[str, torch.Tensor]:
        """Return the standard deviations of results whose yardsticks may be small by chance."""
        found = dict[str, torch.Tensor]()
        if not self.inputs.case.backward:
            return found if self.deviation is None else {"out": self.deviation}
        flows = _dout(self.inputs), _dlse(self.inputs)
        if self.scores is not None and self.deviation is not None:
            found = gradients_deviation(self.inputs, self.scores, *flows)
            found["out"] = self.deviation
        elif "dsinks" in self.ref:
            out, lse = self.ref["out"], self.ref["lse"]
            found["dsinks"] = sinks_deviation(self.inputs.spec, out, lse, *flows)
        return found

    def _stored(self, out: torch.Tensor) -> torch.Tensor:
        """Return the float32 output from which a backward starts: off by as much as eager
        attention's, and by one standard deviation where that is better."""
        assert self.deviation is not None
        error = self.naive["out"].double() - out
        return out + torch.copysign(torch.maximum(error.abs(), self.deviation), error)

    def _of(self, call: Call, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if not self.inputs.case.backward:
            with torch.no_grad():
                out, lse = reference.attention(call, dtype)
            return {"out": out, "lse": lse}
        return reference.gradients(call, _dout(self.inputs), _dlse(self.inputs), dtype)


def examine(expected: Expected, backend: str, where: torch.device) -> Findings:
    """Run every check of the case. Exceptions of the API, including ``UnsupportedProblem``, are not
    caught."""
    inputs = expected.inputs
    case = inputs.case
    found = Findings()
    found.digests["inputs"] = inputs.digest()
    with _watched_lists(found):
        first = _execute(inputs, backend, where, case.backward)
    runs = [first]
    if case.backward and not case.dlse:
        # Asking for the LSE there would have asked for its gradient: the LSE is inference's.
        runs.append(_execute(inputs, backend, where, False))
        first.results["lse"] = runs[1].results["lse"]
        first.results["inference_out"] = runs[1].results["out"]
    if case.deterministic:
        runs.append(_execute(inputs, backend, where, True))
        _same_bits(found, first.results, runs[-1].results)
    for done in runs:
        _untouched(found, inputs, done.buffers)
    ref = dict(expected.ref)
    for name, marks in inputs.marks.items():
        clean = ref[name]
        for of in (name, f"inference_{name}"):
            if of in first.results:
                first.results[of], ref[name] = marks.put(first.results[of], clean)
    _compare(found, expected, ref, first.results)
    check_zeros(found, inputs.case, first.results, ref)
    pattern = first.results["lse"] == -torch.inf
    found.digests["lse"] = _digest(pattern)
    if case.recipe == "identity" and case.dropout_p:
        _dropout_bits(found, inputs, first.results["out"], ref["out"])
    if inputs.cache_after:
        _caches(found, inputs, first.buffers)
    return found


@contextlib.contextmanager
def _watched_lists(found: Findings) -> Iterator[None]:
    """Require that all block lists are exactly those of the mask_mod. A list that names an empty
    tile, or a full tile as partial, costs time without a wrong result."""

    def check(call: Call, tiles: blocks.Tiles, lists: blocks.Lists) -> None:
        expected = blocks.make_lists(call, tiles)
        same = all(torch.equal(a, b) for a, b in zip(lists, expected, strict=True))
        found.require("block lists", same, f"not those of the mask_mod, for {tiles}")

    with blocks.watched(check):
        yield


def _execute(inputs: Inputs, backend: str, where: torch.device, grad: bool) -> _Run:
    case = inputs.case
    buffers = {name: item.buffer.clone().to(where) for name, item in inputs.placed.items()}
    tensors = {name: item.view(buffers[name]) for name, item in inputs.placed.items()}
    others = {
        name: value.to(where) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.others.items()
    }
    made = arguments_of(case, where)
    others |= made
    scales = tuple(tensors.pop(f"{name}_descale", None) for name in "qkv")
    if scales[1] is not None:
        others["descale"] = scales[:2] if case.kind == "latent" else scales
    leaves: dict[str, torch.Tensor] = {}
    if grad:
        wanted = ["q", "k", "v", *(["bias"] if case.bias_grad else [])]
        wanted += ["sinks"] if case.sinks else []
        leaves = {name: tensors[name].requires_grad_() for name in wanted}
        if case.captured_grad:
            made.pop("block_mask", None)
            _, captured, names = captured_by(made, where, True)
            leaves |= {name: captured[name] for name in names}
    function: Any = _FUNCTIONS[case.kind]
    return_lse = bool(case.dlse) or not grad
    with torch.set_grad_enabled(grad):
        result = function(**tensors, **others, return_lse=return_lse, backend=backend)
    out, lse = result if return_lse else (result, None)
    if case.topk and lse is not None:
        # The reference has each row as a sequence, packed.
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    if grad:
        results |= _gradients(inputs, where, out, lse, leaves)
    results = {name: x.detach().cpu() for name, x in results.items()}
    return _Run(results, {name: x.cpu() for name, x in buffers.items()})


def _gradients(
    inputs: Inputs,
    where: torch.device,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    leaves: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    sources, flows = [], []
    for x, flow in ((out, inputs.dout), (lse, inputs.dlse)):
        if flow is not None and x is not None and not (x is out and inputs.case.dlse == "only"):
            sources.append(x)
            flows.append(_view_on(flow, where))
    grads = torch.autograd.grad(sources, list(leaves.values()), flows, materialize_grads=True)
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _view_on(placed: Placed, where: torch.device) -> torch.Tensor:
    return placed.view(placed.buffer.to(where))


def _dout(inputs: Inputs) -> torch.Tensor:
    assert inputs.dout is not None
    dout = inputs.dout.view()
    return torch.zeros_like(dout) if inputs.case.dlse == "only" else dout


def _dlse(inputs: Inputs) -> torch.Tensor | None:
    return inputs.dlse.view().double() if inputs.dlse is not None else None


def _compare(
    found: Findings,
    expected: Expected,
    ref: dict[str, torch.Tensor],
    results: dict[str, torch.Tensor],
) -> None:
    inputs = expected.inputs
    case = inputs.case
    finite = ref["lse"][ref["lse"].isfinite()]
    largest_lse = float(finite.abs().max()) if finite.numel() else 0.0
    terms = max(1, sum(case.lengths_q), *case.lengths_k)
    for name, x in results.items():
        if name == "lse":
            found.require("lse", x.dtype == torch.float32, f"{x.dtype}, expected float32")
            check = judge_lse(
                x,
                ref["lse"],
                inputs.spec.q,
                inputs.score_size,
                inputs.product_size,
                expected.lse_slack,
                error_in_order(inputs),
            )
        else:
            of = name.removeprefix("inference_")
            check = judge(
                name,
                x.reshape(ref[of].shape) if of == "dbias" else x,
                ref[of],
                expected.naive[of],
                recomputed=expected.recomputed[of],
                deviation=expected.deviations.get(of),
                gradient=of != "out",
                softcap=case.softcap != 0.0 or bool(case.score_mod),
                float8=inputs.spec.q.itemsize == 1,
                largest_lse=largest_lse,
                terms=terms,
                grouped=case.heads_q > case.heads_k,
            )
        found.checks.append(check)


def check_zeros(
    found: Findings,
    case: Case,
    results: dict[str, torch.Tensor],
    ref: dict[str, torch.Tensor],
) -> None:
    """Check that fully masked rows, and keys that no row sees, have exactly 0.

    These are the rows whose output, and the keys whose dV, is exactly 0 in float64. With the
    gradient of the LSE alone, dV is 0 everywhere, and dK also where the slope of a score is 0 in
    float64 only because it is rounded: 1 - tanh(x)^2 from x = 19 on. So dK shows no unseen keys
    there.
    """
    pairs = (("out", "out"), ("dq", "out"), ("dv", "dv"), ("dk", "dv"))
    flat = case.dlse == "only" and bool(case.softcap or case.score_mod)
    for name, witness in pairs:
        if name not in results or (name == "dk" and flat):
            continue
        unseen = (ref[witness] == 0.0).all(-1) & (ref[name] == 0.0).all(-1)
        extra = int((results[name][unseen] != 0.0).any(-1).sum())
        found.require(f"{name} of empty rows", extra == 0, f"not exactly 0 in {extra} rows")


def _same_bits(
    found: Findings, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> None:
    for name, x in second.items():
        same = torch.equal(_bytes(x), _bytes(first[name]))
        found.require(f"{name} again", same, "differs from run to run, though deterministic")


def _untouched(found: Findings, inputs: Inputs, buffers: dict[str, torch.Tensor]) -> None:
    """Check that no byte of any input changed, including gaps and guards; caches are checked
    elsewhere."""
    changed = [
        name
        for name, item in inputs.placed.items()
        if not (name in _CACHES and inputs.case.new_keys)
        and not torch.equal(buffers[name], item.buffer)
    ]
    found.require("inputs", not changed, f"{', '.join(changed)} changed")


def _caches(found: Findings, inputs: Inputs, buffers: dict[str, torch.Tensor]) -> None:
    """Check the caches after an append, byte for byte where rotary took no part."""
    for name in _CACHES:
        have, want = buffers[name], inputs.cache_after[name]
        marks = inputs.rotated_rows
        if name == "k_cache" and marks is not None:
            placed = inputs.placed[name]
            x, ref = placed.view(have).clone(), placed.view(want)
            found.checks.append(judge_rotated(x[marks], ref[marks]))
            have = have.clone()
            placed.view(have)[marks] = ref[marks]
        same = torch.equal(have, want)
        found.require(name, same, "differs from the expected cache, or was written elsewhere")


def _dropout_bits(found: Findings, inputs: Inputs, out: torch.Tensor, ref: torch.Tensor) -> None:
    """Read the dropout bits: with V the identity, out is P after dropout, and nonzero elements were
    kept.

    The zeros of ref are masked or dropped elements. With ALiBi a probability may be so small that
    the output's dtype has only 0 for it, or a number that a GPU flushes to 0. Such elements do not
    count.
    """
    counts = (ref == 0) | (ref >= torch.finfo(out.dtype).tiny)
    same = torch.equal((out != 0) & counts, (ref != 0) & counts)
    found.require("dropout bits", same, "not those of the specification")
    found.digests["dropout"] = _digest(out != 0)


def _digest(bits: torch.Tensor) -> str:
    return hashlib.sha256(bits.contiguous().numpy().tobytes()).hexdigest()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)
