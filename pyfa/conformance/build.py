"""Builds the inputs of a case: the arguments of the call, and the same problem in the form that the
reference takes.

The arguments of each public function and the reference's ``Call`` are both made from the same
sequences, and never from each other, so that the conversion between them is tested, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..problem import Call
from . import hostile
from .build_terms import with_terms
from .cases import Case, pick
from .inputs import (
    Inputs,
    Placed,
    Sequence,
    dtype_of,
    integers,
    near_normal,
    permutation,
    place,
    rotate,
    score_sizes,
    sequence,
)

# The value of unused page-table entries: nothing may read it.
_NO_PAGE = (-1, 1 << 30)
_EMPTY_BATCH_ROWS = 5


def build(case: Case) -> Inputs:
    """Return the inputs of ``case``. Their bytes are the same on every machine."""
    parts = [sequence(case, b) for b in range(case.batch)]
    hostile.make_way(case, parts)
    builders = {"dense": _dense, "varlen": _varlen, "kvcache": _kvcache, "latent": _latent}
    builder = builders[case.kind]
    of_reference = hostile.of_reference(case, parts)
    inputs = builder(case, of_reference)
    inputs.sequences = inputs.sequences or of_reference
    inputs.score_size, inputs.product_size = score_sizes(parts, inputs.spec)
    if case.backward:
        _add_gradients(inputs)
    if case.hostile:
        _poison(inputs, builder(case, hostile.poisoned(case, parts)))
    return inputs


def _poison(inputs: Inputs, poisoned: Inputs) -> None:
    """Put the hostile element into the call's inputs, and not into the reference's."""
    inputs.placed, inputs.cache_after = poisoned.placed, poisoned.cache_after
    inputs.marks = hostile.marks(inputs)
    if inputs.case.hostile != "padding=inf":
        return
    padded = {name: hostile.pad_with_inf(item) for name, item in inputs.placed.items()}
    for name, after in inputs.cache_after.items():
        item = dataclasses.replace(padded[name], buffer=after)
        inputs.cache_after[name] = hostile.pad_with_inf(item).buffer
    inputs.placed = padded
    if inputs.dout is not None:
        inputs.dout = hostile.pad_with_inf(inputs.dout)


def _dense(case: Case, parts: list[Sequence]) -> Inputs:
    placed = {}
    for index, name in enumerate("qkv"):
        heads = case.heads_q if name == "q" else case.heads_k
        empty = torch.zeros(0, _EMPTY_BATCH_ROWS, heads, _dim(case, name))
        values = torch.stack([part[index] for part in parts]) if parts else empty
        placed[name] = place(values, dtype_of(case, name), case.layout)
    q, k, v = (placed[name].view() for name in "qkv")
    call = Call(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    return with_terms(case, placed, {}, call)


def _varlen(case: Case, parts: list[Sequence]) -> Inputs:
    room_q = _room(case, "q", case.lengths_q, case.used_q)
    queries, starts_q = _packed([part[0] for part in parts], room_q, _q_shape(case), case)
    placed = {"q": place(queries, dtype_of(case), case.layout)}
    others: dict[str, Any] = {
        "cu_seqlens_q": starts_q,
        "max_seqlen_q": max(room_q, default=0) + case.slack,
    }
    if case.used_q:
        others["seqused_q"] = _int32(case.lengths_q)
    fields = dict(others)
    if case.page_size:
        table, shape = _pages(case, [-(-n // case.page_size) for n in case.lengths_k])
        for index, name in ((1, "k"), (2, "v")):
            values = torch.full((*shape, case.heads_k, _dim(case, name)), torch.nan)
            for b, part in enumerate(parts):
                page, row = _places(case, table, b, 0, case.lengths_k[b])
                if case.shared and b and case.lengths_k[b]:
                    # Rows that the first sequence stored on the shared page belong to this one too.
                    stored = min(case.page_size, case.lengths_k[0], case.lengths_k[b])
                    part[index][:stored] = parts[0][index][:stored]
                values[page, row] = part[index].float()
            placed[name] = place(values, dtype_of(case, name), case.layout)
        others["page_table"] = fields["page_table"] = table
        fields["seqused_k"] = _int32(case.lengths_k)
        if case.used_k:
            others["seqused_k"], others["cu_seqlens_k"] = fields["seqused_k"], None
        else:
            others["cu_seqlens_k"] = _offsets(case.lengths_k)
        longest_k = max(case.lengths_k, default=0)
    else:
        room_k = _room(case, "k", case.lengths_k, case.used_k)
        for index, name in ((1, "k"), (2, "v")):
            shape = (case.heads_k, _dim(case, name))
            values, starts_k = _packed([part[index] for part in parts], room_k, shape, case)
            placed[name] = place(values, dtype_of(case, name), case.layout)
        others["cu_seqlens_k"] = fields["cu_seqlens_k"] = starts_k
        if case.used_k:
            others["seqused_k"] = fields["seqused_k"] = _int32(case.lengths_k)
        longest_k = max(room_k, default=0)
    others["max_seqlen_k"] = fields["max_seqlen_k"] = longest_k + case.slack
    q, k, v = (placed[name].view() for name in "qkv")
    return with_terms(case, placed, others, Call(q, k, v, **fields))


def _kvcache(case: Case, parts: list[Sequence]) -> Inputs:
    batch, new = case.batch, case.new_keys
    left = integers(f"{case.name}/leftpad", batch, 8) if case.leftpad else [0] * batch
    stored = [pad + n for pad, n in zip(left, case.lengths_k, strict=True)]
    capacity = max(stored, default=0) + case.slack
    others: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    if case.page_size:
        table, shape = _pages(case, [-(-capacity // case.page_size)] * batch, stored)
        others["page_table"] = fields["page_table"] = table
        capacity = table.shape[1] * case.page_size
    elif case.batch_idx:
        shape = (batch + 2, capacity)
        rows = permutation(f"{case.name}/rows", batch + 2)[:batch]
        others["cache_batch_idx"] = fields["cache_batch_idx"] = _int32(rows)
        table = None
    else:
        shape, table = (batch, capacity), None
    before = [n - new for n in stored]
    if case.passes_cache_seqlens:
        same = len(set(before)) == 1 and not case.leftpad
        others["cache_seqlens"] = before[0] if same else _int32(before)
        fields["seqused_k"] = _int32(stored)
    if case.leftpad:
        others["cache_leftpad"] = fields["cache_leftpad"] = _int32(left)
    fields |= {"max_seqlen_q": max(case.lengths_q, default=0), "max_seqlen_k": capacity}
    if case.packed_q:
        fields["max_seqlen_q"] += case.slack
        fields["cu_seqlens_q"] = _offsets(case.lengths_q)
        others |= {name: fields[name] for name in ("cu_seqlens_q", "max_seqlen_q")}
    others["num_splits"] = case.num_splits
    near = _rotated(case, parts, others, before, capacity)

    placed = {"q": place(_queries(case, parts), dtype_of(case), case.layout)}
    if near is not None:
        for b, (turned_q, turned_k) in enumerate(near.exact):
            parts[b] = (turned_q, turned_k, parts[b][2])
    spec_q = _queries(case, parts)

    places = [_places(case, table, b, left[b], stored[b], others) for b in range(batch)]
    after, others_of_k = {}, []
    for index, name in ((1, "k"), (2, "v")):
        empty = torch.full((*shape, case.heads_k, _dim(case, name)), torch.nan)
        held, whole = empty.clone(), empty.clone()
        for b, (place_of, row) in enumerate(places):
            kept = case.lengths_k[b] - new
            held[place_of[:kept], row[:kept]] = parts[b][index][:kept].float()
            whole[place_of, row] = parts[b][index].float()
        placed[f"{name}_cache"] = place(held, dtype_of(case, name), case.layout)
        after[f"{name}_cache"] = place(whole, dtype_of(case, name), case.layout)
        if name == "k" and near is not None:
            for turned in (near.rounded, near.unsure):
                for b, (place_of, row) in enumerate(places):
                    whole[place_of, row] = turned[b][1].float()
                others_of_k.append(place(whole, dtype_of(case, name), case.layout).view())
    if new:
        originals = parts if near is None else near.originals
        for index, name in ((1, "k"), (2, "v")):
            fresh = [part[index][part[index].shape[0] - new :] for part in originals]
            placed[name] = place(torch.stack(fresh), dtype_of(case, name), case.layout)
    if near is not None:
        others |= near.arguments
        placed |= near.tables
    spec = Call(spec_q, after["k_cache"].view(), after["v_cache"].view(), **fields)
    inputs = with_terms(case, placed, others, spec)
    if near is not None:
        inputs.naive, inputs.unsure = (
            inputs.spec._replace(q=_queries(case, [(q, q, q) for q, _ in turned]), k=k)
            for turned, k in zip((near.rounded, near.unsure), others_of_k, strict=True)
        )
    inputs.cache_after = {name: item.buffer for name, item in after.items()}
    if near is not None and new:
        marks = torch.zeros((*shape, case.heads_k, case.head_dim), dtype=torch.bool)
        for place_of, row in places:
            marks[place_of[-new:], row[-new:]] = True
        inputs.rotated_rows = marks
    return inputs


def _latent(case: Case, parts: list[Sequence]) -> Inputs:
    """Make one cache, whose first elements are the values. Rows with lists of keys are packed
    sequences of the reference: each has its listed keys in order, as often as they are listed."""
    batch, stored = case.batch, list(case.lengths_k)
    capacity = max(stored, default=0) + case.slack
    others: dict[str, Any] = {"v_dim": case.head_dim_v, "num_splits": case.num_splits}
    fields: dict[str, Any] = {}
    table, shape = None, (batch, capacity)
    if case.page_size:
        table, shape = _pages(case, [-(-capacity // case.page_size)] * batch, stored)
        others["page_table"] = fields["page_table"] = table
        capacity = table.shape[1] * case.page_size
    if case.passes_cache_seqlens:
        same = len(set(stored)) == 1
        others["cache_seqlens"] = stored[0] if same else _int32(stored)
        fields["seqused_k"] = _int32(stored)
    held = torch.full((*shape, 1, case.head_dim), torch.nan)
    for b, part in enumerate(parts):
        held[_places(case, table, b, 0, stored[b])] = part[1].float()
    placed = {
        "q": place(_queries(case, parts), dtype_of(case), case.layout),
        "cache": place(held, dtype_of(case, "k"), case.layout),
    }
    q, cache = (item.view() for item in placed.values())
    if not case.topk:
        fields |= {"max_seqlen_q": max(case.lengths_q, default=0), "max_seqlen_k": capacity}
        spec = Call(q, cache, cache[..., : case.head_dim_v], latent=True, **fields)
        return with_terms(case, placed, others, spec)
    lists, lengths = _lists(case)
    others["indices"] = lists
    if lengths is not None:
        others["topk_lengths"] = lengths
    rows = [_row_with_list(case, part, lists, lengths, b, i) for b, part in enumerate(parts)
            for i in range(case.lengths_q[b])]  # fmt: skip
    counts = [row[1].shape[0] for row in rows]
    empty = parts[0][1][:0]
    spec = Call(
        q.flatten(0, 1),
        torch.cat([empty, *(row[1] for row in rows)]),
        torch.cat([empty, *(row[1] for row in rows)])[..., : case.head_dim_v],
        cu_seqlens_q=_offsets([1] * len(rows)),
        cu_seqlens_k=_offsets(counts),
        max_seqlen_q=1,
        max_seqlen_k=max(counts, default=0),
    )
    inputs = with_terms(case, placed, others, spec)
    inputs.spec = inputs.naive = inputs.spec._replace(window_right=-1)
    inputs.sequences = rows
    return inputs


def _lists(case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make the list of keys of each row: (B, rows, topk), with −1, indices beyond the end, and
    duplicates. Also return how many entries of each list are read, (B, rows), or None for all."""
    rows = max(case.lengths_q, default=0)
    count = case.batch * rows * case.topk
    below = max(case.lengths_k, default=0) + 4
    drawn = integers(f"{case.name}/indices", count, below)
    lists = _int32(drawn).reshape(case.batch, rows, case.topk) - 1
    lists[:, :, 1::7] = lists[:, :, 0::7][:, :, : lists[:, :, 1::7].shape[2]]
    if not case.used_q:
        return lists, None
    lengths = integers(f"{case.name}/topk_lengths", case.batch * rows, case.topk + 1)
    return lists, _int32(lengths).reshape(case.batch, rows)


def _row_with_list(
    case: Case, part: Sequence, lists: torch.Tensor, lengths: torch.Tensor | None, b: int, i: int
) -> Sequence:
    """Return row ``i`` of sequence ``b`` with the keys in its list."""
    q, k, _ = part
    end = k.shape[0] + (i + 1 - q.shape[0] if case.causal else 0)
    read = case.topk if lengths is None else int(lengths[b, i])
    named = [key for key in lists[b, i, :read].tolist() if 0 <= key < min(end, k.shape[0])]
    keys = k[torch.tensor(named, dtype=torch.int64)]
    return q[i : i + 1], keys, keys[..., : case.head_dim_v]


class _Rotated:
    """The rotated inputs of a case: (q, k) of each sequence, exactly rounded, in float32, and the
    ulps of the elements that may be rounded either way."""

    def __init__(self) -> None:
        self.originals: list[Sequence] = []
        self.exact: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rounded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.unsure: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tables: dict[str, Placed] = {}
        self.arguments: dict[str, Any] = {}


def _rotated(
    case: Case, parts: list[Sequence], others: dict[str, Any], before: list[int], capacity: int
) -> _Rotated | None:
    if not case.rotary:
        return None
    result = _Rotated()
    result.originals = list(parts)
    half = case.head_dim // (4 if "part" in case.rotary else 2) or 1
    start = before if "cache_seqlens" in others else [capacity] * case.batch
    if case.rotary_seqlens:
        start = integers(f"{case.name}/rotary_seqlens", case.batch, 8)
        result.arguments["rotary_seqlens"] = _int32(start)
    moving = case.causal or case.window is not None or case.attention_chunk > 0
    taken = [max(rows if moving else min(rows, 1), case.new_keys) for rows in case.lengths_q]
    # The tables end with the last position: what is behind them is not to be read.
    longest = max((first + rows for first, rows in zip(start, taken, strict=True)), default=1)
    longest = max(longest, 1 if case.rotary_seqlens else capacity)
    # Any rotation will do: the rational point (1 − t², 2t) / (1 + t²) needs no library's cosine.
    t = near_normal(f"{case.name}/rotary", (longest, half))
    tables = {"rotary_cos": (1 - t * t) / (1 + t * t), "rotary_sin": 2 * t / (1 + t * t)}
    dtype = torch.float32 if case.rotary.endswith("float32") else dtype_of(case)
    result.tables = {name: place(x, dtype, "contiguous") for name, x in tables.items()}
    cos, sin = (item.view() for item in result.tables.values())
    result.arguments["rotary_interleaved"] = case.rotary.startswith("interleaved")
    for b, (q, k, _) in enumerate(parts):
        steps = torch.arange(q.shape[0]) if moving else torch.zeros(q.shape[0], dtype=torch.int64)
        turned_q = rotate(q, cos, sin, start[b] + steps, case.rotary)
        old, new = k[: k.shape[0] - case.new_keys], k[k.shape[0] - case.new_keys :]
        turned_k = rotate(new, cos, sin, start[b] + torch.arange(case.new_keys), case.rotary)
        result.exact.append((turned_q[0], torch.cat((old, turned_k[0]))))
        result.rounded.append((turned_q[1], torch.cat((old, turned_k[1]))))
        sure = torch.zeros_like(old)
        result.unsure.append((turned_q[2], torch.cat((sure, turned_k[2]))))
    return result


def _queries(case: Case, parts: list[Sequence]) -> torch.Tensor:
    """Return q of all sequences: packed with spare rows, or stacked."""
    if case.packed_q:
        queries, _ = _packed([p[0] for p in parts], list(case.lengths_q), _q_shape(case), case)
        return queries.to(dtype_of(case))
    if not parts:
        return torch.zeros(0, _EMPTY_BATCH_ROWS, case.heads_q, case.head_dim)
    return torch.stack([part[0] for part in parts])


def _add_gradients(inputs: Inputs) -> None:
    """Add dout, and dLSE if it is used, with NaN in rows that no sequence owns."""
    case, call = inputs.case, inputs.spec
    packed = call.cu_seqlens_q is not None
    owned = torch.zeros(call.out_shape()[:-2], dtype=torch.bool)
    for b, rows in enumerate(case.lengths_q):
        if call.cu_seqlens_q is not None:
            begin = int(call.cu_seqlens_q[b])
            owned[begin : begin + rows] = True
        else:
            owned[b, :rows] = True
    values = near_normal(f"{case.name}/dout", call.out_shape())
    values = values.masked_fill(~owned[..., None, None], torch.nan)
    inputs.dout = place(values, dtype_of(case), case.layout)
    if case.dlse:
        values = near_normal(f"{case.name}/dlse", call.lse_shape())
        outside = ~owned[None] if packed else ~owned[:, None]
        inputs.dlse = place(values.masked_fill(outside, torch.nan), torch.float32, "contiguous")


def _int32(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _offsets(lengths: Any) -> torch.Tensor:
    return _int32([sum(lengths[:b]) for b in range(len(lengths) + 1)])


def _dim(case: Case, name: str) -> int:
    return case.head_dim_v if name == "v" else case.head_dim


def _q_shape(case: Case) -> tuple[int, int]:
    return case.heads_q, case.head_dim


def _room(case: Case, side: str, lengths: tuple[int, ...], used: bool) -> list[int]:
    """Return how many rows each sequence owns: with ``used``, more than are in use."""
    extra = integers(f"{case.name}/room_{side}", len(lengths), 4) if used else [0] * len(lengths)
    return [n + more for n, more in zip(lengths, extra, strict=True)]


def _packed(
    parts: list[torch.Tensor], room: list[int], shape: tuple[int, int], case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (total, heads, dim), with NaN in rows that are not in use, and the offsets."""
    values = torch.full((sum(room) + case.slack, *shape), torch.nan)
    starts = _offsets(room)
    for begin, part in zip(starts.tolist(), parts, strict=False):
        values[begin : begin + part.shape[0]] = part.float()
    return values, starts


def _pages(
    case: Case, needed: list[int], stored: list[int] | None = None
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return a page table (B, columns) of scattered pages, and (number of pages, page size).

    The number of ``stored`` rows decides which entries are used; an unused entry is no valid page.
    """
    columns = max(needed, default=0) + (0 if stored is not None else 1)
    used = needed if stored is None else [-(-n // case.page_size) for n in stored]
    numbers = permutation(f"{case.name}/pages", sum(used) + 2)
    nobody = pick(f"{case.name}/no_page", _NO_PAGE)
    table = torch.full((len(needed), columns), nobody, dtype=torch.int32)
    for b, count in enumerate(used):
        table[b, :count] = _int32(numbers[sum(used[:b]) : sum(used[: b + 1])])
        if case.shared and b and count and used[0]:
            table[b, 0] = table[0, 0]
    return table, (sum(used) + 2, case.page_size)


def _places(
    case: Case,
    table: torch.Tensor | None,
    b: int,
    begin: int,
    end: int,
    others: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where rows ``begin`` … ``end``−1 of sequence ``b`` are stored: (page or batch row,
    row)."""
    rows = torch.arange(begin, end)
    if table is not None:
        return table[b, rows // case.page_size].long(), rows % case.page_size
    index = (others or {}).get("cache_batch_idx")
    return torch.full_like(rows, b if index is None else int(index[b])), rows
