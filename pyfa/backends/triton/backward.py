"""Backward in two kernels without atomics (FlashAttention-2, algorithm 2, once by key block and
once by query block). It gives the same bits on every run, and costs two more matrix products per
tile than a single kernel.

``delta`` = rowsum(dO∘O) − dLSE is subtracted from every dP of a row. Above head_dim 512, the
elements beyond ``BLOCK_D`` have separate products (``_rest``), as in ``forward``.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from .common import (
    HAS_ALIBI,
    HAS_CU_K,
    HAS_CU_Q,
    HAS_LEFTPAD,
    HAS_USED_K,
    HAS_USED_Q,
    LOG2E,
    add_bias,
    dot,
    full_tiles,
    kept,
    kept_transposed,
    keys_of_rows,
    keys_seen,
    load_keys,
    locate,
    rounded,
    score,
    sees,
    span,
    state_start,
    within_chunks,
)
from .lists import masked_entry, visits


@triton.jit
def row_state(
    OUT, DOUT, LSE, DLSE, BASE, DELTA, CU_Q, USED_Q, present, stride_ob, stride_os, stride_oh,
    stride_gb, stride_gs, stride_gh, stride_lb, stride_lh, stride_sb, stride_sh, batch, heads,
    head_dim_v, longest_q, blocks, with_dlse,
    LINES: tl.constexpr, BLOCK_DV: tl.constexpr, DIES: tl.constexpr,
):  # fmt: skip
    """Compute ``DELTA``, and the LSE in base 2 as ``BASE``: +inf for fully masked rows, so that
    their P is 0. The loops then load both without a check."""
    block, head, b = locate(blocks, heads, batch, 1, 0, DIES)
    start_q, rows = span(CU_Q, USED_Q, b, longest_q, (present & HAS_CU_Q) != 0,
                         (present & HAS_USED_Q) != 0)  # fmt: skip
    row = block * LINES + tl.arange(0, LINES)
    exists = row < rows
    place = start_q + row.to(tl.int64)
    e = tl.arange(0, BLOCK_DV)
    inside = exists[:, None] & (e < head_dim_v)[None, :]
    o_rows = b * stride_ob + place * stride_os + head * stride_oh
    g_rows = b * stride_gb + place * stride_gs + head * stride_gh
    out = tl.load(OUT + (o_rows[:, None] + e[None, :]), mask=inside, other=0.0)
    dout = tl.load(DOUT + (g_rows[:, None] + e[None, :]), mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    lse_rows = b * stride_lb + head * stride_lh + place
    delta -= tl.load(DLSE + lse_rows, mask=row < rows * with_dlse, other=0.0)
    lse = tl.load(LSE + lse_rows, mask=exists, other=0.0)
    saw = lse != float("-inf")  # NaN has to come through
    to = b * stride_sb + head * stride_sh + state_start(start_q, b, present) + row
    tl.store(BASE + to, tl.where(saw, lse * LOG2E, float("inf")), mask=exists)
    tl.store(DELTA + to, tl.where(saw, delta, 0.0), mask=exists)


@triton.jit
def _load_rows(base, m0, stride, rows, columns, width, step, BLOCK: tl.constexpr,
               EVEN: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Load rows m0 … m0+BLOCK of q or dO: [BLOCK, columns], zero beyond ``rows``."""
    pointers = base + m0 * stride
    offsets = step * (stride if WIDE else stride.to(tl.int32))
    pointers += offsets[:, None] + columns[None, :]
    exists = (m0 + step < rows)[:, None]
    if MASKED and EVEN:
        return tl.load(pointers, mask=exists, other=0.0)
    if MASKED:
        return tl.load(pointers, mask=exists & (columns < width)[None, :], other=0.0)
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(columns < width)[None, :], other=0.0)


@triton.jit
def _keys_step(
    dk, dk_rest, dv, k, k_rest, v, q_base, g_base, lse_base, delta_base, m0, rows, keys, n0,
    stride_qs, stride_gs, d, e, head_dim, head_dim_v, shift, left, right, scale, softcap, slope,
    bias_base, stride_bias_i, stride_bias_j, SEED, head, b, q_start, k_start, threshold,
    keep_scale,
    WINDOW_SHIFT, CHUNK,
    MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, EVEN_DV: tl.constexpr,
    GENERAL: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Process one tile of queries for a block of keys; scores are stored as [keys, rows]."""
    step = tl.arange(0, BLOCK_M)
    row = m0 + step
    key = n0 + tl.arange(0, BLOCK_N)
    exists = row < rows
    if TMA:
        q = q_base.load([m0, 0])
        g = g_base.load([m0, 0])
    else:
        q = _load_rows(q_base, m0, stride_qs, rows, d, head_dim, step, BLOCK_M, EVEN_D, MASKED,
                       WIDE)  # fmt: skip
        g = _load_rows(g_base, m0, stride_gs, rows, e, head_dim_v, step, BLOCK_M, EVEN_DV, MASKED,
                       WIDE)  # fmt: skip
    if TMA:
        # Plain loads of a few floats would be copied by every thread for itself: 32 of the 420
        # instructions of the loop. Rows beyond the end read as 0, and q and dO are 0 there too.
        lse = lse_base.load([m0])
        delta = delta_base.load([m0])
    elif MASKED:
        lse = tl.load(lse_base + row, mask=exists, other=float("inf"))
        delta = tl.load(delta_base + row, mask=exists, other=0.0)
    else:
        lse = tl.load(lse_base + row)
        delta = tl.load(delta_base + row)
    nothing = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    s = dot(k, tl.trans(q), nothing, PRECISION)
    if BLOCK_E > 0:
        rest = BLOCK_D + tl.arange(0, BLOCK_E)
        q_rest = _load_rows(q_base, m0, stride_qs, rows, rest, head_dim, step, BLOCK_M, EVEN_E,
                            MASKED, WIDE)  # fmt: skip
        s = dot(k_rest, tl.trans(q_rest), s, PRECISION)
    distance = key[:, None] - row[None, :] - shift
    capped = nothing
    if GENERAL:
        s, capped = score(
            s, distance, slope, scale, softcap, b, head, row[None, :] + q_start,
            key[:, None] + k_start, MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7, SCORE_MOD,
        )  # fmt: skip
        if BIAS > 0:
            pointers = bias_base + (row[None, :] * stride_bias_i + key[:, None] * stride_bias_j)
            s = add_bias(s, pointers, exists[None, :] & (key < keys)[:, None], BIAS)
        p = tl.exp2(s * LOG2E - lse[None, :])
    else:
        p = tl.exp2(s * (scale * LOG2E) - lse[None, :])
    if MASKED:
        # Keys beyond the end need no mask: their rows of dK and dV are not stored.
        seen = sees(
            distance, key[:, None], row[None, :] + shift, k_start, left, right, WINDOW_SHIFT, CHUNK
        )  # fmt: skip
        p = tl.where(seen, p, 0.0)
    if MASK_MOD is not None:
        shown = MASK_MOD(
            b, head, row[None, :] + q_start, key[:, None] + k_start,
            MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
        )  # fmt: skip
        p = tl.where(shown, p, 0.0)
    p_kept = p
    if DROPOUT:
        keep = kept_transposed(
            SEED, n0 + k_start, row[None, :] + q_start, head, b, threshold, BLOCK_M, BLOCK_N
        )
        p_kept = tl.where(keep, p * keep_scale, 0.0)
    if WITH_DV:
        dv = dot(rounded(p_kept, g.dtype), g, dv, PRECISION)
    if WITH_DK:
        dp = dot(v, tl.trans(g), nothing, PRECISION)
        if DROPOUT:
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[None, :])
        if GENERAL:
            ds = ds * capped
            if SCORE_MOD is not None:
                ds = tl.where(p == 0.0, 0.0, ds)  # where a slope need not be finite
        ds = rounded(ds, q.dtype)
        dk = dot(ds, q, dk, PRECISION)
        if BLOCK_E > 0:
            dk_rest = dot(ds, q_rest, dk_rest, PRECISION)
    return dk, dk_rest, dv


@triton.jit
def grad_keys(
    Q, K, V, DOUT, DK, DV, BASE, DELTA, BIAS_PTR, ALIBI, SINKS, SEED, CU_Q, CU_K, USED_Q,
    USED_K, PAGES, BATCH_IDX, LEFTPAD, present,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_gb, stride_gs, stride_gh, stride_dkb, stride_dks, stride_dkh, stride_dvb,
    stride_dvs, stride_dvh, stride_sb, stride_sh, stride_bias_b, stride_bias_h, stride_bias_i,
    stride_bias_j, stride_ab, stride_pb,
    batch, heads, group, head_dim, head_dim_v, longest_q, longest_k, page_size, blocks, section,
    descending, left, right, scale, softcap, threshold, keep_scale, q_start, k_start, head_start,
    batch_start, WINDOW_SHIFT, CHUNK,
    LIST_COUNTS, LIST_ENTRIES, LIST_B, LIST_H, LIST_MOST,
    MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, EVEN_DV: tl.constexpr,
    GENERAL: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PAGED: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
    DIES: tl.constexpr, PRECISION: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Compute dK, dV or both for a block of keys of one KV head, summed over the heads that share
    it."""
    block, key_head, b = locate(blocks, heads, batch, section, descending, DIES)
    start_q, rows = span(CU_Q, USED_Q, b, longest_q, (present & HAS_CU_Q) != 0,
                         (present & HAS_USED_Q) != 0)  # fmt: skip
    start_k, keys = span(CU_K, USED_K, b, longest_k, (present & HAS_CU_K) != 0,
                         (present & HAS_USED_K) != 0)  # fmt: skip
    pad = tl.load(LEFTPAD + b, mask=(present & HAS_LEFTPAD) != 0, other=0)
    keys -= pad
    n0 = block * BLOCK_N
    if n0 >= keys:
        return
    shift = keys - rows + q_start - k_start
    step = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_DV)
    place = (start_k + pad).to(tl.int64)
    k_base = K + key_head * stride_kh
    v_base = V + key_head * stride_vh
    PAGES += b * stride_pb
    if PAGED == 0:
        k_base += b * stride_kb + place * stride_ks
        v_base += b * stride_vb + place * stride_vs
    k = load_keys(k_base, n0, keys, stride_ks, stride_kb, PAGES, page_size, pad, d, head_dim,
                  BLOCK_N, True, EVEN_D, PAGED, WIDE, False)  # fmt: skip
    k_rest = k
    rest = BLOCK_D + tl.arange(0, BLOCK_E if BLOCK_E > 0 else 16)
    if BLOCK_E > 0:
        k_rest = load_keys(k_base, n0, keys, stride_ks, stride_kb, PAGES, page_size, pad, rest,
                           head_dim, BLOCK_N, True, EVEN_E, PAGED, WIDE, False)  # fmt: skip
    v = load_keys(v_base, n0, keys, stride_vs, stride_vb, PAGES, page_size, pad, e, head_dim_v,
                  BLOCK_N, True, EVEN_DV, PAGED, WIDE, False)  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32) if WITH_DK else 0.0
    dk_rest = tl.zeros([BLOCK_N, BLOCK_E], dtype=tl.float32) if WITH_DK and BLOCK_E > 0 else 0.0
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32) if WITH_DV else 0.0
    last_key = tl.minimum(n0 + BLOCK_N, keys) - 1
    # Seen from the keys the window is mirrored.
    middle = shift if WINDOW_SHIFT is None else shift + WINDOW_SHIFT
    low, high, all_low, all_high = keys_seen(n0, last_key, -middle, rows, right, left)
    if CHUNK is not None:  # noqa: SIM102  (compiled in or not, and then a branch)
        if CHUNK > 0:
            low, high, all_low, all_high = within_chunks(
                low, high, all_low, all_high, n0 + k_start, last_key + k_start, shift + k_start,
                CHUNK,
            )  # fmt: skip
    start, full_start, full_stop = full_tiles(low, high, all_low, all_high, BLOCK_M)
    stop = tl.maximum(high, start)
    right_start = tl.maximum(full_stop, start)
    tiles_left = tl.maximum(tl.cdiv(tl.minimum(full_start, stop) - start, BLOCK_M), 0)
    tiles_right = tl.maximum(tl.cdiv(stop - right_start, BLOCK_M), 0)

    FULL_MASK: tl.constexpr = MASK_MOD if LIST_COUNTS is None else None
    for member in range(group):
        head = key_head * group + member
        q_base = Q + (b * stride_qb + start_q * stride_qs + head * stride_qh)
        g_base = DOUT + (b * stride_gb + start_q * stride_gs + head * stride_gh)
        row_base = b * stride_sb + head * stride_sh + state_start(start_q, b, present)
        lse_base = BASE + row_base
        delta_base = DELTA + row_base
        if TMA:
            lse_base = tl.make_tensor_descriptor(lse_base, [rows], [1], [BLOCK_M])
            delta_base = tl.make_tensor_descriptor(delta_base, [rows], [1], [BLOCK_M])
            q_base = tl.make_tensor_descriptor(
                q_base, [rows, head_dim], [stride_qs, 1], [BLOCK_M, BLOCK_D]
            )
            g_base = tl.make_tensor_descriptor(
                g_base, [rows, head_dim_v], [stride_gs, 1], [BLOCK_M, BLOCK_DV]
            )
        slope = tl.load(ALIBI + b * stride_ab + head, mask=(present & HAS_ALIBI) != 0, other=0.0)
        bias_base = BIAS_PTR + (b * stride_bias_b + head * stride_bias_h)
        if LIST_COUNTS is None:
            first, last, masked = full_start, full_stop, tiles_left + tiles_right
        else:
            number = b * LIST_B + head * LIST_H + block
            LIST, first, last, before, behind, asked, partial = visits(
                LIST_COUNTS, LIST_ENTRIES, number, LIST_MOST, start, full_start, full_stop, stop,
                BLOCK_M,
            )  # fmt: skip
            masked = before + behind + partial
        for at in range(first, last, BLOCK_M if LIST_COUNTS is None else 1):
            m0 = at if LIST_COUNTS is None else tl.load(LIST + at) * BLOCK_M
            dk, dk_rest, dv = _keys_step(
                dk, dk_rest, dv, k, k_rest, v, q_base, g_base, lse_base, delta_base, m0, rows, keys,
                n0, stride_qs, stride_gs, d, e, head_dim, head_dim_v, shift, left, right, scale,
                softcap, slope, bias_base, stride_bias_i, stride_bias_j, SEED, head + head_start,
                b + batch_start, q_start, k_start, threshold, keep_scale, WINDOW_SHIFT, CHUNK,
                MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, EVEN_D, EVEN_E, EVEN_DV, GENERAL, BIAS, DROPOUT,
                WIDE, TMA, PRECISION, WITH_DK, WITH_DV, SCORE_MOD, FULL_MASK, False,
            )  # fmt: skip
        for tile in range(masked):
            if LIST_COUNTS is None:
                m0 = tl.where(
                    tile < tiles_left,
                    start + tile * BLOCK_M,
                    right_start + (tile - tiles_left) * BLOCK_M,
                )
            else:
                at = masked_entry(tile, first, last, before, behind, asked)
                m0 = tl.load(LIST + at) * BLOCK_M
            dk, dk_rest, dv = _keys_step(
                dk, dk_rest, dv, k, k_rest, v, q_base, g_base, lse_base, delta_base, m0, rows, keys,
                n0, stride_qs, stride_gs, d, e, head_dim, head_dim_v, shift, left, right, scale,
                softcap, slope, bias_base, stride_bias_i, stride_bias_j, SEED, head + head_start,
                b + batch_start, q_start, k_start, threshold, keep_scale, WINDOW_SHIFT, CHUNK,
                MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, EVEN_D, EVEN_E, EVEN_DV, GENERAL, BIAS, DROPOUT,
                WIDE, TMA, PRECISION, WITH_DK, WITH_DV, SCORE_MOD, MASK_MOD, True,
            )  # fmt: skip

    # Gradients of paged keys go to a dense buffer that the caller gathers: offset 0 there.
    place = place if PAGED == 0 else place * 0
    exists = (n0 + step < keys)[:, None]
    rows_k = (place + n0 + step)[:, None]
    if WITH_DK:
        to_k = DK + (b * stride_dkb + key_head * stride_dkh) + rows_k * stride_dks + d[None, :]
        inside = exists if EVEN_D else exists & (d < head_dim)[None, :]
        tl.store(to_k, rounded(dk * scale, DK.dtype.element_ty), mask=inside)
        if BLOCK_E > 0:
            to_k = DK + (b * stride_dkb + key_head * stride_dkh) + rows_k * stride_dks
            inside = exists & (rest < head_dim)[None, :]
            dk_rest = rounded(dk_rest * scale, DK.dtype.element_ty)
            tl.store(to_k + rest[None, :], dk_rest, mask=inside)
    if WITH_DV:
        to_v = DV + (b * stride_dvb + key_head * stride_dvh) + rows_k * stride_dvs + e[None, :]
        inside = exists if EVEN_DV else exists & (e < head_dim_v)[None, :]
        tl.store(to_v, rounded(dv, DV.dtype.element_ty), mask=inside)


@triton.jit
def _rows_step(
    dq, dq_rest, dots, q, q_rest, g, lse, delta, k_base, v_base, n0, keys, stride_ks, stride_vs,
    stride_kb, stride_vb, PAGES, page_size, pad, d, e, head_dim, head_dim_v, row, exists, shift,
    left, right, scale, softcap, slope, bias_rows, stride_bias_j, SEED, head, b, q_start, k_start,
    threshold,
    keep_scale, WINDOW_SHIFT, CHUNK,
    MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, EVEN_DV: tl.constexpr,
    GENERAL: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PAGED: tl.constexpr,
    WIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, DOTS: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys for a block of queries; return the new (dq, dq_rest, dots)."""
    if TMA:
        k = k_base.load([n0, 0])
        v = v_base.load([n0, 0])
    else:
        k = load_keys(k_base, n0, keys, stride_ks, stride_kb, PAGES, page_size, pad, d, head_dim,
                      BLOCK_N, MASKED, EVEN_D, PAGED, WIDE, False)  # fmt: skip
        v = load_keys(v_base, n0, keys, stride_vs, stride_vb, PAGES, page_size, pad, e, head_dim_v,
                      BLOCK_N, MASKED, EVEN_DV, PAGED, WIDE, False)  # fmt: skip
    key = n0 + tl.arange(0, BLOCK_N)
    nothing = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    s = dot(q, tl.trans(k), nothing, PRECISION)
    if BLOCK_E > 0:
        k_rest = load_keys(
            k_base, n0, keys, stride_ks, stride_kb, PAGES, page_size, pad,
            BLOCK_D + tl.arange(0, BLOCK_E), head_dim, BLOCK_N, MASKED, EVEN_E, PAGED, WIDE, False,
        )  # fmt: skip
        s = dot(q_rest, tl.trans(k_rest), s, PRECISION)
    distance = key[None, :] - row[:, None] - shift
    capped = nothing
    if GENERAL:
        s, capped = score(
            s, distance, slope, scale, softcap, b, head, row[:, None] + q_start,
            key[None, :] + k_start, MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7, SCORE_MOD,
        )  # fmt: skip
        if BIAS > 0:
            pointers = bias_rows[:, None] + key[None, :] * stride_bias_j
            s = add_bias(s, pointers, exists[:, None] & (key < keys)[None, :], BIAS)
        p = tl.exp2(s * LOG2E - lse[:, None])
    else:
        p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
    if MASKED:
        seen = sees(
            distance, key[None, :], row[:, None] + shift, k_start, left, right, WINDOW_SHIFT, CHUNK
        )  # fmt: skip
        seen = seen & (key < keys)[None, :]
        p = tl.where(seen, p, 0.0)
    if MASK_MOD is not None:
        shown = MASK_MOD(
            b, head, row[:, None] + q_start, key[None, :] + k_start,
            MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
        )  # fmt: skip
        p = tl.where(shown, p, 0.0)
    dp = dot(g, tl.trans(v), nothing, PRECISION)
    if DROPOUT:
        keep = kept(
            SEED, n0 + k_start, row[:, None] + q_start, head, b, threshold, BLOCK_M, BLOCK_N
        )
        dp = tl.where(keep, dp * keep_scale, 0.0)
    if DOTS:
        dots += tl.sum(p * dp, 1)
    ds = p * (dp - delta[:, None])
    if GENERAL:
        ds = ds * capped
        if SCORE_MOD is not None:
            ds = tl.where(p == 0.0, 0.0, ds)  # where a slope need not be finite
    ds = rounded(ds, k.dtype)
    if BLOCK_E > 0:
        dq_rest = dot(ds, k_rest, dq_rest, PRECISION)
    return dot(ds, k, dq, PRECISION), dq_rest, dots


@triton.jit
def grad_rows(
    Q, K, V, DOUT, DQ, BASE, DELTA, DOTS_PTR, BIAS_PTR, ALIBI, SINKS, SEED, CU_Q, CU_K, USED_Q,
    USED_K, PAGES, BATCH_IDX, LEFTPAD, present,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_gb, stride_gs, stride_gh, stride_dqb, stride_dqs, stride_dqh, stride_sb,
    stride_sh, stride_lb, stride_lh, stride_bias_b, stride_bias_h, stride_bias_i, stride_bias_j,
    stride_ab, stride_pb,
    batch, heads, group, head_dim, head_dim_v, longest_q, longest_k, page_size, blocks, section,
    descending, left, right, scale, softcap, threshold, keep_scale, q_start, k_start, head_start,
    batch_start, WINDOW_SHIFT, CHUNK,
    LIST_COUNTS, LIST_ENTRIES, LIST_B, LIST_H, LIST_MOST,
    MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, EVEN_DV: tl.constexpr,
    GENERAL: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, PAGED: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
    DIES: tl.constexpr, PRECISION: tl.constexpr, DOTS: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Compute dQ of a block of queries of one head. ``DOTS``: also Σ P∘dP of each row, which is
    rowsum(dO∘O) without the rounding of O."""
    block, head, b = locate(blocks, heads, batch, section, descending, DIES)
    start_q, rows = span(CU_Q, USED_Q, b, longest_q, (present & HAS_CU_Q) != 0,
                         (present & HAS_USED_Q) != 0)  # fmt: skip
    start_k, keys = span(CU_K, USED_K, b, longest_k, (present & HAS_CU_K) != 0,
                         (present & HAS_USED_K) != 0)  # fmt: skip
    pad = tl.load(LEFTPAD + b, mask=(present & HAS_LEFTPAD) != 0, other=0)
    keys -= pad
    first_row = block * BLOCK_M
    if first_row >= rows:
        return
    last_row = tl.minimum(first_row + BLOCK_M, rows) - 1
    shift = keys - rows + q_start - k_start
    row = first_row + tl.arange(0, BLOCK_M)
    exists = row < rows
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_DV)
    row_place = start_q + row.to(tl.int64)
    mask_d = exists[:, None] if EVEN_D else exists[:, None] & (d < head_dim)[None, :]
    mask_e = exists[:, None] if EVEN_DV else exists[:, None] & (e < head_dim_v)[None, :]
    q_rows = b * stride_qb + row_place * stride_qs + head * stride_qh
    g_rows = b * stride_gb + row_place * stride_gs + head * stride_gh
    q = tl.load(Q + (q_rows[:, None] + d[None, :]), mask=mask_d, other=0.0)
    q_rest = q
    rest = BLOCK_D + tl.arange(0, BLOCK_E if BLOCK_E > 0 else 16)
    mask_rest = exists[:, None] & (rest < head_dim)[None, :]
    if BLOCK_E > 0:
        q_rest = tl.load(Q + (q_rows[:, None] + rest[None, :]), mask=mask_rest, other=0.0)
    g = tl.load(DOUT + (g_rows[:, None] + e[None, :]), mask=mask_e, other=0.0)
    state_rows = b * stride_sb + head * stride_sh + state_start(start_q, b, present) + row
    lse = tl.load(BASE + state_rows, mask=exists, other=float("inf"))
    delta = tl.load(DELTA + state_rows, mask=exists, other=0.0)

    key_head = head // group
    place = (start_k + pad).to(tl.int64)
    k_base = K + key_head * stride_kh
    v_base = V + key_head * stride_vh
    PAGES += b * stride_pb
    if PAGED == 0:
        k_base += b * stride_kb + place * stride_ks
        v_base += b * stride_vb + place * stride_vs
    if TMA:
        k_base = tl.make_tensor_descriptor(
            k_base, [keys, head_dim], [stride_ks, 1], [BLOCK_N, BLOCK_D]
        )
        v_base = tl.make_tensor_descriptor(
            v_base, [keys, head_dim_v], [stride_vs, 1], [BLOCK_N, BLOCK_DV]
        )
    slope = tl.load(ALIBI + b * stride_ab + head, mask=(present & HAS_ALIBI) != 0, other=0.0)
    bias_rows = BIAS_PTR + (b * stride_bias_b + head * stride_bias_h + row * stride_bias_i)
    low, high, all_low, all_high = keys_of_rows(
        first_row, last_row, shift, keys, left, right, k_start, WINDOW_SHIFT, CHUNK, ORDERED
    )
    start, full_start, full_stop = full_tiles(low, high, all_low, all_high, BLOCK_N)
    stop = tl.maximum(high, start)
    right_start = tl.maximum(full_stop, start)
    tiles_left = tl.maximum(tl.cdiv(tl.minimum(full_start, stop) - start, BLOCK_N), 0)
    tiles_right = tl.maximum(tl.cdiv(stop - right_start, BLOCK_N), 0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    dq_rest = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32) if BLOCK_E > 0 else 0.0
    dots = tl.zeros([BLOCK_M], dtype=tl.float32)
    FULL_MASK: tl.constexpr = MASK_MOD if LIST_COUNTS is None else None
    if LIST_COUNTS is None:
        first, last, masked = full_start, full_stop, tiles_left + tiles_right
    else:
        number = b * LIST_B + head * LIST_H + block
        LIST_ENTRIES, first, last, before, behind, asked, partial = visits(
            LIST_COUNTS, LIST_ENTRIES, number, LIST_MOST, start, full_start, full_stop, stop,
            BLOCK_N,
        )  # fmt: skip
        masked = before + behind + partial
    for at in range(first, last, BLOCK_N if LIST_COUNTS is None else 1):
        n0 = at if LIST_COUNTS is None else tl.load(LIST_ENTRIES + at) * BLOCK_N
        dq, dq_rest, dots = _rows_step(
            dq, dq_rest, dots, q, q_rest, g, lse, delta, k_base, v_base, n0, keys, stride_ks,
            stride_vs, stride_kb, stride_vb, PAGES, page_size, pad, d, e, head_dim, head_dim_v,
            row, exists, shift, left, right, scale, softcap, slope, bias_rows, stride_bias_j, SEED,
            head + head_start,
            b + batch_start, q_start, k_start, threshold, keep_scale, WINDOW_SHIFT, CHUNK,
            MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, EVEN_D, EVEN_E, EVEN_DV, GENERAL, BIAS, DROPOUT,
            PAGED, WIDE, TMA, PRECISION, DOTS, SCORE_MOD, FULL_MASK, False,
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
        dq, dq_rest, dots = _rows_step(
            dq, dq_rest, dots, q, q_rest, g, lse, delta, k_base, v_base, n0, keys, stride_ks,
            stride_vs, stride_kb, stride_vb, PAGES, page_size, pad, d, e, head_dim, head_dim_v,
            row, exists, shift, left, right, scale, softcap, slope, bias_rows, stride_bias_j, SEED,
            head + head_start,
            b + batch_start, q_start, k_start, threshold, keep_scale, WINDOW_SHIFT, CHUNK,
            MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, EVEN_D, EVEN_E, EVEN_DV, GENERAL, BIAS, DROPOUT,
            PAGED, WIDE, TMA, PRECISION, DOTS, SCORE_MOD, MASK_MOD, True,
        )  # fmt: skip
    if DOTS:
        tl.store(DOTS_PTR + (b * stride_lb + head * stride_lh + row_place), dots, mask=exists)
    to_q = DQ + (b * stride_dqb + row_place * stride_dqs + head * stride_dqh)[:, None]
    tl.store(to_q + d[None, :], rounded(dq * scale, DQ.dtype.element_ty), mask=mask_d)
    if BLOCK_E > 0:
        dq_rest = rounded(dq_rest * scale, DQ.dtype.element_ty)
        tl.store(to_q + rest[None, :], dq_rest, mask=mask_rest)
