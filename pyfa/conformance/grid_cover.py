"""Cases that execute machine code which no other case of their level executes.

``benchmarks/cover.py`` drew them at random, ran them in the emulator on the gfx942 objects in the
wheel, and kept those that executed new instructions: ``grid_cover.jsonl``, one case per line. The
cases of level "quick" are those that execute most instructions in the least time. With them the
quick level executed 77 % of all instructions, without them 40 %. They take 10 s. A kernel that
changes may need other cases. A case that is no longer needed does no harm.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .cases import Case
from .grid_axes import HALF

_DRAWN = Path(__file__).with_suffix(".jsonl")

# Each catches a planted fault that no other quick case caught; the comment says what it has.
_FAULTS: tuple[Mapping[str, Any], ...] = (
    # A head_dim that is a multiple of 8 and ends inside a tile, beside wider values.
    {"lengths_q": (17,), "lengths_k": (33,), "head_dim": 16, "head_dim_v": 80, "backward": True},
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
    # Keys for each wavefront of a decode with two tiles of rows.
    {"kind": "kvcache", "dtype": "float16", "lengths_q": (3,), "lengths_k": (700,), "heads_q": 8,
     "heads_k": 1, "head_dim": 192, "head_dim_v": 128, "num_splits": 1},
    # Of each 16-bit type: 20 pairs to rotate, 8 at a time; queries to rotate and nothing to append;
    # splits of unlike length with values that are narrower than a tile; a maximum that rises from
    # tile to tile while scores have a bias and keys are in pages.
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
    {"head_dim": 3, "rotary": "halves"},
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
    for dtype in HALF:
        for fields in _APPENDS:
            yield Case("kvcache", dtype, (2, 2), (9, 20), heads_k=1, causal=True, new_keys=2,
                       **{"head_dim_v": fields["head_dim"], **fields})  # fmt: skip


@functools.cache
def _drawn(level: str) -> tuple[Case, ...]:
    rows = map(json.loads, _DRAWN.read_text().splitlines())
    return tuple(Case(**_fields(row)) for row in rows if row.pop("level") == level)


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in row.items()}
