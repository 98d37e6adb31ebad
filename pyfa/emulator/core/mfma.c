// Matrix multiply-accumulate (VOP3P-MAI), by the layouts of AMD's matrix instruction calculator.
//
// With m rows, m columns, k values of the inner dimension held kl per lane, and b independent
// blocks: row r of block n holds inner index t in lane (n * k/kl + t div kl) * m + r, element
// t mod kl; B likewise with columns for rows. Row r of the result is register r mod 4 + 4 * (r div 8)
// in lanes 32 * (r div 4 mod 2) + column for m = 32, register r mod 4 in lanes 16 * (r div 4) + column
// for m = 16, and register r in lanes 4 * block + column for m = 4.
//
// The chip's order of accumulation and its inner rounding are not published. Here an element is
// C + A0*B0 + A1*B1 + ..., in rising order of the inner index, each step a fused multiply-add
// rounded to float; denormals are kept, as CDNA3 documents for all types. A rounding seed gives
// another order of the products, the same for all instructions of a launch.
#include "floats.h"

typedef enum { HALF, BFLOAT, FLOAT, FP8, BF8, INT8 } Element;
typedef struct { u8 m, k, kl, blocks; Element a, b; } Shape;

static float fp8_values[256], bf8_values[256];
void mfma_tables(void) {
    for (u32 n = 0; n < 256; n++) {
        fp8_values[n] = from_fnuz(n, 3, 8);
        bf8_values[n] = from_fnuz(n, 2, 16);
    }
}

// out[n * 64 + lane]: element n of each lane, so that a row of B is contiguous.
static void load_elements(const u32 *rows, Element type, u32 kl, float *out) {
    switch (type) {
    case HALF:
        for (u32 n = 0; n < kl; n++)
            EACH_LANE out[n * LANES + l] = from_f16(rows[n / 2 * LANES + l] >> 16 * (n & 1));
        break;
    case BFLOAT:
        for (u32 n = 0; n < kl; n++)
            EACH_LANE out[n * LANES + l] = from_bf16(rows[n / 2 * LANES + l] >> 16 * (n & 1) & 0xffff);
        break;
    case FLOAT: memcpy(out, rows, 4 * LANES * kl); break;
    case FP8: case BF8: {
        const float *values = type == FP8 ? fp8_values : bf8_values;
        for (u32 n = 0; n < kl; n++)
            EACH_LANE out[n * LANES + l] = values[rows[n / 4 * LANES + l] >> 8 * (n & 3) & 255];
        break;
    }
    case INT8:
        for (u32 n = 0; n < kl; n++)
            EACH_LANE out[n * LANES + l] = (float)(i8)(rows[n / 4 * LANES + l] >> 8 * (n & 3));
        break;
    }
}
static u32 bytes_of(Element e) { return e == FLOAT ? 4 : e == HALF || e == BFLOAT ? 2 : 1; }

static void place(const Shape *s, u32 block, u32 row, u32 *reg, u32 *lane) {
    if (s->m == 32) { *reg = 16 * block + 4 * (row / 8) + row % 4; *lane = 32 * (row / 4 % 2); }
    else if (s->m == 16) { *reg = 4 * block + row % 4; *lane = 16 * (row / 4); }
    else { *reg = row; *lane = 4 * block; }
}

// Several rows of the result at once, so that the additions of one do not wait for each other:
// to[r][c] += sum over t of a[t][r] * b[t][c], in rising t.
#define BLOCK(columns, count)                                                                     \
    static void rows##columns(float *const *to, const float *const *a, const float *const *b,     \
                              u32 k) {                                                            \
        float sum[count][columns];                                                                \
        for (int r = 0; r < count; r++)                                                           \
            for (int c = 0; c < columns; c++) sum[r][c] = to[r][c];                               \
        for (u32 t = 0; t < k; t++)                                                               \
            for (int r = 0; r < count; r++)                                                       \
                for (int c = 0; c < columns; c++)                                                 \
                    sum[r][c] = __builtin_fmaf(a[t][r], b[t][c], sum[r][c]);                      \
        for (int r = 0; r < count; r++)                                                           \
            for (int c = 0; c < columns; c++) to[r][c] = sum[r][c];                               \
    }
BLOCK(32, 2)
BLOCK(16, 4)
BLOCK(4, 4)

static int operand_rows(Wave *w, const Inst *i, u32 code, u32 rows, u64 *defined) {
    u32 row = code - VGPR0;
    *defined = ~0ull;
    if (touch_rows(w, i, row, rows)) return STOP;
    for (u32 r = row; r < row + rows; r++) *defined &= w->defined[r];
    return OK;
}

static int matrix(Wave *w, const Inst *i, const Shape *s) {
    u32 m = s->m, k = s->k, kl = s->kl, groups = k / kl, results = m * m * s->blocks / LANES;
    u32 rows_a = (kl * bytes_of(s->a) + 3) / 4, rows_b = (kl * bytes_of(s->b) + 3) / 4;
    float a[8 * LANES], b[8 * LANES], d[32][LANES];
    const float *at[32], *bt[32], *a_rows[32];
    u64 da, db, dc = ~0ull, defined[32];
    u32 rounding = (u32)w->launch->rounding;
    int c_is_register = i->src[2] >= VGPR0;
    if (i->extra) return fail(w, i, ERROR_UNSUPPORTED, -1, "cbsz, abid or blgp modifiers");
    if (operand_rows(w, i, i->src[0], rows_a, &da) || operand_rows(w, i, i->src[1], rows_b, &db))
        return STOP;
    if (c_is_register && operand_rows(w, i, i->src[2], results, &dc)) return STOP;
    load_elements(w->v[i->src[0] - VGPR0], s->a, kl, a);
    load_elements(w->v[i->src[1] - VGPR0], s->b, kl, b);
    float constant = c_is_register ? 0 : as_float(scalar_value(w, i, i->src[2], 0, F32));
    for (u32 r = 0; r < results; r++) {
        const u32 *c = c_is_register ? w->v[i->src[2] - VGPR0 + r] : 0;
        defined[r] = c ? w->defined[i->src[2] - VGPR0 + r] : ~0ull;
        // Integer sums travel as the bits of floats, which copying does not change.
        EACH_LANE d[r][l] = c ? as_float(c[l]) : constant;
    }
    for (u32 n = 0; n < s->blocks; n++) {
        for (u32 step = 0; step < k; step++) {
            u32 t = (step * (rounding | 1) + (rounding >> 8)) & (k - 1);  // k is a power of two
            u32 place = t % kl * LANES + (n * groups + t / kl) * m;
            at[step] = a + place;
            bt[step] = b + place;
        }
        u64 bad_columns = 0;
        if (db != ~0ull)
            for (u32 t = 0; t < k; t += kl)
                for (u32 c = 0; c < m; c++)
                    bad_columns |= (~db >> ((n * groups + t / kl) * m + c) & 1) << c;
        u32 together = m == 32 ? 2 : 4;
        for (u32 first = 0; first < m; first += together) {
            float *to[4];
            for (u32 r = 0; r < together; r++) {
                u32 reg, lane, row = first + r, bad_row = 0;
                place(s, n, row, &reg, &lane);
                to[r] = &d[reg][lane];
                if (da != ~0ull)
                    for (u32 t = 0; t < k; t += kl)
                        bad_row |= ~da >> ((n * groups + t / kl) * m + row) & 1;
                u64 bad = bad_row ? (m == 32 ? 0xffffffffull : (1ull << m) - 1) : bad_columns;
                defined[reg] &= ~(bad << lane);
            }
            for (u32 t = 0; t < k; t++) a_rows[t] = at[t] + first;
            if (s->a == INT8) {
                for (u32 r = 0; r < together; r++)
                    for (u32 c = 0; c < m; c++) {
                        u32 sum = as_bits(to[r][c]);
                        for (u32 t = 0; t < k; t++)
                            sum += (u32)((i32)a_rows[t][r] * (i32)bt[t][c]);
                        to[r][c] = as_float(sum);
                    }
            } else if (m == 32) rows32(to, a_rows, bt, k);
            else if (m == 16) rows16(to, a_rows, bt, k);
            else rows4(to, a_rows, bt, k);
        }
    }
    u32 to = i->dst - VGPR0;
    if (touch_rows(w, i, to, results)) return STOP;
    // MFMA ignores EXEC: all lanes are written.
    for (u32 r = 0; r < results; r++) write_row(w, to + r, (const u32 *)d[r], ~0ull, defined[r]);
    return OK;
}

#define SHAPES(X)                                                                                 \
    X(f32_32x32x1_2b_f32, 32, 1, 1, 2, FLOAT, FLOAT) X(f32_16x16x1_4b_f32, 16, 1, 1, 4, FLOAT, FLOAT)\
    X(f32_4x4x1_16b_f32, 4, 1, 1, 16, FLOAT, FLOAT) X(f32_32x32x2_f32, 32, 2, 1, 1, FLOAT, FLOAT)  \
    X(f32_16x16x4_f32, 16, 4, 1, 1, FLOAT, FLOAT) X(f32_32x32x4_2b_f16, 32, 4, 4, 2, HALF, HALF)   \
    X(f32_16x16x4_4b_f16, 16, 4, 4, 4, HALF, HALF) X(f32_4x4x4_16b_f16, 4, 4, 4, 16, HALF, HALF)   \
    X(f32_32x32x8_f16, 32, 8, 4, 1, HALF, HALF) X(f32_16x16x16_f16, 16, 16, 4, 1, HALF, HALF)      \
    X(f32_32x32x4_2b_bf16, 32, 4, 4, 2, BFLOAT, BFLOAT)                                           \
    X(f32_16x16x4_4b_bf16, 16, 4, 4, 4, BFLOAT, BFLOAT)                                           \
    X(f32_4x4x4_16b_bf16, 4, 4, 4, 16, BFLOAT, BFLOAT)                                            \
    X(f32_32x32x8_bf16, 32, 8, 4, 1, BFLOAT, BFLOAT)                                              \
    X(f32_16x16x16_bf16, 16, 16, 4, 1, BFLOAT, BFLOAT)                                            \
    X(i32_32x32x16_i8, 32, 16, 8, 1, INT8, INT8) X(i32_16x16x32_i8, 16, 32, 8, 1, INT8, INT8)      \
    X(f32_16x16x32_bf8_bf8, 16, 32, 8, 1, BF8, BF8) X(f32_16x16x32_bf8_fp8, 16, 32, 8, 1, BF8, FP8)\
    X(f32_16x16x32_fp8_bf8, 16, 32, 8, 1, FP8, BF8) X(f32_16x16x32_fp8_fp8, 16, 32, 8, 1, FP8, FP8)\
    X(f32_32x32x16_bf8_bf8, 32, 16, 8, 1, BF8, BF8) X(f32_32x32x16_bf8_fp8, 32, 16, 8, 1, BF8, FP8)\
    X(f32_32x32x16_fp8_bf8, 32, 16, 8, 1, FP8, BF8) X(f32_32x32x16_fp8_fp8, 32, 16, 8, 1, FP8, FP8)
#define RUN(name, m, k, kl, blocks, a, b)                                                         \
    static int name(Wave *w, const Inst *i) {                                                     \
        static const Shape shape = {m, k, kl, blocks, a, b};                                      \
        return matrix(w, i, &shape);                                                              \
    }
SHAPES(RUN)
#define ENTRY(name, m, k, kl, blocks, a, b)                                                       \
    {"v_mfma_" #name, KIND_SPECIAL, MFMA, NONE, {NONE, NONE, NONE}, name, 0},
const Op mfma_ops[] = {SHAPES(ENTRY) {0}};
