// What float8 q, k and v are multiplied by (params.h, descale_type).
#pragma once
#include "../sequence.h"

DEVICE float float_at(const void *array, long long index) { return ((const float *)array)[index]; }

// Of a row of q. `head` is the key head.
DEVICE float query_scale(const Params &p, const Sequence &s, int head, int row) {
  if (!p.q_descale) return 1.0f;
  long long at = head * p.q_descale_head;
  if (p.descale_type == 1)
    at += s.batch * p.q_descale_batch;
  else
    at += s.row_batch * p.q_descale_batch + ((s.row0 + row) >> p.q_block_log2) * p.q_descale_block;
  return float_at(p.q_descale, at);
}

struct KeyScales {
  float k, v;
};

// Of keys and values in a block of rows of `stored`: a sequence, or a row of the cache, or a page.
DEVICE KeyScales scales_of_block(const Params &p, long long stored, int head, long long block) {
  return KeyScales{
      float_at(p.k_descale,
               stored * p.k_descale_batch + head * p.k_descale_head + block * p.k_descale_block),
      float_at(p.v_descale,
               stored * p.v_descale_batch + head * p.v_descale_head + block * p.v_descale_block)};
}

// Of a key and its value.
DEVICE KeyScales key_scales(const Params &p, const Sequence &s, int head, int key) {
  if (!p.k_descale) return KeyScales{1.0f, 1.0f};
  long long stored = s.batch, block = 0;
  if (p.descale_type == 2) {
    stored = s.key_batch;
    long long row = s.key0 + key;
    if (p.page_table) {
      int slot = key + s.padding;
      stored = int_at(p.page_table, s.batch * p.page_table_batch + slot / p.page_size);
      row = slot % p.page_size;
    }
    block = row >> p.k_block_log2;
  }
  return scales_of_block(p, stored, head, block);
}
