// A block takes heads of one row. A lane has the same pairs of some of them, so it reads the row's
// angles once; everything it needs is on its way before it waits for any of it.
#include <algorithm>

#include "cuda/heads.cuh"
#include "cuda/heads_whole.h"

namespace tinyloop::cuda {

namespace {

constexpr int kMostThreads = 128;
constexpr int kHeadsPerLane = 3;
// Up to here there are multiprocessors for a block with one head to each lane.
constexpr int64_t kFewRows = 128;

// A lane's part of a head as it lies in memory.
struct RawHead {
  uint4 low, high;
};

__device__ __forceinline__ Eight halves_of(const uint4& bits) {
  return load_whole(reinterpret_cast<const __half*>(&bits));
}

__device__ __forceinline__ void store_whole_pairs(__half* head, const LanePairs& at,
                                                  const Pairs& pairs) {
  Eight low, high;
  runs_of(pairs, at.adjacent, low, high);
  store_whole(head + first_run(at), low);
  store_whole(head + second_run(at), high);
}

// at.first < at.half: the lane has such a head and a part of it. Called by a whole warp.
template <HeadWork kWork>
__device__ __forceinline__ void finish_head(const Heads& h, const RawHead& raw, __half* from,
                                            const HeadIndex& index, const LanePairs& at,
                                            const Pairs& turn, const KvRow& to) {
  constexpr bool kPrepares = kWork != HeadWork::kStore, kStores = kWork != HeadWork::kPrepare;
  const bool has = at.first < at.half;
  Pairs pairs = pairs_of(halves_of(raw.low), halves_of(raw.high), at.adjacent);
  if constexpr (kPrepares) prepare<true>(pairs, h, index, at, [&] { return turn; }, nullptr);
  if (has && kPrepares && (index.is_q || !kStores)) store_whole_pairs(from, at, pairs);
  if constexpr (kStores) {
    const bool stores = has && !index.is_q && to.keys != nullptr;
    const KvPlace place = place_of(to, index);
    if (to.int8) {  // of the whole block
      store_head<__half>(pairs, h, index, at, place, stores);
    } else if (stores) {
      store_pairs(reinterpret_cast<__half*>(place.heads) + index.within * h.head_dim, at, pairs);
    }
  }
}

template <HeadWork kWork, int kHeads, bool kAdjacent>
__device__ __forceinline__ void do_heads(const Heads& h, const RowsOf<__half>& qkv, int first_head,
                                         int n_heads) {
  const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int shift = __ffs(h.lanes) - 1, groups = static_cast<int>(blockDim.x) >> shift;
  const LanePairs at{h.head_dim / 2, 8 * (thread & (h.lanes - 1)), kAdjacent};
  const int first = static_cast<int>(blockIdx.y) * kHeads * groups + (thread >> shift);
  __half* const heads = qkv.row(row) + first_head * h.head_dim;
  RawHead raw[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    raw[i] = RawHead{};
    const int head = first + i * groups;
    if (head >= n_heads || at.count() <= 0) continue;
    const __half* from = heads + head * h.head_dim;
    raw[i].low = *reinterpret_cast<const uint4*>(from + first_run(at));
    raw[i].high = *reinterpret_cast<const uint4*>(from + second_run(at));
  }
  Pairs turn{};
  if constexpr (kWork != HeadWork::kStore) {
    turn = load_turn<true>(h.rope + static_cast<int64_t>(row) * h.head_dim, at);
  }
  KvRow to{nullptr, nullptr, nullptr, false};
  if constexpr (kWork != HeadWork::kPrepare) to = kv_row<__half>(h, row);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const bool has = first + i * groups < n_heads;
    const int head = has ? first + i * groups : 0;
    const LanePairs part{at.half, has ? at.first : at.half, kAdjacent};
    finish_head<kWork>(h, raw[i], heads + head * h.head_dim, head_index(h, row, first_head + head),
                       part, turn, to);
  }
}

// Six blocks of three heads to a lane have 74 KB of a multiprocessor on their way.
template <HeadWork kWork, int kHeads>
__global__ void __launch_bounds__(kMostThreads, kHeads > 1 ? 6 : 8)
    whole_kernel(const __grid_constant__ Heads h, RowsOf<__half> qkv, int first_head, int n_heads) {
  wait_for_previous();
  let_next_start();
  if (h.prep.adjacent_pairs) {
    do_heads<kWork, kHeads, true>(h, qkv, first_head, n_heads);
  } else {
    do_heads<kWork, kHeads, false>(h, qkv, first_head, n_heads);
  }
}

template <HeadWork kWork, int kHeads>
void launch_whole(cudaStream_t stream, const Heads& h, Rows qkv, int first_head, int n_heads) {
  const unsigned warps = blocks_for(blocks_for(n_heads, kHeads) * h.lanes, 32);
  const unsigned threads = std::min<unsigned>(32 * warps, kMostThreads);
  const int64_t per_block = static_cast<int64_t>(kHeads) * (threads / h.lanes);
  const Grid grid{dim3(static_cast<unsigned>(h.rows), blocks_for(n_heads, per_block)), threads, 0};
  launch(stream, grid, whole_kernel<kWork, kHeads>, h, RowsOf<__half>(qkv), first_head, n_heads);
}

template <HeadWork kWork>
void launch_whole(cudaStream_t stream, const Heads& h, Rows qkv, int first_head, int n_heads) {
  if (h.rows <= kFewRows) return launch_whole<kWork, 1>(stream, h, qkv, first_head, n_heads);
  launch_whole<kWork, kHeadsPerLane>(stream, h, qkv, first_head, n_heads);
}

bool is_whole(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

bool takes_whole(const Heads& h, Rows qkv, HeadWork work) {
  if (h.head_dim % 16 != 0 || h.lanes > 32 || !is_whole(qkv.data) || qkv.stride % 8 != 0) {
    return false;
  }
  if (work == HeadWork::kStore) return true;
  return h.prep.norm != QkNorm::kFull && is_whole(h.rope) && is_whole(h.prep.bias) &&
         is_whole(h.prep.q_norm) && is_whole(h.prep.k_norm);
}

void whole_heads(cudaStream_t stream, const Heads& h, Rows qkv, HeadWork work, int first_head,
                 int n_heads) {
  switch (work) {
    case HeadWork::kPrepare:
      return launch_whole<HeadWork::kPrepare>(stream, h, qkv, first_head, n_heads);
    case HeadWork::kStore:
      return launch_whole<HeadWork::kStore>(stream, h, qkv, first_head, n_heads);
    case HeadWork::kBoth:
      return launch_whole<HeadWork::kBoth>(stream, h, qkv, first_head, n_heads);
  }
}

}  // namespace tinyloop::cuda
