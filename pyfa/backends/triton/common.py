"""Device functions that the kernels share: row positions, masks, score terms, dropout bits.

Lengths and offsets are read on the device, so a graph can be replayed with other lengths. All
exponentials are base 2: ``exp2`` is one instruction, ``exp`` is two.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import os

import triton
import triton.language as tl

# Read when the kernels are decorated, as Triton itself does.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Bits of ``present``: which optional pointers are there. The loads of the others are masked off.
HAS_CU_Q = tl.constexpr(1)
HAS_CU_K = tl.constexpr(2)
HAS_USED_Q = tl.constexpr(4)
HAS_USED_K = tl.constexpr(8)
HAS_BATCH_IDX = tl.constexpr(16)
HAS_LEFTPAD = tl.constexpr(32)
HAS_ALIBI = tl.constexpr(64)
HAS_SINKS = tl.constexpr(128)
# Unlimited, for a window: beyond any length, and sums of two still fit 32 bits.
FAR = tl.constexpr(1 << 30)
# Nobody reads the LSE: it is not stored.
NO_LSE = tl.constexpr(256)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return a·b + acc in float32."""
    if _INTERPRETED:
        # The interpreter's dot of bfloat16 returns garbage.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 x to ``dtype``, to nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        # The interpreter truncates; NaN would survive neither way of rounding by integers.
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = bits & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x).to(dtype)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """Return (tanh, its derivative), to 2 ulp: a polynomial below 0.625 (Cephes' tanhf, S. Moshier
    1984), exponentials above. There 1 − tanh² would cancel: if 1e-6 remains, one ulp of tanh is 6 %
    of it."""
    z = x * x
    odd = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
    odd = ((odd + 1.33314422036e-1) * z - 3.33332819422e-1) * z * x + x
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    small = tl.abs(x) < 0.625
    slope = tl.where(small, 1.0 - odd * odd, 4.0 * e / ((1.0 + e) * (1.0 + e)))
    return tl.where(small, odd, tl.where(x < 0.0, -large, large)), slope


@triton.jit
def locate(blocks, heads, batch, section, descending, DIES: tl.constexpr):
    """Return (block, head, sequence) of this program, all from grid axis 0, because other axes end
    at 65,535.

    Blocks are processed in sections of ``section`` (sequence, head) pairs, whose K and V together
    fit in L2. With ``descending`` the last blocks of a section, which see the most keys under a
    causal mask, start first.
    """
    pid = tl.program_id(0)
    pairs = heads * batch
    if DIES > 1:
        # Consecutive programs go to the dies in turn; hand each die neighboring ones.
        per_die = blocks * pairs // DIES
        inside = pid < per_die * DIES
        pid = tl.where(inside, (pid % DIES) * per_die + pid // DIES, pid)
    first = pid // (blocks * section) * section
    width = tl.minimum(section, pairs - first)
    rest = pid - first * blocks
    block = rest // width
    pair = first + rest % width
    block = tl.where(descending != 0, blocks - 1 - block, block)
    return block, pair % heads, pair // heads


@triton.jit
def span(CU, USED, b, longest, has_cu, has_used):
    """Return the first row and the number of rows of sequence b in a packed or dense tensor."""
    start = tl.load(CU + b, mask=has_cu, other=0)
    stop = tl.load(CU + b + 1, mask=has_cu, other=longest)
    return start, tl.load(USED + b, mask=has_used, other=stop - start)


@triton.jit
def state_start(start_q, b, present):
    """Return the offset of sequence b's rows in BASE and DELTA; 0 unless packed. Offsets are
    multiples of 4 floats, because the copy engine needs 16-byte alignment; this adds at most 4
    floats per sequence."""
    return tl.where((present & HAS_CU_Q) != 0, (start_q // 4 + b) * 4, 0)


@triton.jit
def keys_seen(first_row, last_row, shift, keys, left, right):
    """Return, for rows first … last, the keys [low, high) that any of them sees and [all_low,
    all_high) that all of them see. ``left`` and ``right`` are 2^30 if unlimited."""
    low = tl.maximum(first_row + shift - left, 0)
    high = tl.minimum(last_row + shift + right + 1, keys)
    all_low = tl.maximum(last_row + shift - left, 0)
    all_high = tl.minimum(first_row + shift + right + 1, keys)
    return low, high, all_low, all_high


@triton.jit
def chunk_of(at, CHUNK):
    """Return the index of the chunk that contains position ``at``; −1 for positions before the
    first key."""
    return tl.where(at < 0, -1, at // CHUNK)


@triton.jit
def within_chunks(low, high, all_low, all_high, first, last, offset, CHUNK):
    """Restrict ``keys_seen`` to the chunks of ``first`` … ``last``, positions in the larger
    problem. ``offset``: the difference between a key's, or a row's, position there and its own
    number."""
    begin = chunk_of(first, CHUNK) * CHUNK - offset
    last_begin = chunk_of(last, CHUNK) * CHUNK - offset
    low = tl.maximum(low, begin)
    high = tl.minimum(high, last_begin + CHUNK)
    all_low = tl.maximum(all_low, last_begin)
    all_high = tl.minimum(all_high, begin + CHUNK)
    return low, high, all_low, all_high


@triton.jit
def keys_of_rows(first_row, last_row, shift, keys, left, right, k_start, WINDOW_SHIFT, CHUNK,
                 ORDERED: tl.constexpr):  # fmt: skip
    """Return ``keys_seen`` of the rows from ``first_row`` to ``last_row``, by window and chunk.

    Windows and chunks are given as in ``sees``. ORDERED: a key counts as seen by all rows only if
    that does not depend on which rows share a block.
    """
    middle = shift if WINDOW_SHIFT is None else shift + WINDOW_SHIFT
    low, high, all_low, all_high = keys_seen(first_row, last_row, middle, keys, left, right)
    if CHUNK is not None:  # noqa: SIM102  (compiled in or not, and then a branch)
        if CHUNK > 0:
            low, high, all_low, all_high = within_chunks(
                low, high, all_low, all_high, first_row + shift + k_start,
                last_row + shift + k_start, k_start, CHUNK,
            )  # fmt: skip
    if ORDERED:
        # Which tiles are unmasked at a left edge depends on the other rows of the block. So no tile
        # counts as unmasked, and all are visited in order.
        cut = left < FAR
        if CHUNK is not None:
            cut = cut | (CHUNK > 0)
        all_low = tl.where(cut, high, all_low)
    return low, high, all_low, all_high


@triton.jit
def sees(distance, key, own, k_start, left, right, WINDOW_SHIFT, CHUNK):
    """Return whether a row sees a key ``distance`` after the row's ``own`` position.

    ``WINDOW_SHIFT`` and ``CHUNK`` (0 for none) are None in plans without chunks and negative
    bounds, and then add no code.
    """
    if CHUNK is not None:
        moved = distance - WINDOW_SHIFT
        seen = (moved <= right) & (moved >= -left)
        chunk = tl.maximum(CHUNK, 1)
        same = chunk_of(key + k_start, chunk) == chunk_of(own + k_start, chunk)
        return seen & (same | (CHUNK == 0))
    return (distance <= right) & (distance >= -left)


@triton.jit
def full_tiles(low, high, all_low, all_high, BLOCK: tl.constexpr):
    """Return tile-aligned (start, full_start, full_stop): tiles in [full_start, full_stop) need no
    mask; tiles in [start, full_start) and [full_stop, high) do."""
    start = low // BLOCK * BLOCK
    full_start = tl.cdiv(all_low, BLOCK) * BLOCK
    full_stop = all_high // BLOCK * BLOCK
    none = full_start >= full_stop
    stop = tl.maximum(tl.cdiv(high, BLOCK) * BLOCK, start)
    full_start = tl.where(none, stop, tl.maximum(full_start, start))
    full_stop = tl.where(none, stop, full_stop)
    return start, full_start, full_stop


@triton.jit
def load_keys(
    base,
    n0,
    keys,
    stride_row,
    stride_page,
    PAGES,
    page_size,
    pad,
    columns,
    width,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
    PAGED: tl.constexpr,
    WIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Load keys n0 … n0+BLOCK of one head: [BLOCK, columns], or [columns, BLOCK] if TRANSPOSED.

    ``PAGED``: 0 contiguous, 1 any page size, 2 a page holds whole tiles. ``WIDE``: a tile's offsets
    exceed 31 bits.
    """
    step = tl.arange(0, BLOCK)
    if PAGED == 1:
        place = n0 + step + pad
        page = tl.load(PAGES + place // page_size, mask=n0 + step < keys, other=0)
        rows = page.to(tl.int64) * stride_page + (place % page_size) * stride_row
    else:
        if PAGED == 2:
            page = tl.load(PAGES + n0 // page_size)
            base += page.to(tl.int64) * stride_page + (n0 % page_size) * stride_row
        else:
            base += n0 * stride_row
        rows = step * (stride_row if WIDE else stride_row.to(tl.int32))
    if TRANSPOSED:
        pointers = base + (rows[None, :] + columns[:, None])
        exists = (n0 + step < keys)[None, :]
        inside = (columns < width)[:, None]
    else:
        pointers = base + (rows[:, None] + columns[None, :])
        exists = (n0 + step < keys)[:, None]
        inside = (columns < width)[None, :]
    if MASKED and EVEN:
        return tl.load(pointers, mask=exists, other=0.0)
    if MASKED:
        return tl.load(pointers, mask=exists & inside, other=0.0)
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def key_scales(
    K_SCALE,
    V_SCALE,
    n0,
    keys,
    place,
    stride_page,
    PAGES,
    page_size,
    pad,
    size,
    BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return the float8 scales of keys n0 … n0+BLOCK of one head and of their values; ``size`` rows
    share a scale. They are numbers if ``SCALED`` is 2 (the tile lies in one block), and [BLOCK] if
    it is 3. Without pages, key 0 is stored in row ``place``."""
    if SCALED == 2:
        row = place + n0
        if PAGED > 0:
            row = n0 % page_size
            page = tl.load(PAGES + n0 // page_size).to(tl.int64) * stride_page
            K_SCALE += page
            V_SCALE += page
        k_scale = tl.load(K_SCALE + row // size)
        v_scale = tl.load(V_SCALE + row // size)
    else:
        key = n0 + tl.arange(0, BLOCK)
        exists = key < keys
        row = (place + key) // size
        if PAGED > 0:
            stored = key + pad
            page = tl.load(PAGES + stored // page_size, mask=exists, other=0).to(tl.int64)
            row = page * stride_page + stored % page_size // size
        k_scale = tl.load(K_SCALE + row, mask=exists, other=0.0)
        v_scale = tl.load(V_SCALE + row, mask=exists, other=0.0)
    return k_scale, v_scale


@triton.jit
def score(
    qk, distance, slope, scale, softcap, b, h, q, kv, MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """Return (score before bias and mask, its derivative by the scaled q·k, which is 1 without
    softcap and score_mod). A mod receives b, h, q and kv, the indices in the whole problem."""
    s = qk * scale
    capped = tl.full(s.shape, 1.0, dtype=tl.float32)
    if softcap > 0.0:
        t, capped = tanh(s / softcap)
        s = t * softcap
    if SCORE_MOD is not None:
        new, steep = SCORE_MOD(s, b, h, q, kv, MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7)
        s = tl.zeros(s.shape, dtype=tl.float32) + new
        capped = capped * steep
    return s - slope * tl.abs(distance).to(tl.float32), capped


@triton.jit
def add_bias(s, pointers, exists, BIAS: tl.constexpr):
    """Return s with a float bias added (``BIAS`` 1), or −inf where a boolean bias is False (2)."""
    value = tl.load(pointers, mask=exists, other=0)
    if BIAS == 1:
        return s + value.to(tl.float32)
    return tl.where(value != 0, s, float("-inf"))


@triton.jit
def _words(SEED):
    seed = tl.load(SEED)
    return (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def kept(SEED, n0, rows, head, batch, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return which of the scores [rows, n0 … n0+BLOCK_N) survive dropout, with one draw for four
    keys."""
    k0, k1 = _words(SEED)
    group = (n0 // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)[None, :]
    c0, c1, c2, c3 = tl.philox_impl(
        group, rows.to(tl.uint32), head.to(tl.uint32), batch.to(tl.uint32), k0, k1, n_rounds=7
    )
    draw = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    return tl.reshape(draw, (BLOCK_M, BLOCK_N)) < threshold.to(tl.uint32)


@triton.jit
def kept_transposed(
    SEED, n0, rows, head, batch, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return ``kept`` as [keys, rows]."""
    k0, k1 = _words(SEED)
    group = (n0 // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)[:, None]
    c0, c1, c2, c3 = tl.philox_impl(
        group, rows.to(tl.uint32), head.to(tl.uint32), batch.to(tl.uint32), k0, k1, n_rounds=7
    )
    draw = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    draw = tl.permute(draw, (0, 2, 3, 1))
    return tl.reshape(draw, (BLOCK_N, BLOCK_M)) < threshold.to(tl.uint32)
