// The struct that every kernel takes by value. Generated from pyfa/abi.py by
// `python -m pyfa.abi`; edit the table there. Strides count elements; a null pointer
// means that the argument was not given.
#pragma once

struct Params {
  void *q;  // queries: (B, Sq, H, D) or (total_q, H, D)
  void *k;  // keys: (B, Sk, Hk, D), (total_k, Hk, D) or (pages, page_size, Hk, D)
  void *v;  // values, as k with Dv
  void *out;  // as q with Dv
  void *lse;  // float32 (B, H, Sq) or (H, total_q), natural logarithm
  void *bias;  // (B | 1, H | 1, Sq | 1, Sk | 1), see bias_type; of TREE plans (B | 1, Sq, Sq)
  void *alibi_slopes;  // float32 (H,) or (B, H)
  void *sinks;  // float32 (H,)
  void *seed;  // one int64, read by the kernel
  void *cu_seqlens_q;  // int32 (B + 1,)
  void *cu_seqlens_k;  // int32 (B + 1,)
  void *seqused_q;  // int32 (B,); of append, keys in the cache before it
  void *seqused_k;  // int32 (B,)
  void *page_table;  // int32 (B, pages)
  void *cache_batch_idx;  // int32 (B,)
  void *cache_leftpad;  // int32 (B,)
  void *q_descale;  // float32 scales of float8 queries
  void *k_descale;  // float32 scales of float8 keys
  void *v_descale;  // float32 scales of float8 values
  void *partial_out;  // float32 (B·Sq or total_q, H, splits, Dv): outputs of splits
  void *partial_lse;  // float32 (B·Sq or total_q, H, splits): their LSEs
  void *dout;  // gradient of out
  void *dlse;  // float32 gradient of the LSE
  void *delta;  // float32 (2, as the LSE): dlse - rowsum(dout * out), -lse log2 e
  void *dq;  // gradient of q
  void *dk;  // gradient of k
  void *dv;  // gradient of v
  void *dq_accum;  // float32 workspace of dq
  void *dsinks;  // float32, as the LSE: each row's share of the sinks' gradient
  void *counter;  // int32: next work tile of a persistent grid, or locks of dq tiles
  void *new_k;  // keys to append to the cache: (B, new_rows, Hk, D)
  void *new_v;  // values to append, as new_k with Dv
  void *rotary_cos;  // (rotary_rows, rotary_dim / 2), see rotary_flags
  void *rotary_sin;  // as rotary_cos
  void *rotary_seqlens;  // int32 (B,): positions of the first query and new key
  long long q_batch;  // stride of q between sequences (0: packed)
  long long q_row;  // stride of q between rows
  long long q_head;  // stride of q between heads
  long long k_batch;  // stride of k between sequences (0: packed)
  long long k_row;  // stride of k between rows
  long long k_head;  // stride of k between heads
  long long v_batch;  // stride of v between sequences (0: packed)
  long long v_row;  // stride of v between rows
  long long v_head;  // stride of v between heads
  long long out_batch;  // stride of out between sequences (0: packed)
  long long out_row;  // stride of out between rows
  long long out_head;  // stride of out between heads
  long long dout_batch;  // stride of dout between sequences (0: packed)
  long long dout_row;  // stride of dout between rows
  long long dout_head;  // stride of dout between heads
  long long dq_batch;  // stride of dq between sequences (0: packed)
  long long dq_row;  // stride of dq between rows
  long long dq_head;  // stride of dq between heads
  long long dk_batch;  // stride of dk between sequences (0: packed)
  long long dk_row;  // stride of dk between rows
  long long dk_head;  // stride of dk between heads
  long long dv_batch;  // stride of dv between sequences (0: packed)
  long long dv_row;  // stride of dv between rows
  long long dv_head;  // stride of dv between heads
  long long new_k_batch;  // stride of new_k between sequences (0: packed)
  long long new_k_row;  // stride of new_k between rows
  long long new_k_head;  // stride of new_k between heads
  long long new_v_batch;  // stride of new_v between sequences (0: packed)
  long long new_v_row;  // stride of new_v between rows
  long long new_v_head;  // stride of new_v between heads
  long long bias_batch;  // stride of bias between sequences, 0 where broadcast
  long long bias_head;  // stride of bias between heads, 0 where broadcast
  long long bias_row;  // stride of bias between rows, 0 where broadcast
  long long bias_key;  // stride of bias between keys, 0 where broadcast
  long long lse_batch;  // stride of lse, dlse and delta between sequences (0: packed)
  long long lse_head;  // stride of lse, dlse and delta between heads
  long long page_table_batch;  // stride of page_table between sequences
  long long slopes_batch;  // stride of alibi_slopes between sequences, 0 for (H,)
  long long q_descale_batch;  // stride of q_descale, see descale_type
  long long q_descale_head;  // stride of q_descale between key heads
  int batch;  // number of sequences
  int heads_q;  // query heads
  int heads_k;  // key heads; of a backward, parts of groups: num_splits a key head
  int seqlen_q;  // rows of the longest sequence
  int seqlen_k;  // keys of the longest sequence
  int head_dim;  // D
  int head_dim_v;  // Dv
  int page_size;  // keys a page, 0 without page_table
  int window_left;  // keys to the left of the diagonal, -1 unlimited
  int window_right;  // keys to the right of the diagonal, -1 unlimited, 0 causal
  int q_start;  // global index of row 0
  int k_start;  // global index of key 0
  int head_start;  // global index of query head 0
  int batch_start;  // global index of sequence 0
  int use_sinks;  // whether the sinks take part in this block
  int bias_type;  // 0 none, 1 bool, 2 float32, 3 float16, 4 bfloat16
  int num_splits;  // parts that the keys are cut into; of a backward, the query heads of a group
  int new_rows;  // keys to append to each sequence; seqused_k counts them
  int rotary_dim;  // leading elements of a head that rotary turns, 0 without
  int rotary_rows;  // positions that the rotary tables have
  int rotary_flags;  // as append.h says: what is in the tables, and whom they turn
  int window_shift;  // of BANDED plans: keys from the diagonal to the window's middle
  int attention_chunk;  // of BANDED plans: keys of a chunk, 0 without
  unsigned dropout_threshold;  // a draw below this is kept; 0 without dropout
  float scale;  // factor of q.k
  float softcap;  // 0 without
  float dropout_scale;  // 1 / (1 - p)
  int dies;  // dies (XCDs) that workgroups go round in turn
  long long k_descale_batch;  // as q_descale_batch; of pages, the stride between them
  long long k_descale_head;  // stride of k_descale between key heads
  long long v_descale_batch;  // as k_descale_batch
  long long v_descale_head;  // stride of v_descale between key heads
  int q_descale_block;  // stride of q_descale between blocks of rows
  int k_descale_block;  // stride of k_descale between blocks of rows
  int v_descale_block;  // stride of v_descale between blocks of rows
  int q_block_log2;  // rows of q that share a scale
  int k_block_log2;  // rows of k, and of v, that share a scale
  int descale_type;  // 0 none, 1 per sequence, 2 per block of the rows in memory
  int group;  // of kernels with an order of work tiles: heads_q / heads_k
  int section;  // heads in a section of the order of work tiles
  unsigned long long group_inverse;  // inverse_of(group)
  unsigned long long section_tiles_inverse;  // of the work tiles of a section
  unsigned long long section_inverse;  // inverse_of(section)
  unsigned long long last_section_inverse;  // of the heads in the last section
  unsigned long long heads_inverse;  // of the heads of a sequence
  unsigned long long splits_inverse;  // inverse_of(num_splits)
};

// No offsets: not every NVRTC has offsetof. Members have no holes between them.
static_assert(sizeof(Params) == 824, "as pyfa/abi.py packs it");

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

struct MappedParams {
  Params params;
  TensorMap maps[8];
};

static_assert(sizeof(MappedParams) == 1856, "as pyfa/abi.py packs it");
