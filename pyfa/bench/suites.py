"""The benchmark suites. A suite is a list of cells. A cell is one problem and a way to time it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from ..traffic import Shape

# Compares the timing model of an MI300X with the hardware; runs only by name.
MI300X = "mi300x"


@dataclass(frozen=True)
class Cell:
    """One problem and how it is timed. ``passes``: ``forward``, ``backward`` (alone) or ``both``.
    ``timed``: ``device`` (cold cache), ``replay`` (of a CUDA graph, warm cache) or ``host``.
    ``unit``: the unit of the result.

    ``window``: keys to the left that a causal query sees, −1 for all. ``lengths``: the lengths of a
    packed batch; the longest is ``seqlen_q``. ``layers``: the number of layers of a GPT, whose
    training step is timed, or 0 to time attention only. ``vocabulary``: the size of its vocabulary.
    ``fp8``: "inputs" if all inputs are float8, or "cache" for a float8 cache with queries of
    ``dtype``. With "quantize" or "rotate" (quantize with the rotation), the conversion is timed.
    With "copy", a copy of as many tensors is timed. ``head_dim_v``: the head_dim of V if it differs
    from ``head_dim``, otherwise
    0. ``deterministic``: whether gradients must have the same bits on every run. ``label``: where
       the problem comes from, such as the name of a model. ``softcap``: the cap of the scores, 0
       for none. ``sinks``:
    whether each query head has a sink, an input like the others, which gets a gradient too.
    """

    suite: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    dtype: str
    passes: str = "forward"
    timed: str = "device"
    unit: str = "TFLOP/s"
    grad: bool = False
    cache: bool = False
    window: int = -1
    lengths: tuple[int, ...] = ()
    layers: int = 0
    vocabulary: int = 0
    fp8: str = ""
    head_dim_v: int = 0
    deterministic: bool = False
    label: str = ""
    softcap: float = 0.0
    sinks: bool = False

    @property
    def dim_v(self) -> int:
        """Return V's head_dim."""
        return self.head_dim_v or self.head_dim

    @property
    def name(self) -> str:
        """Return the cell's name, unique in its suite; result files are matched by it."""
        parts = [
            f"D={_pair(self.head_dim, self.dim_v)}",
            f"B={self.batch}",
            f"S={_pair(self.seqlen_q, self.seqlen_k)}",
            f"H={_pair(self.heads_q, self.heads_k)}",
            "causal" if self.causal else "full",
        ]
        if self.window >= 0:
            parts.append(f"window={self.window}")
        if self.softcap:
            parts.append(f"softcap={self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.lengths:
            parts[2] = f"S≤{self.seqlen_q} of {sum(self.lengths)}"
        if self.label:
            parts.insert(0, self.label)
        if self.layers:
            parts.append(f"L={self.layers}")
        if self.suite in ("fp8", "fp8_decode", "quantize") or (self.suite == MI300X and self.fp8):
            said = {"": self.dtype, "inputs": "float8", "cache": "float8 cache"}
            parts.append(said.get(self.fp8, self.fp8))
        # Suites of one kind of pass do not name it.
        if self.suite in ("window", "gqa", "varlen", "layers", MI300X) and self.passes != "forward":
            parts.append(self.passes)
        if self.deterministic:
            parts.append("deterministic")
        if self.timed == "host":
            parts.append(f"autograd, {self.passes}" if self.grad else "inference")
        return " ".join(parts)

    @property
    def flops(self) -> float:
        """Return the number of FLOPs: 4·B·H·Sq·Sk·D for a forward, 2.5 times as many for a
        backward. A causal mask halves this number.

        If V has another head_dim, it replaces D in one of the forward's two products and in two of
        the backward's five. It is customary to halve the FLOPs for a causal mask, although this
        leaves out part of the diagonal. With a window, exactly the visible pairs of query and key
        count.
        """
        lengths = self.lengths or (self.seqlen_q,) * self.batch
        if self.window >= 0:
            pairs = float(sum(self._windowed(length) for length in lengths))
        else:
            share = 0.5 if self.causal and self.seqlen_q > 1 else 1.0
            keys = self.lengths or (self.seqlen_k,) * self.batch
            pairs = share * sum(rows * seen for rows, seen in zip(lengths, keys, strict=True))
        products = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}[self.passes]
        return 2.0 * self.heads_q * pairs * (products[0] * self.head_dim + products[1] * self.dim_v)

    def _windowed(self, length: int) -> int:
        keys = length + self.seqlen_k - self.seqlen_q
        return Shape(1, length, keys, 1, 1, 1, 1, self.window, 0).visible_pairs()

    @property
    def tokens(self) -> int:
        """Return the number of query tokens of all sequences."""
        return sum(self.lengths) or self.batch * self.seqlen_q

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of K and V, each read once. If the cell times ``quantize`` or a copy,
        return all bytes that it reads and writes."""
        width = 4 if self.dtype == "float32" else 2
        of_keys = self.batch * self.seqlen_k * self.heads_k * (self.head_dim + self.dim_v)
        if self.fp8 in ("quantize", "rotate", "copy"):
            of_q = self.batch * self.seqlen_q * self.heads_q * self.head_dim
            return (of_q + of_keys) * (width + (width if self.fp8 == "copy" else 1))
        return of_keys * (1 if self.fp8 else width)

    def value(self, seconds: float) -> float:
        """Convert ``seconds`` to the cell's unit."""
        if self.unit == "TFLOP/s":
            return self.flops / seconds / 1e12
        if self.unit == "TB/s":
            return self.bytes_moved / seconds / 1e12
        if self.unit == "ktoken/s":
            return self.tokens / seconds / 1e3
        return seconds * 1e6

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _pair(first: int, second: int) -> str:
    return str(first) if first == second else f"{first},{second}"


def _matrix(suite: str, passes: str, gpu: bool) -> list[Cell]:
    """Return cells with batch · seqlen = 16,384 and heads · head_dim = 2,048, as in
    flash-attention's own benchmark."""
    dims, lengths = ((128, 64, 256), (16384, 4096, 1024)) if gpu else ((64,), (512, 128))
    tokens, width, dtype = (16384, 2048, "bfloat16") if gpu else (512, 256, "float32")
    return [
        Cell(
            suite, tokens // length, length, length, width // dim, width // dim, dim, causal, dtype,
            passes, grad=passes != "forward",
        )
        for dim, causal, length in itertools.product(dims, (True, False), lengths)
    ]  # fmt: skip


def _decode(gpu: bool) -> list[Cell]:
    """Return cells of one query per sequence with a long cache; eight or four heads share each KV
    head."""
    shapes = ((1, 65536), (8, 32768), (64, 8192)) if gpu else ((1, 8192), (4, 2048))
    heads, heads_k, dim, dtype = (32, 8, 128, "bfloat16") if gpu else (8, 2, 64, "float32")
    return [
        Cell("decode", batch, 1, keys, heads, heads_k, dim, True, dtype, unit="TB/s", cache=True)
        for batch, keys in shapes
    ]


def _small(gpu: bool) -> list[Cell]:
    """Return cells whose grids do not fill the device."""
    heads, lengths = ((8, 32), (128, 512, 2048, 8192)) if gpu else ((2,), (16, 64, 128))
    dim, dtype, timed = (128, "bfloat16", "replay") if gpu else (64, "float32", "device")
    return [
        Cell("small", 1, length, length, count, count, dim, True, dtype, timed=timed, unit="us")
        for count, length in itertools.product(heads, lengths)
    ]


def _host(gpu: bool) -> list[Cell]:
    """Return cells so small that the host's time dominates."""
    sizes = (1, 128, 128, 8, 8, 64) if gpu else (1, 16, 16, 2, 2, 64)
    dtype = "bfloat16" if gpu else "float32"
    ways = (("forward", False), ("forward", True), ("both", True))
    return [
        Cell("host", *sizes, True, dtype, passes, timed="host", unit="us", grad=grad)
        for passes, grad in ways
    ]


def _lognormal(count: int, mean: float, spread: float) -> tuple[int, ...]:
    """Return ``count`` lengths at evenly spaced quantiles of a lognormal distribution, in an order
    in which long and short ones are mixed, the same on every machine."""
    normal = NormalDist(mean, spread)
    rising = [round(math.exp(normal.inv_cdf((n + 0.5) / count))) for n in range(count)]
    return tuple(rising[n * 37 % count] for n in range(count))


# 8 sequences as of documents, 32,768 tokens.
_LONG = (8192, 6144, 5120, 4096, 3072, 2560, 2048, 1536)


def _varlen(gpu: bool) -> list[Cell]:
    """Return cells with packed sequences, forward and training: with lengths that halve, with
    equal lengths, and of many kinds of lengths as in training data."""
    total, longest, heads, dim = (16384, 8192, 16, 128) if gpu else (256, 128, 2, 64)
    dtype = "bfloat16" if gpu else "float32"
    halving = tuple(longest >> n for n in range(4))
    # The label, the lengths, heads, head_dim, and whether causal.
    packs: list[tuple[str, tuple[int, ...], int, int, int, bool]] = [
        ("", (*halving, total - sum(halving)), heads, heads, dim, True),
        ("", (total // 16,) * 16, heads, heads, dim, True),
    ]
    if gpu:
        packs += [
            ("64 lognormal", _lognormal(64, 5.66, 0.977), 32, 8, 128, True),
            ("256 short", _lognormal(256, 4.473, 0.875), 16, 16, 64, False),
            ("8 long", _LONG, 32, 8, 128, True),
        ]
    else:
        packs += [
            ("8 lognormal", _lognormal(8, 2.5, 0.9), 4, 2, 64, True),
            ("16 short", _lognormal(16, 1.5, 0.6), 2, 2, 64, False),
        ]
    return [
        Cell("varlen", len(lengths), max(lengths), max(lengths), heads, heads_k, dim, causal, dtype,
             passes, grad=passes != "forward", lengths=lengths, label=label)
        for (label, lengths, heads, heads_k, dim, causal), passes in itertools.product(
            packs, ("forward", "both")
        )
    ]  # fmt: skip


def _window(gpu: bool) -> list[Cell]:
    """Return cells with causal queries that see this many keys to their left, without and with
    sinks."""
    length, widths, dims = (8192, (128, 1024, 4096), (64, 128, 256)) if gpu else (64, (16,), (64,))
    width, dtype = (2048, "bfloat16") if gpu else (128, "float32")
    return [
        Cell("window", 1, length, length, width // dim, width // dim, dim, True, dtype, passes,
             grad=passes != "forward", window=window, sinks=sinks)
        for dim, window, sinks, passes in itertools.product(
            dims, widths, (False, True), ("forward", "backward")
        )
    ]  # fmt: skip


def _gqa(gpu: bool) -> list[Cell]:
    """Return cells with the head counts of large models: groups that share keys, one KV head for
    all, and keys wider than their values."""
    # Batch, length, query heads, KV heads, head_dim of keys and of values if that differs.
    kinds = [(1, 64, 4, 2, 64, 0), (1, 64, 4, 1, 64, 0), (1, 64, 4, 4, 96, 64)]
    if gpu:
        kinds = [
            (8192 // length, length, heads, heads_k, 128, 0)
            for heads, heads_k in ((64, 8), (32, 8), (32, 4), (32, 1))
            for length in (1024, 8192)
        ]
        kinds += [(1, 16384, 32, 8, 128, 0), (2, 8192, 16, 16, 192, 128)]
    dtype = "bfloat16" if gpu else "float32"
    return [
        Cell("gqa", batch, length, length, heads, heads_k, dim, True, dtype, passes,
             grad=passes != "forward", head_dim_v=dim_v)
        for (batch, length, heads, heads_k, dim, dim_v), passes in itertools.product(
            kinds, ("forward", "backward")
        )
    ]  # fmt: skip


# Attention layers as their models are trained: the label, batch, length, query heads, KV heads,
# head_dim, whether causal; then V's head_dim, window, softcap and sinks where a model has them.
_LAYERS: tuple[tuple[str, int, int, int, int, int, bool, dict[str, Any]], ...] = (
    ("Llama-3-8B", 2, 4096, 32, 8, 128, True, {}),
    ("Llama-70B", 1, 8192, 64, 8, 128, True, {}),
    ("GPT-OSS sliding", 1, 8192, 64, 8, 64, True, {"window": 128, "sinks": True}),
    ("GPT-OSS full", 1, 8192, 64, 8, 64, True, {"sinks": True}),
    ("Gemma-2", 1, 4096, 16, 8, 256, True, {"softcap": 50.0}),
    ("Gemma-3 sliding", 1, 8192, 16, 8, 256, True, {"window": 1024}),
    ("Qwen3", 2, 4096, 40, 8, 128, True, {}),
    ("DeepSeek prefill", 1, 8192, 16, 16, 192, True, {"head_dim_v": 128}),
    ("Mistral", 1, 16384, 32, 8, 128, True, {"window": 4096}),
    ("FLUX", 1, 4608, 24, 24, 128, False, {}),
    ("SDXL", 2, 4096, 10, 10, 64, False, {}),
    ("ViT-B", 64, 197, 12, 12, 64, False, {}),
    ("BERT", 8, 512, 16, 16, 64, False, {}),
)
# On a CPU: every term once.
_TINY_LAYERS: tuple[tuple[str, int, int, int, int, int, bool, dict[str, Any]], ...] = (
    ("grouped", 1, 64, 4, 2, 64, True, {}),
    ("GPT-OSS sliding", 1, 64, 4, 2, 64, True, {"window": 16, "sinks": True}),
    ("GPT-OSS full", 1, 64, 4, 2, 64, True, {"sinks": True}),
    ("Gemma-2", 1, 64, 4, 2, 64, True, {"softcap": 2.0}),
    ("ViT-B", 2, 49, 2, 2, 64, False, {}),
)


def _layers(gpu: bool) -> list[Cell]:
    """Return the attention layers of known models, forward and backward."""
    dtype = "bfloat16" if gpu else "float32"
    return [
        Cell("layers", batch, length, length, heads, heads_k, dim, causal, dtype, passes,
             grad=passes != "forward", label=label, **terms)
        for (label, batch, length, heads, heads_k, dim, causal, terms), passes in itertools.product(
            _LAYERS if gpu else _TINY_LAYERS, ("forward", "backward")
        )
    ]  # fmt: skip


def _wide(gpu: bool) -> list[Cell]:
    """Return causal cells of head_dim 512, as of Gemma 4's global layers: forward, without and
    with groups."""
    length, dim, heads = (8192, 512, ((16, 16), (32, 4))) if gpu else (64, 320, ((2, 2), (4, 1)))
    dtype = "bfloat16" if gpu else "float32"
    return [
        Cell("wide", 1, length, length, count, count_k, dim, True, dtype)
        for count, count_k in heads
    ]


def _model(gpu: bool) -> list[Cell]:
    """Return cells of a training step of a small GPT: forward, gradients of all weights, AdamW."""
    lengths = (1024, 8192) if gpu else (32,)
    tokens, heads, dim, layers, words = (16384, 16, 64, 12, 50304) if gpu else (64, 2, 32, 1, 64)
    dtype = "bfloat16" if gpu else "float32"
    return [
        Cell("model", tokens // length, length, length, heads, heads, dim, True, dtype, "both",
             unit="ktoken/s", grad=True, layers=layers, vocabulary=words)
        for length in lengths
    ]  # fmt: skip


# Rows that share a scale where quantize is timed.
QUANTIZE_BLOCK = 128


def _fp8(gpu: bool) -> list[Cell]:
    """Return cells of forward with float8 inputs, compared with 16 bits in the same run."""
    dims, lengths = ((128, 64, 256), (16384, 4096)) if gpu else ((64,), (128,))
    tokens, width, dtype = (16384, 2048, "bfloat16") if gpu else (128, 128, "float16")
    return [
        Cell(
            "fp8", tokens // length, length, length, width // dim, width // dim, dim, causal, dtype,
            fp8=kind,
        )
        for dim, causal, length, kind in itertools.product(
            dims, (True, False), lengths, ("", "inputs")
        )
    ]  # fmt: skip


def _fp8_decode(gpu: bool) -> list[Cell]:
    """Return cells of decode with a float8 cache and 16-bit queries, compared with a 16-bit
    cache."""
    shapes = ((8, 32768), (64, 8192)) if gpu else ((2, 256),)
    heads, heads_k, dim, dtype = (32, 8, 128, "bfloat16") if gpu else (4, 2, 64, "float16")
    return [
        Cell("fp8_decode", batch, 1, keys, heads, heads_k, dim, True, dtype, unit="us", cache=True,
             fp8=kind)
        for (batch, keys), kind in itertools.product(shapes, ("", "cache"))
    ]  # fmt: skip


def _quantize(gpu: bool) -> list[Cell]:
    """Return cells for the cost of conversion to float8, compared with a copy."""
    length, heads, dim, dtype = (16384, 16, 128, "bfloat16") if gpu else (128, 2, 64, "float16")
    return [
        Cell("quantize", 1, length, length, heads, heads, dim, False, dtype, unit="TB/s", fp8=kind)
        for kind in ("copy", "quantize", "rotate")
    ]


def _mi300x() -> list[Cell]:
    """Return cells for each kernel that the timing model knows, on grids that do and do not fill
    the device, long and short, bound by compute units and by memory. ``mi300x.py`` runs them, on an
    MI300X only."""
    sizes = [(4, 16384, 16), (8, 2048, 16), (1, 1024, 16)]  # batch, length, heads
    cells = [
        Cell(MI300X, batch, length, length, heads, heads, dim, causal, "bfloat16")
        for dim, causal, (batch, length, heads) in itertools.product(
            (128, 64), (False, True), sizes
        )
    ]
    # 608 and 640 workgroups of 256 rows on 304 compute units, 32 blocks a head: the last round.
    cells += [
        Cell(MI300X, 1, 8192, 8192, heads, heads, 128, False, "bfloat16") for heads in (19, 20)
    ]
    cells += [
        Cell(MI300X, 4, 8192, 8192, 16, 16, dim, causal, "bfloat16", head_dim_v=dim_v)
        for dim, dim_v in ((96, 0), (192, 128), (192, 0), (256, 0))
        for causal in (False, True)
    ]
    cells += [
        Cell(MI300X, 4, length, length, 16, 16, dim, causal, "bfloat16", fp8="inputs")
        for dim, causal, length in (
            (64, False, 8192), (128, False, 16384), (128, True, 16384), (128, False, 1024),
            (256, False, 8192),
        )
    ]  # fmt: skip
    cells += [
        Cell(MI300X, batch, length, length, 16, 16, dim, causal, "bfloat16", "backward", grad=True,
             deterministic=deterministic)
        for deterministic in (False, True)
        for dim, causal, batch, length in (
            (128, False, 4, 8192), (128, True, 4, 8192), (128, False, 4, 2048),
            (64, False, 4, 8192), (64, True, 4, 8192),
        )
    ]  # fmt: skip
    # Bytes of K and V decide: from what Infinity Cache holds to 17 GB.
    cells += [
        Cell(MI300X, batch, 1, keys, heads, heads_k, dim, True, "bfloat16", unit="TB/s", cache=True,
             fp8=kind)
        for batch, keys, heads, heads_k, dim, kind in (
            (64, 32768, 32, 8, 128, ""), (16, 32768, 32, 8, 128, ""), (64, 8192, 64, 8, 128, ""),
            (64, 32768, 16, 16, 64, ""), (64, 32768, 32, 8, 128, "cache"),
            (8, 8192, 32, 8, 128, ""),
        )
    ]  # fmt: skip
    return cells


# By name: the cells for a GPU, or for a CPU.
SUITES: dict[str, Callable[[bool], list[Cell]]] = {
    "forward": lambda gpu: _matrix("forward", "forward", gpu),
    "backward": lambda gpu: _matrix("backward", "backward", gpu),
    "decode": _decode,
    "small": _small,
    "varlen": _varlen,
    "window": _window,
    "gqa": _gqa,
    "layers": _layers,
    "wide": _wide,
    "fp8": _fp8,
    "fp8_decode": _fp8_decode,
    "quantize": _quantize,
    "host": _host,
    "model": _model,
    MI300X: lambda gpu: _mi300x(),
}
# Suites that ``pyfa bench`` runs only by name.
BY_NAME_ALONE = (MI300X,)
