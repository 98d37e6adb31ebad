"""The attention calls of a rank on the keys of another rank: blocks of the whole problem.

A block is the attention of some of a rank's rows to some keys. Its mask is the part of the whole
problem's mask in the bounding box of all pairs that are not masked, with window bounds relative to
the box's bottom right corner. A block without masked pairs is plain attention, a block on the
diagonal is causal attention, and every backend supports both. Only ALiBi and dropout need the
position of the block in the whole problem (``Call.q_start`` and what follows it).
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from ..problem import Call
from .layout import Chunk, Layout, Range, starts


class Mask(NamedTuple):
    """The window of the whole problem (−1 means unlimited), and the terms that depend on positions
    in the whole problem."""

    left: int
    right: int
    alibi: bool = False
    dropout: bool = False


def mask_of(call: Call) -> Mask:
    """Return the properties of ``call`` that determine its blocks."""
    slopes, dropout = call.alibi_slopes is not None, call.dropout_p > 0.0
    return Mask(call.window_left, call.window_right, slopes, dropout)


class Piece(NamedTuple):
    """One attention call: ``rows`` of this rank's queries and ``keys`` of the keys received from
    another rank.

    In a packed batch it covers one sequence (number ``sequence``), or all of them; then
    ``offsets_q`` and ``offsets_k`` are relative to the first row and the first key.
    """

    rows: Range
    keys: Range
    left: int = -1
    right: int = -1
    q_start: int = 0
    k_start: int = 0
    sequence: int = 0
    offsets_q: tuple[int, ...] = ()
    offsets_k: tuple[int, ...] = ()


class Plan(NamedTuple):
    """The attention calls on another rank's keys. ``needed``: the chunks of these keys that this
    rank's queries see, in order."""

    needed: tuple[int, ...]
    pieces: tuple[Piece, ...]


# Packed batches are all different, and a thousand sequences take 200 KB.
@functools.lru_cache(512)
def plan(queries: Layout, keys: Layout, rank: int, source: int, mask: Mask, packed: bool) -> Plan:
    """Return the attention calls that rank ``rank`` makes on the keys of rank ``source``.

    Raises ``ValueError`` if a call would have to place its block (some rows × some keys) at one
    position for dropout or ALiBi and at another for the mask.
    """
    rows = queries.chunks(rank)
    found, needed, behind = [], [], 0
    for number, chunk in enumerate(keys.chunks(source)):
        shifted = Chunk((behind, behind + chunk.rows[1] - chunk.rows[0]), chunk.parts)
        seen = [each for row in rows for each in _pieces(queries, keys, row, shifted, mask, packed)]
        if seen:
            found += seen
            needed.append(number)
            behind = shifted.rows[1]
    if not (packed or mask.alibi or mask.dropout):
        causal = queries == keys and rank == source and mask.left < 0 and mask.right == 0
        if causal and found:
            # Queries and keys are the same rows in the same order, so the causal mask is right even
            # if there is a gap between two chunks.
            every = (0, queries.rows(rank))
            found = [Piece(every, every, right=0)]
        found = _joined(found)
    return Plan(tuple(needed), tuple(found))


@functools.lru_cache(256)
def check(queries: Layout, keys: Layout, mask: Mask, packed: bool) -> None:
    """Raise ``ValueError`` if ``plan`` raises it for any two ranks, so that all ranks know before
    one sends."""
    if mask.dropout:
        for rank, source in itertools.product(range(queries.ranks), repeat=2):
            plan(queries, keys, rank, source, mask, packed)


def _pieces(
    queries: Layout, keys: Layout, rows: Chunk, columns: Chunk, mask: Mask, packed: bool
) -> list[Piece]:
    """Return the calls of one chunk of rows on one chunk of keys: one, or one for each sequence."""
    boxes = []
    at_row, at_key = rows.rows[0], columns.rows[0]
    for number, (row, key) in enumerate(zip(rows.parts, columns.parts, strict=True)):
        diagonal = keys.lengths[number] - queries.lengths[number]
        box = _piece(row, key, diagonal, mask)
        if box is not None:
            move_q, move_k = at_row - row[0], at_key - key[0]
            box = box._replace(
                rows=(box.rows[0] + move_q, box.rows[1] + move_q),
                keys=(box.keys[0] + move_k, box.keys[1] + move_k),
                sequence=number,
            )
        boxes.append(box)
        at_row, at_key = at_row + row[1] - row[0], at_key + key[1] - key[0]
    seen = [box for box in boxes if box is not None]
    whole = sum(box.rows[1] - box.rows[0] for box in seen) == rows.rows[1] - rows.rows[0] and (
        sum(box.keys[1] - box.keys[0] for box in seen) == columns.rows[1] - columns.rows[0]
    )
    alike = len({(box.left, box.right) for box in seen}) == 1
    if packed and whole and alike and not (mask.alibi or mask.dropout):
        lengths_q, lengths_k = ([b - a for a, b in x.parts] for x in (rows, columns))
        return [
            Piece(
                rows.rows, columns.rows, seen[0].left, seen[0].right,
                offsets_q=tuple(starts(lengths_q)), offsets_k=tuple(starts(lengths_k)),
            )
        ]  # fmt: skip
    return seen


def _piece(row: Range, key: Range, diagonal: int, mask: Mask) -> Piece | None:
    """Return the call of rows ``row`` on the keys among ``key`` that they see. Row i of the whole
    sequence is at key i + ``diagonal``."""
    box = _box(row, key, diagonal, mask)
    if box is None:
        return None
    if mask.dropout:
        box = row, key  # whose keys begin at a multiple of four
    (first, end), (low, high) = box
    rows, keys = end - first, high - low
    # Row i of the block stands at its key i + place, and its own corner says at i + corner.
    place, corner = first + diagonal - low, keys - rows
    q_start = k_start = 0
    if mask.dropout:
        q_start, k_start = first, low
    elif mask.alibi:
        q_start, k_start = max(place - corner, 0), max(corner - place, 0)
    corner += q_start - k_start
    left = right = -1
    beside = mask.alibi and place != corner
    if 0 <= mask.right < keys - 1 - place:
        right = mask.right + place - corner
        beside |= right < 0
    if 0 <= mask.left < rows - 1 + place:
        left = mask.left - place + corner
        beside |= left < 0
    if beside:
        raise ValueError(
            "dropout_p: with ALiBi or a mask, expected as many keys as queries, in chunks of equal "
            f"length; got rows {row} and keys {key} of the whole sequence"
        )
    return Piece((first, end), (low, high), left, right, q_start, k_start)


def _box(row: Range, key: Range, diagonal: int, mask: Mask) -> tuple[Range, Range] | None:
    """Return the rows that see any of the keys, and the keys that any of them sees."""
    (first, end), (low, high) = row, key
    if mask.right >= 0:
        reach = diagonal + mask.right
        first, high = max(first, low - reach), min(high, end + reach)
    if mask.left >= 0:
        reach = diagonal - mask.left
        low, end = max(low, first + reach), min(end, high - reach)
    return ((first, end), (low, high)) if first < end and low < high else None


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return ``pieces``, with adjacent pieces merged if nothing in them is masked."""
    done: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: (each.keys, each.rows)):
        done.append(piece)
        while len(done) > 1:
            one, other = done[-2:]
            if not one.left == one.right == other.left == other.right == -1:
                break
            if one.keys == other.keys and one.rows[1] == other.rows[0]:
                joined = one._replace(rows=(one.rows[0], other.rows[1]))
            elif one.rows == other.rows and one.keys[1] == other.keys[0]:
                joined = one._replace(keys=(one.keys[0], other.keys[1]))
            else:
                break
            done[-2:] = [joined]
    return done
