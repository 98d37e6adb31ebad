"""Cases that execute machine code that no other case of their level executes.

``benchmarks/cover.py`` drew cases at random, ran them in the emulator on the gfx942 objects in the
wheel, and kept those that executed new instructions. The file ``grid_cover.jsonl`` has one of them
per line. The cases of level "quick" are those that execute the most instructions in the least time:
60 of those that were drawn, then others, of which ``cover.py --quick`` chose most. Some launch code
objects that no other quick case launches: of head dims 96, 192 and 256, of float8 caches, of pages
in prefill, of dropout, and of a term alone. Others catch planted faults.

The quick level executes 70 % of all instructions of the code objects in the wheel
(``benchmarks/results/coverage_gfx942_all.json``). A kernel that changes may need other cases:
``cover.py --quick`` writes lines to add. A case that is no longer needed does no harm.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .cases import BIASES, Case, dense, packed
from .grid_axes import HALF

_DRAWN = Path(__file__).with_suffix(".jsonl")

# Each catches a planted fault that no other quick case caught; the comment says what it has.
_FAULTS: tuple[Mapping[str, Any], ...] = (
    # A head_dim that is a multiple of 8 and ends inside a tile, beside wider values.
    {"lengths_q": (17,), "lengths_k": (33,), "head_dim": 16, "head_dim_v": 80, "backward": True},
    # A boolean bias alone, and a NaN or inf in keys that it hides: the last tile is nearly full.
    *({"dtype": half, "lengths_q": (61,), "lengths_k": (380,), "heads_q": 4, "head_dim": dim,
       "head_dim_v": dim, "bias": bias}
      for dim in (64, 96, 128) for half, bias in zip(HALF, ("bool", "heads_bool"), strict=True)),
    *({"dtype": half, "lengths_q": (33,), "lengths_k": (188,), "head_dim": 64, "bias": "bool",
       "hostile": element} for half, element in zip(HALF, ("k=nan", "k=inf"), strict=True)),
    # Tiles that the ends of rows and keys cut are nearly full: code for the rest of a tile runs
    # with all of its registers in use.
    {"dtype": "float16", "lengths_q": (61,), "lengths_k": (380,), "heads_q": 1, "heads_k": 1,
     "head_dim": 96, "head_dim_v": 96, "backward": True},
    {"lengths_q": (61,), "lengths_k": (125,), "heads_q": 1, "heads_k": 1,
     "score_mod": "relative"},
    {"lengths_q": (61,), "lengths_k": (125,), "heads_q": 1, "heads_k": 1, "backward": True,
     "softcap": 2.0, "bias": "full", "bias_grad": True},
    # A bias of the other 16-bit type.
    {"dtype": "float16", "lengths_q": (61,), "lengths_k": (125,), "heads_q": 1, "heads_k": 1,
     "backward": True, "bias": "other", "bias_grad": True},
    # A 16-bit bias that sequences share, or heads, or both: its gradient is a sum over them.
    *({"dtype": dtype, "lengths_q": (33,) * 3, "lengths_k": (65,) * 3, "heads_q": 4,
       "backward": True, "bias": bias, "bias_grad": True}
      for dtype, bias in (("float16", "heads_like_q"), ("bfloat16", "batch_like_q"),
                          ("float16", "matrix_like_q"))),
    # Three tiles of keys more than a multiple of four: the rest of a decode loads some itself.
    {"kind": "kvcache", "lengths_q": (1,), "lengths_k": (700,), "heads_k": 1,
     "attention_chunk": 3000, "num_splits": 1},
    # Rows whose last key begins a group of four.
    {"kind": "latent", "dtype": "float16", "cache_dtype": "float8_e4m3fnuz",
     "lengths_q": (3, 3, 3), "lengths_k": (39, 101, 135), "heads_q": 4, "heads_k": 1,
     "head_dim": 576, "head_dim_v": 512, "scale": 0.05, "causal": True},
    # Several sequences where a workgroup goes on to the next head.
    {"lengths_q": (129, 129), "lengths_k": (257, 257), "heads_q": 4, "backward": True,
     "causal": True, "attention_chunk": 100},
    # For each 16-bit dtype: chunks that hide keys from some rows of each tile.
    *({"dtype": half, "lengths_q": (200,), "lengths_k": (200,), "head_dim": 128,
       "head_dim_v": 128, "backward": True, "attention_chunk": 128} for half in HALF),
    # Keys for each wavefront of a decode with two tiles of rows.
    {"kind": "kvcache", "dtype": "float16", "lengths_q": (3,), "lengths_k": (700,), "heads_q": 8,
     "heads_k": 1, "head_dim": 192, "head_dim_v": 128, "num_splits": 1},
    # For each 16-bit dtype: 20 pairs to rotate, 8 at a time; queries to rotate without keys to
    # append; splits of different lengths with values that are narrower than a tile; a maximum that
    # rises from tile to tile, with a bias and with keys in pages.
    *({"kind": "kvcache", "dtype": half, **fields} for half in HALF for fields in (
        {"lengths_q": (2, 2), "lengths_k": (9, 20), "heads_k": 1, "head_dim": 40, "head_dim_v": 40,
         "causal": True, "new_keys": 2, "rotary": "halves"},
        {"lengths_q": (3, 3), "lengths_k": (64, 40), "causal": True, "slack": 2,
         "rotary": "interleaved"},
        {"lengths_q": (40, 40), "lengths_k": (257, 257), "heads_q": 4, "head_dim_v": 40,
         "bias": "full", "num_splits": 4, "layout": "unaligned"},
        {"lengths_q": (40, 40), "lengths_k": (300, 257), "bias": "heads", "page_size": 1,
         "recipe": "growing"},
        # A row that outgrows its maximum so far beside one, 16 further, that does not.
        {"lengths_q": (80,), "lengths_k": (300,), "bias": "heads", "page_size": 1,
         "recipe": "huge", "num_splits": 1},
    )),
    # A rotated half whose last piece has one element, which a piece of another wavefront follows.
    {"kind": "kvcache", "lengths_q": (3, 3), "lengths_k": (20, 30), "heads_q": 40, "heads_k": 40,
     "head_dim": 34, "head_dim_v": 34, "causal": True, "new_keys": 3, "rotary": "halves"},
    # Rows before the first chunk, in the second tile of rows of a decode.
    {"lengths_q": (32,), "lengths_k": (9,), "attention_chunk": 100},
    # Several sequences, whose LSEs are a batch stride apart.
    {"lengths_q": (33, 33), "lengths_k": (65, 65), "head_dim": 192, "head_dim_v": 192,
     "backward": True, "softcap": 5.0, "deterministic": True},
    # For each 16-bit dtype: the largest LSE of all splits is in a late slot, far above that of the
    # others: of 64 splits, and of 5 with rows that differ; 9 slots.
    *({"dtype": half, **fields} for half in HALF for fields in (
        {"kind": "kvcache", "lengths_q": (1, 1), "lengths_k": (1600, 300), "heads_q": 3,
         "heads_k": 1, "head_dim": 8, "head_dim_v": 8, "scale": 20.0, "num_splits": 64,
         "recipe": "growing"},
        {"kind": "latent", "lengths_q": (5, 5), "lengths_k": (48, 200), "heads_k": 1,
         "head_dim": 192, "head_dim_v": 128, "scale": 192**-0.5, "slack": 64, "num_splits": 5,
         "recipe": "huge", "layout": "unaligned"},
        {"kind": "kvcache", "lengths_q": (7, 7), "lengths_k": (1100, 300), "heads_q": 8,
         "heads_k": 1, "head_dim": 128, "head_dim_v": 128, "num_splits": 33, "recipe": "mixed"},
    )),
    # Pairs to rotate that end in a piece of 2, 3, 5, 6 and 7, none of them aligned. Of 24 heads of
    # three pieces, a wavefront has a part of one.
    *({"kind": "kvcache", "dtype": half, "lengths_q": (2, 2), "lengths_k": (9, 20),
       "heads_q": 24, "heads_k": 24, "head_dim": dim, "head_dim_v": dim, "causal": True,
       "new_keys": 2, "rotary": rotary, "layout": "unaligned"}
      for half in HALF for rotary in ("halves", "interleaved") for dim in (36, 38, 42, 44, 46)),
    {"kind": "kvcache", "lengths_q": (2, 2), "lengths_k": (9, 20), "heads_k": 1,
     "head_dim": 46, "head_dim_v": 46, "causal": True, "new_keys": 2, "rotary": "halves"},
    # Rows of no sequence, of as many heads as threads clear a row.
    {"kind": "varlen", "lengths_q": (5, 9), "lengths_k": (7, 20), "heads_q": 16, "heads_k": 16,
     "backward": True, "slack": 3},
    # A decode's maximum that rises by far from tile to tile.
    {"kind": "kvcache", "lengths_q": (6, 6), "lengths_k": (700, 300), "heads_q": 8, "heads_k": 1,
     "head_dim": 256, "head_dim_v": 256, "scale": 5.0, "num_splits": 1, "recipe": "growing"},
    # Scores that a softcap flattens, in a late tile of keys of a decode.
    {"kind": "kvcache", "dtype": "float16", "lengths_q": (7,) * 14,
     "lengths_k": (1, 65, 130, 190, 257, 321, 390, 450, 513, 577, 640, 705, 770, 830),
     "heads_q": 8, "heads_k": 1, "head_dim": 96, "head_dim_v": 96, "softcap": 20.0,
     "bias": "heads", "batch_idx": True, "num_splits": 1, "recipe": "huge"},
    {"kind": "kvcache", "dtype": "float16", "lengths_q": (3, 3), "lengths_k": (250, 9),
     "heads_q": 8, "heads_k": 1, "head_dim": 256, "head_dim_v": 256, "scale": 0.5, "softcap": 0.5,
     "num_splits": 1, "cache_dtype": "float8_e4m3fnuz", "scales": "head"},
    # Block lists of several tiles of rows, of several heads; a table that is asked at its end.
    {"lengths_q": (129, 129), "lengths_k": (300, 300), "heads_q": 4, "backward": True,
     "mask_mod": "documents"},
    {"lengths_q": (129, 129), "lengths_k": (129, 129), "backward": True, "dlse": "both",
     "window": (40, -9), "deterministic": True, "score_mod": "alibi", "mask_mod": "strided"},
    {"kind": "kvcache", "dtype": "float16", "lengths_q": (129, 129), "lengths_k": (257, 257),
     "leftpad": True, "score_mod": "alibi", "mask_mod": "tree"},
    # Of each 16-bit type: dropout over splits with values that are narrower than a tile; keys of a
    # packed batch in three blocks beside one.
    *({"dtype": half, **fields} for half in HALF for fields in (
        {"lengths_q": (17, 17), "lengths_k": (513, 513), "head_dim_v": 40, "dropout_p": 0.2},
        {"kind": "varlen", "lengths_q": (70, 33), "lengths_k": (300, 20), "heads_q": 4,
         "causal": True, "backward": True},
    )),
)  # fmt: skip


# The append's ways: head dims of whole vectors, with halves that are none, and odd ones, by how
# pairs lie and by the tables' dtype. Of its 5,187 instructions these execute 4,905 in 4 s, where
# 1,062 cases without them executed 3,741.
_APPENDS: tuple[Mapping[str, Any], ...] = (
    *({"head_dim": dim} for dim in (64, 59)),
    *({"head_dim": dim, "rotary": f"{pairs}{tables}"}
      for pairs in ("interleaved", "halves") for tables in ("", "_float32")
      for dim in (64, 40, 59)),
    *({"head_dim": 40, "rotary": f"{pairs}_part{tables}"}
      for pairs in ("interleaved", "halves") for tables in ("", "_float32")),
    *({"head_dim": 2, "rotary": rotary}
      for rotary in ("interleaved", "interleaved_float32", "halves_float32")),
    *({"head_dim": dim, "rotary": "halves"} for dim in (3, 15)),
    {"head_dim": 64, "page_size": 16},
    {"head_dim": 64, "batch_idx": True},
    {"head_dim": 64, "packed_q": True, "rotary": "halves", "slack": 3},
)  # fmt: skip


def quick() -> Iterator[Case]:
    """Yield the cases of the quick level."""
    yield from _drawn("quick")
    for fields in _FAULTS:
        yield Case(**fields)


def full() -> Iterator[Case]:
    """Yield the additional cases of the full level."""
    yield from _drawn("full")
    yield from _ways()
    for dtype in HALF:
        for fields in _APPENDS:
            yield Case("kvcache", dtype, (2, 2), (9, 20), heads_k=1, causal=True, new_keys=2,
                       **{"head_dim_v": fields["head_dim"], **fields})  # fmt: skip


def _ways() -> Iterator[Case]:
    """Yield small cases that execute rarely executed branches of each of the common kernels.

    The cases are chosen by the branches of the kernels' sources, in the same way for each kernel.
    So they still execute these branches if the compiler lays out the code differently. Cases drawn
    at random may not.
    """
    for dim, half in itertools.product((64, 128), HALF):
        shape = {"dtype": half, "head_dim": dim}
        yield from _decodes(shape)
        yield from _prefills(shape)
        for scales in ("tensor", 64):
            float8 = shape | {"dtype": "float8_e4m3fnuz", "out_dtype": half}
            yield from _prefills(float8 | {"scales": scales})
        # More tiles of keys than lanes, each of which has the scales of one.
        yield packed(((65,), (4200,)), "kvcache", heads_q=1, heads_k=1, num_splits=1, scales=64,
                     **float8)  # fmt: skip
        for deterministic in (False, True):
            yield from _gradients(shape | {"deterministic": deterministic})
        for bias in BIASES:
            fields = shape | {"backward": True, "bias_grad": bias != "bool", "bias": bias}
            yield dense(130, 67, 1, **_MANY, **fields)
            yield dense(33, 70, 2, heads_k=1, softcap=2.0, window=(40, 50), **fields)
        # A sum over rows and keys for each head: too few would be judged by chance.
        yield dense(130, 67, 1, backward=True, bias="per_head", bias_grad=True, **_MANY, **shape)
        # Without a sequence the gradient of a bias that all share is 0.
        yield dense(33, 65, 0, backward=True, bias="keys", bias_grad=True, **shape)
    for half in HALF:
        # Slots that combine sums: up to all of a workgroup, and elements that do not come in fours.
        for dim, splits in ((8, 257), (59, 20), (3, 140), (128, 33)):
            fields = {"dtype": half, "head_dim": max(dim, 8), "head_dim_v": dim}
            yield packed(((1, 1), (1100, 300)), "kvcache", heads_q=3, heads_k=1,
                         num_splits=splits, **fields)  # fmt: skip


# More heads than dies, which do not divide them: some heads are on all dies.
_MANY: Mapping[str, Any] = {"heads_q": 18, "heads_k": 9}
# More sequences than lanes.
_SEQUENCES = (1,) * 64 + (130, 40), (3,) * 64 + (9, 140)
# Three heads for each die, in groups of two.
_THREES: Mapping[str, Any] = {"heads_q": 24, "heads_k": 12}
# A softcap that flattens some scores and not others: tanh has a formula for each.
_CAPPED: Mapping[str, Any] = {"softcap": 2.0, "alibi": "heads"}


def _decodes(shape: Mapping[str, Any]) -> Iterator[Case]:
    """Yield decode cases with 8, 24 and 56 grouped rows, which take one, two and four matrix
    products of 16 rows. Their biases have elements of 1, 2 and 4 bytes. Then yield cases with a
    window over many keys, and one with packed queries."""
    for rows in (1, 3, 7):
        lengths = (rows, rows), (700, 130)
        heads: dict[str, Any] = {"heads_q": 8, "heads_k": 1, **shape}
        yield packed(lengths, "kvcache", bias="bool", **_CAPPED, **heads)
        yield packed(lengths, "kvcache", bias="heads", softcap=2.0, causal=True, num_splits=3,
                     **heads)  # fmt: skip
        yield packed(lengths, "kvcache", bias="full", sinks=True, page_size=16, **heads)
        yield packed(lengths, "kvcache", bias="full", softcap=2.0, window=(200, 0), num_splits=2,
                     **heads)  # fmt: skip
    # Many keys, of which some rows do not see the first.
    for rows in (2, 3, 7):
        yield packed(((rows,), (1300,)), "kvcache", window=(1100, 0), heads_q=8, heads_k=1,
                     num_splits=1, **shape)  # fmt: skip
    yield packed(((3, 1), (300, 40)), "kvcache", packed_q=True, slack=2, num_splits=2, heads_q=72,
                 heads_k=9, **shape)  # fmt: skip


def _prefills(shape: Mapping[str, Any]) -> Iterator[Case]:
    for terms in ({}, _CAPPED):
        yield packed(((65, 0, 33), (200, 33, 97)), "varlen", causal=True, used_k=True, **terms,
                     **_MANY, **shape)  # fmt: skip
        yield packed(_SEQUENCES, "varlen", **terms, **shape)
        yield packed(((5, 9), (7, 20)), "varlen", **terms, **_THREES, **shape)
        yield dense(65, 200, 1, window=(100, 20), sinks=True, **terms, **_MANY, **shape)
        # Splits of the keys, of values that fill a tile and of narrower ones.
        fields = {"num_splits": 3, "heads_q": 4, "packed_q": True, "slack": 2, **terms}
        lengths = (65, 40), (700, 130)
        yield packed(lengths, "kvcache", sinks=True, **fields, **shape)
        yield packed(lengths, "kvcache", leftpad=True, batch_idx=True, **fields,
                     **{**shape, "head_dim": shape["head_dim"] - 5})  # fmt: skip
    for bias in ("bool", "heads", "full"):
        yield dense(129, 200, 1, bias=bias, **shape)


def _gradients(shape: Mapping[str, Any]) -> Iterator[Case]:
    for terms in ({}, _CAPPED):
        fields: dict[str, Any] = {"backward": True, **terms, **shape}
        yield packed(((129, 0, 33), (200, 33, 97)), "varlen", causal=True, dlse="both", slack=3,
                     **_MANY, **fields)  # fmt: skip
        yield packed(((257, 20, 65), (300, 33, 97)), "varlen", used_q=True, used_k=True,
                     window=(100, 20) if terms else None, heads_q=6, heads_k=2,
                     **fields)  # fmt: skip
        yield packed(_SEQUENCES, "varlen", **fields)
        yield packed(((5, 9), (7, 20)), "varlen", **_THREES, **fields)
        yield dense(33, 65, 1, **_MANY, **fields)


@functools.cache
def _drawn(level: str) -> tuple[Case, ...]:
    rows = map(json.loads, _DRAWN.read_text().splitlines())
    return tuple(Case(**_fields(row)) for row in rows if row.pop("level") == level)


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in row.items()}
