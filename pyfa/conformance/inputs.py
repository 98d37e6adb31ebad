"""The tensors of a case: values from raw PCG64 integers, laid out with NaN all around them.

numpy guarantees that the raw output of its bit generators never changes, but does not guarantee
this for ``normal`` or ``integers``. So only ``PCG64.random_raw`` is used: each 64-bit word gives
four 16-bit integers, and the sum s of four such integers (Irwin–Hall) becomes x = (s − 131070) · √3
/ 65536, with mean 0, variance 1 and |x| ≤ 2√3. Each step is exact or IEEE-rounded once, and the
value is then rounded once to the problem's dtype.

Tensors are views of buffers that are filled with 0xFF bytes. Such bytes are NaN in every float
dtype (but −240 in float8_e4m3fnuz). Everything outside a tensor's valid region (guards, gaps
between strides, rows beyond a sequence, unused pages, left padding) stays NaN. If such an element
changes, a kernel wrote out of bounds.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import mods, reference
from ..mods.evaluate import evaluate
from ..problem import Call
from ..quantize import rotate as rotate_by_hadamard
from .cases import Case

_GUARD_BYTES = 64


def near_normal(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float64 values of ``shape`` with mean 0 and variance 1, seeded by ``key``."""
    count = int(np.prod(shape, dtype=np.int64))
    words = _raw(key, count).astype(np.uint64)
    total = np.zeros(count, np.int64)
    for quarter in range(4):
        total += ((words >> np.uint64(16 * quarter)) & np.uint64(0xFFFF)).astype(np.int64)
    return torch.from_numpy((total - 131070) * (3.0**0.5 / 65536.0)).reshape(shape)


def integers(key: str, count: int, below: int) -> list[int]:
    """Return ``count`` integers from 0 to ``below`` − 1, seeded by ``key``."""
    return [int(word) % below for word in _raw(key, count)]


def permutation(key: str, count: int) -> list[int]:
    """Return the integers 0 to count − 1, in the order of the raw words that ``key`` seeds."""
    return [int(place) for place in np.argsort(_raw(key, count), kind="stable")]


def _raw(key: str, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    return np.asarray(np.random.PCG64(seed).random_raw(count), dtype=np.uint64)


@dataclass(frozen=True)
class Placed:
    """A strided tensor inside a buffer of bytes. The whole buffer is copied between devices."""

    buffer: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensor in its own buffer, or in a copy of it."""
        flat = (self.buffer if buffer is None else buffer).view(self.dtype)
        return flat.as_strided(self.shape, self.strides, self.offset)


# The integers of formats in which all ones are a NaN.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def place(values: torch.Tensor, dtype: torch.dtype, layout: str) -> Placed:
    """Round ``values`` (…, heads, dim) to ``dtype``, into a buffer of NaN with the given
    ``layout``. A NaN has all bits set.

    The layouts are: "contiguous"; "strided", with gaps after every row, head and sequence, all
    multiples of 16 bytes; "heads_first", with the memory order (…, heads, rows, dim); "unaligned",
    dense, but starting one element after an address that is aligned to 16 bytes; "gapped", in every
    second element along the last dimension.
    """
    shape = tuple(values.shape)
    unit = 16 // dtype.itemsize
    outer, order = list(shape), list(range(len(shape)))
    offset = _GUARD_BYTES // dtype.itemsize
    if layout == "strided":
        outer = [n + 1 for n in shape[:-1]] + [(-(-shape[-1] // unit) + 1) * unit]
    elif layout == "heads_first" and len(shape) >= 3:
        order[-3], order[-2] = order[-2], order[-3]
    elif layout == "unaligned":
        offset += 1
    elif layout == "gapped":
        outer[-1] *= 2
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * outer[dim]
    if layout == "gapped":
        strides[-1] = 2
    size = (2 * offset + step) * dtype.itemsize
    buffer = torch.full((-(-size // 16) * 16,), 0xFF, dtype=torch.uint8)
    placed = Placed(buffer, dtype, shape, tuple(strides), offset)
    placed.view().copy_(values)
    if dtype in _BITS:
        # PyTorch writes 0x7fc0 or 0xffff, depending on the tensor's size.
        placed.view().view(_BITS[dtype]).masked_fill_(values.isnan(), -1)
    return placed


Sequence = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Inputs:
    """All inputs of one case, on the CPU.

    ``placed`` holds the float tensors of the call by argument name, ``others`` its integer tensors
    and scalars. ``spec`` is the same problem for the reference, in float64 and rounded as the
    semantics require; ``naive`` differs from ``spec`` only in the precision of rotary. ``unsure``
    has tensors of the shapes of q and k, with one ulp for each element that may be rounded either
    way after rotary, and 0 elsewhere (``rotary.py``). ``dout`` and ``dlse`` are the incoming
    gradients. ``cache_after`` holds the expected contents of the caches' buffers after an append;
    with rotary, ``rotated_rows`` marks k's elements that hold a rotated value. ``sequences`` holds
    q, k and v of each sequence. ``marks`` is the effect of a hostile element on each result
    (``hostile.Marks``); ``spec`` does not contain this element. ``score_size`` and ``product_size``
    are the largest |score| and the largest scale·Σ|q||k|, both including all other score terms.
    """

    case: Case
    placed: dict[str, Placed]
    others: dict[str, Any]
    spec: Call
    naive: Call
    unsure: Call | None = None
    dout: Placed | None = None
    dlse: Placed | None = None
    cache_after: dict[str, torch.Tensor] = field(default_factory=dict)
    rotated_rows: torch.Tensor | None = None
    sequences: list[Sequence] = field(default_factory=list)
    marks: dict[str, Any] = field(default_factory=dict)
    score_size: float = 0.0
    product_size: float = 0.0

    def digest(self) -> str:
        """Return the SHA-256 of all bytes of the call's tensors and of its scalars."""
        total = hashlib.sha256()
        for name in sorted(self.placed):
            total.update(name.encode() + self.placed[name].buffer.numpy().tobytes())
        for name in sorted(self.others):
            value = self.others[name]
            if isinstance(value, torch.Tensor):
                total.update(name.encode() + value.numpy().tobytes())
            else:
                total.update(f"{name}={value!r}".encode())
        for grad in (self.dout, self.dlse):
            total.update(b"" if grad is None else grad.buffer.numpy().tobytes())
        return total.hexdigest()


def sequence(case: Case, b: int) -> Sequence:
    """Return q (rows, H, D), k (keys, Hk, D) and v (keys, Hk, Dv) of sequence ``b``, in the
    case's dtype."""
    rows, keys, dim = case.lengths_q[b], case.lengths_k[b], case.head_dim
    q = near_normal(f"{case.name}/q{b}", (rows, case.heads_q, dim))
    k = near_normal(f"{case.name}/k{b}", (keys, case.heads_k, dim))
    v = near_normal(f"{case.name}/v{b}", (keys, case.heads_k, case.head_dim_v))
    if case.recipe == "growing":
        # Scores rise by about 40 along the keys: a running maximum is raised in every tile.
        q[..., 0] = 4.0
        k[..., 0] = torch.arange(keys)[:, None] * (10.0 * dim**0.5 / max(keys, 1))
    elif case.recipe == "huge" and rows and keys:
        # One score of 64·√D among scores of about 1.
        q[rows // 2] = 8.0
        k[keys // 3] = 8.0
    elif case.recipe == "equal":
        k[:] = k[:1].clone()
    elif case.recipe == "offset":
        # If P is not rounded to nearest, the mean of 16 makes the error large.
        v += 16.0
    elif case.recipe == "big":
        # Scores of several tens to hundreds: nearly one-hot rows and a large LSE.
        q *= 6.0
        k *= 6.0
    elif case.recipe == "identity":
        # out is P itself, so that the bits of dropout can be read from it.
        v[:] = torch.eye(keys, case.head_dim_v)[:, None, :]
        q *= 0.25
    elif case.recipe in ("sink", "needle"):
        _dominate(case, q, k, v)
    elif case.recipe == "mixed" and rows and keys:
        _mix(case, f"{case.name}/mixed{b}", q, k)
    elif case.recipe == "rotated":
        # An outlying channel, and then the rotation that spreads it.
        q[..., 1] *= 12.0
        k[..., 1] *= 12.0
        q, k = rotate_by_hadamard(q, 0), rotate_by_hadamard(k, 0)
    of_q, of_k, of_v = (getattr(torch, name) for name in case.dtypes)
    q, k = q.to(of_q), k.to(of_k)
    return q, k, k[..., : case.head_dim_v] if case.kind == "latent" else v.to(of_v)


def _dominate(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Make one key, whose row of V is 0, dominate all others. The share of the others must not be
    lost.

    "sink": the first key is about 2²⁰ times as likely as the others, and the first 128 rows of V, a
    tile, are 0. A float8 P of the other keys is then 0, unless the keys are visited from last to
    first. "needle": a key in the middle is about 2¹² times as likely as the others. In one tile, P
    scaled by 2⁸ keeps the others, and unscaled P loses them.
    """
    keys = k.shape[0]
    where, ahead = (0, 20.0) if case.recipe == "sink" else (keys // 3, 12.0)
    q[..., 0], k[..., 0] = 4.0, 0.0
    v += 4.0
    v[: 128 if case.recipe == "sink" else 0] = 0.0
    if keys:
        v[where] = 0.0
        k[where] = 0.0
        k[where, :, 0] = ahead * math.log(2.0) * case.head_dim**0.5 / 4.0


def _mix(case: Case, name: str, q: torch.Tensor, k: torch.Tensor) -> None:
    """Give rows scores of four kinds in turn, so that each tile has rows of each kind. The turn
    begins with another kind in each head.

    The scores of the first kind are plain. Those of the second are about -200, so that exp(-LSE)
    is infinite: a key beyond the end that is not masked, whose score is 0, makes NaN. Those of the
    third rise by about 40 along the keys. In the fourth, a random key is ahead of all others by
    about 100: where a maximum leaves out its score, P is infinite. Each offset is spread over a
    quarter of the head, so that few elements of the gradients are larger than in plain cases. A
    large scale makes the offsets smaller, because 14 bits do not hold a float8 score of -2,000.
    """
    (rows, heads, dim), (keys, heads_k, _) = q.shape, k.shape
    quarter, root = max(dim // 4, 1), 1.0 / max(abs(case.scale or 0.0), dim**-0.5)
    low, rising = slice(quarter), slice(quarter, 2 * quarter)
    kind = (torch.arange(rows)[:, None] + torch.arange(heads)) % 4
    k[..., low] = (200.0 * root / quarter) ** 0.5
    k[..., rising] = torch.arange(keys)[:, None, None] * (10.0 * root / quarter / keys)
    q[..., low] = torch.where((kind == 1)[..., None], -k[0, 0, low], q[..., low])
    q[..., rising] = torch.where((kind == 2)[..., None], 4.0, q[..., rising])
    ahead = torch.tensor(integers(name, rows * heads, keys)).reshape(rows, heads)
    found = k[ahead, torch.arange(heads) // (heads // heads_k)]
    found[..., : 2 * quarter] = 0.0
    found *= 100.0 * root / found.square().sum(-1, keepdim=True).clamp(min=1.0)
    found.clamp_(-200.0, 200.0)  # float8 ends at 240
    q[:] = torch.where((kind == 3)[..., None], found, q)


def mod_slope(call: Call, b: int, score: torch.Tensor) -> torch.Tensor:
    """Return the slope of the score_mod at the scores (H, rows, keys) of sequence ``b``, or 1 if
    there is no score_mod."""
    slope = mods.of(call.mods).slope if call.mods else None
    if slope is None:
        return torch.ones_like(score)
    heads, rows, keys = score.shape
    given = {"score": score, **reference.places_of(call, b, rows, keys, heads)}
    return evaluate(slope, given, call.captured)[1].expand(score.shape).nan_to_num(0.0)


def score_sizes(parts: list[Sequence], call: Call) -> tuple[float, float]:
    """Return the largest |score| and the largest scale·Σ|q||k|, both with the ALiBi and bias terms.
    Each is multiplied by the slope of a score_mod where this slope is more than 1."""
    score = product = 0.0
    added = 0.0
    if call.bias is not None and call.bias.is_floating_point() and call.bias.numel():
        added += float(call.bias.double().nan_to_num(0.0, 0.0, 0.0).abs().max())
    factor = abs(call.scale)
    for scales in (call.q_descale, call.k_descale):
        if scales is not None and scales.numel():
            factor *= float(scales.nan_to_num(0.0).max())
    for b, (q, k, _) in enumerate(parts):
        if not q.shape[0] or not k.shape[0]:
            continue
        q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        exact = torch.einsum("qhd,khd->hqk", q, k)
        steep: torch.Tensor | float = 1.0
        if call.mods:
            capped = exact * call.scale
            if call.softcap:
                capped = call.softcap * torch.tanh(capped / call.softcap)
            steep = mod_slope(call, b, capped).abs().clamp(min=1.0)
        raw = (exact.abs() * steep).max()
        terms = (torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * steep).max()
        extra = added
        if call.alibi_slopes is not None:
            extra += float(call.alibi_slopes.max()) * max(q.shape[0], k.shape[0])
        score = max(score, float(raw) * factor + extra)
        product = max(product, float(terms) * factor + extra)
    return score, product


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, style: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x (S, H, D), rotated by ``positions`` (S,) once in float64 and once in float32, both
    rounded to x's dtype. Also return the ulp of the elements that may be rounded either way
    (``rotary.py``).

    The products and the cache use the problem's dtype, so the rounding after rotary is part of the
    semantics; the precision of the rotation itself is not.
    """
    interleaved = style.startswith("interleaved")

    def turned_by(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return reference.rotary(x[None], cos, sin, positions[None], interleaved)[0]

    def rounded(values: torch.Tensor) -> torch.Tensor:
        if x.itemsize == 1:  # what is too large is the largest number, and no NaN
            values = values.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)
        return values.to(x.dtype)

    exact = turned_by(x, cos, sin)
    unsure = torch.zeros_like(x)
    if x.dtype != torch.float32:  # whose rotation is not rounded again
        # |ac| + |bs| of the first elements of the pairs, and then |as| + |bc| of the second ones.
        sizes = x.double().abs(), cos.abs(), sin.abs()
        size = torch.maximum(turned_by(sizes[0], sizes[1], -sizes[2]), turned_by(*sizes))
        above, below = (rounded(exact + sign * 2.0**-23 * size) for sign in (1.0, -1.0))
        unsure = (above.double() - below.double()).to(x.dtype)
    half = cos.shape[-1]
    c, s = (table.float()[positions][:, None, :] for table in (cos, sin))
    near = x.float()
    if interleaved:
        first, second = near[..., 0 : 2 * half : 2], near[..., 1 : 2 * half : 2]
        turned = torch.stack((first * c - second * s, first * s + second * c), -1).flatten(-2)
    else:
        first, second = near[..., :half], near[..., half : 2 * half]
        turned = torch.cat((first * c - second * s, first * s + second * c), -1)
    near = torch.cat((turned, near[..., 2 * half :]), -1)
    return rounded(exact), rounded(near), unsure


def dtype_of(case: Case, name: str = "q") -> torch.dtype:
    """Return the dtype of q, k or v."""
    dtype: torch.dtype = getattr(torch, case.dtypes["qkv".index(name)])
    return dtype
