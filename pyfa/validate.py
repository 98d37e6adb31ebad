"""Checks every argument and converts it to the form that ``Call`` describes.

Each check is a plain comparison, cheap enough for every call; the message is built only if a check
fails. It names the argument, what was expected and what was received. Checks that need the values
of a tensor (offsets, lengths, page numbers) are in ``validate_values``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch


class Edge(NamedTuple):
    """A window bound that is taken literally, so that −1 means −1 and not unlimited.

    In ``window`` the plain number −1 means unlimited, as in flash-attention. ``Edge(-1)`` as the
    right bound excludes the query's own key.
    """

    keys: int


Window = Sequence[int | Edge | None] | None

# Names of the same arguments in other packages.
_OTHER_NAMES = {
    "block_table": "page_table",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window",
    "is_causal": "causal",
    "attn_mask": "bias",
    "attn_bias": "bias",
    "mask": "bias",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "dropout": "dropout_p",
    "p": "dropout_p",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "softmax_lse": "return_lse",
    "logits_soft_cap": "softcap",
    "q_descale": "descale",
    "k_descale": "descale",
    "v_descale": "descale",
    "seqlens_k": "seqused_k",
    "leftpad_k": "cache_leftpad",
    "rotary_seqlen_offsets": "rotary_seqlens",
}


def refuse_unknown(
    name: str, unknown: Mapping[str, object], known: Iterable[str] | Callable[..., Any]
) -> None:
    """Raise ``TypeError`` for arguments that the function ``name`` does not have, with a
    suggestion. ``known``: its arguments, or the function."""
    for each in unknown:
        names = tuple(inspect.signature(known).parameters if callable(known) else known)
        near = _OTHER_NAMES.get(each)
        if near not in names:
            near = next(iter(difflib.get_close_matches(each, names, 1, 0.75)), None)
        hint = f"; did you mean '{near}'?" if near else ""
        raise TypeError(f"{name}() got an unexpected keyword argument '{each}'{hint}")


def wrong(name: str, expected: str, got: object) -> NoReturn:
    """Raise ``ValueError``: ``name`` should have been ``expected``, and was ``got``."""
    if isinstance(got, torch.Tensor):
        shape = "nested" if got.is_nested else f"shape {tuple(got.shape)}"
        layout = "" if got.layout is torch.strided else f", {got.layout}"
        got = f"{shape}{layout}, {got.dtype}, on {got.device}"
    raise ValueError(f"{name}: expected {expected}; got {got}")


def a_tensor(name: str, value: object) -> None:
    """Raise ``TypeError`` unless ``value`` is a tensor, ``ValueError`` unless it has strides."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor; got {type(value).__name__}")
    if not _is_dense(value):
        wrong(name, "a dense tensor, neither sparse nor nested", value)


def _is_dense(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


_INPUT_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
}
# The dtypes of a bias that kernels read. Any other is converted to float32, in which all kernels
# add it.
_BIAS_DTYPES = {torch.bool, torch.float32, torch.float16, torch.bfloat16}
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512  # those of latent attention
_FLOAT32_MAX = float(torch.finfo(torch.float32).max)
UNLIMITED = 2**31 - 1  # kernels hold lengths and a window's edges in 32 bits


def qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dims: tuple[int, int],
    names: tuple[str, str] = ("k", "v"),
) -> None:
    """Check q, k and v: tensors on one device, with matching dtypes, heads and head_dim.

    ``dims``: the number of dimensions of q, and that of k and v. The last two dimensions are
    (heads, head_dim) in every layout. The caller, which knows the layout, checks the others.
    ``names``: what error messages call k and v.
    """
    try:
        if not (_is_dense(q) and _is_dense(k) and _is_dense(v)):
            _refuse_qkv(q, k, v, dims, names)
        q_shape, k_shape, v_shape, dtype, device = q.shape, k.shape, v.shape, q.dtype, q.device
        # One expression for the good case, 1.5 µs; which part failed is found out only then.
        good = (
            len(q_shape) == dims[0]
            and len(k_shape) == dims[1]
            and len(v_shape) == dims[1]
            and (k.dtype is dtype or (k.dtype.itemsize == 1 and dtype.itemsize == 2))
            and v.dtype is k.dtype
            and k.device == device
            and v.device == device
            and dtype in _INPUT_DTYPES
            and k.dtype in _INPUT_DTYPES
            and q_shape[-1] == k_shape[-1]
            and k_shape[:-1] == v_shape[:-1]
            and 0 < q_shape[-1] <= MAX_HEAD_DIM
            and 0 < v_shape[-1] <= MAX_HEAD_DIM_V
            and q_shape[-2] > 0
            and k_shape[-2] > 0
            and q_shape[-2] % k_shape[-2] == 0
        )
    except AttributeError:
        good = False
    if not good:
        _refuse_qkv(q, k, v, dims, names)


def _refuse_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dims: tuple[int, int],
    names: tuple[str, str],
) -> None:
    of_k, of_v = names
    for name, x, dim in (("q", q, dims[0]), (of_k, k, dims[1]), (of_v, v, dims[1])):
        a_tensor(name, x)
        if x.dim() != dim:
            layout = "(batch, seqlen, heads, head_dim)" if dim == 4 else "(total, heads, head_dim)"
            wrong(name, f"{dim} dimensions {layout}", x)
        cached = x.dtype in _INPUT_DTYPES and x.itemsize == 1 and q.itemsize == 2
        if x.dtype != q.dtype and not cached:
            wrong(name, f"q's dtype {q.dtype}" + " or float8_e4m3" * (q.itemsize == 2), x)
        if x.device != q.device:
            wrong(name, f"q's device {q.device}", x)
    if q.dtype not in _INPUT_DTYPES:
        wrong("q", "float16, bfloat16, float32 or float8_e4m3", q)
    if q.shape[-1] != k.shape[-1]:
        wrong(of_k, f"q's head_dim {q.shape[-1]}", k)
    if v.dtype != k.dtype:
        wrong(of_v, f"{of_k}'s dtype {k.dtype}", v)
    if k.shape[:-1] != v.shape[:-1]:
        wrong(of_v, f"{of_k}'s shape {tuple(k.shape)} except for head_dim", v)
    for name, x, most in (("q", q, MAX_HEAD_DIM), (of_v, v, MAX_HEAD_DIM_V)):
        if not 1 <= x.shape[-1] <= most:
            wrong(name, f"a head_dim from 1 to {most}", x)
    if 0 in (q.shape[-2], k.shape[-2]):
        wrong(of_k if q.shape[-2] else "q", "at least one head", k if q.shape[-2] else q)
    wrong(of_k, f"a number of heads that divides q's {q.shape[-2]}", f"{k.shape[-2]} heads")


def window(value: Any, causal: Any) -> tuple[int, int, int]:
    """Return (left, right, shift) as ``Call`` has them, with ``causal`` folded into the right
    bound."""
    if value is None:
        return -1, 0 if flag("causal", causal) else -1, 0
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        wrong("window", "(left, right)", value)
    left, right = (_edge(edge, value) for edge in value)
    if flag("causal", causal):
        right = 0 if right is None else min(right, 0)
    return shifted(left, right)


def shifted(left: int | None, right: int | None) -> tuple[int, int, int]:
    """Convert bounds, None for unlimited, to the form of ``Call``: a shift, and bounds that are
    nonnegative or −1 for unlimited.

    Kernels then need no negative bounds. An empty window becomes a window beyond all keys.
    """
    if left is not None and right is not None and left + right < 0:
        return -1, 0, -UNLIMITED
    if left is not None and left < 0:
        return 0, -1 if right is None else right + left, -left
    if right is not None and right < 0:
        return -1 if left is None else left + right, 0, right
    return -1 if left is None else left, -1 if right is None else right, 0


def _edge(edge: Any, window: object) -> int | None:
    """Return a bound as a number; None for unlimited."""
    exact = isinstance(edge, Edge)
    number = edge.keys if exact else edge
    if number is None and not exact:
        return None
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
        wrong("window", "two integers, None or -1 for unlimited", window)
    if (number == -1 and not exact) or number >= UNLIMITED:
        return None
    return max(int(number), -UNLIMITED)


def attention_chunk(value: Any) -> int:
    """Return the chunk size in keys; 0 for None."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"attention_chunk: expected an int or None; got {type(value).__name__}")
    if value < 0:
        wrong("attention_chunk", "a number of keys, or None or 0 for no chunks", value)
    return min(int(value), UNLIMITED)


def flag(name: str, value: object) -> bool:
    """Return ``value`` as True or False; 0 and 1 are accepted."""
    if value is True or value is False:
        return value
    if not isinstance(value, (int, np.bool_)) or value not in (0, 1):
        got = value if isinstance(value, int) else type(value).__name__
        raise TypeError(f"{name}: expected True or False; got {got}")
    return bool(value)


def scalars(
    scale: float | None, head_dim: int, softcap: float, dropout_p: float
) -> tuple[float, float, float]:
    """Return (scale, softcap, dropout_p) as floats in range; the default scale is 1/√head_dim."""
    scale = head_dim**-0.5 if scale is None else number("scale", scale)
    softcap, dropout_p = number("softcap", softcap), number("dropout_p", dropout_p)
    if softcap == 0.0 and dropout_p == 0.0:
        return scale, 0.0, 0.0
    if softcap < 0.0:
        wrong("softcap", "0 for none, or a positive number", softcap)
    if not 0.0 <= dropout_p < 1.0:
        wrong("dropout_p", "0 <= dropout_p < 1", dropout_p)
    return scale, softcap, dropout_p


def number(name: str, value: Any) -> float:
    """Return ``value`` as a float that float32 can represent."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a number; got {type(value).__name__}")
    if isinstance(value, np.floating):  # float16 would be compared in float16
        value = float(value)
    # torch.compile cannot trace math.isfinite for a symbolic number.
    if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        wrong(name, "a finite number of float32", value)
    return value if isinstance(value, float) else float(value)


def bias(value: torch.Tensor, q: torch.Tensor, sizes: tuple[int, int, int, int]) -> torch.Tensor:
    """Return ``value`` with four dimensions, each of size 1 or as in ``sizes`` (batch, heads, rows,
    keys).

    The result has a dtype that kernels read, and no pending negation (negative bit).
    """
    a_tensor("bias", value)
    if value.device != q.device:
        wrong("bias", f"q's device {q.device}", value)
    if value.dtype != torch.bool and not value.is_floating_point():
        wrong("bias", "a floating point dtype, or bool", value)
    fits = value.dim() <= 4 and all(
        have in (1, want)
        for have, want in zip(reversed(value.shape), reversed(sizes), strict=False)
    )
    if not fits:
        wrong("bias", f"a shape that broadcasts to {sizes} (batch, heads, rows, keys)", value)
    if value.dtype not in _BIAS_DTYPES:
        value = value.float()
    value = value.resolve_neg()
    return value[(None,) * (4 - value.dim())] if value.dim() < 4 else value


def per_head(name: str, value: torch.Tensor, q: torch.Tensor, batch: int | None) -> torch.Tensor:
    """Return ``value`` in float32, of shape (heads,) or, if ``batch`` is given, also (batch,
    heads).

    The result is contiguous and without negative bit, because kernels get no stride between heads.
    """
    a_tensor(name, value)
    shapes = [(q.shape[-2],)] + ([(batch, q.shape[-2])] if batch is not None else [])
    if tuple(value.shape) not in shapes:
        wrong(name, f"shape {' or '.join(str(shape) for shape in shapes)}", value)
    if not value.is_floating_point():
        wrong(name, "a floating point dtype", value)
    if value.device != q.device:
        wrong(name, f"q's device {q.device}", value)
    return value.float().contiguous().resolve_neg()


def seed(value: object, device: torch.device) -> torch.Tensor:
    """Return the seed as one int64 on ``device``. If ``value`` is None, the seed is drawn there
    from torch's generator."""
    if value is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype != torch.int64 or value.device != device:
            wrong("seed", f"one int64 on {device}", value)
        # Return the same tensor if possible, because a bound call is found by it.
        return value if value.dim() == 1 else value.reshape(1)
    number = seed_number(value)
    signed = number - 2**64 if number >= 2**63 else number
    return torch.full((1,), signed, dtype=torch.int64, device=device)


def seed_number(value: Any) -> int:
    """Check a seed that is not a tensor."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"seed: expected an int or a tensor; got {type(value).__name__}")
    number = int(value)
    if not -(2**63) <= number < 2**64:
        wrong("seed", "a number of 64 bits", number)
    return number


def unused_seed(value: object, device: torch.device) -> None:
    """Check a seed although nothing is dropped."""
    if isinstance(value, torch.Tensor):
        seed(value, device)
    elif value is not None:
        seed_number(value)


def integers(name: str, value: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    """Check that ``value`` is an int32 tensor of ``shape`` on q's device, contiguous in its last
    dimension."""
    a_tensor(name, value)
    if value.dtype != torch.int32:
        wrong(name, "dtype int32", value)
    if value.shape != shape:
        wrong(name, f"shape {shape}", value)
    if value.device != q.device:
        wrong(name, f"q's device {q.device}", value)
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        wrong(name, "a contiguous last dimension", f"strides {value.stride()}")


def offsets(name: str, value: torch.Tensor, q: torch.Tensor) -> None:
    """Check that ``value`` is int32 offsets (B + 1,) on q's device, B ≥ 0."""
    a_tensor(name, value)
    if value.dim() != 1 or value.shape[0] < 1:
        wrong(name, "shape (batch + 1,)", value)
    integers(name, value, (value.shape[0],), q)


def length(name: str, value: Any) -> int:
    """Check a sequence length given as a number."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, torch.SymInt)):
        raise TypeError(f"{name}: expected an int; got {type(value).__name__}")
    if torch.compiler.is_compiling() and not isinstance(value, np.integer):
        # Only the compiled code knows a number that comes from a tensor.
        torch._check(value >= 0)
        torch._check(value <= UNLIMITED)
        return value  # type: ignore[return-value]  # a SymInt is an int to whoever traces
    if value < 0:
        wrong(name, "0 or more", value)
    if value > UNLIMITED:
        wrong(name, f"at most {UNLIMITED}", value)
    return int(value)


def splits(num_splits: int) -> int:
    """Check ``num_splits``: 0 for the plan's choice, or the number of splits of the keys."""
    return length("num_splits", num_splits)


def only_part(num_splits: int) -> int:
    """Return 1, because merging several splits would change the order of summation."""
    if num_splits > 1:
        wrong("num_splits", "0 or 1 with batch_invariant", num_splits)
    return 1


def rows(name: str, x: torch.Tensor) -> None:
    """Raise ``ValueError`` if x (batch, rows, heads, head_dim) has more rows than kernels can
    count."""
    if x.shape[1] > UNLIMITED:
        wrong(name, f"at most {UNLIMITED} rows", x)


def no_gradient(tensors: Mapping[str, torch.Tensor | None], why: str) -> None:
    """Raise ``ValueError`` if a tensor requires a gradient that is not computed."""
    grad = torch.is_grad_enabled()
    for name, x in tensors.items():
        if x is None:
            continue
        a_tensor(name, x)
        if grad and x.requires_grad:
            wrong(name, f"no requires_grad ({why}; use torch.no_grad() or detach())", x)


def a_dtype(out_dtype: object) -> None:
    """Raise ``TypeError`` unless the value is a dtype or None."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: expected a dtype; got {type(out_dtype).__name__}")


def output(q: torch.Tensor, descale: object, out_dtype: torch.dtype | None) -> None:
    """Check that ``descale`` and a differing ``out_dtype`` are given only with float8 inputs."""
    a_dtype(out_dtype)
    if descale is not None:
        wrong("descale", f"None for {q.dtype} (it scales float8 inputs)", type(descale).__name__)
    if out_dtype is not None and out_dtype != q.dtype:
        wrong("out_dtype", f"None or {q.dtype} (others are for float8 inputs)", out_dtype)
