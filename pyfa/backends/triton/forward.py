"""Forward: online softmax over tiles of keys (Dao 2023, FlashAttention-2, algorithm 1).

One kernel serves prefill and decode. ``PACK``: a block holds the query rows of all heads that share
a KV head, so K and V are read once for the group. ``SPLIT``: each program takes one split of the
keys and writes a normalized float32 partial result for ``decode.combine``.

Float8 queries are multiplied with float8 keys directly. V is converted to bfloat16, which is exact,
and P is rounded to bfloat16, for two reasons. A float8 product would need V transposed byte by byte
before the matrix unit. And P in bfloat16 has a relative error of 2⁻⁹, while V already has 2⁻⁵, and
keeps float32's range: keys far below a dominating key are not lost, in any order of keys, and P can
include V's scales. With 16-bit queries K and V are converted to the queries' dtype. ``SCALED`` is 0
without scales, 1 by sequence and head, 2 and 3 per block of rows (``common.key_scales``).

Tiles are as wide as a power of two, up to 512. In wider heads, ``BLOCK_E`` elements follow those of
``BLOCK_D`` and have a separate product. ``SHARED_V``: V is K's first elements, as in latent
attention, and is not loaded again.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra import cuda

from .common import (
    HAS_ALIBI,
    HAS_BATCH_IDX,
    HAS_CU_K,
    HAS_CU_Q,
    HAS_LEFTPAD,
    HAS_SINKS,
    HAS_USED_K,
    HAS_USED_Q,
    LN2,
    LOG2E,
    NO_LSE,
    add_bias,
    dot,
    full_tiles,
    kept,
    key_scales,
    keys_of_rows,
    load_keys,
    locate,
    rounded,
    score,
    sees,
    span,
)
from .lists import masked_entry, visits


@triton.jit
def _step(
    acc, total, top, q, q_rest, k_base, v_base, n0, keys, stride_ks, stride_vs, stride_kb,
    stride_vb, PAGES, page_size, pad, d, dv, head_dim, head_dim_v, rows, row_exists, shift, left,
    right, scale, softcap, slope, bias_rows, stride_bias_j, SEED, head, b, q_start, k_start,
    threshold,
    K_SCALE, V_SCALE, place, stride_page, K_SCALE_ROWS, WINDOW_SHIFT, CHUNK,
    MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, EVEN_DV: tl.constexpr, SHARED_V: tl.constexpr,
    GENERAL: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PAGED: tl.constexpr,
    WIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys; return the new (acc, total, top). ``top`` is each row's largest
    score so far, multiplied by log2(e) except for float32 queries. ``scale``: the softmax scale
    times the float8 scale of q, and that of k if ``SCALED`` is 1. If ``SCALED`` is 2 or 3, each
    block of rows has its own float8 scale, and ``scale`` has one value per row."""
    if TMA:
        k = tl.trans(k_base.load([n0, 0]))
    else:
        k = load_keys(
            k_base, n0, keys, stride_ks, stride_kb, PAGES, page_size, pad, d, head_dim,
            BLOCK_N, MASKED, EVEN_D, PAGED, WIDE, True,
        )  # fmt: skip
    stored = k
    if k.dtype != q.dtype:
        k = k.to(q.dtype)  # float8 under 16-bit queries, exactly
    qk = dot(q, k, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), PRECISION)
    if BLOCK_E > 0:
        k_rest = load_keys(
            k_base, n0, keys, stride_ks, stride_kb, PAGES, page_size, pad,
            BLOCK_D + tl.arange(0, BLOCK_E), head_dim, BLOCK_N, MASKED, EVEN_E, PAGED, WIDE, True,
        )  # fmt: skip
        qk = dot(q_rest, k_rest.to(q.dtype), qk, PRECISION)
    key = n0 + tl.arange(0, BLOCK_N)
    distance = key[None, :] - rows[:, None] - shift
    EXACT: tl.constexpr = q.dtype == tl.float32
    if SCALED >= 2:
        k_scale, v_scale = key_scales(
            K_SCALE, V_SCALE, n0, keys, place, stride_page, PAGES, page_size, pad, K_SCALE_ROWS,
            BLOCK_N, PAGED, SCALED,
        )  # fmt: skip
        if SCALED == 2:
            scale = scale * k_scale
        else:
            qk = qk * k_scale[None, :]
    factor = scale * LOG2E
    # One per row, as a column next to the scores.
    each = factor[:, None] if SCALED >= 2 else factor
    if GENERAL:
        qk, _capped = score(
            qk, distance, slope, scale[:, None] if SCALED >= 2 else scale, softcap, b, head,
            rows[:, None] + q_start, key[None, :] + k_start,
            MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7, SCORE_MOD,
        )  # fmt: skip
        if BIAS == 1 or BIAS == 2:
            exists = row_exists[:, None] & (key < keys)[None, :]
            pointers = bias_rows[:, None] + key[None, :] * stride_bias_j
            qk = add_bias(qk, pointers, exists, BIAS)
        factor = LOG2E
        each = LOG2E
    elif EXACT:
        qk = qk * scale
    if MASK_MOD is not None:
        shown = MASK_MOD(
            b, head, rows[:, None] + q_start, key[None, :] + k_start,
            MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
        )  # fmt: skip
        qk = tl.where(shown, qk, float("-inf"))
    if MASKED:
        seen = sees(
            distance, key[None, :], rows[:, None] + shift, k_start, left, right, WINDOW_SHIFT, CHUNK
        )  # fmt: skip
        seen = seen & (key < keys)[None, :]
        if BIAS == 3:
            column = key - shift
            new = row_exists[:, None] & ((column >= 0) & (key < keys))[None, :]
            pointers = bias_rows[:, None] + column[None, :] * stride_bias_j
            seen = seen & (tl.load(pointers, mask=new, other=1) != 0)
        qk = tl.where(seen, qk, float("-inf"))
    if EXACT:
        # Subtracted before it is scaled: of the row's largest score exactly 0 is left, and a row
        # that sees one key gives its value. Natural units, since a scaled maximum is a rounded one.
        raised = tl.maximum(top, tl.max(qk, 1))
    else:
        # A positive factor, so that it can wait until after the maximum and become part of an fma.
        raised = tl.maximum(top, tl.max(qk, 1) * factor)
    # While a row has seen nothing its maximum is −inf, and −inf − −inf would be NaN. So it is also
    # where nothing is masked, but all scores are −inf.
    base = tl.where(raised == float("-inf"), 0.0, raised)
    if EXACT:
        p = tl.exp2((qk - base[:, None]) * LOG2E)
        rescale = tl.exp2((top - base) * LOG2E)
    else:
        p = tl.exp2(qk * each - base[:, None])
        rescale = tl.exp2(top - base)
    total = total * rescale + tl.sum(p, 1)
    if DROPOUT:
        keep = kept(
            SEED, n0 + k_start, rows[:, None] + q_start, head, b, threshold, BLOCK_M, BLOCK_N
        )
        p = tl.where(keep, p, 0.0)
    acc = acc * rescale[:, None]
    if SHARED_V:
        v = tl.trans(stored)
    elif TMA:
        v = v_base.load([n0, 0])
    else:
        v = load_keys(
            v_base, n0, keys, stride_vs, stride_vb, PAGES, page_size, pad, dv, head_dim_v,
            BLOCK_N, MASKED, EVEN_DV, PAGED, WIDE, False,
        )  # fmt: skip
    if v.dtype.primitive_bitwidth == 8:
        if SCALED >= 2 and q.dtype == tl.float16:
            # P times a scale may leave float16's range; what V itself is does not.
            v = (v.to(tl.float32) * (v_scale[:, None] if SCALED == 3 else v_scale)).to(tl.float16)
        elif SCALED >= 2:
            p = p * (v_scale[None, :] if SCALED == 3 else v_scale)
        v = v.to(tl.float16 if q.dtype == tl.float16 else tl.bfloat16)
    acc = dot(rounded(p, v.dtype), v, acc, PRECISION)
    return acc, total, raised


@triton.jit
def attention_forward(
    Q, K, V, OUT, LSE, BIAS_PTR, ALIBI, SINKS, SEED, CU_Q, CU_K, USED_Q, USED_K, PAGES, BATCH_IDX,
    LEFTPAD, present,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_bias_b, stride_bias_h,
    stride_bias_i, stride_bias_j, stride_ab, stride_pb, stride_o_split, stride_l_split,
    batch, heads, group, head_dim, head_dim_v, longest_q, longest_k, page_size, blocks, section,
    descending, splits, left, right, scale, softcap, threshold, keep_scale, q_start, k_start,
    head_start, batch_start, WINDOW_SHIFT, CHUNK,
    K_SCALE, V_SCALE, K_SCALE_B, K_SCALE_H, K_SCALE_ROWS, Q_SCALE, Q_SCALE_B, Q_SCALE_H,
    Q_SCALE_ROWS, LIST_COUNTS, LIST_ENTRIES, LIST_B, LIST_H, LIST_MOST,
    MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, EVEN_DV: tl.constexpr,
    SHARED_V: tl.constexpr, GENERAL: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PAGED: tl.constexpr, PACK: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, TMA: tl.constexpr, DIES: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr, SCALED: tl.constexpr, ORDERED: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    if AHEAD:
        cuda.gdc_launch_dependents()  # the combination may take its place and wait there
    # ``heads`` counts what a program handles one of: key heads where rows are packed.
    block, unit, b = locate(blocks * splits, heads, batch, section, descending, DIES)
    part = block % splits
    block = block // splits
    start_q, rows_q = span(CU_Q, USED_Q, b, longest_q, (present & HAS_CU_Q) != 0,
                           (present & HAS_USED_Q) != 0)  # fmt: skip
    start_k, keys = span(CU_K, USED_K, b, longest_k, (present & HAS_CU_K) != 0,
                         (present & HAS_USED_K) != 0)  # fmt: skip
    pad = tl.load(LEFTPAD + b, mask=(present & HAS_LEFTPAD) != 0, other=0)
    keys -= pad
    line = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACK:
        lines = rows_q * group
        rows = line // group
        head_of_row = unit * group + line % group
        head = head_of_row[:, None]
        first_row = block * BLOCK_M // group
        last_row = tl.minimum(block * BLOCK_M + BLOCK_M - 1, lines - 1) // group
        key_head = unit
    else:
        lines = rows_q
        rows = line
        head_of_row = unit
        head = unit
        first_row = block * BLOCK_M
        last_row = tl.minimum(first_row + BLOCK_M, rows_q) - 1
        key_head = unit // group
    if block * BLOCK_M >= lines:
        return
    row_exists = line < lines
    shift = keys - rows_q + q_start - k_start
    row_place = start_q + rows.to(tl.int64)

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_rows = b * stride_qb + row_place * stride_qs + head_of_row * stride_qh
    q_mask = row_exists[:, None]
    if not EVEN_D:
        q_mask = q_mask & (d < head_dim)[None, :]
    q = tl.load(Q + (q_rows[:, None] + d[None, :]), mask=q_mask, other=0.0)
    q_rest = q
    if BLOCK_E > 0:
        rest = BLOCK_D + tl.arange(0, BLOCK_E)
        rest_mask = row_exists[:, None] & (rest < head_dim)[None, :]
        q_rest = tl.load(Q + (q_rows[:, None] + rest[None, :]), mask=rest_mask, other=0.0)

    PAGES += b * stride_pb
    if PAGED > 0:
        k_base = K + key_head * stride_kh
        v_base = V + key_head * stride_vh
    else:
        row_of_cache = tl.load(BATCH_IDX + b, mask=(present & HAS_BATCH_IDX) != 0, other=b)
        place = (start_k + pad).to(tl.int64)
        k_base = K + (row_of_cache * stride_kb + place * stride_ks
                      + key_head * stride_kh)  # fmt: skip
        v_base = V + (row_of_cache * stride_vb + place * stride_vs
                      + key_head * stride_vh)  # fmt: skip
    stored_at = 0
    if SCALED == 1:
        K_SCALE += b * K_SCALE_B + key_head * K_SCALE_H
        scale *= tl.load(K_SCALE)
        if Q_SCALE is not None:
            scale *= tl.load(Q_SCALE + (b * Q_SCALE_B + key_head * Q_SCALE_H))
    elif SCALED >= 2:
        K_SCALE += key_head * K_SCALE_H
        V_SCALE += key_head * K_SCALE_H
        if PAGED == 0:
            K_SCALE += row_of_cache * K_SCALE_B
            V_SCALE += row_of_cache * K_SCALE_B
            stored_at = start_k + pad
        scale = tl.zeros([BLOCK_M], dtype=tl.float32) + scale
        if Q_SCALE is not None:
            of_rows = b * Q_SCALE_B + key_head * Q_SCALE_H + row_place // Q_SCALE_ROWS
            scale *= tl.load(Q_SCALE + of_rows, mask=row_exists, other=1.0)
    if TMA:
        # The copy engine's bounds are the sequence's own: rows beyond its end read as zero.
        k_base = tl.make_tensor_descriptor(
            k_base, [keys, head_dim], [stride_ks, 1], [BLOCK_N, BLOCK_D]
        )
        v_base = tl.make_tensor_descriptor(
            v_base, [keys, head_dim_v], [stride_vs, 1], [BLOCK_N, BLOCK_DV]
        )

    # Heads below these have a slope or a sink. The interpreter knows no scalar mask for a vector.
    sloped = tl.where((present & HAS_ALIBI) != 0, heads * group, 0)
    slope = tl.load(ALIBI + b * stride_ab + head, mask=head < sloped, other=0.0)
    bias_rows = BIAS_PTR + (b * stride_bias_b + head_of_row * stride_bias_h
                            + rows * stride_bias_i)  # fmt: skip

    low, high, all_low, all_high = keys_of_rows(
        first_row, last_row, shift, keys, left, right, k_start, WINDOW_SHIFT, CHUNK, ORDERED
    )
    if BIAS == 3:
        all_high = tl.minimum(all_high, tl.maximum(shift, 0))  # behind it not every row sees a key
    start, full_start, full_stop = full_tiles(low, high, all_low, all_high, BLOCK_N)
    stop = tl.maximum(high, start)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(stop - start, BLOCK_N), splits) * BLOCK_N
        start = start + part * share
        stop = tl.minimum(stop, start + share)
    right_start = tl.maximum(full_stop, start)
    tiles_left = tl.maximum(tl.cdiv(tl.minimum(full_start, stop) - start, BLOCK_N), 0)
    tiles_right = tl.maximum(tl.cdiv(stop - right_start, BLOCK_N), 0)

    # A sink is one more logit without a value row: the state after having seen it.
    sunk = tl.where((present & HAS_SINKS) != 0, heads * group, 0)
    if SPLIT:
        sunk = tl.where(part == 0, sunk, 0)
    EXACT: tl.constexpr = q.dtype == tl.float32
    top = tl.zeros([BLOCK_M], dtype=tl.float32) + (1.0 if EXACT else LOG2E) * tl.load(
        SINKS + head_of_row, mask=head_of_row < sunk, other=float("-inf")
    )
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)

    FULL_MASK: tl.constexpr = MASK_MOD if LIST_COUNTS is None else None
    if LIST_COUNTS is None:
        first, last = tl.maximum(full_start, start), tl.minimum(full_stop, stop)
        masked = tiles_left + tiles_right
    else:
        number = b * LIST_B + unit * LIST_H + block
        LIST_ENTRIES, first, last, before, behind, asked, partial = visits(
            LIST_COUNTS, LIST_ENTRIES, number, LIST_MOST, start, full_start, full_stop, stop,
            BLOCK_N,
        )  # fmt: skip
        masked = before + behind + partial
    for at in range(first, last, BLOCK_N if LIST_COUNTS is None else 1):
        n0 = at if LIST_COUNTS is None else tl.load(LIST_ENTRIES + at) * BLOCK_N
        acc, total, top = _step(
            acc, total, top, q, q_rest, k_base, v_base, n0, keys, stride_ks, stride_vs, stride_kb,
            stride_vb, PAGES, page_size, pad, d, dv, head_dim, head_dim_v, rows, row_exists, shift,
            left, right, scale, softcap, slope, bias_rows, stride_bias_j, SEED, head + head_start,
            b + batch_start, q_start, k_start, threshold, K_SCALE, V_SCALE, stored_at, K_SCALE_B,
            K_SCALE_ROWS, WINDOW_SHIFT, CHUNK,
            MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, EVEN_D, EVEN_E, EVEN_DV, SHARED_V, GENERAL, BIAS,
            DROPOUT, PAGED, WIDE, TMA, PRECISION, SCALED, SCORE_MOD, FULL_MASK, False,
        )  # fmt: skip
    for tile in range(masked):
        if LIST_COUNTS is None:
            n0 = tl.where(
                tile < tiles_left,
                start + tile * BLOCK_N,
                right_start + (tile - tiles_left) * BLOCK_N,
            )
        else:
            at = masked_entry(tile, first, last, before, behind, asked)
            n0 = tl.load(LIST_ENTRIES + at) * BLOCK_N
        acc, total, top = _step(
            acc, total, top, q, q_rest, k_base, v_base, n0, keys, stride_ks, stride_vs, stride_kb,
            stride_vb, PAGES, page_size, pad, d, dv, head_dim, head_dim_v, rows, row_exists, shift,
            left, right, scale, softcap, slope, bias_rows, stride_bias_j, SEED, head + head_start,
            b + batch_start, q_start, k_start, threshold, K_SCALE, V_SCALE, stored_at, K_SCALE_B,
            K_SCALE_ROWS, WINDOW_SHIFT, CHUNK,
            MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, EVEN_D, EVEN_E, EVEN_DV, SHARED_V, GENERAL, BIAS,
            DROPOUT, PAGED, WIDE, TMA, PRECISION, SCALED, SCORE_MOD, MASK_MOD, True,
        )  # fmt: skip

    empty = total == 0.0
    lse = top + tl.log2(total) * LN2 if EXACT else (top + tl.log2(total)) * LN2
    lse = tl.where(empty, float("-inf"), lse)
    inverse = 1.0 / tl.where(empty, 1.0, total)
    if DROPOUT:
        inverse *= keep_scale
    if SCALED == 1:
        inverse *= tl.load(V_SCALE + (b * K_SCALE_B + key_head * K_SCALE_H))
    out = acc * inverse[:, None]
    out_rows = b * stride_ob + row_place * stride_os + head_of_row * stride_oh
    lse_rows = b * stride_lb + row_place + head_of_row * stride_lh
    if SPLIT:
        out_rows += part * stride_o_split
        lse_rows += part * stride_l_split
    out_mask = row_exists[:, None]
    if not EVEN_DV:
        out_mask = out_mask & (dv < head_dim_v)[None, :]
    tl.store(LSE + lse_rows, lse, mask=line < tl.where((present & NO_LSE) != 0, 0, lines))
    tl.store(
        OUT + (out_rows[:, None] + dv[None, :]), rounded(out, OUT.dtype.element_ty), mask=out_mask
    )
