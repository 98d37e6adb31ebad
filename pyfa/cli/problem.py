"""The ``[problem]`` flags, and the tensors without memory that they describe."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..dispatch import Explanation
    from ..traffic import Model, Shape, TiledKernel

_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e4m3fnuz")
_CHUNK = 8192  # Llama 4's
_PAGE_SIZE = 256
_TOPK = 2048  # DeepSeek-V3.2's
SEQLEN = (8192, 8192)  # the default
_LARGEST = 2**31 - 1  # lengths and offsets are int32
_MOST_BYTES = 2**63 - 1  # of one tensor, as PyTorch counts them


def _pair(text: str) -> tuple[int, int]:
    """Parse ``"8"`` as (8, 8) and ``"8,2"`` as (8, 2)."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected a number, or two as 32,8; got {text!r}")
    return _size(parts[0]), _size(parts[-1])


def _number(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0 up; got {text!r}")
    return _size(text)


def _size(text: str) -> int:
    if int(text) > _LARGEST:
        raise argparse.ArgumentTypeError(f"expected at most {_LARGEST:,}; got {int(text):,}")
    return int(text)


def _window(text: str) -> tuple[int | None, int | None]:
    parts = [part.strip() for part in text.split(",")]
    edges = [None if part in ("none", "-1") else part for part in parts]
    if len(edges) != 2 or not all(e is None or e.removeprefix("-").isdecimal() for e in edges):
        raise argparse.ArgumentTypeError(f"expected two numbers or none, as 256,0; got {text!r}")
    left, right = (None if edge is None else int(edge) for edge in edges)
    return left, right


def _dtype(text: str) -> str:
    name = _SHORT.get(text, text)
    if name not in _DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_DTYPES)}; got {text!r}")
    return name


def _features(text: str) -> tuple[str, ...]:
    from ..problem import FEATURES

    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name in FEATURES and FEATURES[name].flag:
            raise argparse.ArgumentTypeError(f"for {name}, use {FEATURES[name].flag}")
        if name not in FEATURES:
            expected = ", ".join(by_name())
            raise argparse.ArgumentTypeError(f"expected some of {expected}; got {name!r}")
    return names


def by_name() -> tuple[str, ...]:
    """Return the names that ``--features`` takes. Other features of a problem have a flag of their
    own."""
    from ..problem import FEATURES

    return tuple(name for name, feature in FEATURES.items() if not feature.flag)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the ``[problem]`` flags to ``parser``."""
    group = parser.add_argument_group("problem")
    group.add_argument("--batch", type=_number, default=1, metavar="B", help="sequences")
    group.add_argument(
        "--seqlen",
        type=_pair,
        default=SEQLEN,
        metavar="S|Sq,Sk",
        help="queries and keys of each sequence; 1,32768 is one query over 32,768 keys "
        f"(default: {SEQLEN[0]})",
    )
    group.add_argument(
        "--heads",
        type=_pair,
        default=(8, 8),
        metavar="H|H,Hk",
        help="query heads and KV heads; 64,8 is grouped-query attention",
    )
    group.add_argument(
        "--head-dim",
        type=_pair,
        default=(64, 64),
        metavar="D|D,Dv",
        help="head_dim of q and k, then of v",
    )
    group.add_argument(
        "--dtype", type=_dtype, default="bfloat16", metavar="T", help=", ".join(_DTYPES)
    )
    group.add_argument("--causal", action="store_true", help="causal mask (default: none)")
    group.add_argument(
        "--window",
        type=_window,
        metavar="L,R",
        help="visible keys before and after each query, as in 256,0; the word none means "
        "unlimited, and a number below -1 excludes keys next to the query, as in --window=256,-8 "
        "(default: no window)",
    )
    group.add_argument(
        "--features",
        type=_features,
        default=(),
        metavar="a,b,…",
        help=f"some of {', '.join(by_name())} (default: none)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument(
        "--device",
        metavar="D",
        help="a GPU by name, such as MI300X, H200 or RTX4090 (default: this machine's)",
    )


def explain(
    options: argparse.Namespace, device: str | None, backend: str | None = None
) -> Explanation:
    """Call ``pyfa.explain`` for the problem that the flags describe, here or on a named
    ``device``."""
    import torch

    import pyfa

    place = torch.device("cuda" if device is None and torch.cuda.is_available() else "cpu")
    q, k, v, arguments = _build(options, place)
    return pyfa.explain(q, k, v, device=device, backend=backend, **arguments)


def shape(options: argparse.Namespace) -> Shape:
    """Return only the sizes: a dense attention of the longest sequences, without score terms."""
    import torch

    from .. import validate
    from ..traffic import Shape

    left, right, shift = validate.window(options.window, options.causal)
    (rows, keys), (heads, heads_k) = options.seqlen, options.heads
    batch, latent = options.batch, not {"latent", "topk"}.isdisjoint(options.features)
    if "topk" in options.features:
        batch, rows, keys = batch * rows, 1, min(keys, _TOPK)
    return Shape(
        batch, rows, keys, heads, 1 if latent else heads_k, options.head_dim[0],
        options.head_dim[1], left, right, getattr(torch, options.dtype).itemsize, latent, shift,
    )  # fmt: skip


def modeled(options: argparse.Namespace) -> tuple[Explanation, Model, str]:
    """Return the explanation, its costs, and a reason if no kernels are known."""
    from ..traffic import model

    answer = explain(options, options.device, options.backend)
    sizes = shape(options)
    if 0 in (sizes.batch, sizes.seqlen_q, sizes.seqlen_k):
        raise ValueError("--batch and --seqlen: expected 1 or more")
    kernels, why_none = kernels_of(answer, sizes, options.compile)
    return answer, model(sizes, answer.problem.device, options.dtype, kernels), why_none


def kernels_of(
    answer: Explanation, shape: Shape, compiled: bool
) -> tuple[Sequence[TiledKernel], str]:
    """Return the kernels of the chosen backend's plan, or why there are none."""
    from ..backends import BACKENDS
    from ..backends.base import Tiled

    if answer.chosen is None:
        return (), "no backend can run this attention"
    backend = BACKENDS[answer.chosen]
    if not isinstance(backend, Tiled):
        able = [one.backend for one in answer.answers if one.plan is not None]
        others = [name for name in able if isinstance(BACKENDS[name], Tiled)]
        hint = f" (--backend {others[0]} does)" if others else ""
        return (), f"{answer.chosen} has no known tiles{hint}"
    (plan,) = (one.plan for one in answer.answers if one.backend == answer.chosen)
    assert plan is not None
    return backend.tiled_kernels(plan, answer.problem, shape, compiled), ""


def _build(
    options: argparse.Namespace, place: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    import torch

    wanted = set(options.features)
    backward = bool(wanted & {"backward", "dlse", "bias_grad", "captured_grad", "deterministic"})
    batch, (rows, keys) = options.batch, options.seqlen
    (heads, heads_k), (dim, dim_v) = options.heads, options.head_dim
    dtype = getattr(torch, options.dtype)

    # Expanded from one row: the shape and the device of a real input, and next to no memory.
    def tensor(*shape: int, dtype: torch.dtype = dtype, grad: bool = False) -> torch.Tensor:
        if math.prod(shape) * dtype.itemsize > _MOST_BYTES:
            raise ValueError(f"expected tensors that PyTorch can describe; got shape {shape}")
        x = torch.zeros(shape[-1], dtype=dtype, device=place).expand(shape)
        return x.requires_grad_() if grad else x

    def lengths(count: int) -> torch.Tensor:
        return tensor(count, dtype=torch.int32)

    if wanted & {"latent", "topk"}:
        return _latent(options, tensor)
    cached = bool(wanted & {"leftpad", "batch_idx", "tree"}) or (
        bool(wanted & {"paged", "seqused"}) and "varlen" not in wanted
    )
    packed = "varlen" in wanted
    arguments: dict[str, Any] = {"causal": options.causal, "window": options.window}
    q = tensor(*((batch * rows,) if packed else (batch, rows)), heads, dim, grad=backward)
    if "paged" in wanted:
        pages = -(-keys // _PAGE_SIZE)
        outer: tuple[int, ...] = (batch * pages, _PAGE_SIZE)
        arguments["page_table"] = tensor(batch, pages, dtype=torch.int32)
    else:
        outer = (batch * keys,) if packed and not cached else (batch, keys)
    k = tensor(*outer, heads_k, dim, grad=backward)
    v = tensor(*outer, heads_k, dim_v, grad=backward)
    if packed:
        arguments |= {"cu_seqlens_q": lengths(batch + 1), "max_seqlen_q": rows}
    if packed and not cached:
        arguments["max_seqlen_k"] = keys
        arguments["cu_seqlens_k"] = None if "paged" in wanted else lengths(batch + 1)
    if cached or "seqused" in wanted or "paged" in wanted:
        arguments["cache_seqlens" if cached else "seqused_k"] = lengths(batch)
    for name, argument in (("leftpad", "cache_leftpad"), ("batch_idx", "cache_batch_idx")):
        if name in wanted:
            arguments[argument] = lengths(batch)
    if "chunk" in wanted:
        arguments["attention_chunk"] = _CHUNK
    if "softcap" in wanted:
        arguments["softcap"] = 30.0
    if "alibi" in wanted:
        arguments["alibi_slopes"] = tensor(heads, dtype=torch.float32)
    if "tree" in wanted:
        arguments["tree_mask"] = tensor(batch, rows, rows, dtype=torch.bool)
    if wanted & {"bias", "bias_grad"}:
        bias_grad = "bias_grad" in wanted
        arguments["bias"] = tensor(1, heads, rows, keys, dtype=torch.float32, grad=bias_grad)
    if "score_mod" in wanted:
        arguments["score_mod"] = lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx)
    if "captured_grad" in wanted:
        gain = tensor(heads, dtype=torch.float32, grad=True)
        arguments["score_mod"] = lambda score, b, h, q_idx, kv_idx: score * gain[h]
    if "mask_mod" in wanted:
        arguments["mask_mod"] = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    if "sinks" in wanted:
        arguments["sinks"] = tensor(heads, dtype=torch.float32)
    if "dropout" in wanted:
        arguments |= {"dropout_p": 0.1, "seed": 0}
    if "deterministic" in wanted:
        arguments["deterministic"] = True
    if "batch_invariant" in wanted:
        arguments["batch_invariant"] = True
    if "dlse" in wanted:
        arguments["return_lse"] = True
    return q, k, v, arguments


def _latent(
    options: argparse.Namespace, tensor: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the problem of ``attention_latent``, with one KV head. With lists of keys each row is
    a sequence over pages of one key."""
    import torch

    wanted, batch, (rows, keys) = set(options.features), options.batch, options.seqlen
    (heads, _), (dim, dim_v) = options.heads, options.head_dim
    if dim_v > dim or options.window:
        raise ValueError(
            "--features latent: expected a head_dim of v of at most q's, as "
            "--head-dim 576,512, and no window"
        )
    arguments: dict[str, Any] = {"latent": True, "causal": options.causal}
    store: tuple[int, ...] = (batch, keys)
    if "topk" in wanted:
        count = min(keys, _TOPK)
        arguments |= {"topk": True, "causal": False}
        arguments["page_table"] = tensor(batch * rows, count, dtype=torch.int32)
        store, batch, rows = (batch * keys, 1), batch * rows, 1
    elif "paged" in wanted:
        pages = -(-keys // _PAGE_SIZE)
        store = (batch * pages, _PAGE_SIZE)
        arguments["page_table"] = tensor(batch, pages, dtype=torch.int32)
    if wanted & {"topk", "paged", "seqused"}:
        arguments["cache_seqlens"] = tensor(batch, dtype=torch.int32)
    if "sinks" in wanted:
        arguments["sinks"] = tensor(heads, dtype=torch.float32)
    cache = tensor(*store, 1, dim)
    return tensor(batch, rows, heads, dim), cache, cache[..., :dim_v], arguments
