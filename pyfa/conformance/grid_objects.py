"""Cases that execute most of each code object that ships for gfx942.

Each head_dim, dtype, tile and class of score terms is a code object of its own: the same source,
compiled once more. Cases of other families execute most of those of head_dim 64 and 128. These do
the same for the head dims 96, 192 and 256, for float8 caches, for pages in prefill and for dropout.
Each case has many features at once, so that few cases reach the branches of each object. Most of
them have the recipe "mixed": their code runs in few cases, and wrong code has to change a result
there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .cases import Case, dense, packed
from .grid_axes import HALF, Lengths

Shape = dict[str, Any]

_FLOAT8 = "float8_e4m3fnuz"
_COMMON = ((64, 64), (128, 128))
_OTHERS = ((96, 96), (192, 128), (192, 192), (256, 256))
_PAGED = ((64, 64), (128, 128), (256, 256))
# Whose forward has kernels for a bias or ALiBi alone, and for a softcap alone.
_ADDED = ((64, 64), (96, 96), (128, 128))
_SOFTCAP = (*_ADDED, (256, 256))
# Score terms whose backward, without other terms, has a kernel of its own, by head dims.
_ALONE: dict[tuple[int, int], tuple[Shape, ...]] = {
    (64, 64): ({"sinks": True}, {"alibi": "batch"}, {"softcap": 2.0}, {"dropout_p": 0.2}),
    (96, 96): ({"alibi": "batch"}, {"softcap": 2.0}),
    (128, 128): ({"sinks": True}, {"alibi": "batch"}, {"softcap": 2.0}, {"dropout_p": 0.2}),
    (192, 128): ({"sinks": True},),
    (192, 192): ({"alibi": "batch"}, {"softcap": 2.0}),
    (256, 256): ({"softcap": 2.0},),
}

# Biases that, without other terms, have such kernels: of q's dtype, float32 and bool. The gradient
# of a bias has one for each head_dim.
_BIASES_ALONE = {64: ("full", "heads", "bool"), 128: ("full", "heads", "bool")}
_BIASES_WITH_GRADIENT = ("full", "heads")

# Keys of decode: a sequence for each way into and out of the unrolled loop over groups of 64 keys,
# and one that has none. A wavefront has up to 4 groups in flight, and up to 8 of float8.
_KEYS = (1, 65, 130, 190, 257, 321, 390, 450, 513, 577, 640, 705, 770, 830, 0)
_FLOAT8_KEYS = (1, 65, 190, 257, 450, 577, 960, 1025, 1400, 1990, 0)
# Rows of 8 heads that share a KV head: one, two and four products of 16 rows.
_ROWS = (1, 3, 7)
# Rows and query heads of a KV head, for divisors that are not powers of two: one, one, two and four
# products of 16 rows. Of those with the most rows, a sequence has three workgroups.
_UNEVEN = ((1, 3), (5, 3), (7, 3), (11, 12))
_UNEVEN_WIDE = ((1, 3), (11, 6))
# More heads than dies, which do not divide them; three heads for each die, in groups of two.
_MANY: Shape = {"heads_q": 18, "heads_k": 9}
_THREES: Shape = {"heads_q": 24, "heads_k": 12}
_GROUPS: Shape = {"heads_q": 6, "heads_k": 2}
# A softcap that flattens some scores and not others: tanh has a formula for each.
_CAPPED: Shape = {"softcap": 2.0, "alibi": "heads"}
# 142 more keys than rows: causal rows see all of a tile's keys from row 1 of a step of 16 on.
_LENGTHS: Lengths = ((65, 0, 33, 20), (207, 33, 97, 0))
_SHORT: Lengths = ((5, 9), (7, 20))
_LONE: Lengths = ((9,), (20,))
_STEPS: Lengths = ((33, 17, 49, 1, 96), (70, 300, 20, 40, 97))
# Sequences of 1 to 17 steps of 16 rows: the loop over them ends after each of its turns.
_ENDS: Lengths = ((257, 20, 33, 9, 49, 100), (300, 33, 97, 70, 300, 130))
_SPLIT: Lengths = ((65, 40), (700, 130))


# The least head_dim that runs on the tiles of each head_dim.
_LEAST = {64: 8, 96: 72, 128: 104, 192: 136, 256: 200}


def full() -> Iterator[Case]:
    for turn, case in enumerate(_cases()):
        short = (case.lengths_q, case.lengths_k) in (_SHORT, _LONE, _STEPS)
        yield _narrower(case, turn) if short else case


def _narrower(case: Case, turn: int) -> Case:
    """Return the case with heads that end inside the tile, at another multiple of 8 each turn."""
    dims = _inside(case.head_dim, turn), _inside(case.head_dim_v, turn + 1)
    return replace(case, head_dim=dims[0], head_dim_v=dims[1])


def _inside(dim: int, turn: int) -> int:
    return dim - 8 * (1 + turn % ((dim - _LEAST[dim]) // 8))


def _cases() -> Iterator[Case]:
    for pair, half in itertools.product((*_COMMON, *_OTHERS), HALF):
        dims: Shape = {"head_dim": pair[0], "head_dim_v": pair[1]}
        shape: Shape = {"dtype": half, "recipe": "mixed", **dims}
        queries = {"dtype": _FLOAT8, "out_dtype": half, **dims}
        other = pair in _OTHERS
        for rows in _ROWS if pair[0] <= 128 else _ROWS[:2]:
            if other:
                yield from _decodes(rows, _KEYS, shape)
            else:
                yield next(_biases(rows, _KEYS, shape))
            yield from _float8_decodes(rows, shape, queries)
        uneven = _UNEVEN if pair[0] <= 128 else _UNEVEN_WIDE
        for rows, group in uneven:
            yield _uneven(rows, group, shape | {"cache_dtype": _FLOAT8, "scales": "head"})
        # Other cases are uneven for the most rows of 16-bit caches.
        for rows, group in uneven[:-1] if other else uneven:
            yield _uneven(rows, group, shape)
        if other:
            yield from _prefills(shape)
            yield from _float8_prefills(queries)
            yield from _bias_gradients(shape)
            for deterministic in (False, True):
                yield from _gradients(shape | {"deterministic": deterministic})
        for term in _ALONE.get(pair, ()):
            yield from _one_term(shape | term)
        for bias in _BIASES_ALONE.get(pair[0], _BIASES_WITH_GRADIENT):
            yield from _bias_alone(shape | {"bias": bias, "bias_grad": bias != "bool"})
        if pair in _PAGED:
            yield from _pages(shape, "", "")
            yield from _pages(queries, "head", 64)
        yield from _dropouts(shape)
    for half in HALF:
        for dim in (512, 576):
            wide: Shape = {"head_dim": dim, "head_dim_v": 512, "dtype": half, "recipe": "mixed"}
            yield from _biases(1, _KEYS[:5], wide)
            yield _uneven(*_UNEVEN[0], wide)
        yield from _latent(half)
    for pair, half in itertools.product(_ADDED, HALF):
        of_pair: Shape = {"head_dim": pair[0], "dtype": half, "recipe": "mixed"}
        for term in ({"bias": "full"}, {"bias": "heads"}, {"alibi": "batch"}, {"bias": "bool"}):
            yield from _added(of_pair | term)
    for pair, half in itertools.product(_SOFTCAP, HALF):
        yield from _added({"head_dim": pair[0], "dtype": half, "recipe": "mixed", "softcap": 2.0})
    for pair, half in itertools.product(_PAGED, HALF):
        yield from _plain_pages({"head_dim": pair[0], "dtype": half, "recipe": "mixed"})
    # A bias that query rows share, and one of bool for each head.
    for pair, half in itertools.product(_ADDED, HALF):
        of_pair = {"head_dim": pair[0], "dtype": half, "recipe": "mixed"}
        for bias in ("keys_like_q", "keys", "sequences_bool"):
            yield dense(65, 200, 1, bias=bias, window=(100, 20), **_GROUPS, **of_pair)
        yield dense(300, 376, 1, bias="heads_bool", causal=True, sinks=True, **_MANY, **of_pair)


def _added(shape: Shape) -> Iterator[Case]:
    """Yield cases of a term alone. The rows of a bias are multiples of 8 keys: others are not
    copied in tiles."""
    yield packed(((257, 20, 0, 33), (304, 40, 97, 8)), "varlen", causal=True, used_q=True, **_MANY,
                 **shape)  # fmt: skip
    yield packed(((65, 40), (704, 130)), "kvcache", num_splits=3, packed_q=True, sinks=True,
                 batch_idx=True, heads_q=4, **shape)  # fmt: skip
    yield dense(65, 200, 1, window=(100, 20), **_GROUPS, **shape)


def _plain_pages(shape: Shape) -> Iterator[Case]:
    """Yield cases of pages of whole groups of 16 keys, and of pages that are none or padded."""
    yield _split(leftpad=True, page_size=24, **_MANY, **shape)
    for padded in ({}, {"leftpad": True, "num_splits": 1}):
        yield packed(((129, 40), (200, 190)), "kvcache", window=(100, 20), page_size=16,
                     packed_q=True, **padded, **_GROUPS, **shape)  # fmt: skip
    yield packed(((257, 20, 0, 33), (300, 40, 97, 9)), "varlen", causal=True, used_q=True,
                 page_size=48, **_MANY, **shape)  # fmt: skip


def _biases(rows: int, keys: tuple[int, ...], shape: Shape) -> Iterator[Case]:
    """Yield decode cases with biases of 4, 2 and 1 bytes per element. Heads of the first one end
    inside the tile."""
    lengths = (rows,) * len(keys), keys
    one: dict[str, Any] = {"heads_q": 8, "heads_k": 1, "num_splits": 1, **shape}
    narrow = one | {"head_dim": one["head_dim"] - 8}
    yield packed(lengths, "kvcache", bias="heads", softcap=2.0, batch_idx=True, **narrow)
    yield packed(lengths, "kvcache", bias="full", alibi="heads", causal=True, page_size=24, **one)
    yield packed(lengths, "kvcache", bias="bool", softcap=2.0, sinks=True, leftpad=True, **one)


def _decodes(rows: int, keys: tuple[int, ...], shape: Shape) -> Iterator[Case]:
    fields: dict[str, Any] = {"heads_q": 8, "heads_k": 1, **shape}
    yield from _biases(rows, keys, shape)
    # Rows that do not see the same keys first; splits, one of which sees no key of a row; packed
    # keys.
    several = max(rows, 2)
    yield packed(((several,), (1300,)), "kvcache", window=(1100, 0), num_splits=1,
                 **fields)  # fmt: skip
    yield packed(((rows, rows), (700, rows - 1)), "kvcache", bias="heads", causal=True,
                 num_splits=2, **fields)  # fmt: skip
    fields |= {"heads_q": 72, "heads_k": 9, "used_q": rows > 1}
    yield packed(((rows, 1, several - 1), (300, 40, 130)), "varlen", bias="full", window=(90, 5),
                 **fields)  # fmt: skip


def _uneven(rows: int, group: int, shape: Shape) -> Case:
    """Return a case of decode whose divisors are not powers of two: KV heads, query heads of each,
    page size and splits, of which the short sequence leaves the last ones empty."""
    lengths = (rows, 1, max(rows - 1, 1)), (380, 17, 250)
    return packed(lengths, "varlen", heads_q=3 * group, heads_k=3, page_size=24, causal=True,
                  used_q=True, sinks=True, **shape)  # fmt: skip


def _float8_decodes(rows: int, shape: Shape, queries: Shape) -> Iterator[Case]:
    """Yield the same cases with a float8 cache, and cases with float8 queries."""
    scales: tuple[str | int, ...] = (16, "head", 64, "tensor", "head", "tensor")
    cases = _decodes(rows, _FLOAT8_KEYS, shape | {"cache_dtype": _FLOAT8})
    for case, scale in zip(cases, scales, strict=True):
        yield replace(case, scales=scale)
    lengths = (rows,) * 3, (40, 250, 950)
    fields: dict[str, Any] = {"heads_q": 8, "heads_k": 1, "num_splits": 1, **queries}
    yield packed(lengths, "kvcache", scales="head", causal=True, **fields)
    yield packed(lengths, "kvcache", scales=16, softcap=2.0, page_size=16, **fields)


def _split(**options: Any) -> Case:
    """Return a case of a cache whose keys are split, for rows of more than one work tile."""
    return packed(_SPLIT, "kvcache", num_splits=3, packed_q=True, sinks=True, slack=2, **options)


def _prefills(shape: Shape) -> Iterator[Case]:
    for terms in ({}, _CAPPED):
        yield _split(leftpad=True, batch_idx=True, heads_q=4, **terms, **shape)


def _float8_prefills(shape: Shape) -> Iterator[Case]:
    for terms, scales in (({}, "head"), (_CAPPED, 64)):
        yield packed(_LENGTHS, "varlen", causal=True, used_q=True, used_k=True, slack=3,
                     scales=scales, **terms, **_MANY, **shape)  # fmt: skip
        yield _split(leftpad=True, batch_idx=True, heads_q=4, scales="tensor", **terms, **shape)
        yield dense(65, 200, 1, window=(100, 20), sinks=True, scales="tensor", **terms, **_MANY,
                    **shape)  # fmt: skip
    yield packed(_SHORT, "varlen", scales="tensor", **_CAPPED, **_THREES, **shape)
    yield dense(129, 200, 1, bias="bool", scales="tensor", **shape)
    yield dense(129, 200, 1, bias="heads", causal=True, scales=64, **shape)
    yield dense(129, 200, 1, bias="full", heads_k=1, scales="head", **shape)
    # More tiles of keys than lanes, each of which has the scales of one.
    yield packed(((65,), (4200,)), "kvcache", heads_q=1, heads_k=1, num_splits=1, scales=64,
                 **shape)  # fmt: skip


def _pages(shape: Shape, scales: str | int, blocks: str | int) -> Iterator[Case]:
    stored = {"page_size": 16, **shape}
    scaled, in_blocks = ({**stored, "scales": each} for each in (scales, blocks))
    lengths = (129, 129), (200, 190)
    yield _split(**_CAPPED, **_MANY, **in_blocks)
    yield packed(_LENGTHS, "varlen", causal=True, used_q=True, used_k=True, **_THREES, **scaled)
    yield packed(lengths, "kvcache", bias="bool", leftpad=True, window=(100, 20), **scaled)
    yield packed(((65,), (130,)), "kvcache", bias="heads", **_MANY, **in_blocks)
    yield packed(lengths, "kvcache", bias="full", causal=True, **scaled)


def _dropouts(shape: Shape) -> Iterator[Case]:
    fields: dict[str, Any] = {"dropout_p": 0.2, **shape}
    yield packed(_LENGTHS, "varlen", causal=True, used_q=True, used_k=True, **_CAPPED, **_MANY,
                 **fields)  # fmt: skip
    yield packed(_SHORT, "varlen", sinks=True, **_THREES, **fields)
    yield dense(65, 200, 1, bias="bool", window=(100, 20), sinks=True, **_MANY, **fields)
    yield dense(129, 200, 1, bias="heads", causal=True, **fields)
    # Few rows of many keys, which are split.
    yield dense(17, 1100, **fields)


def _gradients(shape: Shape) -> Iterator[Case]:
    fields: dict[str, Any] = {"backward": True, **shape}
    grad: Shape = {**fields, "bias_grad": True}
    yield packed(_LENGTHS, "varlen", causal=True, dlse="both", slack=3, **_MANY, **fields)
    lone = fields["dtype"] == HALF[1]  # a packed batch of one sequence
    yield packed(_LONE if lone else _SHORT, "varlen", **_THREES, **fields)
    yield packed(_ENDS, "varlen", used_q=True, used_k=True, window=(100, 20), **_GROUPS,
                 **fields)  # fmt: skip
    yield dense(33, 65, 2, **_MANY, **fields)
    yield packed(_LENGTHS, "varlen", causal=True, sinks=True, dropout_p=0.2, slack=3, **_CAPPED,
                 **_GROUPS, **fields)  # fmt: skip
    yield packed(_SHORT if lone else _LONE, "varlen", softcap=2.0, dlse="only", **_THREES,
                 **fields)  # fmt: skip
    yield packed(_ENDS, "varlen", bias="heads", used_q=True, used_k=True, alibi="batch", sinks=True,
                 **_GROUPS, **grad)  # fmt: skip
    yield dense(200, 67, 1, bias="other", softcap=2.0, causal=True, **_MANY, **grad)
    yield dense(130, 400, 1, bias="bool", sinks=True, window=(40, 50), alibi="heads", **_GROUPS,
                **fields)  # fmt: skip


def _one_term(shape: Shape) -> Iterator[Case]:
    """Yield cases of one term alone: sequences of 1 to 17 steps of 16 rows, so that the loop ends,
    and goes on to the next head, after each of its turns."""
    fields: dict[str, Any] = {"backward": True, **shape}
    yield packed(_LENGTHS, "varlen", causal=True, dlse="both", slack=3, **_MANY, **fields)
    yield packed(_ENDS, "varlen", used_q=True, used_k=True, window=(100, 20), **_GROUPS,
                 **fields)  # fmt: skip
    yield packed(_STEPS, "varlen", **_THREES, **fields)
    yield dense(33, 65, 2, **_MANY, **fields)


def _bias_alone(shape: Shape) -> Iterator[Case]:
    fields: dict[str, Any] = {"backward": True, **shape}
    yield packed(_LENGTHS, "varlen", causal=True, dlse="both", slack=3, **_MANY, **fields)
    yield packed(_ENDS, "varlen", used_q=True, used_k=True, window=(100, 20), **_GROUPS,
                 **fields)  # fmt: skip
    yield dense(33, 65, 2, **_MANY, **fields)
    if fields["bias"] == "full":
        yield dense(200, 67, 1, causal=True, **_MANY, **fields | {"bias": "other"})


def _bias_gradients(shape: Shape) -> Iterator[Case]:
    for terms in ({}, {"softcap": 2.0}):
        grad: Shape = {"backward": True, "bias_grad": True, **terms, **shape}
        yield dense(33, 70, bias="rows", window=(40, 50), **_GROUPS, **grad)
        yield dense(130, 67, 1, bias="per_head", **_MANY, **grad)
        # Without a sequence the gradient of a bias that all share is 0.
        yield dense(33, 65, 0, bias="keys", **grad)


def _latent(half: str) -> Iterator[Case]:
    """Yield cases of a float8 cache with enough keys for the loop's full iterations."""
    fields: dict[str, Any] = {
        "dtype": half, "cache_dtype": _FLOAT8, "heads_q": 8, "heads_k": 1, "head_dim": 576,
        "head_dim_v": 512, "scale": 192**-0.5, "num_splits": 1, "recipe": "mixed",
    }  # fmt: skip
    queries: Shape = {"dtype": _FLOAT8, "cache_dtype": "", "out_dtype": half, "recipe": "plain"}
    lengths = (2,) * 5, (40, 257, 450, 600, 1100)
    yield packed(lengths, "latent", scales="tensor", page_size=16, sinks=True, **fields)
    yield packed(lengths, "latent", scales="head", **{**fields, **queries})
    yield packed(lengths, "latent", scales=16, causal=True, **{**fields, "recipe": "growing"})
    # Queries with a scale of their own block, and sequences that end at each of a round's groups.
    ends = (2,) * 4, (250, 390, 840, 950)
    yield packed(ends, "latent", scales=16, causal=True, **{**fields, **queries})
    # The kernel for many lines: more sequences than dies, and parts without keys, with a sink.
    lengths_k = (0, 70, 33, 5, 90, 1, 64, 17, 130)
    fields |= {"cache_dtype": "", "heads_q": 96, "num_splits": 2, "sinks": True}
    yield packed(((1,) * 9, lengths_k), "latent", **fields)
