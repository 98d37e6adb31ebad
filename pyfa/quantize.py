"""Float8 inputs for attention: scales per tensor, per head or per block of rows, and a rotation.

A float8 number has 4 significant bits. Values far below the largest value with the same scale keep
fewer bits; scales for smaller blocks reduce this error. An outlier has an error of up to 1/16 of
its size, which affects every score that contains it. Incoherent processing (QuIP, Chee et al.
2023) reduces this error: Q and K are multiplied by the same orthogonal matrix, random signs and
then a Hadamard matrix. This spreads an outlier over the head's channels and leaves every q·k
unchanged. FlashAttention-3 uses both methods (Shah et al. 2024, arXiv:2407.08608, §3.3).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from . import _torch, device, validate
from .backends import AUTOMATIC, BACKENDS
from .backends.base import Quantizing, Rounding
from .validate_fp8 import FLOAT8, LEAST_SCALE

_LEAST_BLOCK = 16
# The Hadamard matrices are those of Sylvester, whose sizes are powers of two.
_LEAST_MIXED = 8


class Descale(NamedTuple):
    """The float32 scales of q, k and v: (1, 1), (B, Hk), or (B, Hk, blocks). The scale of q is
    None if no q was quantized."""

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor


class Quantized(NamedTuple):
    """Float8 tensors, and the scales by which attention multiplies them.

    >>> x = pyfa.quantize(q, k, v, block=128, hadamard=True)
    >>> pyfa.attention(x.q, x.k, x.v, descale=x.descale, out_dtype=torch.bfloat16)
    """

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    descale: Descale

    def to(self, dtype: torch.dtype) -> Quantized:
        """Convert to the other float8 format, for another vendor's GPU.

        Conversion to ``float8_e4m3fnuz`` (gfx942) is exact: the same bits mean half the value
        there, so the scales are doubled. Conversion to ``float8_e4m3fn`` is exact for magnitudes
        from 2⁻⁶ on; smaller values are rounded to multiples of 2⁻⁹. Raises ``ValueError`` for any
        other dtype.
        """
        if dtype not in FLOAT8:
            validate.wrong("dtype", "float8_e4m3fn or float8_e4m3fnuz", dtype)
        if dtype == self.k.dtype:
            return self
        factor = 2.0 if dtype == torch.float8_e4m3fnuz else 1.0
        of_q, of_k, of_v = self.descale
        return Quantized(
            None if self.q is None else _converted(self.q, dtype),
            _converted(self.k, dtype),
            _converted(self.v, dtype),
            Descale(None if of_q is None else of_q * factor, of_k * factor, of_v * factor),
        )


def _converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        return x.float().to(dtype)
    bits = x.view(torch.uint8)
    # 0x80 is -0 here and NaN there; 0x7f and 0xff are NaN here and numbers there.
    bits = torch.where(bits == 0x80, 0, bits)
    return torch.where(bits & 0x7F == 0x7F, 0x80, bits).to(torch.uint8).view(dtype)


def quantize(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block: int | None = None,
    per_tensor: bool = False,
    hadamard: bool = False,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> Quantized:
    """Convert q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) to float8 e4m3 with scales.

    Tensors may also be packed, (total, heads, head_dim): then all rows count as one sequence. Or
    they may be pages, (num_pages, page_size, Hk, D). ``q`` may be None, for a cache that 16-bit
    queries will read. A scale is the largest magnitude of the elements that share the scale,
    divided by the largest float8 number. It is 1 if all these elements are zero. The query heads of
    a KV head share one scale.

    Parameters
    ----------
    block
        The number of rows that share a scale: a power of two that is 16 or more. Scales are then
        (B, Hk, ⌈rows / block⌉). 128 suits every kernel. If ``block`` is None, there is one scale
        per sequence and KV head, (B, Hk), as in FlashAttention-3.
    per_tensor
        One scale per tensor, (1, 1). Cannot be combined with ``block``.
    hadamard
        Rotate Q and K before rounding, which spreads outliers over the channels. A head_dim that is
        not a power of two is rotated in blocks, whose size is the largest power of two that divides
        it (96: three blocks of 32). head_dim must be a multiple of 8.
    seed
        Seed of the rotation's signs. The same int gives the same rotation in every call and on
        every device. Keys in a cache and later queries need the same rotation, so give them the
        same int. If ``seed`` is None, the signs are drawn from torch's generator.
    dtype
        ``float8_e4m3fn``, or ``float8_e4m3fnuz`` (gfx942). The default is the format of k's device.

    Notes
    -----
    There is no gradient. Inputs must be finite. A wrong argument raises a ``ValueError`` or
    ``TypeError`` that names it.

    Source: Shah et al. 2024, arXiv:2407.08608, §3.3; Chee et al. 2023 (QuIP).
    """
    _check(q, k, v, block, per_tensor, hadamard, seed)
    dtype = native_dtype(k.device) if dtype is None else dtype
    if dtype not in FLOAT8:
        validate.wrong("dtype", "float8_e4m3fn or float8_e4m3fnuz", dtype)
    signs = _signs(k.shape[-1], seed, k.device) if hadamard else None
    how = Rounding(k.shape[-2], block, per_tensor, signs, dtype)
    given = [x.detach() for x in (q, k, v) if x is not None]
    whole = [x if x.dim() == 4 else x[None] for x in given]
    made = _by_kernel(whole, how) or _by_pytorch(whole, how)
    *of_queries, (k8, of_k), (v8, of_v) = [
        (y if x.dim() == 4 else y[0], scale) for x, (y, scale) in zip(given, made, strict=True)
    ]
    q8, of_q = of_queries[0] if of_queries else (None, None)
    return Quantized(q8, k8, v8, Descale(of_q, of_k, of_v))


def native_dtype(where: torch.device) -> torch.dtype:
    """Return the e4m3 format of a device's matrix units: fnuz on gfx942, OCP's elsewhere."""
    if where.type == "cuda" and device.of(where).arch == "gfx942":
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def _check(
    q: Any, k: Any, v: Any, block: Any, per_tensor: bool, hadamard: bool, seed: int | None
) -> None:
    validate.a_tensor("k", k)
    dims = k.dim()
    if dims not in (3, 4):
        validate.wrong("k", "(batch, rows, heads, head_dim) or (total, heads, head_dim)", k)
    # Packed or dense, but q beside pages may be either.
    of_q = q.dim() if isinstance(q, torch.Tensor) and q.dim() in (3, 4) else dims
    validate.qkv(k if q is None else q, k, v, (dims if q is None else of_q, dims))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and x.itemsize == 1:
            validate.wrong(name, "float16, bfloat16 or float32", x)
    per_tensor = validate.flag("per_tensor", per_tensor)
    hadamard = validate.flag("hadamard", hadamard)
    if block is not None:
        whole = isinstance(block, int) and not isinstance(block, bool)
        if not whole or block < _LEAST_BLOCK or block & (block - 1):
            validate.wrong("block", f"a power of two from {_LEAST_BLOCK}, or None", block)
        if per_tensor:
            validate.wrong("per_tensor", "False with block", per_tensor)
    if not hadamard:
        if seed is not None:
            validate.wrong("seed", "None without hadamard", seed)
        return
    if q is None and seed is None:
        validate.wrong(
            "seed",
            "an int with hadamard and no q, because later queries need the same rotation",
            seed,
        )
    if seed is not None:
        _as_int(seed)
    dim = k.shape[-1]
    if dim & -dim < _LEAST_MIXED:
        validate.wrong("hadamard", f"a head_dim that is a multiple of {_LEAST_MIXED}", dim)


def _as_int(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed: expected an int; got {type(seed).__name__}")
    return int(seed)


@functools.lru_cache(256)
def _drawn(dim: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return ±1 for each channel, from raw PCG64 bits: the same for a seed on every device."""
    bits = np.random.PCG64(seed % 2**64).random_raw(dim) >> np.uint64(63)
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float32)).to(device)


def _signs(dim: int, seed: int | None, device: torch.device) -> torch.Tensor:
    if seed is None:
        return torch.randint(0, 2, (dim,), device=device, dtype=torch.float32) * 2.0 - 1.0
    return _drawn(dim, _as_int(seed), device)


def rotate(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Rotate x (…, D) as ``quantize(…, hadamard=True, seed=seed)`` rotates Q and K, in x's dtype.

    Use it for 16-bit queries over rotated keys. Import it with ``from pyfa.quantize import
    rotate``: as an attribute, ``pyfa.quantize`` is the function, which hides the module. Raises
    ``ValueError`` if head_dim is not a multiple of 8.
    """
    validate.a_tensor("x", x)
    if not x.dim() or not x.is_floating_point():
        validate.wrong("x", "floating point (…, head_dim)", x)
    seed = _as_int(seed)
    dim = x.shape[-1]
    if dim & -dim < _LEAST_MIXED:
        validate.wrong("x", f"a head_dim that is a multiple of {_LEAST_MIXED}", x)
    return _rotated(x, _signs(dim, seed, x.device)).to(x.dtype)


def _rotated(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return x (…, D) times diag(signs)·H/√n in float32, where H is Sylvester's matrix in blocks of
    n channels."""
    dim = x.shape[-1]
    size = dim & -dim
    y = (x.float() * signs).unflatten(-1, (-1, size))
    width = 1
    while width < size:
        pairs = y.unflatten(-1, (-1, 2, width))
        y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]),
                        dim=-2).flatten(-3)  # fmt: skip
        width *= 2
    turned: torch.Tensor = (y * size**-0.5).flatten(-2)
    return turned


_Made = list[tuple[torch.Tensor, torch.Tensor]]


def _by_kernel(xs: list[torch.Tensor], how: Rounding) -> _Made | None:
    """Quantize with the first kernel of this device's backends that supports it; None if PyTorch
    must do it."""
    where = xs[0].device
    if where.type != "cuda" or torch.compiler.is_compiling():
        return None
    if not all(_torch.is_plain(x) and x.numel() for x in xs):
        return None
    for backend in _with_kernels(device.of(where).vendor):
        if backend.why_unavailable() is None:
            made: _Made | None = backend.quantize(xs, how)
            if made is not None:
                return made
    return None


@functools.cache
def _with_kernels(vendor: str) -> tuple[Any, ...]:
    """Return a vendor's backends that are ``Quantizing``; the check takes 30 µs."""
    return tuple(
        backend for name in AUTOMATIC[vendor] if isinstance(backend := BACKENDS[name], Quantizing)
    )


def _by_pytorch(xs: list[torch.Tensor], how: Rounding) -> _Made:
    """Implement ``Quantizing.quantize`` in plain PyTorch."""
    *turned, last = xs
    return [*(_in_pytorch(x, how) for x in turned), _in_pytorch(last, how._replace(signs=None))]


def _in_pytorch(x: torch.Tensor, how: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize one tensor for ``_by_pytorch``, rotated if there are signs."""
    heads, block, per_tensor, signs, dtype = how
    y = x.float() if signs is None else _rotated(x, signs)
    rows = y.shape[1]
    size = min(block or rows, rows) or 1
    y = y.unflatten(2, (heads, -1))
    y = torch.nn.functional.pad(y, (0, 0, 0, 0, 0, 0, 0, -rows % size)).unflatten(1, (-1, size))
    most = _largest(y.abs(), (2, 4, 5)).transpose(1, 2)  # (B, Hk, blocks)
    if per_tensor:
        most = _largest(most, (0, 1, 2)).reshape(1, 1, 1)
    elif block is None:
        most = _largest(most, (2,))[..., None]
    # Divide by a tensor. Division by a number is a multiplication on CUDA, whose result differs by
    # an ulp from what the kernels compute.
    scale = most / torch.full_like(most, torch.finfo(dtype).max)
    scale = torch.where(most > 0.0, scale.clamp(min=LEAST_SCALE), 1.0)
    y = y * scale.reciprocal().transpose(1, 2)[:, :, None, :, None, None]
    y = y.flatten(1, 2)[:, :rows].flatten(2, 3).to(dtype)
    return y, scale.contiguous() if block else scale[..., 0]


def _largest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the maximum over ``dims``, 0 if it is empty."""
    return x.amax(dims) if x.numel() else x.sum(dims)
