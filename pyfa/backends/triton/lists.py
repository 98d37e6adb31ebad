"""Block lists: the tiles to visit under a mask_mod, and the tile states from which they are made.

The list of a block names first the tiles in which the mask_mod hides nothing, then those in which
it hides something, each in ascending order. So the loop over the tiles in which nothing is hidden
has no branch, and no code of the mask_mod.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

# Entries of a list that are looked at together.
_CHUNK = tl.constexpr(128)


@triton.jit
def tile_states(
    STATES, tiles_q, tiles_k, heads, longest_q, longest_k, q_start, k_start, head_start,
    batch_start, MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    ROWS: tl.constexpr, KEYS: tl.constexpr, AT_ONCE: tl.constexpr, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Write 0 for each tile of ROWS x KEYS in which the mask_mod hides everything, 1 if it hides
    something, and 2 if it hides nothing. A program takes AT_ONCE tiles of the same rows."""
    strips = tl.cdiv(tiles_k, AT_ONCE)
    pid = tl.program_id(0)
    line = pid // strips
    pair = line // tiles_q
    first = pid % strips * AT_ONCE
    # Beyond the end the last one again, which adds nothing.
    row = tl.minimum(line % tiles_q * ROWS + tl.arange(0, ROWS), longest_q - 1)
    one = tl.full([ROWS, KEYS], 1, dtype=tl.int32)
    for tile in range(first, tl.minimum(first + AT_ONCE, tiles_k)):
        key = tl.minimum(tile * KEYS + tl.arange(0, KEYS), longest_k - 1)
        shown = MASK_MOD(
            pair // heads + batch_start, pair % heads + head_start, row[:, None] + q_start,
            key[None, :] + k_start, MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
        )  # fmt: skip
        seen = tl.where(shown, one, 0)
        state = tl.max(tl.max(seen, 1), 0) + tl.min(tl.min(seen, 1), 0)
        tl.store(STATES + (line.to(tl.int64) * tiles_k + tile), state.to(tl.uint8))


@triton.jit
def _below(ENTRIES, count, a, b, c, d):
    """Return how many of ``count`` ascending entries are below a, b, c and d."""
    of_a, of_b, of_c, of_d = 0, 0, 0, 0
    for first in range(0, count, _CHUNK):
        place = first + tl.arange(0, _CHUNK)
        entry = tl.load(ENTRIES + place, mask=place < count, other=0x7FFFFFFF)
        of_a += tl.sum((entry < a).to(tl.int32))
        of_b += tl.sum((entry < b).to(tl.int32))
        of_c += tl.sum((entry < c).to(tl.int32))
        of_d += tl.sum((entry < d).to(tl.int32))
    return of_a, of_b, of_c, of_d


@triton.jit
def visits(
    COUNTS, ENTRIES, number, most, start, full_start, full_stop, stop, BLOCK: tl.constexpr
):  # fmt: skip
    """Return where the entries of list ``number`` that lie in [start, stop) are:

    - the list;
    - the first and last of the entries [first, last), whose tiles need no mask: they are full and
      lie in [full_start, full_stop);
    - how many entries of other full tiles come before these, and how many after them;
    - the first entry of a partial tile, for which the mask_mod is evaluated, and how many there
      are.

    Positions are multiples of BLOCK, except ``stop``.
    """
    full = tl.load(COUNTS + 2 * number)
    count = tl.load(COUNTS + 2 * number + 1)
    ENTRIES += number.to(tl.int64) * most
    end = tl.cdiv(stop, BLOCK)
    low = tl.minimum(tl.maximum(full_start, start) // BLOCK, end)
    high = tl.maximum(tl.minimum(full_stop, stop) // BLOCK, low)
    begin, first, last, behind = _below(ENTRIES, full, start // BLOCK, low, high, end)
    asked, asked_end, _, _ = _below(ENTRIES + full, count - full, start // BLOCK, end, 0, 0)
    return ENTRIES, first, last, first - begin, behind - last, full + asked, asked_end - asked


@triton.jit
def masked_entry(i, first, last, before, behind, asked):
    """Return the index, in a block's list, of the ``i``-th entry whose tile needs a mask.
    ``visits`` returns the other arguments."""
    place = tl.where(i < before + behind, last + i - before, asked + i - before - behind)
    return tl.where(i < before, first - before + i, place)
