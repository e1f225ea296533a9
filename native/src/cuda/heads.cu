// Heads of q, k and v between their product and the attention: of any shape, one a group of lanes.
#include "cuda/heads.cuh"
#include "cuda/heads_whole.h"
#include "cuda/rows.h"

namespace tinyloop::cuda {

namespace {

constexpr int kThreads = 128;

// ---- angles -------------------------------------------------------------------------------------

// In double: position * frequency loses nothing at any position.
__global__ void __launch_bounds__(kThreads)
    rope_kernel(const int32_t* positions, const float* frequencies, int64_t angles, int64_t half,
                float* rope) {
  wait_for_previous();
  let_next_start();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= angles) return;
  const int64_t r = i / half, j = i % half;
  double sine = 0.0, cosine = 0.0;
  sincos(__dmul_rn(positions[r], frequencies[j]), &sine, &cosine);
  rope[r * 2 * half + j] = static_cast<float>(cosine);
  rope[r * 2 * half + half + j] = static_cast<float>(sine);
}

// ---- the kernel ---------------------------------------------------------------------------------

// Head `index` of those that the work is about, for a group of lanes; has: there is such a head.
template <typename T, HeadWork kWork>
__device__ __forceinline__ void do_head(const Heads& h, const RowsOf<T>& qkv, int row, int head,
                                        bool has, const float* full) {
  constexpr bool kPrepares = kWork != HeadWork::kStore, kStores = kWork != HeadWork::kPrepare;
  const HeadIndex at = head_index(h, row, head);
  const int group_lane = static_cast<int>(threadIdx.x) % h.lanes;
  LanePairs lane_pairs{h.head_dim / 2, 8 * group_lane, h.prep.adjacent_pairs};
  if (!has) lane_pairs.first = lane_pairs.half;
  T* from = qkv.row(at.row) + static_cast<int64_t>(at.head) * h.head_dim;
  KvPlace place{nullptr, nullptr, false};
  if (kStores && has && !at.is_q) place = place_of(kv_row<T>(h, at.row), at);
  Pairs pairs = load_pairs<false>(from, lane_pairs);
  if constexpr (kPrepares) {
    const auto turn = [&] {
      return load_turn<false>(h.rope + static_cast<int64_t>(at.row) * h.head_dim, lane_pairs);
    };
    prepare<false>(pairs, h, at, lane_pairs, turn, full);
  }
  if (has && kPrepares && (at.is_q || !kStores)) store_pairs(from, lane_pairs, pairs);
  if constexpr (kStores) {
    store_head<T>(pairs, h, at, lane_pairs, place, place.heads != nullptr);
  }
}

// Heads of all rows side by side.
template <typename T, HeadWork kWork>
__global__ void __launch_bounds__(kThreads)
    heads_kernel(Heads h, RowsOf<T> qkv, int first_head, int n_heads) {
  wait_for_previous();
  let_next_start();
  const int i =
      static_cast<int>(blockIdx.x) * (kThreads / h.lanes) + static_cast<int>(threadIdx.x) / h.lanes;
  const bool has = i < h.rows * n_heads;
  const int row = has ? i / n_heads : 0;
  const int head = first_head + (has ? i % n_heads : 0);
  do_head<T, kWork>(h, qkv, row, head, has, nullptr);
}

// A block for a row: the norm is over all of its heads.
template <typename T, HeadWork kWork>
__global__ void __launch_bounds__(kThreads)
    full_norm_heads_kernel(Heads h, RowsOf<T> qkv, int first_head, int n_heads) {
  wait_for_previous();
  let_next_start();
  const int row = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __shared__ float full[2];
  if (warp < 2) {
    const int first = warp == 0 ? 0 : h.n_q * h.head_dim;
    const int width = (warp == 0 ? h.n_q : h.n_kv) * h.head_dim;
    const float* bias = h.prep.bias == nullptr ? nullptr : h.prep.bias + first;
    const float inverse =
        width == 0 ? 1.0f : inverse_rms_biased(qkv.row(row) + first, bias, width, h.prep.eps);
    if (lane() == 0) full[warp] = inverse;
  }
  __syncthreads();
  const int groups = kThreads / h.lanes;
  for (int begin = 0; begin < n_heads; begin += groups) {
    const int i = begin + static_cast<int>(threadIdx.x) / h.lanes;
    const bool has = i < n_heads;
    do_head<T, kWork>(h, qkv, row, first_head + (has ? i : 0), has, full);
  }
}

int lanes_of(int64_t head_dim) {
  int lanes = 1;
  while (16 * lanes < head_dim) lanes *= 2;
  return lanes;
}

// Heads [first_head, first_head + n_heads) of each row.
template <HeadWork kWork>
void launch_heads(cudaStream_t stream, bool fp32, const Heads& h, Rows qkv, int first_head,
                  int n_heads) {
  if (h.rows == 0 || n_heads == 0) return;
  if (!fp32 && takes_whole(h, qkv, kWork)) {
    return whole_heads(stream, h, qkv, kWork, first_head, n_heads);
  }
  const bool full = kWork != HeadWork::kStore && h.prep.norm == QkNorm::kFull;
  const int64_t blocks =
      full ? h.rows : blocks_for(static_cast<int64_t>(h.rows) * n_heads, kThreads / h.lanes);
  const Grid grid{dim3(static_cast<unsigned>(blocks)), kThreads, 0};
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    launch(stream, grid, full ? full_norm_heads_kernel<T, kWork> : heads_kernel<T, kWork>, h,
           RowsOf<T>(qkv), first_head, n_heads);
  });
}

Heads heads_of(int64_t rows, const HeadShape& shape) {
  Heads h{};
  h.rows = static_cast<int>(rows);
  h.n_q = static_cast<int>(shape.n_q_heads);
  h.n_kv = static_cast<int>(shape.n_kv_heads);
  h.head_dim = static_cast<int>(shape.head_dim);
  h.lanes = lanes_of(shape.head_dim);
  return h;
}

}  // namespace

void rope_table(cudaStream_t stream, const int32_t* positions, const float* frequencies,
                int64_t rows, int64_t head_dim, float* rope) {
  const int64_t angles = rows * (head_dim / 2);
  if (angles == 0) return;
  const Grid grid{dim3(blocks_for(angles, kThreads)), kThreads, 0};
  launch(stream, grid, rope_kernel, positions, frequencies, angles, head_dim / 2, rope);
}

void prepare_heads(cudaStream_t stream, bool fp32, Rows qkv, const float* rope, int64_t rows,
                   const HeadShape& shape, const HeadPrep& prep) {
  Heads h = heads_of(rows, shape);
  h.rope = rope;
  h.prep = prep;
  // Of v only the bias changes anything.
  const int heads = h.n_q + (prep.bias == nullptr ? 1 : 2) * h.n_kv;
  launch_heads<HeadWork::kPrepare>(stream, fp32, h, qkv, 0, heads);
}

void store_kv(cudaStream_t stream, bool fp32, Rows qkv, const HeadShape& shape, int64_t rows,
              const RunTable<KvRun>& runs, int64_t plane) {
  Heads h = heads_of(rows, shape);
  h.runs = runs;
  h.plane = plane;
  launch_heads<HeadWork::kStore>(stream, fp32, h, qkv, h.n_q, 2 * h.n_kv);
}

void prepare_and_store(cudaStream_t stream, bool fp32, Rows qkv, const float* rope, int64_t rows,
                       const HeadShape& shape, const HeadPrep& prep, const RunTable<KvRun>& runs,
                       int64_t plane) {
  Heads h = heads_of(rows, shape);
  h.rope = rope;
  h.prep = prep;
  h.runs = runs;
  h.plane = plane;
  launch_heads<HeadWork::kBoth>(stream, fp32, h, qkv, 0, h.n_q + 2 * h.n_kv);
}

}  // namespace tinyloop::cuda
