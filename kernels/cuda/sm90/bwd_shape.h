// What a block of backward is made of: sizes, where things lie in shared memory, barriers, its work.
#pragma once
#include "../bwd_work.h"
#include "../order.h"
#define TENSOR_MAPS
#ifdef MOD
#include "../mods.h"
#endif
#if LISTS
#include "../../lists.h"
#endif
#include "tma.h"
#include "wgmma.h"

// The score terms of a plan, TERMS, are a set of these and the mods. A plan with all of them asks at run time
// which the call has, one with fewer is for calls that have them all.
enum Term { kSoftcap = 1, kAlibi = 2, kBias = 4, kDropout = 8, kSinks = 16, kAllTerms = 31 };
// With kBias alone: tiles of the bias come by TMA, each to where dS of the same tile is written later.
constexpr bool kBiasTiles = TERMS & 32;
DEVICE constexpr bool may_have(Term term) { return TERMS & term; }
DEVICE bool has(Term term, bool asked) { return may_have(term) && (TERMS != kAllTerms || asked); }
#ifdef MOD
constexpr bool kMods = true;
#else
constexpr bool kMods = false;
#endif
#ifdef HAS_SCORE_MOD
constexpr bool kScoreMod = true;
#else
constexpr bool kScoreMod = false;
#endif
// Whether scores change between S and P, whether a bias alone does it.
constexpr bool kScoreTerms = (TERMS & (kSoftcap | kAlibi | kBias)) || kScoreMod;
constexpr bool kBiasAlone = TERMS == kBias && !kMods;
// Whether the derivative of a score by scale q.k is not 1, and whether dS is thus, or by dropout, of other
// weights than dV.
constexpr bool kSlopes = may_have(kSoftcap) || kScoreMod;
// Softcap without a score_mod: a quarter of P times the slope takes an instruction less, and dP and -delta are
// four times as large instead. Where P has few exponents, in float16, its last bits are wanted.
constexpr bool kSoftcapAlone = TERMS != kAllTerms && may_have(kSoftcap) && !kScoreMod;
constexpr bool kQuarters = kSoftcapAlone && DTYPE == BFLOAT16;
constexpr float kMore = kQuarters ? 4.0f : 1.0f;
constexpr bool kTwoWeights = kSlopes || may_have(kDropout);
// Whether what rounding P took from it is kept for the sinks' gradient, in 16 bits times kRestScale. Without it
// the gradient has the rounding of P once, as PyTorch's has. With a bias that hides most keys of 65, that was 1.35
// of the suite's bound. Sinks alone stay below it, and are spared the instructions.
constexpr bool kRests = may_have(kSinks) && !ROLES && ((TERMS & ~kSinks) || kScoreMod);
constexpr float kRestScale = DTYPE == BFLOAT16 ? 1.0f : 2048.0f;
// Whether the registers of dQ's sums are wanted before dP.
constexpr bool kDqEarly = kTwoWeights || kRests;

// Without ROLES: whether dS is of P in 32 bits. In float16, whose sake is its precision, dQ then has a mean error like
// that of PyTorch's eager FlexAttention, and 1.25 times it otherwise.
constexpr bool kFloatP = FLOAT_WEIGHTS && !ROLES;
static_assert(!kFloatP || !(TERMS & (kDropout | kSinks)), "whose P has no place in 32 bits");

// Whether products begin with the row states: S with -LSE over the scale, dP with -delta. At D = 64 (128 rows), where
// registers hold no states beside products under way, warps would wait about 700 of a tile's 4,460 cycles for them,
// behind the operands of products. The backward takes 0.95 to 0.99 of the time. With 64 rows or fewer, which leave
// registers for the states, it would take 1.02 to 1.05.
constexpr bool kManyRows = !ROLES && BLOCK_Q > 64;
constexpr bool kLseFirst = kManyRows && !kScoreTerms && !kFloatP;
constexpr bool kDeltaFirst = kManyRows && !kTwoWeights && !may_have(kSinks) && !kFloatP;
// What scores are multiplied by in P's exponents. -LSE is divided by it, so it is never 0: 2^-100 q.k is nothing beside
// an LSE.
DEVICE float exponent_scale(const Params &p) {
  constexpr float kLeast = 7.9e-31f;  // about 2^-100
  float scale = p.scale * kLog2E;
  return kLseFirst && __builtin_fabsf(scale) < kLeast ? kLeast : scale;
}

// Warpgroups that multiply: each for 64 keys or, with ROLES, two for the same 64 (bwd_wide.h).
constexpr int kConsumers = GROUPS;
constexpr int kKeyGroups = BLOCK_K / 64;
static_assert(ROLES ? kConsumers == 2 && kKeyGroups == 1 : kConsumers == kKeyGroups, "or else");
constexpr int kConsumerThreads = kConsumers * 128;
constexpr int kThreads = kConsumerThreads + 128;  // and one that loads
// Of the registers of an SM, which has BLOCKS blocks at a time. With two, of one consumer warpgroup each, one multiplies
// while the other loads or stores.
static_assert(BLOCKS == 1 || (BLOCKS == 2 && GROUPS == 1), "whose registers are counted here");
constexpr int kProducerRegisters = 24, kConsumerRegisters = BLOCKS == 2 ? 232 : 240;

// Panels of 64 elements a row, as TMA leaves them and wgmma reads them.
constexpr int kRowBytes = 128;
constexpr int kStages = 2;

constexpr int kQPanels = HEAD_DIM / 64, kVPanels = HEAD_DIM_V / 64;
constexpr int kQPanel = BLOCK_Q * kRowBytes, kKPanel = BLOCK_K * kRowBytes;
typedef Operand<64> Panel;

// dQ^T = K^T dS^T: a warpgroup makes 64 of the head's elements for all rows or, where they are too few, all
// elements for some of the rows. Of 192 elements, each of two warpgroups makes the last 64 for half of the rows.
// A warp's sums, 16 elements x kDqRows and x kLastRows, are staged in shared memory.
constexpr int kDqPartsD = HEAD_DIM / 64 < kConsumers ? HEAD_DIM / 64 : kConsumers;
constexpr int kDqRows = BLOCK_Q * kDqPartsD / kConsumers;
constexpr int kLastRows = !ROLES && HEAD_DIM / 64 > kConsumers ? BLOCK_Q / kConsumers : 0;
static_assert(!kLastRows || (ONE_SENDER && HEAD_DIM / 64 == kConsumers + 1), "which lie as in memory");
constexpr int kStagedBytes = 16 * kDqRows * 4;
// Where one thread sends them for all, the whole tile lies there as in memory, in one of two places: one is
// staged while the other is sent or waits for its turn.
constexpr int kStagedTile = BLOCK_Q * HEAD_DIM * 4, kStagedTiles = ONE_SENDER ? 2 : 1;

// Shared memory. The states of a tile: -LSE with its Q, -delta with its dO.
constexpr int kStates = (BLOCK_Q * 4 + 127) / 128 * 128;
constexpr int kK = 0;
constexpr int kV = kK + kQPanels * kKPanel;
constexpr int kQ = kV + kVPanels * kKPanel;
constexpr int kQBytes = kQPanels * kQPanel;
constexpr int kDout = kQ + kStages * kQBytes;
constexpr int kDoutBytes = kVPanels * kQPanel;
constexpr int kDs = kDout + kStages * kDoutBytes;  // two buffers of panels of 64 keys
constexpr int kDsBytes = kKeyGroups * kQPanel;
constexpr int kWeights = kDs + 2 * kDsBytes;  // with ROLES, P^T as threads hold it
constexpr int kMinusLse = kWeights + (ROLES ? 64 * BLOCK_Q * (FLOAT_WEIGHTS ? 4 : 2) : 0);
constexpr int kMinusDelta = kMinusLse + kStages * kStates;
constexpr int kSinkWeights = kMinusDelta + kStages * kStates;  // exp(sink - LSE), with dO
constexpr int kStaged = kSinkWeights + (may_have(kSinks) ? kStages * kStates : 0);
constexpr int kBarriers = kStaged + (ROLES ? 0 : kStagedTiles * kStagedTile);
static_assert(kBarriers + 256 == SHARED_BYTES, "as the plan says");

extern __shared__ __align__(1024) unsigned char memory[];

// Where the float of a row lies among those of its tile: the four of a slice of 16 that a lane needs (of
// rows 2 c, 2 c + 1 and the same of the next 8, c = lane % 4) one behind the other.
DEVICE int state_place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

// mbarriers. "Full" ones: of an arrival for the copies and one of the warp that brings states and clears
// what lies beyond a sequence's end. "Landed": of the copies, where that warp has to wait for them.
// "Empty", and kDsFull: of each consumer warp.
enum Barrier {
  kKFull, kVFull, kKLanded, kVLanded,
  kQLanded, kDoutLanded = kQLanded + kStages,  // of each place: two short heads may be under way
  kQFull = kDoutLanded + kStages, kQEmpty = kQFull + kStages,
  kDoutFull = kQEmpty + kStages, kDoutEmpty = kDoutFull + kStages,
  kDsFull = kDoutEmpty + kStages,  // dS of all keys is written; wide heads have kConsumersMeet for it
  kStagedEmpty = kDsFull + kStages,         // with ONE_SENDER, of each place: one arrival
  kTurn = kStagedEmpty, kAdded = kTurn + 1,  // wide heads in turn: it has come, one arrival; all has been added
  kBiasFull = kTurn + (ONE_SENDER || ROLES ? 2 : 0),  // of each place
  kDsEmpty = kBiasFull + (kBiasTiles ? kStages : 0),  // dS of a tile was read for dQ: of each consumer warp
  kBarrierCount = kDsEmpty + (kBiasTiles ? 1 : 0)
};
constexpr int kOwned = kBarriers + 240;
static_assert(kBarrierCount * 8 <= 240, "what is set aside for them");
DEVICE Shared mbarrier_at(Shared shared, int number) { return shared + kBarriers + number * 8; }

// Named barriers; 0 is that of the block.
constexpr int kConsumersMeet = 1;   // of all consumers
constexpr int kWeightsWritten = 2;  // with ROLES
constexpr int kGroupMeets = 3;      // and on, of each consumer warpgroup

// The keys that a block owns, in the order of plans.heads_together.
DEVICE Owned find_keys(const Params &p) {
  if (has_work_table(p)) return owned_of_table(p, workgroup_index(), BLOCK_K);
  int blocks = (p.seqlen_k + BLOCK_K - 1) / BLOCK_K;
  InSection found = place_in_section(p, workgroup_index(), blocks, p.heads_k * p.batch);
  int block = DETERMINISTIC ? blocks - 1 - found.tile : found.tile, batch = divide(found.pair, p.heads_inverse);
  return Owned{batch, found.pair - batch * p.heads_k, block * BLOCK_K};
}
// They are found once, and lie in shared memory: no register keeps them through the loop, and to find them
// again took 30 % of the kernel's instructions.
//
// With them lies what -LSE is multiplied by: the producer warps, of 24 registers, would spill it.
DEVICE void keep_keys(const Params &p, Shared shared, const Owned &own) {
  store_shared(shared + kOwned, Quad{(unsigned)own.batch, (unsigned)own.head_k, (unsigned)own.first_key,
                                     kLseFirst ? __float_as_uint(reciprocal(exponent_scale(p))) : 0});
}
DEVICE float one_over_scale() { return __uint_as_float(load_shared<Quad>(shared_address(memory) + kOwned)[3]); }
DEVICE Owned owned_keys() {
  Quad kept = load_shared<Quad>(shared_address(memory) + kOwned);
  return Owned{(int)kept[0], (int)kept[1], (int)kept[2]};
}

// The sequence that they are of. Where blocks take turns, nobody waits for one that a max_seqlen, too small, did not
// start.
DEVICE Sequence owned_sequence(const Params &p, const Owned &own) {
  Sequence s = sequence_of(p, own.batch);
  if (DETERMINISTIC) {
    s.rows = min(s.rows, p.seqlen_q);
    s.keys = min(s.keys, p.seqlen_k);
  }
  return s;
}

// What it does: tiles begin ... end of BLOCK_Q rows, of each head of the group.
struct Work {
  int begin, end;         // tiles
  int all_low, all_high;  // the rows that see all of the keys
  int steps;              // tiles of all heads
#if LISTS
  const Params &p;
#endif
};

// The tile of a step.
#if LISTS
// The tiles of a head that the list of this block of keys names. Found anew for each head: no register keeps what
// it is made of.
DEVICE List list_of_head(const Params &p, const Owned &own, int head) {
  Sequence s = sequence_of(p, own.batch);
  Seen seen = rows_seeing(p, s, own.first_key, min(own.first_key + BLOCK_K, s.keys) - 1);
  List list = list_of(p, own.batch, head, own.first_key / BLOCK_K);
  cut_to(list, BLOCK_Q, seen.low, max(seen.high, seen.low));
  return list;
}
struct Cursor {
  int head, tile;
  bool full;  // the mask_mod hides nothing there
  int left;   // entries of this head
  const int *entries;
  METHOD void advance(const Work &w) {
    while (left == 0) {
      ++head;
      if (head % w.p.group == 0) return;  // that was the group's last
      open(w.p);
    }
    read();
  }
  METHOD void open(const Params &p) {
    List list = list_of_head(p, owned_keys(), head);
    left = list.count;
    entries = list.entries;
  }
  METHOD void read() {
    int entry = *entries++;
    --left;
    tile = tile_of(entry);
    full = is_full(entry);
  }
};
DEVICE Cursor first_tile(const Params &p, const Owned &own, const Work &w) {
  Cursor first{own.head_k * p.group, 0, false, 0, nullptr};
  first.open(p);
  if (first.left)
    first.read();
  else
    first.advance(w);
  return first;
}
DEVICE bool is_full(const Cursor &at) { return at.full; }
#else
struct Cursor {
  int head, tile;
  METHOD void advance(const Work &w) {
    if (++tile == w.end) {
      tile = w.begin;
      ++head;
    }
  }
};
DEVICE Cursor first_tile(const Params &p, const Owned &own, const Work &w) {
  return Cursor{own.head_k * p.group, w.begin};
}
DEVICE bool is_full(const Cursor &) { return false; }
#endif

// A step's place among the stages, and the parity that ends with its filling there.
DEVICE int stage_of(unsigned step) { return step % kStages; }
DEVICE unsigned phase_of(unsigned step) { return step / kStages % 2; }

// Rows that a tile holds and that are not of the sequence arrive as they lie in memory, where it is part of
// a longer tensor; else as zeros.
DEVICE bool rows_to_clear(const Params &p, const Sequence &s, int tile) {
  return (p.cu_seqlens_q || p.seqused_q) && (tile + 1) * BLOCK_Q > s.rows;
}
DEVICE bool keys_to_clear(const Params &p, const Sequence &s, int first_key) {
  return (p.cu_seqlens_k || p.seqused_k) && first_key + BLOCK_K > s.keys;
}
