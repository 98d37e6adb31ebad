"""NaN and inf among the inputs: the results that they must affect, and the results that they may
affect.

``Case.hostile`` may be "q=nan" or similar: one element of q, k or v is then NaN or inf, and half of
the rows see it if there is a mask. A boolean bias or a mask_mod may hide it from others. Or it is
"padding=inf": inf then replaces the NaN around every tensor. Or it is "k=-inf": the last element of
one key, which hides the key from all rows. The reference is computed without the hostile element,
except that it has a finite number with the same effect for "k=-inf". This module defines the
element's effect, as the guide does under "NaN and inf":

- a row that sees a NaN in q or k has NaN in its output and its LSE. A score of +inf counts as NaN,
  a score of −inf as masked. So if all scores of a row are −inf, its LSE is its sink, if there is
  one;
- a NaN in v gives NaN in that element of the output, in every row that sees the key. Other rows of
  the sequence with the same KV head may have NaN there (0 · NaN). The NaN does not change the LSE.
  An inf in v has the same effect, as inf or as NaN, because kernels read the last key in place of
  keys that are missing in its tile;
- if a row sees a NaN, its gradients are NaN, and so are those of the keys that it sees. Gradients
  of the sequence's other rows and keys with the same KV head may be NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from .. import mods, reference
from ..mods.evaluate import evaluate
from .cases import Case
from .inputs import Inputs, Placed, Sequence


class Marks(NamedTuple):
    """Marks for one result: which elements must have the value ``value``, and which may have any
    value."""

    must: torch.Tensor
    value: float
    free: torch.Tensor

    def put(self, x: torch.Tensor, ref: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and ref, changed for the comparison: ref has ``value`` where x must have it, and
        x equals ref where x may have any value."""
        must = self.must.reshape(ref.shape)
        ref = torch.where(must, self.value, ref)
        x, taken = x.reshape(ref.shape), self.free.reshape(ref.shape)
        if self.value == math.inf:
            taken = taken | (must & x.isnan())
        return torch.where(taken, ref.to(x.dtype), x), ref


# In place of −inf. It is multiplied by at least 0.5, and the exponential of the score is 0.
_HIDES = -32768.0


class _Place(NamedTuple):
    """The position of the element: sequence, row or key, head of q or of k, and along the head."""

    name: str
    value: float
    b: int
    at: int
    head: int
    d: int


def _place(case: Case) -> _Place:
    name, value = case.hostile.split("=")
    b = max(range(case.batch), key=lambda b: case.lengths_q[b] * case.lengths_k[b])
    rows, keys = case.lengths_q[b], case.lengths_k[b]
    at = rows - 1 - rows // 3 if name == "q" else max(0, keys - 1 - rows // 2)
    head, dim = case.heads_k - 1, case.head_dim_v if name == "v" else case.head_dim
    # A kernel may read the last elements of a key again, in place of those beyond the head.
    d = dim - 1 if case.hostile == "k=-inf" else dim // 3
    return _Place(name, float(value), b, at, case.heads_q - 1 if name == "q" else head, d)


def make_way(case: Case, parts: list[Sequence]) -> None:
    """If q or k has an inf, make the elements by which it is multiplied positive, so that all
    scores with the inf have the same sign."""
    if not case.hostile.startswith(("q=", "k=")) or "inf" not in case.hostile:
        return
    place = _place(case)
    other = parts[place.b][1 if place.name == "q" else 0]
    other[..., place.d] = other[..., place.d].abs() + 0.5


def of_reference(case: Case, parts: list[Sequence]) -> list[Sequence]:
    """Return the sequences for the reference."""
    return _changed(case, parts, _HIDES) if case.hostile == "k=-inf" else parts


def poisoned(case: Case, parts: list[Sequence]) -> list[Sequence]:
    """Return the sequences, with the hostile element in one of them."""
    if case.hostile.startswith("padding"):
        return parts
    return _changed(case, parts, _place(case).value)


def _changed(case: Case, parts: list[Sequence], value: float) -> list[Sequence]:
    """Return the sequences with ``value`` where the hostile element is."""
    place = _place(case)
    found = [tuple(x.clone() for x in part) for part in parts]
    found[place.b]["qkv".index(place.name)][place.at, place.head, place.d] = value
    return found  # type: ignore[return-value]


def pad_with_inf(placed: Placed) -> Placed:
    """Return the tensor with inf instead of NaN in the rows that belong to no sequence."""
    result = dataclasses.replace(placed, buffer=placed.buffer.clone())
    view = result.view()
    view.masked_fill_(view.isnan(), math.inf)
    return result


def marks(inputs: Inputs) -> dict[str, Marks]:
    """Return, for each result by name (out, lse, dq, …), which elements the hostile element must or
    may change. The mapping is empty if the reference has the results that the call must have."""
    case, spec = inputs.case, inputs.spec
    if not case.hostile or case.hostile.startswith("padding") or case.hostile == "k=-inf":
        return {}
    place = _place(case)
    rows, keys = case.lengths_q[place.b], case.lengths_k[place.b]
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if spec.window_right >= 0:
        seen &= distance - spec.window_shift <= spec.window_right
    if spec.window_left >= 0:
        seen &= spec.window_shift - distance <= spec.window_left
    if spec.attention_chunk:
        chunk = torch.arange(keys) // spec.attention_chunk
        seen &= chunk == (torch.arange(keys) - distance) // spec.attention_chunk
    seen = seen.expand(case.heads_q, rows, keys)
    if spec.bias is not None:
        of_batch = spec.bias[place.b if spec.bias.shape[0] > 1 else 0, :, :rows, :keys]
        seen = seen & of_batch
    modified = mods.of(spec.mods) if spec.mods else None
    if modified is not None and modified.mask is not None:
        zeros = torch.zeros(case.heads_q, rows, keys)
        places = {"score": zeros, **reference.places_of(spec, place.b, rows, keys, case.heads_q)}
        seen = seen & evaluate(modified.mask, places, spec.captured)[0]
    group = case.heads_q // case.heads_k
    if place.name == "q":
        heads, head_k = [place.head], place.head // group
        hit = seen.any(-1) & (torch.arange(rows) == place.at)
    else:
        heads, head_k = list(range(place.head * group, (place.head + 1) * group)), place.head
        hit = seen[:, :, place.at]
    hit_keys = torch.stack([seen[head][hit[head]].any(0) for head in heads]).any(0)

    def own(mask: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
        """Return the part of ``mask`` that belongs to the sequence, from its first row on."""
        return mask[place.b] if starts is None else mask[int(starts[place.b]) :]

    def of_rows(which: torch.Tensor, shape: tuple[int, ...], d: slice) -> torch.Tensor:
        mask = torch.zeros(shape, dtype=torch.bool)
        for head in heads:
            own(mask, spec.cu_seqlens_q)[:rows, head, d] |= which[head, :, None]
        return mask

    def of_keys(which: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(like.shape, dtype=torch.bool)
        own(mask, spec.cu_seqlens_k)[:keys, head_k] |= which[:, None]
        return mask

    nothing = place.value == -math.inf and place.name != "v"
    value = place.value if place.name == "v" else 0.0 if nothing else math.nan
    d = slice(place.d, place.d + 1) if place.name == "v" else slice(None)
    out = of_rows(hit, spec.out_shape(), d)
    free = of_rows(~hit, spec.out_shape(), d) if place.name == "v" else torch.zeros_like(out)
    found = {"out": Marks(out, value, free)}
    lse = out.any(-1).transpose(-1, -2)
    if place.name != "v":
        at_lse = -math.inf if nothing else math.nan
        if nothing and spec.sinks is not None:
            at_lse = float(spec.sinks[place.head])
        found["lse"] = Marks(lse, at_lse, torch.zeros_like(lse))
    if case.backward:
        found["dq"] = Marks(
            of_rows(hit, spec.q.shape, slice(None)),
            math.nan,
            of_rows(~hit, spec.q.shape, slice(None)),
        )
        found["dk"] = Marks(of_keys(hit_keys, spec.k), math.nan, of_keys(~hit_keys, spec.k))
        if place.name != "v":
            found["dv"] = Marks(of_keys(hit_keys, spec.v), math.nan, of_keys(~hit_keys, spec.v))
    return found
