"""The gradient of a bias: dS before the chain rule through softcap or score_mod.

Each program owns one tile of the bias and loops over the batches, heads, rows and keys that the
bias is broadcast to. It needs no atomics and no workspace of scores, and gives the same bits on
every run.
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
    kept,
    keys_of_rows,
    load_keys,
    rounded,
    score,
    sees,
    span,
    state_start,
)


@triton.jit
def grad_bias(
    Q, K, V, DOUT, DBIAS, BASE, DELTA, BIAS_PTR, ALIBI, SINKS, SEED, CU_Q, CU_K, USED_Q,
    USED_K, PAGES, BATCH_IDX, LEFTPAD, present,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_gb, stride_gs, stride_gh, stride_sb, stride_sh, stride_bias_b, stride_bias_h,
    stride_bias_i, stride_bias_j, stride_ab, stride_pb,
    batch, heads, group, head_dim, head_dim_v, longest_q, longest_k, page_size, batches_b, heads_b,
    rows_b, keys_b, left, right, scale, softcap, threshold, keep_scale, q_start, k_start,
    head_start, batch_start, WINDOW_SHIFT, CHUNK,
    MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_DV: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PAGED: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALL_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Compute dBias (batches_b, heads_b, rows_b, keys_b), contiguous. ``ALL_ROWS`` and
    ``ALL_KEYS``: the bias is broadcast along them."""
    pid = tl.program_id(0)
    columns = 1 if ALL_KEYS else tl.cdiv(keys_b, BLOCK_N)
    lines = 1 if ALL_ROWS else tl.cdiv(rows_b, BLOCK_M)
    first_key = (pid % columns) * BLOCK_N
    first_row = (pid // columns % lines) * BLOCK_M
    bias_head = pid // (columns * lines) % heads_b
    bias_batch = pid // (columns * lines) // heads_b
    # The stretch of each dimension that this tile gathers: a bias of one head gathers all heads.
    many_heads = tl.where(heads_b == heads, 1, heads)
    many_batches = tl.where(batches_b == batch, 1, batch)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_DV)
    rest = BLOCK_D + tl.arange(0, BLOCK_E if BLOCK_E > 0 else 16)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for batch_step in range(many_batches):
        b = bias_batch + batch_step
        start_q, rows = span(CU_Q, USED_Q, b, longest_q, (present & HAS_CU_Q) != 0,
                             (present & HAS_USED_Q) != 0)  # fmt: skip
        start_k, keys = span(CU_K, USED_K, b, longest_k, (present & HAS_CU_K) != 0,
                             (present & HAS_USED_K) != 0)  # fmt: skip
        pad = tl.load(LEFTPAD + b, mask=(present & HAS_LEFTPAD) != 0, other=0)
        keys -= pad
        shift = keys - rows + q_start - k_start
        place = (start_k + pad).to(tl.int64)
        pages = PAGES + b * stride_pb
        row_stop = rows if ALL_ROWS else tl.minimum(first_row + BLOCK_M, rows)
        for head_step in range(many_heads):
            head = bias_head + head_step
            key_head = head // group
            k_base = K + key_head * stride_kh
            v_base = V + key_head * stride_vh
            if PAGED == 0:
                k_base += b * stride_kb + place * stride_ks
                v_base += b * stride_vb + place * stride_vs
            slope = tl.load(
                ALIBI + b * stride_ab + head, mask=(present & HAS_ALIBI) != 0, other=0.0
            )
            for m0 in range(first_row, row_stop, BLOCK_M):
                row = m0 + tl.arange(0, BLOCK_M)
                exists = row < rows
                row_place = start_q + row.to(tl.int64)
                q_rows = b * stride_qb + row_place * stride_qs + head * stride_qh
                g_rows = b * stride_gb + row_place * stride_gs + head * stride_gh
                inside_q = exists[:, None] & (d < head_dim)[None, :]
                inside_g = exists[:, None] & (e < head_dim_v)[None, :]
                q = tl.load(Q + (q_rows[:, None] + d[None, :]), mask=inside_q, other=0.0)
                q_rest = q
                if BLOCK_E > 0:
                    inside_q = exists[:, None] & (rest < head_dim)[None, :]
                    at = Q + (q_rows[:, None] + rest[None, :])
                    q_rest = tl.load(at, mask=inside_q, other=0.0)
                g = tl.load(DOUT + (g_rows[:, None] + e[None, :]), mask=inside_g, other=0.0)
                places = b * stride_sb + head * stride_sh + state_start(start_q, b, present) + row
                lse = tl.load(BASE + places, mask=exists, other=float("inf"))
                delta = tl.load(DELTA + places, mask=exists, other=0.0)
                bias_rows = BIAS_PTR + (
                    b * stride_bias_b + head * stride_bias_h + row * stride_bias_i
                )
                last_row = tl.minimum(m0 + BLOCK_M, rows) - 1
                low, high, _all_low, _all_high = keys_of_rows(
                    m0, last_row, shift, keys, left, right, k_start, WINDOW_SHIFT, CHUNK, False
                )
                key_start = tl.maximum(first_key, low // BLOCK_N * BLOCK_N)
                key_stop = high if ALL_KEYS else tl.minimum(high, first_key + BLOCK_N)
                for n0 in range(key_start, key_stop, BLOCK_N):
                    key = n0 + tl.arange(0, BLOCK_N)
                    k = load_keys(k_base, n0, keys, stride_ks, stride_kb, pages, page_size, pad, d,
                                  head_dim, BLOCK_N, True, False, PAGED, True, False)  # fmt: skip
                    v = load_keys(v_base, n0, keys, stride_vs, stride_vb, pages, page_size, pad, e,
                                  head_dim_v, BLOCK_N, True, False, PAGED, True, False)  # fmt: skip
                    nothing = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                    distance = key[None, :] - row[:, None] - shift
                    s = dot(q, tl.trans(k), nothing, PRECISION)
                    if BLOCK_E > 0:
                        k_rest = load_keys(
                            k_base, n0, keys, stride_ks, stride_kb, pages, page_size, pad, rest,
                            head_dim, BLOCK_N, True, False, PAGED, True, False,
                        )  # fmt: skip
                        s = dot(q_rest, tl.trans(k_rest), s, PRECISION)
                    s, _capped = score(
                        s, distance, slope, scale, softcap, b + batch_start, head + head_start,
                        row[:, None] + q_start, key[None, :] + k_start,
                        MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7, SCORE_MOD,
                    )  # fmt: skip
                    pointers = bias_rows[:, None] + key[None, :] * stride_bias_j
                    inside = exists[:, None] & (key < keys)[None, :]
                    s = add_bias(s, pointers, inside, BIAS)
                    p = tl.exp2(s * LOG2E - lse[:, None])
                    seen = inside & sees(
                        distance, key[None, :], row[:, None] + shift, k_start, left, right,
                        WINDOW_SHIFT, CHUNK,
                    )  # fmt: skip
                    p = tl.where(seen, p, 0.0)
                    if MASK_MOD is not None:
                        shown = MASK_MOD(
                            b + batch_start, head + head_start, row[:, None] + q_start,
                            key[None, :] + k_start, MOD_INFO, C0, C1, C2, C3, C4, C5, C6, C7,
                        )  # fmt: skip
                        p = tl.where(shown, p, 0.0)
                    dp = dot(g, tl.trans(v), nothing, PRECISION)
                    if DROPOUT:
                        keep = kept(
                            SEED, n0 + k_start, row[:, None] + q_start, head + head_start,
                            b + batch_start, threshold, BLOCK_M, BLOCK_N,
                        )  # fmt: skip
                        dp = tl.where(keep, dp * keep_scale, 0.0)
                    acc += p * (dp - delta[:, None])
    kind = DBIAS.dtype.element_ty
    base = DBIAS + (bias_batch * heads_b + bias_head).to(tl.int64) * rows_b * keys_b
    row = first_row + tl.arange(0, BLOCK_M)
    key = first_key + tl.arange(0, BLOCK_N)
    if ALL_ROWS and ALL_KEYS:
        tl.store(base, rounded(tl.sum(tl.sum(acc, 1), 0), kind))
    elif ALL_ROWS:
        tl.store(base + key, rounded(tl.sum(acc, 0), kind), mask=key < keys_b)
    elif ALL_KEYS:
        tl.store(base + row, rounded(tl.sum(acc, 1), kind), mask=row < rows_b)
    else:
        pointers = base + row.to(tl.int64)[:, None] * keys_b + key[None, :]
        tl.store(
            pointers, rounded(acc, kind), mask=(row < rows_b)[:, None] & (key < keys_b)[None, :]
        )
