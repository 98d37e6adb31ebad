// How tiles come from memory to shared memory.
#pragma once
#include "bwd_smem.h"
#include "../../sequence.h"

typedef unsigned short Bits;  // of a 16-bit element

// The rows of one head of one sequence.
struct Rows {
  const Bits *from;
  long long step;  // between rows
  int count, width;
};

DEVICE Rows rows_of(const void *x, const Sequence &s, int head, long long batch, long long row,
                    long long head_stride, int width) {
  return Rows{(const Bits *)x + s.row_batch * batch + s.row0 * row + head * head_stride, row, s.rows,
              width};
}
DEVICE Rows keys_of(const void *x, const Sequence &s, int head, long long batch, long long row,
                    long long head_stride, int width) {
  return Rows{(const Bits *)x + s.key_batch * batch + s.key0 * row + head * head_stride, row, s.keys,
              width};
}

// Asks for `rows` rows from `first` on; what lies beyond the last row or the width becomes 0.
template <int width, int rows, int threads>
DEVICE void load_rows(Shared to, const Rows &x, int first) {
  typedef Tile<width> T;
  // Rows of a pass: by eights, so that a thread's rows are turned alike.
  constexpr int kPass = threads / T::kUnits >= 8 ? threads / T::kUnits / 8 * 8 : threads / T::kUnits;
  static_assert(rows % kPass == 0 && kPass % 4 == 0, "passes are whole");
  if (kPass * T::kUnits < threads && thread_index() >= kPass * T::kUnits) return;
  int row = thread_index() / T::kUnits, unit = thread_index() % T::kUnits;
  const Bits *from = x.from + (first + row) * x.step + unit * 8;
  int left = unit * 8 < x.width ? x.count - first - row : 0;
#pragma unroll
  for (int i = 0; i < rows; i += kPass) {
    Shared at = kPass % 8 ? T::place(row + i, unit) : T::place(row, unit) + i * T::kRowBytes;
    copy_16(to + at, from, i < left ? 16 : 0);
    from += kPass * x.step;
  }
}

// 4 bytes, or 0.
DEVICE void copy_4(Shared to, const void *from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0)
               : "memory");
}

DEVICE void load_pair(float (&x)[2], Shared at) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(at));
}
DEVICE float load_float(Shared at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
  return x;
}
DEVICE void store_float(Shared at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
DEVICE Quad load_quad(Shared at) {
  Quad x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at));
  return x;
}
