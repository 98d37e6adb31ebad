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

// Whether the first block that reaches a tile of dQ writes zeros there, because its warps add by themselves
// (bwd_first.h).
constexpr bool kFirstClears = DQ_UNSET && !ONE_SENDER;

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
constexpr int kWork = kBarriers + 256;  // what is told of two work tiles
constexpr int kWorkBytes = 48;
constexpr int kOneOverScale = kWork + 2 * kWorkBytes;
static_assert(kOneOverScale + 16 == SHARED_BYTES, "as the plan says");

extern __shared__ __align__(1024) unsigned char memory[];

// Where the float of a row lies among those of its tile: the four of a slice of 16 that a lane needs (of
// rows 2 c, 2 c + 1 and the same of the next 8, c = lane % 4) one behind the other.
DEVICE int state_place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

// mbarriers. "Full" ones: of an arrival for the copies and one of the warp that brings states and clears
// what lies beyond a sequence's end; kDoutFull with kFirstClears: and one of the warp that sees to dQ. "Landed": of the
// copies, where that warp has to wait for them. "Empty", kDsFull and kLastStaged: of each consumer warp.
enum Barrier {
  kKFull, kVFull, kKLanded, kVLanded,
  kQLanded, kDoutLanded = kQLanded + kStages,  // of each place: two short heads may be under way
  kQFull = kDoutLanded + kStages, kQEmpty = kQFull + kStages,
  kDoutFull = kQEmpty + kStages, kDoutEmpty = kDoutFull + kStages,
  kDsFull = kDoutEmpty + kStages,  // dS of all keys is written; wide heads have kConsumersMeet for it
  kStagedEmpty = kDsFull + kStages,         // with ONE_SENDER, of each place: one arrival
  kTurn = kStagedEmpty, kAdded = kTurn + 1,  // wide heads in turn: it has come, one arrival; all has been added
  kBiasFull = kTurn + (ONE_SENDER || ROLES ? 2 : 0),  // of each place
  kDsEmpty = kBiasFull + (kBiasTiles ? kStages : 0),  // of each place, dS was read for dQ: of each consumer warp
  kKEmpty = kDsEmpty + (kBiasTiles ? kStages : 0), kVEmpty,  // of a work tile: its K and V are not needed any more
  kLastStaged,                     // with ONE_SENDER, of every other work tile: all sums of dQ are staged
  kWorkFull = kLastStaged + 2,     // of every other work tile: it has been told of, one arrival
  kWorkEmpty = kWorkFull + 2,      // and is done: of each warp that hears of it
  kBarrierCount = kWorkEmpty + 2
};
static_assert(kBarrierCount * 8 <= kWork - kBarriers, "what is set aside for them");
DEVICE Shared mbarrier_at(Shared shared, int number) { return shared + kBarriers + number * 8; }

// Named barriers; 0 is that of the block.
constexpr int kConsumersMeet = 1;   // of all consumers
constexpr int kWeightsWritten = 2;  // with ROLES
constexpr int kGroupMeets = 3;      // and on, of each consumer warpgroup

// Whether a block stays on its SM and takes one work tile after the other: it loads the next one while it stores the
// gradients of this one. Else it has one (plans.grid_of).
constexpr bool kPersistent = PERSISTENT;
static_assert(!(kPersistent && ROLES), "whose consumers count steps from 0");

// The keys of a work tile, which a block owns for a while, in the order of plans.heads_together. First key kNoKeys:
// there are fewer.
DEVICE Owned find_keys(const Params &p, int id) {
  if (has_work_table(p)) return owned_of_table(p, id, BLOCK_K);
  if (id >= work_count(p, BLOCK_K)) return Owned{0, 0, kNoKeys};
  int blocks = (p.seqlen_k + BLOCK_K - 1) / BLOCK_K;
  InSection found = place_in_section(p, id, blocks, p.heads_k * p.batch);
  int block = DETERMINISTIC ? blocks - 1 - found.tile : found.tile, batch = divide(found.pair, p.heads_inverse);
  return Owned{batch, found.pair - batch * p.heads_k, block * BLOCK_K};
}
// The number of a block's first work tile. Where blocks wait for those of lower work tiles, these must have been
// started: then the first one comes from the counter, too, and a block takes the lowest that nobody has. Without rows
// nobody has set the counter to 0.
constexpr bool kAllCounted = kPersistent && DETERMINISTIC;
DEVICE int first_work_tile(const Params &p) {
  if (!kAllCounted || !p.seqlen_q) return workgroup_index();
  griddepcontrol_wait();
  return atomicAdd(work_counter(p), 1);
}
// The next one of a block that has had number `id`.
DEVICE int next_work_tile(const Params &p, int id) {
  if (!p.seqlen_q) return id + (int)gridDim.x;
  return (kAllCounted ? 0 : (int)gridDim.x) + atomicAdd(work_counter(p), 1);
}

// What -LSE is multiplied by: the producer warps, of 24 registers, would spill it.
DEVICE void keep_one_over_scale(const Params &p, Shared shared) {
  if (kLseFirst) store_shared(shared + kOneOverScale, Quad{__float_as_uint(reciprocal(exponent_scale(p))), 0, 0, 0});
}
DEVICE float one_over_scale() {
  return __uint_as_float(load_shared<Quad>(shared_address(memory) + kOneOverScale)[0]);
}

// The sequence that they are of. Where blocks take turns, nobody waits for one that a max_seqlen, too small, did not
// start.
DEVICE Sequence owned_sequence(const Params &p, const Owned &own) {
  Sequence s = sequence_of(p, own.batch);
  if (DETERMINISTIC) {
    s.rows = min(s.rows, p.seqlen_q);
    s.keys = min(s.keys, p.seqlen_k);
    s.shift = shift_of(p, s.rows, s.keys);  // as told_sequence has it, for one count of turns
  }
  return s;
}

// What is done for these keys: tiles begin ... end of BLOCK_Q rows, of each head of the group; with goes_around tiles
// 0 ... end, from begin on.
struct Work {
  int begin, end;         // tiles
  int all_low, all_high;  // the rows that see all of the keys
  int steps;              // tiles of all heads
  unsigned number;        // of the block's work tiles
#if LISTS
  const Params *p;
#endif
};
DEVICE Work no_work(const Params &p, unsigned number) {
  return Work{0, 0, 0, 0, -1, number
#if LISTS
              , &p
#endif
  };
}
// Work tiles are found once, and lie in shared memory: no register keeps the keys through the loop, and to find them
// again took 30 % of the kernel's instructions.
DEVICE Shared place_of_work(unsigned number) {
  return shared_address(memory) + kWork + number % 2 * kWorkBytes;
}
DEVICE Owned owned_keys(unsigned number) {
  Quad kept = load_shared<Quad>(place_of_work(number));
  return Owned{(int)kept[0], (int)kept[1], (int)kept[2]};
}
// Tells the other warps of a work tile; -1 steps: there is no more work. `s`: the sequence of its keys.
DEVICE void tell(const Owned &own, const Sequence &s, const Work &w) {
  Shared to = place_of_work(w.number);
  store_shared(to, Quad{(unsigned)own.batch, (unsigned)own.head_k, (unsigned)own.first_key, (unsigned)w.steps});
  store_shared(to + 16, Quad{(unsigned)w.begin, (unsigned)w.end, (unsigned)w.all_low, (unsigned)w.all_high});
  store_shared(to + 32, Quad{(unsigned)s.row0, (unsigned)s.key0, (unsigned)s.rows, (unsigned)s.keys});
  mbarrier_arrive(mbarrier_at(shared_address(memory), kWorkFull + w.number % 2));
}
// Waits for what is told of a work tile.
DEVICE Work hear(const Params &p, unsigned number) {
  mbarrier_wait(mbarrier_at(shared_address(memory), kWorkFull + number % 2), number / 2 % 2);
  Shared at = place_of_work(number);
  Quad tiles = load_shared<Quad>(at + 16);
  Work w = no_work(p, number);
  w.begin = tiles[0];
  w.end = tiles[1];
  w.all_low = tiles[2];
  w.all_high = tiles[3];
  w.steps = load_shared<Quad>(at)[3];
  return w;
}
DEVICE Sequence told_sequence(const Params &p, const Owned &own, unsigned number) {
  Quad told = load_shared<Quad>(place_of_work(number) + 32);
  Sequence s;
  s.batch = own.batch;
  s.row0 = (int)told[0];
  s.key0 = (int)told[1];
  s.row_batch = p.cu_seqlens_q ? 0 : own.batch;
  s.key_batch = p.cu_seqlens_k ? 0 : own.batch;
  s.rows = s.stored_rows = told[2];
  s.keys = told[3];
  s.padding = 0;
  s.shift = shift_of(p, s.rows, s.keys);
  return s;
}
// One thread of each warp says that it is done with a work tile.
DEVICE void end_work(unsigned number) {
  mbarrier_arrive(mbarrier_at(shared_address(memory), kWorkEmpty + number % 2));
}
// Does `once` for each work tile that is told of, with the number of its first step among those of all.
template <class Do>
DEVICE void for_each_work_tile(const Params &p, Do once) {
  int step = 0;
  unsigned number = 0;
  for (Work w = hear(p, 0); w.steps >= 0; w = hear(p, ++number)) {
    once(w, step);
    if (!kPersistent) return;
    step += w.steps;
  }
}

// Without a mask, each block of keys begins at another tile and goes around. Otherwise all blocks that run at the same
// time would reach a tile at the same time, and wait for the first one to set its dQ: at D = 256 the backward of 1,024
// to 4,096 tokens would take 1.35 times as long as with zeros from row_sums, instead of 0.97 to 1.0 (H200).
DEVICE bool goes_around(const Params &p) {
  return !DETERMINISTIC && !BANDED && p.window_left < 0 && p.window_right < 0;
}

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
  METHOD void advance(const Params &, const Work &w) {
    while (left == 0) {
      ++head;
      if (head % w.p->group == 0) return;  // that was the group's last
      open(*w.p, owned_keys(w.number));
    }
    read();
  }
  METHOD void open(const Params &p, const Owned &own) {
    List list = list_of_head(p, own, head);
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
  first.open(p, own);
  if (first.left)
    first.read();
  else
    first.advance(p, w);
  return first;
}
DEVICE bool is_full(const Cursor &at) { return at.full; }
#else
struct Cursor {
  int head, tile;
  METHOD void advance(const Params &p, const Work &w) {
    if (++tile == w.end) tile = goes_around(p) ? 0 : w.begin;
    if (tile == w.begin) ++head;
  }
};
DEVICE Cursor first_tile(const Params &p, const Owned &own, const Work &w) {
  return Cursor{own.head_k * p.group, w.begin};
}
DEVICE bool is_full(const Cursor &) { return false; }
#endif

DEVICE Work work_of(const Params &p, const Owned &own, const Sequence &s, unsigned number) {
  if (own.first_key == kNoKeys) return no_work(p, number);
  Seen seen = rows_seeing(p, s, own.first_key, min(own.first_key + BLOCK_K, s.keys) - 1);
  Work w = no_work(p, number);
  w.steps = 0;
#if LISTS
  static_assert(!DETERMINISTIC, "blocks that leave out a tile would not take their turn there");
  for (int i = 0; i < p.group; ++i) w.steps += list_of_head(p, own, own.head_k * p.group + i).count;
#else
  w.begin = seen.low / BLOCK_Q;
  w.end = seen.low < seen.high ? (seen.high + BLOCK_Q - 1) / BLOCK_Q : w.begin;
  // As in sm80's: a block whose keys no row sees takes its turn between others.
  if (BANDED && seen.low < s.rows) w.end = max((seen.high + BLOCK_Q - 1) / BLOCK_Q, w.begin);
  // A max_seqlen, too small, may leave out all of the keys.
  if (own.first_key < s.keys) w.steps = (w.end - w.begin) * p.group;
  if (goes_around(p)) {
    unsigned first = own.first_key / BLOCK_Q;
    w.begin = first < w.end ? first : __umulhi(first * 0x9e3779b9u, w.end);  // by the golden ratio, for even gaps
  }
#endif
  // Keys beyond the end are seen by nobody; rows beyond it have P = 0 without a mask, unless a bias there is NaN.
  w.all_low = own.first_key + BLOCK_K > s.keys ? s.rows : seen.all_low;
  w.all_high = !BANDED && !kMods && !kBiasTiles && p.window_left < 0 ? 0x7fffffff : seen.all_high;
  return w;
}

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
