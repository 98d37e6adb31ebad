"""The smallest cases of compiled kernels that no other case runs without a compiler.

A release wheel contains the gfx942 kernels that a case ran in the emulator. Cases of other families
reach most of them, but rarely the head dims 96, 192 and 256 together with score terms, float8 or a
deterministic backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .cases import Case, dense, packed

_HALF = ("float16", "bfloat16")
_FLOAT8 = "float8_e4m3fn"
_PAIRS = ((96, 96), (192, 128), (192, 192), (256, 256))


def full() -> Iterator[Case]:
    for (dim, dim_v), dtype in itertools.product(_PAIRS, _HALF):
        dims: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim_v}
        half = dims | {"dtype": dtype}
        # The two passes of backward without and with score terms, and forward with them.
        for softcap in (0.0, 5.0):
            yield dense(65, 97, 1, backward=True, deterministic=True, softcap=softcap, **half)
        # Dropout, and one pass with score terms.
        terms: dict[str, Any] = {"bias": "full", "bias_grad": True, "dropout_p": 0.1}
        yield dense(65, 97, 1, backward=True, **terms, **half)
        for softcap in (0.0, 5.0):
            float8 = dims | {"dtype": _FLOAT8, "out_dtype": dtype}
            yield dense(65, 97, 1, softcap=softcap, causal=True, **float8)
        # Decode of float8 keys, for few and for many rows.
        for heads in (4, 32, 64):
            lengths = ((1, 1), (40, 130))
            fields = half | {"heads_q": heads, "heads_k": 1, "cache_dtype": _FLOAT8}
            yield packed(lengths, "kvcache", **fields)
    for dim, dtype in itertools.product((64, 128, 256), _HALF):
        lengths = ((65, 65), (65, 130))
        fields = {"head_dim": dim, "page_size": 16}
        yield packed(lengths, "kvcache", dtype=dtype, **fields)
        yield packed(lengths, "kvcache", dtype=_FLOAT8, out_dtype=dtype, **fields)
