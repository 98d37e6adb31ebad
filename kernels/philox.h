// The dropout generator: Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"), the same bits on every backend. One draw serves four neighbouring keys of one
// query row. Needs DEVICE and wide_product.
#pragma once

struct Draws {
  unsigned word[4];  // of keys 4 g, 4 g + 1, 4 g + 2, 4 g + 3
};

// key_group = key / 4; the others are the row, the query head and the sequence, all global.
DEVICE Draws philox(unsigned key_group, unsigned row, unsigned head, unsigned batch,
                    unsigned long long seed) {
  unsigned c0 = key_group, c1 = row, c2 = head, c3 = batch;
  unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    unsigned long long a = wide_product(0xD2511F53u, c0), b = wide_product(0xCD9E8D57u, c2);
    c0 = (unsigned)(b >> 32) ^ c1 ^ k0;
    c2 = (unsigned)(a >> 32) ^ c3 ^ k1;
    c1 = (unsigned)b;
    c3 = (unsigned)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Draws{{c0, c1, c2, c3}};
}
