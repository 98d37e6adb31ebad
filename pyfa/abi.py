"""``Params``: the one struct that every HIP and CUDA kernel takes by value, and its C header.

``FIELDS`` is the only table. ``python -m pyfa.abi`` generates ``kernels/params.h`` from it, and a
test checks that they agree. Strides count elements, the last dimension is contiguous, and a null
pointer means that the argument was not given. ``q_start`` … ``batch_start`` place a block inside a
larger problem: masks, ALiBi and dropout use global indices. Kernels that copy by tensor maps
(Hopper's TMA) take ``MappedParams``, the same members followed by the maps.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from . import mods
from .problem import TENSORS, Call, band_of, scales_of
from .sizes import Extent, Size

Strides = tuple[Extent, ...]
Values = dict[str, float | Size]
"""Members of ``Params`` that are numbers."""


class Field(NamedTuple):
    """One member of the struct: its C type and what it holds."""

    name: str
    type: str
    meaning: str


# C type → struct's format character. A pointer travels as its 64-bit address.
_FORMATS = {
    "void *": "Q",
    "long long": "q",
    "unsigned long long": "Q",
    "int": "i",
    "unsigned": "I",
    "float": "f",
}
_SIZES = {name: struct.calcsize("<" + code) for name, code in _FORMATS.items()}


def _strided(*names: str) -> Iterator[Field]:
    for name in names:
        yield Field(f"{name}_batch", "long long", f"stride of {name} between sequences (0: packed)")
        yield Field(f"{name}_row", "long long", f"stride of {name} between rows")
        yield Field(f"{name}_head", "long long", f"stride of {name} between heads")


# Members of eight bytes stand at multiples of eight: the layout has no holes on any compiler.
FIELDS: tuple[Field, ...] = (
    Field("q", "void *", "queries: (B, Sq, H, D) or (total_q, H, D)"),
    Field("k", "void *", "keys: (B, Sk, Hk, D), (total_k, Hk, D) or (pages, page_size, Hk, D)"),
    Field("v", "void *", "values, as k with Dv"),
    Field("out", "void *", "as q with Dv"),
    Field("lse", "void *", "float32 (B, H, Sq) or (H, total_q), natural logarithm"),
    Field(
        "bias",
        "void *",
        "(B | 1, H | 1, Sq | 1, Sk | 1), see bias_type; of TREE plans (B | 1, Sq, Sq)",
    ),
    Field("alibi_slopes", "void *", "float32 (H,) or (B, H)"),
    Field("sinks", "void *", "float32 (H,)"),
    Field("seed", "void *", "one int64, read by the kernel"),
    Field("cu_seqlens_q", "void *", "int32 (B + 1,)"),
    Field("cu_seqlens_k", "void *", "int32 (B + 1,)"),
    Field("seqused_q", "void *", "int32 (B,); of append, keys in the cache before it"),
    Field("seqused_k", "void *", "int32 (B,)"),
    Field("page_table", "void *", "int32 (B, pages)"),
    Field("cache_batch_idx", "void *", "int32 (B,)"),
    Field("cache_leftpad", "void *", "int32 (B,)"),
    Field("q_descale", "void *", "float32 scales of float8 queries"),
    Field("k_descale", "void *", "float32 scales of float8 keys"),
    Field("v_descale", "void *", "float32 scales of float8 values"),
    Field("partial_out", "void *", "float32 (B·Sq or total_q, H, splits, Dv): outputs of splits"),
    Field("partial_lse", "void *", "float32 (B·Sq or total_q, H, splits): their LSEs"),
    Field("dout", "void *", "gradient of out"),
    Field("dlse", "void *", "float32 gradient of the LSE"),
    Field("delta", "void *", "float32 (2, as the LSE): dlse - rowsum(dout * out), -lse log2 e"),
    Field("dq", "void *", "gradient of q"),
    Field("dk", "void *", "gradient of k"),
    Field("dv", "void *", "gradient of v"),
    Field("dq_accum", "void *", "float32 workspace of dq"),
    Field("dsinks", "void *", "float32, as the LSE: each row's share of the sinks' gradient"),
    Field("counter", "void *", "int32: next work tile of a persistent grid, or locks of dq tiles"),
    Field("new_k", "void *", "keys to append to the cache: (B, new_rows, Hk, D)"),
    Field("new_v", "void *", "values to append, as new_k with Dv"),
    Field("rotary_cos", "void *", "(rotary_rows, rotary_dim / 2), see rotary_flags"),
    Field("rotary_sin", "void *", "as rotary_cos"),
    Field("rotary_seqlens", "void *", "int32 (B,): positions of the first query and new key"),
    *_strided("q", "k", "v", "out", "dout", "dq", "dk", "dv", "new_k", "new_v"),
    Field("bias_batch", "long long", "stride of bias between sequences, 0 where broadcast"),
    Field("bias_head", "long long", "stride of bias between heads, 0 where broadcast"),
    Field("bias_row", "long long", "stride of bias between rows, 0 where broadcast"),
    Field("bias_key", "long long", "stride of bias between keys, 0 where broadcast"),
    Field("lse_batch", "long long", "stride of lse, dlse and delta between sequences (0: packed)"),
    Field("lse_head", "long long", "stride of lse, dlse and delta between heads"),
    Field("page_table_batch", "long long", "stride of page_table between sequences"),
    Field("slopes_batch", "long long", "stride of alibi_slopes between sequences, 0 for (H,)"),
    Field("q_descale_batch", "long long", "stride of q_descale, see descale_type"),
    Field("q_descale_head", "long long", "stride of q_descale between key heads"),
    Field("batch", "int", "number of sequences"),
    Field("heads_q", "int", "query heads"),
    Field("heads_k", "int", "key heads; of a backward, parts of groups: num_splits a key head"),
    Field("seqlen_q", "int", "rows of the longest sequence"),
    Field("seqlen_k", "int", "keys of the longest sequence"),
    Field("head_dim", "int", "D"),
    Field("head_dim_v", "int", "Dv"),
    Field("page_size", "int", "keys a page, 0 without page_table"),
    Field("window_left", "int", "keys to the left of the diagonal, -1 unlimited"),
    Field("window_right", "int", "keys to the right of the diagonal, -1 unlimited, 0 causal"),
    Field("q_start", "int", "global index of row 0"),
    Field("k_start", "int", "global index of key 0"),
    Field("head_start", "int", "global index of query head 0"),
    Field("batch_start", "int", "global index of sequence 0"),
    Field("use_sinks", "int", "whether the sinks take part in this block"),
    Field("bias_type", "int", "0 none, 1 bool, 2 float32, 3 float16, 4 bfloat16"),
    Field(
        "num_splits",
        "int",
        "parts that the keys are cut into; of a backward, the query heads of a group",
    ),
    Field("new_rows", "int", "keys to append to each sequence; seqused_k counts them"),
    Field("rotary_dim", "int", "leading elements of a head that rotary turns, 0 without"),
    Field("rotary_rows", "int", "positions that the rotary tables have"),
    Field("rotary_flags", "int", "as append.h says: what is in the tables, and whom they turn"),
    Field("window_shift", "int", "of BANDED plans: keys from the diagonal to the window's middle"),
    Field("attention_chunk", "int", "of BANDED plans: keys of a chunk, 0 without"),
    Field("dropout_threshold", "unsigned", "a draw below this is kept; 0 without dropout"),
    Field("scale", "float", "factor of q.k"),
    Field("softcap", "float", "0 without"),
    Field("dropout_scale", "float", "1 / (1 - p)"),
    Field("dies", "int", "dies (XCDs) that workgroups go round in turn"),
    # At the end and not among their like, so that every other member stays where it was.
    Field("k_descale_batch", "long long", "as q_descale_batch; of pages, the stride between them"),
    Field("k_descale_head", "long long", "stride of k_descale between key heads"),
    Field("v_descale_batch", "long long", "as k_descale_batch"),
    Field("v_descale_head", "long long", "stride of v_descale between key heads"),
    Field("q_descale_block", "int", "stride of q_descale between blocks of rows"),
    Field("k_descale_block", "int", "stride of k_descale between blocks of rows"),
    Field("v_descale_block", "int", "stride of v_descale between blocks of rows"),
    Field("q_block_log2", "int", "rows of q that share a scale"),
    Field("k_block_log2", "int", "rows of k, and of v, that share a scale"),
    Field("descale_type", "int", "0 none, 1 per sequence, 2 per block of the rows in memory"),
    Field("group", "int", "of kernels with an order of work tiles: heads_q / heads_k"),
    Field("section", "int", "heads in a section of the order of work tiles"),
    Field("group_inverse", "unsigned long long", "inverse_of(group)"),
    Field("section_tiles_inverse", "unsigned long long", "of the work tiles of a section"),
    Field("section_inverse", "unsigned long long", "inverse_of(section)"),
    Field("last_section_inverse", "unsigned long long", "of the heads in the last section"),
    Field("heads_inverse", "unsigned long long", "of the heads of a sequence"),
    Field("splits_inverse", "unsigned long long", "inverse_of(num_splits)"),
)

# The members for tensors that mods captured (``kernels/mods.h``): for each tensor its address, and
# four sizes and strides in elements. In plans with block lists, two further tensors come last
# (``kernels/lists.h``), and for kernels that make lists also a table
# (``kernels/common/tile_bounds.h``).
_OF_LISTS = 3
_MOST_CAPTURED, _RANK = mods.MOST_CAPTURED + _OF_LISTS, 4


def inverse_of(divisor: int) -> int:
    """Return what a kernel multiplies by to divide numbers below 2^31 by ``divisor``: 2^64 over
    ``divisor``, rounded up, or 0 for a divisor of 1 (``kernels/cuda/order.h``)."""
    return -(-(1 << 64) // divisor) if divisor > 1 else 0


def captured_fields(number: int) -> Iterator[Field]:
    """Return the members for captured tensor ``number``."""
    name = f"captured{number}"
    yield Field(name, "void *", "a tensor that a mod captured")
    yield from (Field(f"{name}_size{dim}", "int", "of a dimension") for dim in range(_RANK))
    yield from (Field(f"{name}_stride{dim}", "int", "in elements") for dim in range(_RANK))


MODIFIED_FIELDS = tuple(f for n in range(_MOST_CAPTURED) for f in captured_fields(n))

_LAYOUT = struct.Struct("<" + "".join(_FORMATS[field.type] for field in FIELDS))
_MODIFIED = struct.Struct("<" + "".join(_FORMATS[field.type] for field in MODIFIED_FIELDS))
SIZE = _LAYOUT.size
_CAPTURED_SIZE = _MODIFIED.size // _MOST_CAPTURED
# CUtensorMap is 128 opaque bytes, and the hardware wants it at a multiple of 64.
MAP_SIZE, MAP_ALIGNMENT, MAX_MAPS = 128, 64, 8
MAPS_AT = -(-SIZE // MAP_ALIGNMENT) * MAP_ALIGNMENT
MAPPED_SIZE = MAPS_AT + MAX_MAPS * MAP_SIZE
NAMES = tuple(field.name for field in FIELDS)
_ALL = (*FIELDS, *MODIFIED_FIELDS)
_POSITIONS = {field.name: index for index, field in enumerate(_ALL)}
_BIAS_TYPES = {torch.bool: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}


def pack(values: Mapping[str, int | float], maps: Sequence[bytes] = ()) -> bytes:
    """Return the bytes of ``Params``, or of ``MappedParams`` if ``maps`` are given.

    Members that ``values`` does not name are 0. The members of captured tensors follow if
    ``values`` names one of them. Raises ``KeyError`` for a name that is not a member, and
    ``ValueError`` for maps of a wrong size or number.
    """
    if len(maps) > MAX_MAPS or any(len(tensor_map) != MAP_SIZE for tensor_map in maps):
        raise ValueError(f"maps: expected at most {MAX_MAPS} tensor maps of {MAP_SIZE} bytes")
    row: list[int | float] = [0] * len(_ALL)
    last = 0
    for name, value in values.items():
        position = _POSITIONS[name]
        row[position] = value
        last = max(last, position)
    data = _LAYOUT.pack(*row[: len(FIELDS)])
    if maps:
        data = data.ljust(MAPS_AT, b"\0") + b"".join(maps).ljust(MAX_MAPS * MAP_SIZE, b"\0")
    return data + _MODIFIED.pack(*row[len(FIELDS) :]) if last >= len(FIELDS) else data


def captured_bytes(number: object, listed: bool = False) -> int:
    """Return the bytes after ``Params`` for ``captured`` tensors: room for one tensor if the mods
    captured none, and 0 without mods (None). ``listed``: the kernel also takes block lists."""
    if not isinstance(number, int):
        return 0
    return _CAPTURED_SIZE * (number + _OF_LISTS if listed else max(number, 1))


def captured_values(number: int, shape: Strides, strides: Strides) -> Values:
    """Return the sizes and strides of captured tensor ``number``; missing dimensions have 1."""
    filler = (1,) * (_RANK - len(shape))
    values: Values = {f"captured{number}_size{dim}": n for dim, n in enumerate((*shape, *filler))}
    steps = enumerate((*strides, *filler))
    return values | {f"captured{number}_stride{dim}": n for dim, n in steps}


def unpack(data: bytes) -> dict[str, int | float]:
    """Return the members of ``Params`` by name, from its bytes."""
    return dict(zip(NAMES, _LAYOUT.unpack_from(data), strict=True))


def forward_values(call: Call, out: Strides, lse: Strides) -> Values:
    """Return the numbers (not addresses) that a forward kernel needs for ``call``.

    ``out`` and ``lse`` are the strides of tensors shaped ``Call.out_shape`` and ``lse_shape``.
    """
    band = band_of(call)
    values: Values = {
        "batch": call.batch,
        "heads_q": call.q.shape[-2],
        "heads_k": call.k.shape[-2],
        "seqlen_q": call.max_seqlen_q,
        "seqlen_k": call.max_seqlen_k,
        "head_dim": call.q.shape[-1],
        "head_dim_v": call.v.shape[-1],
        "window_left": call.window_left,
        "window_right": call.window_right,
        "scale": call.scale,
        "softcap": call.softcap,
        "use_sinks": int(call.sinks is not None),
        "num_splits": 1,
        "q_start": band.q_start,
        "k_start": call.k_start,
        "head_start": call.head_start,
        "batch_start": call.batch_start,
        "window_shift": band.window_shift,
        "attention_chunk": band.attention_chunk,
        "dies": 1,
        "lse_head": lse[-2],
        "lse_batch": lse[0] if len(lse) == 3 else 0,
    }
    for name, strides in (
        ("q", call.q.stride()),
        ("k", call.k.stride()),
        ("v", call.v.stride()),
        ("out", out),
    ):
        values |= strides_of(name, strides)
    if call.page_table is not None:
        values["page_size"] = call.k.shape[1]
        values["page_table_batch"] = call.page_table.stride(0)
    if call.bias is not None and call.tree:
        # For TREE plans. The mask is not a score term, so bias_type stays 0.
        batch, rows, _ = call.bias.shape
        values["bias_batch"] = call.bias.stride(0) if batch > 1 else 0
        values["bias_row"] = call.bias.stride(1) if rows > 1 else 0
    elif call.bias is not None:
        given = (
            stride if size > 1 else 0
            for stride, size in zip(call.bias.stride(), call.bias.shape, strict=True)
        )
        names = ("bias_batch", "bias_head", "bias_row", "bias_key")
        values |= dict(zip(names, given, strict=True))
        values["bias_type"] = _BIAS_TYPES[call.bias.dtype]
    if call.alibi_slopes is not None and call.alibi_slopes.dim() == 2:
        values["slopes_batch"] = call.alibi_slopes.stride(0)
    if call.k_descale is not None:
        values |= descale_values(call)
    for number, x in enumerate(call.captured):
        values |= captured_values(number, x.shape, x.stride())
    if call.dropout_p:
        values["dropout_threshold"] = int((1.0 - call.dropout_p) * 2**32)
        values["dropout_scale"] = 1.0 / (1.0 - call.dropout_p)
    return values


def pointers_of(call: Call) -> dict[str, str]:
    """Return the members that point to tensors of ``call``; member and tensor have one name."""
    given = zip(Call._fields[:TENSORS], call[:TENSORS], strict=True)
    return {name: name for name, x in given if x is not None}


def descale_values(call: Call) -> dict[str, int]:
    """Return strides and block sizes of the float8 scales of ``call``.

    Scales per block belong to rows in memory order; a packed tensor counts as one sequence.
    """
    values = {}
    for name, scale in (("q", call.q_descale), ("k", call.k_descale), ("v", call.v_descale)):
        if scale is None:
            continue
        batch, head, *block = scale.stride()
        values[f"{name}_descale_batch"] = batch
        values[f"{name}_descale_head"] = head
        values[f"{name}_descale_block"] = block[0] if block else 0
        values["descale_type"] = 2 if block else 1
    for name, scale, rows in (("q", call.q_descale, call.q), ("k", call.k_descale, call.k)):
        values[f"{name}_block_log2"] = max(0, scales_of(scale, rows).bit_length() - 1)
    return values


def strides_of(name: str, strides: Strides) -> dict[str, Extent]:
    """Return the strides of a tensor (B, S, H, D), or (total, H, D) with batch stride 0."""
    batch, row, head = strides[:3] if len(strides) == 4 else (0, *strides[:2])
    return {f"{name}_batch": batch, f"{name}_row": row, f"{name}_head": head}


@functools.cache
def offset_of(member: str) -> int:
    """Return the offset of a member in bytes."""
    return sum(_SIZES[field.type] for field in _ALL[: _POSITIONS[member]])


def format_of(member: str) -> str:
    """Return the struct format of a member."""
    return _FORMATS[_ALL[_POSITIONS[member]].type]


def header() -> str:
    """Return the text of ``kernels/params.h``."""
    lines = [
        "// The struct that every kernel takes by value. Generated from pyfa/abi.py by",
        "// `python -m pyfa.abi`; edit the table there. Strides count elements; a null pointer",
        "// means that the argument was not given.",
        "#pragma once",
        "",
        "struct Params {",
    ]
    for field in FIELDS:
        space = "" if field.type.endswith("*") else " "
        lines.append(f"  {field.type}{space}{field.name};  // {field.meaning}")
    lines += [
        "};",
        "",
        "// No offsets: not every NVRTC has offsetof. Members have no holes between them.",
        f'static_assert(sizeof(Params) == {SIZE}, "as pyfa/abi.py packs it");',
    ]
    lines += [
        "",
        f"struct alignas({MAP_ALIGNMENT}) TensorMap {{",
        f"  unsigned char opaque[{MAP_SIZE}];",
        "};",
        "",
        "struct MappedParams {",
        "  Params params;",
        f"  TensorMap maps[{MAX_MAPS}];",
        "};",
        "",
        f'static_assert(sizeof(MappedParams) == {MAPPED_SIZE}, "as pyfa/abi.py packs it");',
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(header(), end="")
