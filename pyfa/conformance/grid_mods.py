"""The grid's cases of users' functions (``score_mod``, ``mask_mod``) and of masks by block list."""

from __future__ import annotations

from collections.abc import Iterator

from .cases import Case, dense, packed
from .grid_axes import CACHES, DTYPES, HALF, PACKED, SHAPES, Fields
from .modifiers import MASKS, SCORES

# Gradients of tables, whose elements many scores read.
_CAPTURED: tuple[Fields, ...] = (
    {"score_mod": "relative", "captured_grad": True},
    {"score_mod": "alibi", "captured_grad": True, "softcap": 5.0, "dropout_p": 0.2},
    {"score_mod": "gated", "mask_mod": "documents", "captured_grad": True, "dlse": "both"},
)
# Users' functions, alone and with what they combine with.
_MODS: tuple[Fields, ...] = (
    {"mask_mod": "documents"},
    {"mask_mod": "prefix", "heads_q": 4},
    {"mask_mod": "sliding", "score_mod": "softcap"},
    {"mask_mod": "dilated", "heads_q": 6, "heads_k": 2},
    {"mask_mod": "natten", "sinks": True},
    {"mask_mod": "diffusion", "head_dim_v": 40},
    {"mask_mod": "shared_prefix", "dropout_p": 0.2},
    {"mask_mod": "tree", "softcap": 4.0},
    {"mask_mod": "strided", "score_mod": "alibi", "window": (40, 12)},
    {"score_mod": "relative", "heads_q": 4},
    {"score_mod": "alibi", "causal": True},
    {"score_mod": "softcap", "bias": "full", "alibi": "heads", "softcap": 5.0},
    {"score_mod": "gated"},
    # Its scores are squared.
    {
        "score_mod": "bounded",
        "mask_mod": "documents",
        "sinks": True,
        "scale": -0.2,
        "recipe": "plain",
    },
    {"mask_mod": "dilated", "attention_chunk": 24},
    # If a backend shifts rows for a window, mods must still receive the original positions.
    {"score_mod": "alibi", "mask_mod": "strided", "window": (40, -9)},
    *_CAPTURED,
)
_MODS_PACKED: tuple[Fields, ...] = (
    {"mask_mod": "documents", "slack": 2},
    {"score_mod": "relative", "used_q": True, "used_k": True, "heads_q": 4},
    {"score_mod": "gated", "mask_mod": "natten", "causal": True, "deterministic": True},
    {"score_mod": "relative", "used_q": True, "slack": 3, "heads_q": 4, "captured_grad": True},
)
_MODS_CACHED: tuple[Fields, ...] = (
    {"mask_mod": "prefix", "page_size": 16},
    {"mask_mod": "tree", "leftpad": True, "score_mod": "alibi"},
    # Lone rows, whose heads a mod tells apart.
    {"score_mod": "alibi", "mask_mod": "dilated", "batch_invariant": True, "heads_q": 4},
)
# Masks of which kernels visit some tiles, whole ones without asking, and leave out others.
_LISTS: tuple[Fields, ...] = (
    {"mask_mod": "patches", "heads_q": 4},
    {"mask_mod": "patches", "causal": True, "sinks": True},
    {"mask_mod": "patches", "score_mod": "relative", "deterministic": True, "window": (150, 40)},
    {"block_mask": 64, "heads_q": 4},
    {"block_mask": 48, "sinks": True, "causal": True},
)
_LISTS_SHAPES = ((300, 420), (420, 300), (330, 330))

# Several tiles of rows and of keys, so that wavefronts and lists share what there is of a list.
_TILES = (300, 420)

# The calls in which ``everywhere`` tests each mod: kinds of calls, and pyfa's own terms and masks.
_DENSE_WITH: tuple[Fields, ...] = (
    {"causal": True, "dlse": "both"},
    {"window": (40, 12), "heads_q": 4},
    {"sinks": True, "heads_q": 6, "heads_k": 2},
    {"dropout_p": 0.2, "softcap": 5.0},
    {"bias": "full", "alibi": "heads", "deterministic": True},
)
_PACKED_WITH: tuple[Fields, ...] = (
    {"slack": 2, "causal": True},
    {"used_q": True, "used_k": True, "heads_q": 4},
)
_CACHED_WITH: tuple[Fields, ...] = (
    {"page_size": 16, "heads_q": 8},
    {"leftpad": True, "causal": True, "num_splits": 3},
)
# The mods of ``modifiers_more`` in the quick level: those that differ most from all others.
_QUICK = ("morton_natten", "vision", "rope", "table")


def mods(count: int) -> Iterator[Case]:
    """Yield cases of each mod with ``count`` combinations of dtype and shape."""
    for index, options in enumerate(_MODS):
        for more in range(count):
            dtype, shape = DTYPES[(index + more) % 3], SHAPES[(index + 2 * more) % 4]
            fields: Fields = {"backward": True, "dlse": ("", "both")[index % 2], **options}
            if not more and dtype in HALF and "mask_mod" in options:
                shape, fields = _TILES, {"recipe": "mixed", **fields}
            yield dense(*shape, dtype=dtype, **fields)
            if more:
                forward = {**options, "captured_grad": False}
                yield dense(*shape, dtype=dtype, head_dim=128, **forward)
    for index, options in enumerate(_MODS_PACKED):
        for lengths in (PACKED * 2)[index : index + count]:
            yield packed(lengths, "varlen", dtype=DTYPES[index % 3], backward=True, **options)
    for index, options in enumerate(_MODS_CACHED):
        for lengths in (*CACHES[:2], *CACHES)[index : index + count]:
            yield packed(lengths, "kvcache", dtype=HALF[index % 2], **options)


def below_zero() -> Iterator[Case]:
    """Yield masks and scores with a scale of 0 or less. Kernels that mask before they scale, or
    that take the largest product for the largest score, do not run these."""
    fields: Fields = {"scale": -0.3, "backward": True}
    yield dense(4, 5, batch=1, mask_mod="morton_natten", **fields)
    for index, mask in enumerate(("documents", "sliding", "natten")):
        yield dense(*_TILES, dtype=HALF[index % 2], mask_mod=mask, heads_q=4, **fields)
        yield dense(65, 97, dtype=HALF[1 - index % 2], mask_mod=mask, head_dim=128, **fields)
    yield dense(65, 97, mask_mod="prefix", scale=0.0)
    yield dense(*_TILES, dtype="float16", batch=1, block_mask=64, **fields)
    yield packed(PACKED[0], "varlen", mask_mod="documents", **fields)
    yield packed(CACHES[0], "kvcache", dtype="float16", mask_mod="tree", heads_q=4, scale=-0.3)
    yield dense(65, 97, score_mod="alibi", causal=True, **fields)
    yield dense(65, 97, dtype="float16", score_mod="relative", mask_mod="natten", **fields)


def lists(count: int) -> Iterator[Case]:
    """Yield each block-list case with ``count`` combinations of dtype and shape."""
    for index, options in enumerate(_LISTS):
        for more in range(count):
            shape = _LISTS_SHAPES[(index + more) % 3]
            dtype = (HALF[index % 2], HALF[1 - index % 2], "float32")[more]
            fields: Fields = {"dtype": dtype, "backward": True, **options}
            yield dense(*shape, batch=1, head_dim=(64, 128, 64)[more], **fields)
    lengths = (300, 0, 150), (420, 33, 200)
    yield packed(lengths, "varlen", dtype=HALF[0], backward=True, mask_mod="patches")
    yield packed(lengths, "varlen", dtype=HALF[1], backward=True, block_mask=64, heads_q=4)
    splits: Fields = {"heads_q": 4, "dtype": HALF[1], "num_splits": 3}
    yield packed(((2, 2), (513, 300)), "kvcache", mask_mod="patches", **splits)
    yield packed(((2, 2), (513, 300)), "kvcache", block_mask=64, **splits)


def _mod(name: str) -> Fields:
    return {"mask_mod" if name in MASKS else "score_mod": name}


def everywhere(names: tuple[str, ...] = (*MASKS, *SCORES)) -> Iterator[Case]:
    """Yield each mod in dense calls with pyfa's own score terms and masks, in packed calls, with
    pages and in decode. Dtypes and shapes vary from mod to mod."""
    for number, name in enumerate(names):
        mod = _mod(name)
        for index, options in enumerate(_DENSE_WITH):
            (rows, keys), dtype = SHAPES[(number + index) % 5], DTYPES[(number + index) % 3]
            fields: Fields = {"dtype": dtype, "backward": True, **mod, **options}
            yield dense(rows, keys, **fields)
        for index, options in enumerate(_PACKED_WITH):
            lengths, dtype = PACKED[(number + index) % 3], HALF[(number + index) % 2]
            yield packed(lengths, "varlen", dtype=dtype, backward=True, **mod, **options)
        for index, options in enumerate(_CACHED_WITH):
            lengths = CACHES[(number + 2 * index) % 4]
            yield packed(lengths, "kvcache", dtype=HALF[number % 2], **mod, **options)


def quick() -> Iterator[Case]:
    """Yield one case like those of ``everywhere`` for each of a few mods, with several tiles."""
    for number, name in enumerate(_QUICK):
        mod = _mod(name)
        options = _DENSE_WITH[2 * number % len(_DENSE_WITH)]
        fields: Fields = {"dtype": HALF[number % 2], "recipe": "mixed", **mod, **options}
        yield dense(*_TILES, backward=True, **fields)
