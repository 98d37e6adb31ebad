"""Defines ``Case``: one attention problem, specified by a few frozen fields, without tensors or
randomness.

A case's name contains every field that differs from the default. So two cases have the same name
only if they are the same, and a name means the same problem in every report. The name seeds the
inputs (see ``inputs.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..problem import FEATURES, NARROW

KINDS = ("dense", "varlen", "kvcache", "latent")
RECIPES = ("plain", "growing", "huge", "equal", "offset", "big", "identity", "mixed")
# Inputs that are hard only for a float8 P, and float8 queries and keys that were rotated.
FLOAT8_RECIPES = ("sink", "needle", "rotated")
LAYOUTS = ("contiguous", "strided", "heads_first", "unaligned", "gapped")
BIASES = ("full", "keys", "rows", "heads", "bool", "hidden", "other")
HOSTILE = ("q=nan", "k=nan", "v=nan", "q=inf", "q=-inf", "k=inf", "k=-inf", "v=inf", "padding=inf")
ROTARIES = ("interleaved", "halves", "interleaved_part", "halves_part")
# Rotary embeddings whose tables are in float32 instead of q's dtype.
FLOAT32_ROTARIES = tuple(f"{name}_float32" for name in ROTARIES)
_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8fnuz",
}


@dataclass(frozen=True)
class Case:
    """One attention problem of the suite, and the recipe for its inputs.

    ``kind`` says which public function is called: "dense" (``attention``), "varlen"
    (``attention_varlen``), "kvcache" (``attention_kvcache``) or "latent" (``attention_latent``).
    ``lengths_q`` and ``lengths_k`` are the numbers of query rows and of keys of each sequence. In a
    cache, the number of keys does not include left padding, but includes the appended keys. These
    fields need an explanation:

    - ``dlse``: "both" if there are incoming gradients of out and of the LSE, "only" if there is one
      of the LSE only.
    - ``bias``: the dimensions of the bias (one of ``BIASES``). "hidden" has all dimensions and some
      rows of −inf; "other" has all dimensions and the 16-bit dtype that is not q's. Others are in
      float32, in q's dtype if the name ends in "_like_q", or boolean if it ends in "_bool".
    - ``alibi``: slopes per "heads" or per "batch" and head.
    - ``used_q``, ``used_k``: the sequences also have unused rows (``seqused_q``, ``seqused_k``).
    - ``slack``: the number of rows of a packed tensor or cache that belong to no sequence, and by
      how much ``max_seqlen`` exceeds the longest sequence.
    - ``shared``: sequences share their first page.
    - ``recipe``, ``layout``: the distribution of the values (``RECIPES``), and their memory layout
      (``LAYOUTS``).
    - ``cache_dtype``: the dtype of k and v if it is not q's.
    - ``scales``: float8 scales per "tensor", per "head", or per block of this many rows.
    - ``hostile``: which input contains a NaN or an inf (``HOSTILE``).
    - ``score_mod``, ``mask_mod``: names in ``modifiers.py``.
    - ``captured_grad``: also compute gradients of the tensors that the score_mod captured.
    - ``topk``: the length of each row's list of keys. Some entries of the list are empty, and some
      repeat a key. With ``used_q`` the call also passes ``topk_lengths``.
    - ``block_mask``: the block size of a BlockMask with full, partial and absent blocks.
    - ``tree``: the call has a ``tree_mask``, one per sequence.
    - ``head_dim_v``: for ``attention_latent``, the number of elements of a key that are its value.
    """

    kind: str = "dense"
    dtype: str = "bfloat16"
    lengths_q: tuple[int, ...] = (65, 65)
    lengths_k: tuple[int, ...] = (97, 97)
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    backward: bool = False
    dlse: str = ""
    causal: bool = False
    window: tuple[int, int] | None = None
    attention_chunk: int = 0
    scale: float | None = None
    softcap: float = 0.0
    bias: str = ""
    bias_grad: bool = False
    alibi: str = ""
    sinks: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    used_q: bool = False
    used_k: bool = False
    slack: int = 0
    page_size: int = 0
    shared: bool = False
    leftpad: bool = False
    batch_idx: bool = False
    packed_q: bool = False
    new_keys: int = 0
    rotary: str = ""
    rotary_seqlens: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    recipe: str = "plain"
    layout: str = "contiguous"
    cache_dtype: str = ""
    scales: str | int = ""
    out_dtype: str = ""
    hostile: str = ""
    score_mod: str = ""
    mask_mod: str = ""
    captured_grad: bool = False
    topk: int = 0
    block_mask: int = 0
    tree: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the dtypes of q, k and v."""
        return (self.dtype, self.cache_dtype or self.dtype, self.cache_dtype or self.dtype)

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    @property
    def name(self) -> str:
        """Return the name. It is unique, and stays the same as long as the fields keep their
        meaning."""
        parts = [
            f"{self.kind}-{_SHORT.get(self.dtype, self.dtype)}",
            f"b{self.batch}-q{_lengths(self.lengths_q)}-k{_lengths(self.lengths_k)}",
            f"h{self.heads_q}x{self.heads_k}-d{self.head_dim}x{self.head_dim_v}",
        ]
        for item in _NAMED:
            value = getattr(self, item.name)
            if value == item.default:
                continue
            if value is True:
                parts.append(item.name)
            elif isinstance(value, tuple):
                parts.append(f"{item.name}={','.join(str(x) for x in value)}")
            else:
                parts.append(f"{item.name}={value}")
        return "-".join(parts)

    @property
    def passes_cache_seqlens(self) -> bool:
        """Return whether the call passes ``cache_seqlens``. Without it, the whole cache is used."""
        return bool(
            self.used_k or self.leftpad or self.new_keys or self.slack
            or len(set(self.lengths_k)) > 1
            or (self.page_size and any(n % self.page_size for n in self.lengths_k))
        )  # fmt: skip

    @property
    def features(self) -> frozenset[str]:
        """Return the features (names in ``problem.FEATURES``) that a backend must declare to get
        this case."""
        left, right = self.window or (-1, -1)
        right = 0 if self.causal and right >= -1 else right
        moved = min(left, right) < -1
        cache, latent = self.kind in ("kvcache", "latent"), self.kind == "latent"
        needs = {
            # A list leaves out what its row does not see, before a backend has it.
            "causal": right == 0 and not moved and not self.topk,
            "window": left >= 0 or right > 0 or moved,
            "negative_edge": moved,
            "chunk": self.attention_chunk > 0,
            "softcap": self.softcap != 0.0,
            "alibi": bool(self.alibi),
            "bias": bool(self.bias),
            "bias_grad": self.bias_grad,
            "sinks": self.sinks,
            "dropout": self.dropout_p > 0.0,
            "score_mod": bool(self.score_mod),
            "mask_mod": bool(self.mask_mod) or self.block_mask > 0,
            "captured_grad": self.captured_grad,
            "varlen": self.kind == "varlen" or self.packed_q,
            "seqused": (self.passes_cache_seqlens if cache else self._has_seqused) or self.topk > 0,
            "paged": self.page_size > 0 or self.topk > 0,
            "leftpad": self.leftpad,
            "batch_idx": self.batch_idx,
            "gqa": self.heads_q != self.heads_k,
            "dv": self.head_dim != self.head_dim_v,
            "wide": not latent and max(self.head_dim, self.head_dim_v) > NARROW,
            "latent": latent,
            "topk": self.topk > 0,
            "tree": self.tree,
            "backward": self.backward,
            "dlse": bool(self.dlse),
            "deterministic": self.deterministic,
            "batch_invariant": self.batch_invariant,
            "fp8": self.dtypes[1].startswith("float8"),
        }
        return frozenset(name for name, needed in needs.items() if needed)

    @property
    def has_bool_bias(self) -> bool:
        return self.bias == "bool" or self.bias.endswith("_bool")

    @property
    def _has_seqused(self) -> bool:
        return self.used_q or self.used_k or self.page_size > 0

    @property
    def _can_be_hostile(self) -> bool:
        """Return whether ``hostile.py`` defines the effect of the element, or of the padding."""
        if self.hostile == "padding=inf":
            return not self.rotary and "float8" not in "".join(self.dtypes)
        pairs = list(zip(self.lengths_q, self.lengths_k, strict=False))
        unknown = self.dropout_p or self.rotary or self.shared or self.dlse or self.tree
        unknown = unknown or (self.bias and not self.has_bool_bias)
        unknown = unknown or self.score_mod or self.block_mask
        if "float8" in "".join(self.dtypes):
            unknown = unknown or "inf" in self.hostile  # which the format does not have
        if self.hostile.startswith(("q=", "k=")) and "inf" in self.hostile:
            unknown = unknown or self.softcap  # which makes it finite
            unknown = unknown or (self.scale is not None and self.scale <= 0.0)  # of which sign?
        if self.hostile == "k=-inf":  # every row must see another key
            masked = self.causal or self.window or self.mask_mod or self.bias
            chunk = self.attention_chunk
            alone = chunk and any(rows > keys or (keys - 1) % chunk == 0 for rows, keys in pairs)
            unknown = unknown or bool(masked or alone) or min(self.lengths_k) < 2
        if self.backward:
            unknown = unknown or self.page_size or self.sinks or "inf" in self.hostile
        return self.hostile in HOSTILE and not unknown and any(a and b for a, b in pairs)

    @property
    def _can_be_latent(self) -> bool:
        """Return whether ``attention_latent`` can express this case."""
        terms = self.window or self.softcap or self.bias or self.alibi or self.dropout_p
        terms = terms or self.attention_chunk or self.score_mod or self.mask_mod
        terms = terms or self.batch_invariant
        options = self.leftpad or self.batch_idx or self.packed_q or self.new_keys or self.rotary
        fits = self.heads_k == 1 and self.head_dim_v <= self.head_dim and self.scale is not None
        return fits and not (terms or options or self.hostile)

    def clamped(self, longest: int) -> Case:
        """Return the case with no length above ``longest``, for slow backends."""
        lengths_k = tuple(min(n, longest) for n in self.lengths_k)
        return replace(
            self,
            lengths_q=tuple(min(n, longest) for n in self.lengths_q),
            lengths_k=lengths_k,
            new_keys=min(self.new_keys, *lengths_k) if lengths_k else self.new_keys,
        )

    def flaws(self) -> list[str]:
        """Return why this is not a valid case: which of its fields cannot be combined in the
        API."""
        dense, latent = self.kind == "dense", self.kind == "latent"
        cache = latent or self.kind == "kvcache"
        uneven = len(set(self.lengths_q)) > 1 or (dense and len(set(self.lengths_k)) > 1)
        found = {
            "unknown feature": not self.features <= set(FEATURES),
            "lengths": len(self.lengths_k) != len(self.lengths_q),
            "heads": self.heads_q % self.heads_k != 0,
            "dense lengths differ": uneven and (dense or (cache and not self.packed_q)),
            "used rows": (dense and (self.used_q or self.used_k))
            or (cache and self.used_q and not self.topk),
            "latent": latent and not self._can_be_latent,
            "block_mask": self.block_mask > 0
            and bool(latent or self.mask_mod or self.slack or self.leftpad or self.page_size),
            "topk": self.topk > 0 and (not latent or isinstance(self.scales, int)),
            "slack": dense and self.slack > 0,
            "pages": dense and self.page_size > 0,
            "shared": self.shared
            and (
                self.kind != "varlen"
                or not self.page_size
                or self.lengths_k[0] < min(self.page_size, max(self.lengths_k))
            ),
            "cache options": not cache
            and bool(self.leftpad or self.batch_idx or self.packed_q or self.new_keys),
            "cache only": not cache and bool(self.rotary or self.num_splits),
            "tree": self.tree and (self.kind != "kvcache" or bool(self.bias)),
            "parts of an invariant call": self.batch_invariant and self.num_splits > 1,
            "batch_idx with pages": self.batch_idx and self.page_size > 0,
            "cache gradient": cache and bool(self.backward or self.dropout_p),
            "gradient options": not self.backward
            and bool(self.dlse or self.bias_grad or self.deterministic),
            "captured_grad": self.captured_grad
            and not (self.backward and self.score_mod in ("relative", "alibi", "gated")),
            "bias_grad": self.bias_grad and (not self.bias or self.has_bool_bias),
            "append": self.new_keys > min(self.lengths_k, default=0),
            "rotary needs": bool(self.rotary) and self.head_dim < 2,
            "window with causal": self.causal and self.window is not None and self.window[1] > 0,
            "batch slopes": self.alibi == "batch" and self.batch == 0,
            "float8 only": not self.dtypes[1].startswith("float8")
            and bool(self.scales or self.cache_dtype or self.recipe in FLOAT8_RECIPES),
            "float8 gradient": self.dtypes[1].startswith("float8") and self.backward,
            "float8 tables": bool(self.rotary)
            and self.dtype.startswith("float8")
            and self.rotary not in FLOAT32_ROTARIES,
            "float8 under": bool(self.cache_dtype) and self.dtype not in ("bfloat16", "float16"),
            "out_dtype": bool(self.out_dtype) and not self.dtype.startswith("float8"),
            "hostile": bool(self.hostile) and not self._can_be_hostile,
            "rotated": self.recipe == "rotated" and self.head_dim % 8 != 0,
            # Its rows would be equal: one number, however many there are.
            "growing": self.recipe == "growing" and self.head_dim < 8,
            "identity": self.recipe == "identity" and max(self.lengths_k, default=0) > 256,
        }
        return [name for name, wrong in found.items() if wrong]


def dense(rows: int, keys: int, batch: int = 2, **options: Any) -> Case:
    """Return a dense case whose sequences all have ``rows`` rows and ``keys`` keys."""
    return case({"lengths_q": (rows,) * batch, "lengths_k": (keys,) * batch} | options)


def packed(lengths: tuple[tuple[int, ...], tuple[int, ...]], kind: str, **options: Any) -> Case:
    """Return a case of ``kind`` whose sequences have these ``lengths`` of rows and of keys."""
    return case({"kind": kind, "lengths_q": lengths[0], "lengths_k": lengths[1]} | options)


def case(options: Mapping[str, Any]) -> Case:
    """Return a case. V's head_dim is K's unless it is given."""
    dim = options.get("head_dim", 64)
    return Case(**{"head_dim_v": dim} | dict(options))


_IN_FRONT = (
    "kind", "dtype", "lengths_q", "lengths_k", "heads_q", "heads_k", "head_dim", "head_dim_v",
)  # fmt: skip
_NAMED = tuple(item for item in fields(Case) if item.name not in _IN_FRONT)


def _lengths(lengths: tuple[int, ...]) -> str:
    if len(set(lengths)) == 1:
        return str(lengths[0])
    return ",".join(str(n) for n in lengths)


def pick(key: str, choices: Any) -> Any:
    """Return one of ``choices``, selected by the SHA-256 of ``key``. The selection is the same on
    every machine and in every version of Python."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return choices[number % len(choices)]
