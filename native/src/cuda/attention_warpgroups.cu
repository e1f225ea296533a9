// Attention of many rows on sm_90a: one warpgroup fetches tiles into a ring in shared memory, two
// others multiply them with 64 query vectors each. Blocks go on to other items, and the fetches run
// ahead across that border. The arithmetic, and so the bits, are those of attention_many.cu.
//
// Where all vectors of a warpgroup see all of a tile, the products of a tile's values run while the
// next tile's scores become weights. Other tiles are folded one by one.
#include <algorithm>

#include "cuda/attention_item.cuh"
#include "cuda/attention_products.cuh"

namespace tinyloop::cuda {
namespace {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kConsumers = 2;       // warpgroups
constexpr int kConsumerWarps = kConsumers * kGroupThreads / 32;
constexpr int kGroupVectors = kBlockVectors / kConsumers;
constexpr int kThreads = kGroupThreads * (1 + kConsumers);
// Tiles under way. The fetching warpgroup hands a tile on when it has asked for the next: then a
// consumer that holds a tile and waits for the next one gets it, whatever is free.
constexpr int kStages = 4;
// Registers of a thread, of 168 that each gets at first.
constexpr int kFetchRegisters = 40, kFoldRegisters = 232;
static_assert(kFetchRegisters + kConsumers * kFoldRegisters <= 3 * 168);
static_assert(kTile == 64 && kGroupVectors == 64 && kBlockVectors == kGroupThreads);

// 64 rows as the tensor cores read them.
template <int kDim>
struct SwizzledRows {
  static constexpr int kHalf = 64 * 64;  // elements of 64 columns
  static constexpr int kHalves = (kDim + 63) / 64;
  static constexpr int kElements = kHalves * kHalf;
  static __device__ __forceinline__ int place(int row, int chunk) {
    return chunk / 8 * kHalf + row * 64 + (chunk % 8 ^ row % 8) * 8;
  }
};

template <int kDim>
struct alignas(1024) SwizzledBuffer {
  static constexpr int kStride = 64;   // between rows that are a multiple of 8 apart
  static constexpr int kUnrolled = 2;  // of a thread's rows: the registers are few
  static __device__ __forceinline__ int place(int row, int chunk) {
    return SwizzledRows<kDim>::place(row, chunk);
  }
  __half keys[SwizzledRows<kDim>::kElements];
  __half values[SwizzledRows<kDim>::kElements];
  float key_scales[kTile];
  float value_scales[kTile];
};

template <int kDim>
struct GroupShared {
  SwizzledBuffer<kDim> buffers[kStages];
  // Of two items in turn; at the end of an item its outputs.
  __half queries[2][kConsumers][SwizzledRows<kDim>::kElements];
  ItemShared items[2];
  Window window;
  int2 rows[2][kConsumers];  // first and last row of a consumer's vectors, of the two items
  int scaled[kStages];
  uint64_t full[kStages], empty[kStages], left[2];
};

// The threads of one warpgroup.
template <int kBarrier>
struct GroupSync {
  __device__ __forceinline__ void operator()() const {
    asm volatile("bar.sync %0, 128;" ::"n"(kBarrier) : "memory");
  }
};
using FetchSync = GroupSync<1>;

__device__ __forceinline__ void sync_consumer(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}
__device__ __forceinline__ bool any_of_consumer(int group, bool here) {
  uint32_t any = 0;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.b32 q, %1, 0; bar.red.or.pred p, %2, 128, q; "
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(here)), "r"(2 + group)
      : "memory");
  return any != 0;
}

// A place in the ring, and which time it comes.
struct Stage {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

// The item and K/V head that a block has in its `round`, or -1. Long items come first, and who had
// the longest of a round gets the shortest of the next.
__device__ __forceinline__ int64_t work_at(const ManyArguments& a, int64_t round) {
  const int64_t blocks = gridDim.x, block = blockIdx.x;
  const int64_t at = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  return at < static_cast<int64_t>(a.plan.n_items) * a.n_kv_heads ? at : -1;
}

// ---- fetching -----------------------------------------------------------------------------------

template <int kDim>
struct Fetcher {
  using Shared = GroupShared<kDim>;
  using Rows64 = SwizzledRows<kDim>;

  Shared& shared;
  const ManyArguments& a;
  Stage stage, behind;  // the next to fill, and the one that is not yet handed on
  Arriving came;
  bool pending = false;
  Cursor cursor;

  __device__ __forceinline__ void start_queries(int buffer) const {
    using Copier = TileCopier<kDim, kGroupThreads, SwizzledBuffer<kDim>>;
    const ItemShared& item = shared.items[buffer];
    const Copier copier{item.work.place};
    const int chunk = copier.chunk();
    if (chunk >= Copier::kChunks) return;
    const int bytes = min(max(a.head_dim - chunk * 8, 0), 8) * 2;
#pragma unroll 1
    for (int v = copier.row(0); v < kBlockVectors; v += Copier::kPassRows) {
      __half* to =
          shared.queries[buffer][v / kGroupVectors] + Rows64::place(v % kGroupVectors, chunk);
      const int64_t at = vector_offset(item, v, a.query_stride);
      if (at < 0 || bytes == 0) {
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
      } else if (a.aligned_queries) {
        copy_async(shared_address(to), a.queries + at + chunk * 8, bytes);
      } else {
        copy_elements(reinterpret_cast<uint8_t*>(to),
                      reinterpret_cast<const uint8_t*>(a.queries + at + chunk * 8), bytes, 16);
      }
    }
  }

  // The copies of the stage behind have arrived.
  __device__ __forceinline__ void hand_on() {
    using Copier = TileCopier<kDim, kGroupThreads, SwizzledBuffer<kDim>>;
    const Copier copier{shared.items[0].work.place};
    copier.finish(shared.buffers[behind.index], came);
    if (threadIdx.x == 0) shared.scaled[behind.index] = came.scaled;
    publish_to_products();
    arrive(shared_address(&shared.full[behind.index]));
    behind.advance();
  }

  __device__ __forceinline__ void fetch(const ItemShared& item, const Step& step) {
    using Copier = TileCopier<kDim, kGroupThreads, SwizzledBuffer<kDim>>;
    const Work& work = item.work;
    wait_for_phase(shared_address(&shared.empty[stage.index]), stage.phase ^ 1);
    const int first = seek(shared.window, cursor, work.prefix, step.tile, work.place, FetchSync{});
    const Copier copier{work.place};
    const Arriving coming = copier.start(shared.buffers[stage.index], shared.window, first,
                                         own_source(item, step), step.tile, step.limit);
    stage.advance();
    if (pending) {
      wait_for_copies<1>();
      hand_on();
    }
    came = coming;
    pending = true;
  }

  __device__ __forceinline__ void run() {
    int taken = 0;  // items
    for (int64_t round = 0;; ++round) {
      // The last round may have no work for this block and yet not be the last.
      if (round * gridDim.x >= static_cast<int64_t>(a.plan.n_items) * a.n_kv_heads) break;
      const int64_t at = work_at(a, round);
      if (at < 0) continue;
      const Item from = a.plan.items[a.plan.n_items - 1 - static_cast<int>(at / a.n_kv_heads)];
      if (from.rows == 0) continue;
      const int buffer = taken % 2;
      ItemShared& item = shared.items[buffer];
      wait_for_phase(shared_address(&shared.left[buffer]), (taken / 2 + 1) % 2);
      const HeadPlace place = {a.plane, static_cast<int>(at % a.n_kv_heads), a.n_kv_heads,
                               a.head_dim};
      if (threadIdx.x == 0) {
        item.work = work_of(a.plan, from, place, a.group);
        for (int i = 0; i < kConsumers; ++i) {
          const int vector = i * kGroupVectors;
          const int last = min((vector + kGroupVectors - 1) / a.group, item.work.rows - 1);
          shared.rows[buffer][i] = make_int2(vector / a.group, last);
        }
      }
      FetchSync{}();
      if (threadIdx.x < 32) fill_window(shared.window, item.work.prefix, 0, item.work.place);
      take_pieces(item, a.plan.pieces + from.first_piece, FetchSync{});
      FetchSync{}();
      cursor = {};
      start_queries(buffer);
      Step step = first_step(item);
      do {
        fetch(item, step);
      } while (advance(item, step));
      ++taken;
    }
    if (pending) {
      wait_for_copies<0>();
      hand_on();
    }
    // An item without rows: the end.
    wait_for_phase(shared_address(&shared.left[taken % 2]), (taken / 2 + 1) % 2);
    wait_for_phase(shared_address(&shared.empty[stage.index]), stage.phase ^ 1);
    if (threadIdx.x == 0) shared.items[taken % 2].work.rows = 0;
    arrive(shared_address(&shared.full[stage.index]));
  }
};

// ---- folding ------------------------------------------------------------------------------------

using Scores = float[kTile / 2];  // of a thread: [8 keys after 8 keys][4]
using Weights = uint32_t[kTile / 16][4];

template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    asm volatile(""
                 : "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]),
                   "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])::"memory");
  }
}
__device__ __forceinline__ void pin(Weights& x) {
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    asm volatile("" : "+r"(x[k][0]), "+r"(x[k][1]), "+r"(x[k][2]), "+r"(x[k][3])::"memory");
  }
}

template <int kDim>
struct Folder {
  using Shared = GroupShared<kDim>;
  using Rows64 = SwizzledRows<kDim>;
  using Outputs = float[kDim / 2];  // of a thread: [8 columns after 8 columns][4]

  Shared& shared;
  const ManyArguments& a;
  const int group;  // of the two consumers
  Stage stage;
  int buffer = 0;  // of the item

  Outputs o;
  float maximum[2], sum[2];

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ const ItemShared& item() const { return shared.items[buffer]; }
  // The first and the last row of this warpgroup's vectors.
  __device__ __forceinline__ int2 rows() const { return shared.rows[buffer][group]; }

  // ---- what of a tile is seen

  __device__ __forceinline__ View view(const Step& step) const {
    const int first = rows().x, last = rows().y;
    if (first > last) return View::kNone;
    if (step.piece < 0) return View::kAll;
    const OwnKeys& piece = item().pieces[step.piece];
    const int low = max(first, static_cast<int>(piece.first_row));
    const int high = min(last, piece.first_row + piece.rows - 1);
    if (low > high || keys_seen(piece, high, step.tile) <= 0) return View::kNone;
    const bool all = low == first && high == last && keys_seen(piece, low, step.tile) >= kTile;
    return all ? View::kAll : View::kSome;
  }
  // Keys of a piece's tile that each vector of the thread sees.
  __device__ __forceinline__ void see(const Step& step, int (&seen)[2]) const {
    const OwnKeys& piece = item().pieces[step.piece];
    const int vector = group * kGroupVectors + warp() * 16 + lane() / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (vector + h * 8) / item().work.group;
      const bool inside = row >= piece.first_row && row < piece.first_row + piece.rows;
      seen[h] = inside ? max(min(keys_seen(piece, row, step.tile), kTile), 0) : 0;
    }
  }

  // ---- the ring

  __device__ __forceinline__ void wait(const Stage& at) const {
    wait_for_phase(shared_address(&shared.full[at.index]), at.phase);
  }
  __device__ __forceinline__ void release(int index) const {
    __syncwarp();
    if (lane() == 0) arrive(shared_address(&shared.empty[index]));
  }

  // ---- products

  __device__ __forceinline__ void start_scores(int index, Scores& s) const {
    uint32_t queries = shared_address(shared.queries[buffer][group]);
    asm volatile("" : "+r"(queries));  // else all steps' places are kept in registers
    const uint64_t q = rows_at(kSwizzledRows, queries);
    const uint64_t k = rows_at(kSwizzledRows, shared_address(shared.buffers[index].keys));
    multiply_keys<0>(s, q, k);
#pragma unroll
    for (int i = 1; i < kDim / 16; ++i) {
      const int at = (i / 4 * Rows64::kHalf * 2 + i % 4 * 32) / 16;
      multiply_keys<1>(s, q + at, k + at);
    }
    commit_products();
  }
  template <int kAdd>
  __device__ __forceinline__ static void step_values(Outputs& t, const uint32_t (&p)[4],
                                                     uint64_t v) {
    if constexpr (kDim == 128) {
      multiply_values_128<kAdd>(t, p, v);
    } else {
      multiply_values_64<kAdd>(t, p, v);
      if constexpr (kDim == 96) multiply_values_32<kAdd>(t + 32, p, v + Rows64::kHalf * 2 / 16);
    }
  }
  __device__ __forceinline__ void start_values(int index, const Weights& p, Outputs& t) const {
    const uint64_t v = rows_at(kSwizzledValues, shared_address(shared.buffers[index].values));
    step_values<0>(t, p[0], v);
#pragma unroll
    for (int k = 1; k < kTile / 16; ++k) step_values<1>(t, p[k], v + k * (16 * 128 / 16));
    commit_products();
  }

  // ---- scores to weights

  __device__ __forceinline__ void scale_scores(int index, Scores& s) const {
    const float* scales = shared.buffers[index].key_scales + lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + n * 8);
      s[n * 4] = __fmul_rn(s[n * 4], scale.x);
      s[n * 4 + 1] = __fmul_rn(s[n * 4 + 1], scale.y);
      s[n * 4 + 2] = __fmul_rn(s[n * 4 + 2], scale.x);
      s[n * 4 + 3] = __fmul_rn(s[n * 4 + 3], scale.y);
    }
  }
  __device__ __forceinline__ static void mask_scores(const int (&seen)[2], Scores& s) {
    const int key = lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) {
      if (i / 4 * 8 + key + i % 2 >= seen[i % 4 / 2]) s[i] = minus_infinity();
    }
  }
  // Scores become weights, not yet rounded.
  __device__ __forceinline__ void weigh(Scores& s, Merge (&merge)[2]) {
    const float c = item().work.c;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
      for (int n = 1; n < kTile / 8; ++n) {
        largest = fmaxf(largest, fmaxf(s[n * 4 + 2 * h], s[n * 4 + 2 * h + 1]));
      }
      const float top = tile_top(row_max(largest), c);
      const float subtracted = subtrahend(top);
      merge[h] = merge_top(maximum[h], top);
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        s[n * 4 + 2 * h] = softmax_weight(s[n * 4 + 2 * h], c, subtracted);
        s[n * 4 + 2 * h + 1] = softmax_weight(s[n * 4 + 2 * h + 1], c, subtracted);
      }
    }
  }
  __device__ __forceinline__ static void round_weights(const float* s, uint32_t (&p)[4]) {
    p[0] = pack_halves(s[0], s[1]);
    p[1] = pack_halves(s[2], s[3]);
    p[2] = pack_halves(s[4], s[5]);
    p[3] = pack_halves(s[6], s[7]);
  }
  // Rounds weights and adds their sums; with scales, then the values' scales come in.
  template <bool kScaled>
  __device__ __forceinline__ void round_all(int index, const Merge (&merge)[2], Scores& s,
                                            Weights& p) {
    float sums[4] = {};
    const float* scales = shared.buffers[index].value_scales + lane() % 4 * 2;
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      round_weights(s + k * 8, p[k]);
      multiply(sums, p[k], kHalfOnes, kHalfOnes);
      if constexpr (kScaled) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 scale = *reinterpret_cast<const float2*>(scales + k * 16 + n * 8);
          float* w = s + k * 8 + n * 4;
          w[0] = scaled_weight(w[0], scale.x);
          w[1] = scaled_weight(w[1], scale.y);
          w[2] = scaled_weight(w[2], scale.x);
          w[3] = scaled_weight(w[3], scale.y);
        }
        round_weights(s + k * 8, p[k]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = merged(sum[h], sums[2 * h], merge[h]);
  }

  __device__ __forceinline__ void merge_outputs(const Outputs& t, const Merge (&merge)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] = merged(o[i], t[i], merge[i % 4 / 2]);
  }

  // ---- tiles that all see

  // From a tile that is there, with scales or without, as far as the next ones are like it. step:
  // then the first one that is not. False: there is none.
  template <bool kScaled>
  __device__ __forceinline__ bool fold_run(Step& step) {
    Scores s;
    Outputs t;
    Weights p;
    Merge merge[2];
    begin_products();
    start_scores(stage.index, s);
    wait_for_products<0>();
    pin(s);
    if constexpr (kScaled) scale_scores(stage.index, s);
    weigh(s, merge);
    round_all<kScaled>(stage.index, merge, s, p);
    bool more = true;
    while (true) {
      const int before = stage.index;
      stage.advance();
      more = advance(item(), step);
      if (!more || view(step) != View::kAll) break;
      wait(stage);
      if ((shared.scaled[stage.index] != 0) != kScaled) break;
      pin(p);
      begin_products();
      start_scores(stage.index, s);
      start_values(before, p, t);
      wait_for_products<1>();
      pin(s);
      if constexpr (kScaled) scale_scores(stage.index, s);
      Merge next[2];
      weigh(s, next);
      pin(s);
      wait_for_products<0>();
      pin(t);
      release(before);
      merge_outputs(t, merge);
      merge[0] = next[0];
      merge[1] = next[1];
      round_all<kScaled>(stage.index, merge, s, p);
    }
    const int before = (stage.index + kStages - 1) % kStages;
    pin(p);
    begin_products();
    start_values(before, p, t);
    wait_for_products<0>();
    pin(t);
    release(before);
    merge_outputs(t, merge);
    return more;
  }

  // ---- tiles that some see

  __device__ __forceinline__ bool has_broken_values(int index) const {
    constexpr int kPerRow = kDim / 8;
    const __half* values = shared.buffers[index].values;
    uint32_t broken = 0;
    for (int i = threadIdx.x % kGroupThreads; i < kTile * kPerRow; i += kGroupThreads) {
      const uint4 x =
          *reinterpret_cast<const uint4*>(values + Rows64::place(i / kPerRow, i % kPerRow));
      broken |= broken_halves(x.x) | broken_halves(x.y) | broken_halves(x.z) | broken_halves(x.w);
    }
    return any_of_consumer(group, broken != 0);
  }

  // Of two keys from `key` on those below `end`.
  __device__ __forceinline__ static uint32_t below(uint32_t pair, int key, int end) {
    return key + 1 < end ? pair : key < end ? pair & 0xFFFFu : 0;
  }
  // A weight of 0 does not keep out a value that is no number: so the tile is multiplied for the
  // rows that see all of its keys, then, without its last key, for those that see one less.
  __device__ __forceinline__ void merge_broken(int index, const Weights& p, const int (&seen)[2],
                                               const Merge (&merge)[2]) {
    const __half* values = shared.buffers[index].values;
    const int l = lane();
#pragma unroll 1
    for (int end = kTile; end > 0; --end) {
      if (!__any_sync(0xFFFFFFFFu, seen[0] == end || seen[1] == end)) continue;
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        float sums[2][4] = {};
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
          uint32_t b[4];
          load_matrices_transposed(
              b, shared_address(values + Rows64::place(k * 16 + l % 16, n * 2 + l / 16)));
          const int key = k * 16 + l % 4 * 2;
          multiply(sums[0], p[k], below(b[0], key, end), below(b[1], key + 8, end));
          multiply(sums[1], p[k], below(b[2], key, end), below(b[3], key + 8, end));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& total = o[n * 8 + i];
          const float both = merged(total, sums[i / 4][i % 4], merge[i % 4 / 2]);
          total = seen[i % 4 / 2] == end ? both : total;
        }
      }
    }
  }

  __device__ __forceinline__ void fold_cut(const Step& step) {
    const bool scaled = shared.scaled[stage.index] != 0;
    Scores s;
    Outputs t;
    Weights p;
    Merge merge[2];
    int seen[2];
    begin_products();
    start_scores(stage.index, s);
    wait_for_products<0>();
    pin(s);
    see(step, seen);
    if (scaled) scale_scores(stage.index, s);
    mask_scores(seen, s);
    weigh(s, merge);
    if (scaled) {
      round_all<true>(stage.index, merge, s, p);
    } else {
      round_all<false>(stage.index, merge, s, p);
    }
    if (cuts_rows(item(), step) && has_broken_values(stage.index)) {
      merge_broken(stage.index, p, seen, merge);
      release(stage.index);
      return;
    }
    pin(p);
    begin_products();
    start_values(stage.index, p, t);
    wait_for_products<0>();
    pin(t);
    release(stage.index);
    // A row that sees nothing of the tile is left out, also where a value is no number.
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      const float both = merged(o[i], t[i], merge[i % 4 / 2]);
      o[i] = seen[i % 4 / 2] > 0 ? both : o[i];
    }
  }

  // ---- items

  __device__ __forceinline__ void begin_item() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = minus_infinity();
      sum[h] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0f;
  }

  // Through the memory of the queries, so that whole rows are written.
  __device__ __forceinline__ void store() const {
    constexpr int kChunks = kDim / 8;
    __half* memory = shared.queries[buffer][group];
    sync_consumer(group);  // all warps have multiplied the queries
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = divisor(sum[h]);
      const int row = warp() * 16 + h * 8 + lane() / 4;
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        *reinterpret_cast<uint32_t*>(memory + Rows64::place(row, n) + lane() % 4 * 2) = pack_halves(
            quotient(o[n * 4 + 2 * h], inverse), quotient(o[n * 4 + 2 * h + 1], inverse));
      }
    }
    __syncwarp();
    for (int i = lane(); i < 16 * kChunks; i += 32) {
      const int vector = warp() * 16 + i / kChunks, chunk = i % kChunks;
      const int64_t at = vector_offset(item(), group * kGroupVectors + vector, a.out_stride);
      if (at < 0) continue;
      const __half* from = memory + Rows64::place(vector, chunk);
      __half* to = a.out + at + chunk * 8;
      const int n = min(a.head_dim - chunk * 8, 8);
      if (a.aligned_out && n == 8) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int e = 0; e < n; ++e) to[e] = from[e];
      }
    }
  }

  __device__ __forceinline__ void run() {
    while (true) {
      wait(stage);
      if (item().work.rows == 0) return;
      begin_item();
      Step step = first_step(item());
      bool more = true;
      while (more) {
        wait(stage);
        const View seen = view(step);
        if (seen == View::kAll) {
          more = shared.scaled[stage.index] != 0 ? fold_run<true>(step) : fold_run<false>(step);
          continue;
        }
        if (seen == View::kSome) {
          fold_cut(step);
        } else {
          release(stage.index);
        }
        stage.advance();
        more = advance(item(), step);
      }
      store();
      __syncwarp();
      if (lane() == 0) arrive(shared_address(&shared.left[buffer]));
      buffer ^= 1;
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) warpgroups_kernel(const ManyArguments a) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared =
      *reinterpret_cast<GroupShared<kDim>*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&shared.full[i]), kGroupThreads);
      init_barrier(shared_address(&shared.empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) init_barrier(shared_address(&shared.left[i]), kConsumerWarps);
    publish_barriers();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  if (threadIdx.x < kGroupThreads) {
    shrink_to<kFetchRegisters>();
    Fetcher<kDim> fetcher{shared, a};
    fetcher.run();
  } else {
    grow_to<kFoldRegisters>();
    Folder<kDim> folder{shared, a, static_cast<int>(threadIdx.x) / kGroupThreads - 1};
    folder.run();
  }
}

template <int kDim>
void launch_warpgroups(cudaStream_t stream, const AttentionCall& call, int processors) {
  constexpr size_t kBytes = sizeof(GroupShared<kDim>) + 1024;
  static_assert(kBytes <= 227 * 1024);
  check(cudaFuncSetAttribute(warpgroups_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kBytes)),
        "give the attention kernel its shared memory");
  const int64_t works = call.shape.n_kv_heads * call.plan.n_items;
  const Grid grid{dim3(static_cast<unsigned>(std::min<int64_t>(works, processors))), kThreads,
                  kBytes};
  launch(stream, grid, warpgroups_kernel<kDim>, many_arguments(call));
}

}  // namespace

bool attention_warpgroups(cudaStream_t stream, const AttentionCall& call) {
  int device = 0, major = 0, minor = 0, processors = 0;
  check(cudaGetDevice(&device), "find the current device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "ask for the device's kind");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "ask for the device's kind");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "count the device's multiprocessors");
#ifndef TINYLOOP_SM90A
  return false;  // the build has no code for them
#endif
  if (major != 9 || minor != 0) return false;
  switch (padded_head_dim(call.shape.head_dim)) {
    case 64:
      launch_warpgroups<64>(stream, call, processors);
      return true;
    case 96:
      launch_warpgroups<96>(stream, call, processors);
      return true;
    case 128:
      launch_warpgroups<128>(stream, call, processors);
      return true;
    default:
      return false;
  }
}

}  // namespace tinyloop::cuda
