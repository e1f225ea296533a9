// Attention of many rows: a thread block has up to kBlockVectors query vectors of one item and one
// K/V head. Tiles that the whole item shares come first and are multiplied by all; then, piece by
// piece, the tiles that only the piece sees. The next tile is always on its way.
#include "cuda/attention_item.cuh"

namespace tinyloop::cuda {
namespace {

template <int kDim>
inline constexpr int kWarps = kDim > 128 ? 8 : 4;
// Tiles of 16 query vectors of one warp: two of them share each fragment of keys and values.
template <int kDim>
inline constexpr int kRowTiles = kBlockVectors / 16 / kWarps<kDim>;

template <int kDim, int kStages>
struct ManyShared {
  __half queries[kBlockVectors * kRowStride<kDim>];  // at the end the outputs
  TileBuffer<kDim> buffers[kStages];
  Window window;
  ItemShared item;
};

// ---- what a warp has of its query vectors -------------------------------------------------------

template <int kDim>
struct WarpState {
  float o[kRowTiles<kDim>][kDim / 8][4] = {};
  float maximum[kRowTiles<kDim>][2];
  float sum[kRowTiles<kDim>][2] = {};
};

// Keys of the tile that each vector of a lane sees.
template <int kDim>
struct Seen {
  int keys[kRowTiles<kDim>][2];
};

template <int kDim>
using Scores = float[kRowTiles<kDim>][kTile / 8][4];
template <int kDim>
using Weights = uint32_t[kRowTiles<kDim>][kTile / 16][4];

template <int kDim>
__device__ __forceinline__ void score_tile(uint32_t queries, uint32_t keys, Scores<kDim>& s) {
  constexpr int kStride = kRowStride<kDim> * 2;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[kRowTiles<kDim>][4];
#pragma unroll
    for (int t = 0; t < kRowTiles<kDim>; ++t) {
      load_matrices(a[t], queries + t * 16 * kStride + k * 32);
    }
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, keys + n * 16 * kStride + k * 32);
#pragma unroll
      for (int t = 0; t < kRowTiles<kDim>; ++t) {
        multiply(s[t][2 * n], a[t], b[0], b[1]);
        multiply(s[t][2 * n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

template <int kDim>
__device__ __forceinline__ void scale_scores(const float* scales, Scores<kDim>& s) {
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n) {
    const float2 scale = *reinterpret_cast<const float2*>(scales + n * 8);
#pragma unroll
    for (int t = 0; t < kRowTiles<kDim>; ++t) {
      s[t][n][0] = __fmul_rn(s[t][n][0], scale.x);
      s[t][n][1] = __fmul_rn(s[t][n][1], scale.y);
      s[t][n][2] = __fmul_rn(s[t][n][2], scale.x);
      s[t][n][3] = __fmul_rn(s[t][n][3], scale.y);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void mask_scores(const Seen<kDim>& seen, Scores<kDim>& s) {
  const int first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int t = 0; t < kRowTiles<kDim>; ++t) {
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n * 8 + first + i % 2 >= seen.keys[t][i / 2]) s[t][n][i] = minus_infinity();
      }
    }
  }
}

// The state's maxima move. subtracted: what each vector's scores are compared with.
template <int kDim>
__device__ __forceinline__ void find_tops(float c, const Scores<kDim>& s, WarpState<kDim>& state,
                                          float (&subtracted)[kRowTiles<kDim>][2],
                                          Merge (&merge)[kRowTiles<kDim>][2]) {
#pragma unroll
  for (int t = 0; t < kRowTiles<kDim>; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = fmaxf(s[t][0][2 * h], s[t][0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < kTile / 8; ++n) {
        largest = fmaxf(largest, fmaxf(s[t][n][2 * h], s[t][n][2 * h + 1]));
      }
      const float top = tile_top(row_max(largest), c);
      subtracted[t][h] = subtrahend(top);
      merge[t][h] = merge_top(state.maximum[t][h], top);
    }
  }
}

__device__ __forceinline__ void round_weights(const float (&low)[4], const float (&high)[4],
                                              uint32_t (&p)[4]) {
  p[0] = pack_halves(low[0], low[1]);
  p[1] = pack_halves(low[2], low[3]);
  p[2] = pack_halves(high[0], high[1]);
  p[3] = pack_halves(high[2], high[3]);
}

__device__ __forceinline__ void scale_weights(float2 scale, float (&w)[4]) {
  w[0] = scaled_weight(w[0], scale.x);
  w[1] = scaled_weight(w[1], scale.y);
  w[2] = scaled_weight(w[2], scale.x);
  w[3] = scaled_weight(w[3], scale.y);
}

// Scores become weights of the values, and their sums. 16 keys after 16 keys, so that registers of
// scores become free early. scales: of the values, from the lane's first key on.
template <int kDim, bool kScaled>
__device__ __forceinline__ void weigh(float c, const float (&subtracted)[kRowTiles<kDim>][2],
                                      const float* scales, Scores<kDim>& s, Weights<kDim>& p,
                                      float (&sums)[kRowTiles<kDim>][4]) {
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
#pragma unroll
    for (int t = 0; t < kRowTiles<kDim>; ++t) {
      float (&low)[4] = s[t][2 * k];
      float (&high)[4] = s[t][2 * k + 1];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i] = softmax_weight(low[i], c, subtracted[t][i / 2]);
        high[i] = softmax_weight(high[i], c, subtracted[t][i / 2]);
      }
      round_weights(low, high, p[t][k]);
      multiply(sums[t], p[t][k], kHalfOnes, kHalfOnes);
      if constexpr (kScaled) {
        scale_weights(*reinterpret_cast<const float2*>(scales + k * 16), low);
        scale_weights(*reinterpret_cast<const float2*>(scales + k * 16 + 8), high);
        round_weights(low, high, p[t][k]);
      }
    }
  }
}

// ---- values -------------------------------------------------------------------------------------

// kSelective: rows that see nothing are left out, also where a value is no number.
template <int kDim, bool kSelective>
__device__ __forceinline__ void add_values(uint32_t values, const Weights<kDim>& p,
                                           const Seen<kDim>& seen,
                                           const Merge (&merge)[kRowTiles<kDim>][2],
                                           WarpState<kDim>& state) {
  constexpr int kStride = kRowStride<kDim> * 2;
#pragma unroll
  for (int c = 0; c < kDim / 16; ++c) {
    float o[kRowTiles<kDim>][2][4] = {};
    // Else the compiler loads ahead more than there are registers for.
    if (c % 2 == 0) __syncwarp();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      uint32_t b[4];
      load_matrices_transposed(b, values + k * 16 * kStride + c * 32);
#pragma unroll
      for (int t = 0; t < kRowTiles<kDim>; ++t) {
        multiply(o[t][0], p[t][k], b[0], b[1]);
        multiply(o[t][1], p[t][k], b[2], b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8 * kRowTiles<kDim>; ++i) {
      const int t = i / 8, h = i % 4 / 2;
      if (kSelective && seen.keys[t][h] <= 0) continue;
      float& total = state.o[t][2 * c + i % 8 / 4][i % 4];
      total = merged(total, o[t][i % 8 / 4][i % 4], merge[t][h]);
    }
  }
}

// ---- a block's work -----------------------------------------------------------------------------

// kStages: tiles in shared memory. With 2 the next one is on its way while one is folded.
template <int kDim, int kStages>
struct ManyBlock {
  using Shared = ManyShared<kDim, kStages>;
  using Copier = TileCopier<kDim, 32 * kWarps<kDim>>;
  static constexpr int kTiles = kRowTiles<kDim>;
  static constexpr int kWarpVectors = 16 * kTiles;

  Shared& shared;
  const Work& work;  // shared's
  Copier copier;

  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void start_queries(const __half* queries, int64_t stride,
                                                bool aligned) {
    const int chunk = copier.chunk();
    if (chunk >= Copier::kChunks) return;
    const int bytes = min(max(work.place.head_dim - chunk * 8, 0), 8) * 2;
    for (int v = copier.row(0); v < kBlockVectors; v += Copier::kPassRows) {
      __half* to = shared.queries + v * kRowStride<kDim> + chunk * 8;
      const int64_t at = vector_offset(shared.item, v, stride);
      if (at < 0 || bytes == 0) {
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
      } else if (aligned) {
        // Heads are then of whole chunks.
        copy_async_all<16>(shared_address(to), queries + at + chunk * 8);
      } else {
        copy_elements(reinterpret_cast<uint8_t*>(to),
                      reinterpret_cast<const uint8_t*>(queries + at + chunk * 8), bytes, 16);
      }
    }
  }

  __device__ __forceinline__ Arriving start_tile(int stage, const Step& step, Cursor& cursor) {
    const int first = seek(shared.window, cursor, work.prefix, step.tile, work.place, BlockSync{});
    const Source own = own_source(shared.item, step);
    return copier.start(shared.buffers[stage], shared.window, first, own, step.tile, step.limit);
  }

  // What this warp's vectors see of a step's tile. only: 0, or how many keys those rows see that
  // the tile is folded for.
  __device__ __forceinline__ View view(const Step& step, int only, Seen<kDim>& seen) const {
    const int first_vector = warp() * kWarpVectors;
    const int first = first_vector / work.group;
    const int last = min((first_vector + kWarpVectors - 1) / work.group, work.rows - 1);
    if (first > last) return View::kNone;
    if (step.piece < 0) return View::kAll;
    const OwnKeys& piece = shared.item.pieces[step.piece];
    const int low = max(first, static_cast<int>(piece.first_row));
    const int high = min(last, piece.first_row + piece.rows - 1);
    if (low > high || keys_seen(piece, high, step.tile) <= 0) return View::kNone;
    if (only == 0 && low == first && high == last && keys_seen(piece, low, step.tile) >= kTile) {
      return View::kAll;
    }
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int row = (first_vector + i * 8 + lane() / 4) / work.group;
      int keys = 0;
      if (row >= low && row <= high) keys = min(keys_seen(piece, row, step.tile), kTile);
      seen.keys[i / 2][i % 2] = only == 0 || keys == only ? keys : 0;
    }
    return View::kSome;
  }

  __device__ __forceinline__ void fold(int stage, bool scaled, View view, const Seen<kDim>& seen,
                                       WarpState<kDim>& state) const {
    const TileBuffer<kDim>& buffer = shared.buffers[stage];
    const int l = lane();
    const uint32_t queries = shared_address(
        shared.queries + (warp() * kWarpVectors + l % 16) * kRowStride<kDim> + l / 16 * 8);
    const uint32_t keys =
        shared_address(buffer.keys + (l % 8 + l / 16 * 8) * kRowStride<kDim> + l / 8 % 2 * 8);
    const uint32_t values = shared_address(buffer.values + l % 16 * kRowStride<kDim> + l / 16 * 8);
    Scores<kDim> s = {};
    score_tile<kDim>(queries, keys, s);
    if (scaled) scale_scores<kDim>(buffer.key_scales + l % 4 * 2, s);
    if (view == View::kSome) mask_scores<kDim>(seen, s);
    float subtracted[kTiles][2], sums[kTiles][4] = {};
    Merge merge[kTiles][2];
    find_tops<kDim>(work.c, s, state, subtracted, merge);
    Weights<kDim> p;
    if (scaled) {
      weigh<kDim, true>(work.c, subtracted, buffer.value_scales + l % 4 * 2, s, p, sums);
    } else {
      weigh<kDim, false>(work.c, subtracted, nullptr, s, p, sums);
    }
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      float& sum = state.sum[i / 2][i % 2];
      sum = merged(sum, sums[i / 2][i % 2 * 2], merge[i / 2][i % 2]);
    }
    if (view == View::kSome) {
      add_values<kDim, true>(values, p, seen, merge, state);
    } else {
      add_values<kDim, false>(values, p, seen, merge, state);
    }
  }

  __device__ __forceinline__ void run(WarpState<kDim>& state) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) state.maximum[i / 2][i % 2] = minus_infinity();
    Cursor cursor;
    Step now = {}, next = first_step(shared.item);
    Arriving came, coming;
    bool begun = false, more = true;
    int only = 0;
    for (int stage = 0;; stage ^= kStages - 1) {
      if (kStages == 2 && more) coming = start_tile(stage, next, cursor);
      while (begun) {
        Seen<kDim> seen;
        const View seen_by_warp = view(now, only, seen);
        if (seen_by_warp != View::kNone) {
          fold(stage ^ (kStages - 1), came.scaled, seen_by_warp, seen, state);
        }
        if (only <= 1) break;
        --only;
        __syncthreads();
        copier.clear_value(shared.buffers[stage ^ (kStages - 1)], only);
        __syncthreads();
      }
      if (!more) return;
      if constexpr (kStages == 1) {
        __syncthreads();
        coming = start_tile(stage, next, cursor);
      }
      now = next;
      came = coming;
      begun = true;
      more = advance(shared.item, next);
      wait_for_copies<0>();
      copier.finish(shared.buffers[stage], came);
      only = 0;
      if (!cuts_rows(shared.item, now)) {
        __syncthreads();
      } else if (__syncthreads_or(copier.has_broken_values(shared.buffers[stage]))) {
        // A weight of 0 does not keep out a value that is no number. So the tile is folded for the
        // rows that see all of its keys, then, without its last key, for those that see one less.
        only = now.limit - now.tile;
      }
    }
  }

  // Through the warp's own part of the queries' memory, so that whole rows are written.
  __device__ __forceinline__ void store(const WarpState<kDim>& state, __half* out, int64_t stride,
                                        bool aligned) const {
    const int first = warp() * kWarpVectors;
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float inverse = divisor(state.sum[t][h]);
        __half* row = shared.queries + (first + t * 16 + h * 8 + lane() / 4) * kRowStride<kDim> +
                      lane() % 4 * 2;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          *reinterpret_cast<uint32_t*>(row + n * 8) = pack_halves(
              quotient(state.o[t][n][2 * h], inverse), quotient(state.o[t][n][2 * h + 1], inverse));
        }
      }
    }
    __syncwarp();
    for (int i = lane(); i < kWarpVectors * Copier::kChunks; i += 32) {
      const int vector = first + i / Copier::kChunks, column = i % Copier::kChunks * 8;
      const int64_t at = vector_offset(shared.item, vector, stride);
      if (at < 0) continue;
      const __half* from = shared.queries + vector * kRowStride<kDim> + column;
      const int n = min(work.place.head_dim - column, 8);
      if (aligned && n == 8) {
        *reinterpret_cast<uint4*>(out + at + column) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int e = 0; e < n; ++e) out[at + column + e] = from[e];
      }
    }
  }
};

template <int kDim, int kStages>
__global__ void __launch_bounds__(32 * kWarps<kDim>, kDim > 128 ? 1 : 2)
    many_kernel(const ManyArguments a) {
  extern __shared__ __align__(16) unsigned char memory[];
  wait_for_previous();
  let_next_start();
  // The last items of a sequence see the most keys: they begin first.
  const Item item = a.plan.items[a.plan.n_items - 1 - static_cast<int>(blockIdx.y)];
  if (item.rows == 0) return;
  auto& shared = *reinterpret_cast<ManyShared<kDim, kStages>*>(memory);
  if (threadIdx.x == 0) {
    shared.item.work = work_of(
        a.plan, item, {a.plane, static_cast<int>(blockIdx.x), a.n_kv_heads, a.head_dim}, a.group);
  }
  __syncthreads();
  ManyBlock<kDim, kStages> block{shared, shared.item.work, {shared.item.work.place}};
  if (threadIdx.x / 32 == kWarps<kDim> - 1) {
    fill_window(shared.window, shared.item.work.prefix, 0, shared.item.work.place);
  }
  take_pieces(shared.item, a.plan.pieces + item.first_piece, BlockSync{});
  __syncthreads();
  block.start_queries(a.queries, a.query_stride, a.aligned_queries);
  WarpState<kDim> state;
  block.run(state);
  block.store(state, a.out, a.out_stride, a.aligned_out);
}

template <int kDim, int kStages>
void launch_stages(cudaStream_t stream, const AttentionCall& call) {
  const ManyArguments a = many_arguments(call);
  constexpr size_t kBytes = sizeof(ManyShared<kDim, kStages>);
  // Of 228 KB a multiprocessor has, a block takes 1 KB more than it asks for.
  static_assert((kDim > 128 ? 1 : 2) * (kBytes + 1024) <= 228 * 1024);
  check(cudaFuncSetAttribute(many_kernel<kDim, kStages>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "give the attention kernel its shared memory");
  const Grid grid{
      dim3(static_cast<unsigned>(call.shape.n_kv_heads), static_cast<unsigned>(call.plan.n_items)),
      32 * kWarps<kDim>, kBytes};
  launch(stream, grid, many_kernel<kDim, kStages>, a);
}

// Heads above 128 elements need more for two tiles than an sm_80 device has for a block.
bool fits_two_tiles(size_t bytes) {
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "find the current device");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "ask for the shared memory of a block");
  return bytes <= static_cast<size_t>(most);
}

template <int kDim>
void launch_many(cudaStream_t stream, const AttentionCall& call) {
  if constexpr (kDim > 128) {
    static_assert(sizeof(ManyShared<kDim, 1>) <= 163 * 1024);
    if (!fits_two_tiles(sizeof(ManyShared<kDim, 2>))) return launch_stages<kDim, 1>(stream, call);
  }
  launch_stages<kDim, 2>(stream, call);
}

}  // namespace

void attention_many(cudaStream_t stream, const AttentionCall& call) {
  switch (padded_head_dim(call.shape.head_dim)) {
    case 32:
      return launch_many<32>(stream, call);
    case 64:
      return launch_many<64>(stream, call);
    case 96:
      return launch_many<96>(stream, call);
    case 128:
      return launch_many<128>(stream, call);
    default:
      return launch_many<256>(stream, call);
  }
}

}  // namespace tinyloop::cuda
