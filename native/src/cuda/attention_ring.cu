// Attention of many rows on sm_90a: one warpgroup fetches tiles into a ring in shared memory, each
// of its warps one place of it by itself; two others multiply them with 64 query vectors each, and
// go on freely of one another. Blocks go on to other items, and the fetches run ahead across that
// border. The arithmetic, and so the bits, are those of attention_many.cu.
//
// Where all vectors of a warpgroup see all of a tile, the products of a tile's values run while the
// next tile's scores become weights. Other tiles are folded one by one.
#include <algorithm>

#include "cuda/attention_ring.cuh"

namespace tinyloop::cuda {
namespace {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kConsumers = 2;       // warpgroups
constexpr int kConsumerWarps = kConsumers * kGroupThreads / 32;
constexpr int kGroupVectors = kBlockVectors / kConsumers;
constexpr int kThreads = kGroupThreads * (1 + kConsumers);
// A matrix of ones, the same wherever its rows lie.
constexpr uint64_t kOnes = uint64_t{8} << 32 | uint64_t{8} << 16;
constexpr int kPlaces = kGroupThreads / 32;  // of the ring: one for each warp that fetches
// Registers of a thread, of 168 that each gets at first.
constexpr int kFetchRegisters = 56, kFoldRegisters = 224;
static_assert(kFetchRegisters + kConsumers * kFoldRegisters <= 3 * 168);
static_assert(kTile == 64 && kGroupVectors == 64 && kBlockVectors == kGroupThreads);

// Where a query vector lies: row of the pass, or -1 for none, and element of the row.
struct VectorPlace {
  int row, column;
  __device__ __forceinline__ int64_t in(int64_t stride) const { return row * stride + column; }
};

template <int kDim>
struct RingShared {
  RingPlace<kDim> ring[kPlaces];
  // Of two items in turn; at the end of an item its outputs.
  __half queries[2][kConsumers][SwizzledRows<kDim>::kElements];
  alignas(128) uint32_t ones[64];  // as many as 16 keys of eight columns need
  ItemShared items[2];
  VectorPlace vectors[2][kBlockVectors];
  Window windows[kPlaces];
  int2 rows[2][kConsumers];  // first and last row of a consumer's vectors, of the two items
  uint32_t turn;             // the work that comes next
  uint64_t full[kPlaces], empty[kPlaces], begun[2], left[2];
};

// The threads of the warpgroup that fetches.
struct FetchSync {
  __device__ __forceinline__ void operator()() const {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  }
};

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
    if (++index == kPlaces) {
      index = 0;
      phase ^= 1;
    }
  }
};

// ---- fetching -----------------------------------------------------------------------------------

// What a block does next: pairs of an item and a K/V head, the last items first, because the last
// of a sequence see the most keys.
struct Turns {
  uint32_t* counters;  // the plan's, or null
  uint32_t works;
  uint32_t round = 0;
  uint32_t drawn = 0;  // thread 0's; 0: none, since a first turn is never drawn

  // By thread 0, early enough for the answer to be there.
  __device__ __forceinline__ void draw() {
    if (counters != nullptr && drawn == 0) drawn = gridDim.x + atomicAdd(counters, 1u);
  }
  // Without counters: who had the longest of a round gets the shortest of the next.
  __device__ __forceinline__ uint32_t next_dealt() {
    ++round;
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  // By thread 0 when it needs no more. The last block leaves zeros for the next kernel.
  __device__ __forceinline__ void leave() const {
    if (counters == nullptr) return;
    __threadfence();
    if (atomicAdd(counters + 1, 1u) + 1 != gridDim.x) return;
    counters[0] = 0;
    counters[1] = 0;
  }
};

template <int kDim>
struct Fetcher {
  using Shared = RingShared<kDim>;
  using Rows64 = SwizzledRows<kDim>;

  Shared& shared;
  const ManyArguments& a;
  const int warp;
  Finder finder;
  Turns turns;
  uint32_t place_phase = 0;  // of this warp's place
  int until_mine = 0;        // tiles until this warp's next

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // All of a warp: this thread's stores so far, and its copies once they have arrived.
  __device__ __forceinline__ static void hand_on(uint64_t& barrier) {
    arrive_with_copies(shared_address(&barrier));
    __syncwarp();
    if (lane() == 0) arrive(shared_address(&barrier));
  }

  __device__ __forceinline__ void start_queries(int buffer) const {
    constexpr int kChunks = kDim / 8, kLanes = kChunks <= 8 ? 8 : 16,
                  kRows = kGroupThreads / kLanes;
    const int chunk = threadIdx.x % kLanes;
    if (kLanes != kChunks && chunk >= kChunks) return;
    const int bytes = min(max(a.head_dim - chunk * 8, 0), 8) * 2;
#pragma unroll 4
    for (int i = 0; i < kBlockVectors / kRows; ++i) {
      const int v = i * kRows + threadIdx.x / kLanes;
      __half* to =
          shared.queries[buffer][v / kGroupVectors] + Rows64::place(v % kGroupVectors, chunk);
      const VectorPlace at = shared.vectors[buffer][v];
      const __half* from = a.queries + at.in(a.query_stride) + chunk * 8;
      if (at.row < 0 || bytes == 0) {
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
      } else if (a.aligned_queries) {
        copy_async_all<16>(shared_address(to), from);  // heads are then of whole chunks
      } else {
        copy_16_slowly<true>(to, reinterpret_cast<const uint8_t*>(from), bytes);
      }
    }
  }

  // What all know of an item, and its queries. By all four warps.
  __device__ __forceinline__ void begin(const Item& from, int kv_head, int buffer) {
    ItemShared& item = shared.items[buffer];
    if (threadIdx.x == 0) {
      item.work = work_of(a.plan, from, {a.plane, kv_head, a.n_kv_heads, a.head_dim}, a.group);
      for (int i = 0; i < kConsumers; ++i) {
        const int vector = i * kGroupVectors;
        const int last = min((vector + kGroupVectors - 1) / a.group, item.work.rows - 1);
        shared.rows[buffer][i] = make_int2(vector / a.group, last);
      }
    }
    FetchSync{}();
    take_pieces(item, a.plan.pieces + from.first_piece, FetchSync{});
    FetchSync{}();
    const int vector = static_cast<int>(threadIdx.x), row = vector / a.group;
    const int head = kv_head * a.group + vector % a.group;
    shared.vectors[buffer][vector] = {row < item.work.rows ? item.rows[row] : -1,
                                      head * a.head_dim};
    FetchSync{}();
    start_queries(buffer);
    hand_on(shared.begun[buffer]);
    finder.begin();
  }

  __device__ __forceinline__ void fetch(const ItemShared& item, const Step& step) {
    const Work& work = item.work;
    const int first = finder.seek(work.prefix, step.tile, work.place);
    wait_for_phase(shared_address(&shared.empty[warp]), place_phase ^ 1);
    place_phase ^= 1;
    const TileFetch<kDim> tile{shared.ring[warp], a.n_kv_heads, a.head_dim};
    const Coming coming =
        tile.start(finder.window, first, own_source(item, step), step.tile, step.limit);
    tile.finish(coming);
    hand_on(shared.full[warp]);
  }

  // This warp's tiles of an item: each fourth one, counted across items.
  __device__ __forceinline__ void fetch_mine(const ItemShared& item) {
    Step step = first_step(item);
    bool more = true;
    while (true) {
      while (more && until_mine > 0) {
        more = advance(item, step);
        --until_mine;
      }
      if (!more) return;
      const Step mine = step;
      for (until_mine = kPlaces; more && until_mine > 0; --until_mine) more = advance(item, step);
      // The item's end is in sight.
      if (!more && threadIdx.x == 0) turns.draw();
      fetch(item, mine);
    }
  }

  __device__ __forceinline__ uint32_t next_turn() {
    if (turns.counters == nullptr) return turns.next_dealt();
    if (threadIdx.x == 0) {
      turns.draw();
      shared.turn = turns.drawn;
      turns.drawn = 0;
    }
    FetchSync{}();
    const uint32_t next = shared.turn;
    FetchSync{}();
    return next;
  }

  __device__ __forceinline__ void run() {
    uint32_t taken = 0;  // items
    for (uint32_t at = blockIdx.x; at < turns.works; at = next_turn()) {
      const auto heads = static_cast<uint32_t>(a.n_kv_heads);
      const Item& from = a.plan.items[a.plan.n_items - 1 - static_cast<int>(at / heads)];
      if (from.rows == 0) continue;
      const uint32_t buffer = taken % 2;
      wait_for_phase(shared_address(&shared.left[buffer]), (taken / 2 + 1) % 2);
      begin(from, static_cast<int>(at % heads), static_cast<int>(buffer));
      fetch_mine(shared.items[buffer]);
      ++taken;
    }
    if (threadIdx.x == 0) turns.leave();
    // An item without rows: the end.
    wait_for_phase(shared_address(&shared.left[taken % 2]), (taken / 2 + 1) % 2);
    if (threadIdx.x == 0) shared.items[taken % 2].work.rows = 0;
    hand_on(shared.begun[taken % 2]);
    commit_copies();
    wait_for_copies<0>();
  }
};

// ---- folding ------------------------------------------------------------------------------------

using Scores = float[kTile / 2];  // of a thread: [8 keys after 8 keys][4]
using Weights = uint32_t[kTile / 16][4];

// What products write is known when they have ended, and not before.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    asm volatile("" : "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])::"memory");
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
  using Shared = RingShared<kDim>;
  using Rows64 = SwizzledRows<kDim>;
  using Outputs = float[kDim / 2];  // of a thread: [8 columns after 8 columns][4]

  Shared& shared;
  const ManyArguments& a;
  const int group;  // of the two consumers
  Stage stage;
  int buffer = 0;           // of the item
  uint32_t item_phase = 0;  // of the buffer

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
  // Tiles from this one on that all vectors of this warpgroup see all of, as they do this one.
  __device__ __forceinline__ int seen_by_all(const Step& step) const {
    if (step.piece < 0) return (item().work.shared - step.tile) / kTile;
    return keys_seen(item().pieces[step.piece], rows().x, step.tile) / kTile;
  }
  // Keys of a tile that each vector of the thread sees.
  __device__ __forceinline__ void see(const Step& step, int (&seen)[2]) const {
    if (step.piece < 0) {
      seen[0] = seen[1] = kTile;
      return;
    }
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
    publish_to_products();  // what others have copied
  }
  __device__ __forceinline__ void release(int index) const {
    __syncwarp();
    if (lane() == 0) arrive(shared_address(&shared.empty[index]));
  }

  // ---- products

  // A matrix in shared memory as the tensor cores are told of it: the part that says where, the
  // same in all threads and known to be, which takes a while.
  template <uint64_t kKind>
  __device__ __forceinline__ static uint32_t find(const void* memory) {
    const uint32_t at = static_cast<uint32_t>(kKind) | (shared_address(memory) & 0x3FFFF) >> 4;
    return __shfl_sync(0xFFFFFFFFu, at, 0);
  }
  // `on`: 16 bytes after 16 bytes further on.
  template <uint64_t kKind>
  __device__ __forceinline__ static uint64_t matrix(uint32_t found, int on) {
    return kKind >> 32 << 32 | (found + static_cast<uint32_t>(on));
  }
  __device__ __forceinline__ uint32_t find_queries() const {
    return find<kSwizzledRows>(shared.queries[buffer][group]);
  }
  __device__ __forceinline__ uint32_t find_keys(int index) const {
    return find<kSwizzledRows>(shared.ring[index].keys);
  }
  __device__ __forceinline__ uint32_t find_values(int index) const {
    return find<kSwizzledValues>(shared.ring[index].values);
  }

  __device__ __forceinline__ static void start_scores(uint32_t q, uint32_t k, Scores& s) {
    multiply_keys<0>(s, matrix<kSwizzledRows>(q, 0), matrix<kSwizzledRows>(k, 0));
#pragma unroll
    for (int i = 1; i < kDim / 16; ++i) {
      const int on = (i / 4 * Rows64::kHalf * 2 + i % 4 * 32) / 16;
      multiply_keys<1>(s, matrix<kSwizzledRows>(q, on), matrix<kSwizzledRows>(k, on));
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
  __device__ __forceinline__ static void start_sums(uint32_t ones, const Weights& p,
                                                    float (&sums)[4]) {
    const uint64_t b = matrix<kOnes>(ones, 0);
    multiply_values_8<0>(sums, p[0], b);
#pragma unroll
    for (int k = 1; k < kTile / 16; ++k) multiply_values_8<1>(sums, p[k], b);
  }
  __device__ __forceinline__ static void start_values(uint32_t v, const Weights& p, Outputs& t) {
    step_values<0>(t, p[0], matrix<kSwizzledValues>(v, 0));
#pragma unroll
    for (int k = 1; k < kTile / 16; ++k) {
      step_values<1>(t, p[k], matrix<kSwizzledValues>(v, k * (16 * 128 / 16)));
    }
    commit_products();
  }

  // ---- scores to weights

  __device__ __forceinline__ void scale_scores(int index, Scores& s) const {
    const float* scales = shared.ring[index].key_scales + lane() % 4 * 2;
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
  __device__ __forceinline__ static void round_all(const Scores& s, Weights& p) {
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) round_weights(s + k * 8, p[k]);
  }
  // The same, and a step of their sums.
  __device__ __forceinline__ static void add_rounded(const float* s, uint32_t (&p)[4],
                                                     float (&sums)[4]) {
    round_weights(s, p);
    multiply(sums, p, kHalfOnes, kHalfOnes);
  }
  // The sums before the values' scales come in.
  __device__ __forceinline__ void add_all(const Merge (&merge)[2], const Scores& s, Weights& p) {
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) add_rounded(s + k * 8, p[k], sums);
    merge_sums(sums, merge);
  }
  // kOddly: a key that is not seen adds nothing, whatever its value's scale is.
  template <Coded kCoded>
  __device__ __forceinline__ void add_scaled(int index, const Merge (&merge)[2], Scores& s,
                                             Weights& p) {
    float sums[4] = {};
    const float* scales = shared.ring[index].value_scales + lane() % 4 * 2;
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      add_rounded(s + k * 8, p[k], sums);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + k * 16 + n * 8);
        float* w = s + k * 8 + n * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float by = i % 2 == 0 ? scale.x : scale.y;
          w[i] = kCoded == Coded::kOddly ? scaled_weight(w[i], by) : __fmul_rn(w[i], by);
        }
      }
      round_weights(s + k * 8, p[k]);
    }
    merge_sums(sums, merge);
  }

  __device__ __forceinline__ void merge_sums(const float (&sums)[4], const Merge (&merge)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = merged(sum[h], sums[2 * h], merge[h]);
  }
  __device__ __forceinline__ void merge_outputs(const Outputs& t, const Merge (&merge)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] = merged(o[i], t[i], merge[i % 4 / 2]);
  }

  // ---- tiles that all see

  // Scores of a tile to its weights, and what the merge of its outputs takes.
  template <bool kScaled>
  __device__ __forceinline__ void take_weights(int index, const Merge (&merge)[2], Scores& s,
                                               Weights& p) {
    if constexpr (kScaled) {
      add_scaled<Coded::kYes>(index, merge, s, p);
    } else {
      round_all(s, p);
    }
  }
  template <bool kScaled>
  __device__ __forceinline__ void merge_tile(const Merge (&merge)[2], const float (&sums)[4],
                                             const Outputs& t) {
    if constexpr (!kScaled) merge_sums(sums, merge);
    merge_outputs(t, merge);
  }

  // From a tile that is there, with scales or without, as far as all see the next ones and they are
  // like it. step: then the first one that is not. False: there is none.
  template <Coded kCoded>
  __device__ __forceinline__ bool fold_run(Step& step) {
    constexpr bool kScaled = kCoded == Coded::kYes;
    Scores s;
    Outputs t;
    Weights p;
    float sums[4] = {};
    Merge merge[2];
    const uint32_t ones = find<kOnes>(shared.ones);
    begin_products();
    start_scores(find_queries(), find_keys(stage.index), s);
    wait_for_products<0>();
    pin(s);
    if constexpr (kScaled) scale_scores(stage.index, s);
    weigh(s, merge);
    take_weights<kScaled>(stage.index, merge, s, p);
    const int tiles = seen_by_all(step);
    int folded = 1;
    uint32_t values = find_values(stage.index);
    int before = stage.index;
    stage.advance();
    if (tiles > 1) wait(stage);
    for (; folded < tiles; ++folded) {
      if (shared.ring[stage.index].coded != kCoded) break;
      const uint32_t queries = find_queries(), keys = find_keys(stage.index);
      pin(p);
      begin_products();
      start_scores(queries, keys, s);
      if constexpr (!kScaled) start_sums(ones, p, sums);
      start_values(values, p, t);
      wait_for_products<1>();
      pin(s);
      if constexpr (kScaled) scale_scores(stage.index, s);
      Merge next[2];
      weigh(s, next);
      pin(s);
      values = find_values(stage.index);
      const int current = stage.index;
      stage.advance();
      // Here also because it keeps the compiler from putting off the weights until the products
      // have ended.
      if (folded + 1 < tiles) wait(stage);
      wait_for_products<0>();
      pin(t);
      pin(sums);
      release(before);
      merge_tile<kScaled>(merge, sums, t);
      merge[0] = next[0];
      merge[1] = next[1];
      take_weights<kScaled>(current, merge, s, p);
      before = current;
    }
    pin(p);
    begin_products();
    if constexpr (!kScaled) start_sums(ones, p, sums);
    start_values(values, p, t);
    wait_for_products<0>();
    pin(t);
    pin(sums);
    release(before);
    merge_tile<kScaled>(merge, sums, t);
    step = piece_step(item(), step.piece, step.tile + (folded - 1) * kTile);
    return advance(item(), step);
  }

  // ---- tiles that some see

  __device__ __forceinline__ bool has_broken_values(int index) const {
    constexpr int kPerRow = kDim / 8;
    const __half* values = shared.ring[index].values;
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
    const __half* values = shared.ring[index].values;
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
    const bool scaled = shared.ring[stage.index].coded != Coded::kNo;
    Scores s;
    Outputs t;
    Weights p;
    Merge merge[2];
    int seen[2];
    begin_products();
    start_scores(find_queries(), find_keys(stage.index), s);
    wait_for_products<0>();
    pin(s);
    see(step, seen);
    if (scaled) scale_scores(stage.index, s);
    mask_scores(seen, s);
    weigh(s, merge);
    if (scaled) {
      add_scaled<Coded::kOddly>(stage.index, merge, s, p);
    } else {
      add_all(merge, s, p);
    }
    if (cuts_rows(item(), step) && has_broken_values(stage.index)) {
      merge_broken(stage.index, p, seen, merge);
      release(stage.index);
      return;
    }
    pin(p);
    begin_products();
    start_values(find_values(stage.index), p, t);
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
      const VectorPlace at = shared.vectors[buffer][group * kGroupVectors + vector];
      if (at.row < 0) continue;
      const __half* from = memory + Rows64::place(vector, chunk);
      __half* to = a.out + at.in(a.out_stride) + chunk * 8;
      const int n = min(a.head_dim - chunk * 8, 8);
      if (a.aligned_out && n == 8) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int e = 0; e < n; ++e) to[e] = from[e];
      }
    }
  }

  // Tiles from the step's on; step: then the next one. False: there is none.
  __device__ __forceinline__ bool fold(Step& step) {
    const View seen = view(step);
    const Coded coded = shared.ring[stage.index].coded;
    if (seen == View::kAll && coded == Coded::kNo) return fold_run<Coded::kNo>(step);
    if (seen == View::kAll && coded == Coded::kYes) return fold_run<Coded::kYes>(step);
    if (seen == View::kNone) {
      release(stage.index);
    } else {
      fold_cut(step);
    }
    stage.advance();
    return advance(item(), step);
  }

  __device__ __forceinline__ void run() {
    while (true) {
      wait_for_phase(shared_address(&shared.begun[buffer]), item_phase);
      if (item().work.rows == 0) return;
      begin_item();
      Step step = first_step(item());
      do {
        wait(stage);
      } while (fold(step));
      store();
      __syncwarp();
      if (lane() == 0) arrive(shared_address(&shared.left[buffer]));
      buffer ^= 1;
      item_phase ^= buffer ^ 1;
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) ring_kernel(const ManyArguments a) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared =
      *reinterpret_cast<RingShared<kDim>*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  if (threadIdx.x < 64) shared.ones[threadIdx.x] = kHalfOnes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPlaces; ++i) {
      init_barrier(shared_address(&shared.full[i]), 32 + 1);
      init_barrier(shared_address(&shared.empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(shared_address(&shared.begun[i]), kGroupThreads + kPlaces);
      init_barrier(shared_address(&shared.left[i]), kConsumerWarps);
    }
    publish_barriers();
  }
  publish_to_products();
  __syncthreads();
  wait_for_previous();
  let_next_start();
  if (threadIdx.x < kGroupThreads) {
    shrink_to<kFetchRegisters>();
    // The same in all threads of a warp, and known to be.
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
    const auto works = static_cast<uint32_t>(a.plan.n_items * a.n_kv_heads);
    Fetcher<kDim> fetcher{shared, a, warp, {shared.windows[warp]}, {a.plan.turns, works}, 0, warp};
    fetcher.run();
  } else {
    grow_to<kFoldRegisters>();
    const int group = static_cast<int>(threadIdx.x) / kGroupThreads - 1;
    Folder<kDim> folder{shared, a, __shfl_sync(0xFFFFFFFFu, group, 0)};
    folder.run();
  }
}

template <int kDim>
void launch_ring(cudaStream_t stream, const AttentionCall& call, int processors) {
  constexpr size_t kBytes = sizeof(RingShared<kDim>) + 1024;
  static_assert(kBytes <= 227 * 1024);
  check(cudaFuncSetAttribute(ring_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kBytes)),
        "give the attention kernel its shared memory");
  const int64_t works = call.shape.n_kv_heads * call.plan.n_items;
  const Grid grid{dim3(static_cast<unsigned>(std::min<int64_t>(works, processors))), kThreads,
                  kBytes};
  launch(stream, grid, ring_kernel<kDim>, many_arguments(call));
}

}  // namespace

bool attention_ring(cudaStream_t stream, const AttentionCall& call) {
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
      launch_ring<64>(stream, call, processors);
      return true;
    case 96:
      launch_ring<96>(stream, call, processors);
      return true;
    case 128:
      launch_ring<128>(stream, call, processors);
      return true;
    default:
      return false;
  }
}

}  // namespace tinyloop::cuda
