// Attention of single rows: a thread block has the heads of one K/V group of one row, and a run of
// the row's tiles. Its four warps share each tile: first by keys (scores), then by columns of the
// values, so that every sum is the chain that the many-row kernel makes. With several blocks for a
// row, each leaves its tiles' (m, l, o) in scratch, and a second kernel merges them in order.
#include "cuda/attention_tiles.cuh"

namespace tinyloop::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps * 16 == kTile);
constexpr int kWeightStride = kTile + 8;

// A tile's weights take the place of its keys once these have been multiplied.
template <int kDim>
struct DecodeShared {
  TileBuffer<kDim> buffers[2];
  float largest[kWarps][kDecodeVectors];
  Window window;
  static_assert(2 * kDecodeVectors * kWeightStride <= kTile * kRowStride<kDim>);
};

struct Partials {
  float* outputs;  // [item][head][tile][padded head_dim]
  float2* tops;    // [item][head][tile]: m, l
  int tiles;       // places for each head
};

struct DecodeArguments {
  AttentionPlan plan;
  int64_t plane;
  const __half* queries;
  __half* out;
  int64_t query_stride, out_stride;
  int group, n_kv_heads, head_dim;
  bool paired_queries, paired_out;  // two elements can be moved at once
  Partials partials;
};

__device__ __forceinline__ int keys_of(const AttentionPiece& piece) {
  return static_cast<int>(max(piece.position + 1, piece.open_end));
}

template <int kDim>
struct DecodeState {
  static constexpr int kColumns = kDim / 8 / kWarps;  // tiles of 8 columns of a warp
  float o[kColumns][4] = {};
  float maximum[2];
  float sum[2] = {};
};

template <int kDim, bool kSplit>
struct DecodeBlock {
  using Copier = TileCopier<kDim, kThreads>;
  using State = DecodeState<kDim>;

  DecodeShared<kDim>& shared;
  const DecodeArguments& a;
  HeadPlace place;
  Copier copier;

  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // The heads' vectors as the A operand; vectors behind the group's last are zero.
  __device__ __forceinline__ void load_queries(int64_t row, uint32_t (&q)[kDim / 16][4]) const {
    const __half* heads = a.queries + row * a.query_stride +
                          static_cast<int64_t>(place.kv_head) * a.group * place.head_dim;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int vector = lane() / 4 + i % 2 * 8;
        const int column = k * 16 + i / 2 * 8 + lane() % 4 * 2;
        q[k][i] = 0;
        if (vector >= a.group || column >= place.head_dim) continue;
        const __half* at = heads + vector * place.head_dim + column;
        if (a.paired_queries) {
          q[k][i] = *reinterpret_cast<const uint32_t*>(at);
        } else {
          const __half2 pair = __halves2half2(at[0], at[1]);
          q[k][i] = *reinterpret_cast<const uint32_t*>(&pair);
        }
      }
    }
  }

  // Scores of this warp's 16 keys.
  __device__ __forceinline__ void score(const TileBuffer<kDim>& buffer,
                                        const uint32_t (&q)[kDim / 16][4], bool scaled, int keys,
                                        float (&s)[2][4]) const {
    const int l = lane(), first = warp() * 16;
    const uint32_t at = shared_address(
        buffer.keys + (first + l % 8 + l / 16 * 8) * kRowStride<kDim> + l / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t b[4];
      load_matrices(b, at + k * 32);
      multiply(s[0], q[k], b[0], b[1]);
      multiply(s[1], q[k], b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = first + n * 8 + l % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (scaled) s[n][i] = __fmul_rn(s[n][i], buffer.key_scales[key + i % 2]);
        if (key + i % 2 >= keys) s[n][i] = minus_infinity();
      }
    }
  }

  // Largest score of the tile for vectors lane / 4 and 8 on, over all warps.
  __device__ __forceinline__ void share_largest(const float (&s)[2][4], float (&largest)[2]) {
    const int l = lane();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float mine =
          fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
      const float warps = row_max(mine);
      if (l % 4 == 0) shared.largest[warp()][l / 4 + h * 8] = warps;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = shared.largest[0][l / 4 + h * 8];
      for (int w = 1; w < kWarps; ++w) {
        largest[h] = fmaxf(largest[h], shared.largest[w][l / 4 + h * 8]);
      }
    }
  }

  // This warp's weights to where all warps find them: as they are, and times the values' scales.
  __device__ __forceinline__ void share_weights(TileBuffer<kDim>& buffer, const float (&s)[2][4],
                                                bool scaled) const {
    const int l = lane();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = warp() * 16 + n * 8 + l % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        __half* to = buffer.keys + (l / 4 + h * 8) * kWeightStride + key;
        const float low = s[n][2 * h], high = s[n][2 * h + 1];
        *reinterpret_cast<uint32_t*>(to) = pack_halves(low, high);
        if (!scaled) continue;
        *reinterpret_cast<uint32_t*>(to + kDecodeVectors * kWeightStride) =
            pack_halves(scaled_weight(low, buffer.value_scales[key]),
                        scaled_weight(high, buffer.value_scales[key + 1]));
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_weights(const __half* weights,
                                               uint32_t (&p)[kTile / 16][4]) const {
    const uint32_t at = shared_address(weights + lane() % 16 * kWeightStride + lane() / 16 * 8);
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) load_matrices(p[k], at + k * 32);
  }

  // This warp's columns of weights times values.
  __device__ __forceinline__ void weigh_values(const TileBuffer<kDim>& buffer,
                                               const uint32_t (&p)[kTile / 16][4],
                                               float (&o)[State::kColumns][4]) const {
    constexpr int kStride = kRowStride<kDim> * 2;
    const uint32_t at =
        shared_address(buffer.values + lane() * kRowStride<kDim> + warp() * State::kColumns * 8);
#pragma unroll
    for (int n = 0; n < State::kColumns; ++n) {
#pragma unroll
      for (int k = 0; k < kTile / 32; ++k) {
        uint32_t b[4];
        load_matrices_transposed(b, at + k * 32 * kStride + n * 16);
        multiply(o[n], p[2 * k], b[0], b[1]);
        multiply(o[n], p[2 * k + 1], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void fold(TileBuffer<kDim>& buffer, const uint32_t (&q)[kDim / 16][4],
                                       bool scaled, int tile, int keys, float c, State& state) {
    float s[2][4] = {};
    score(buffer, q, scaled, keys, s);
    float top[2], largest[2];
    share_largest(s, largest);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = tile_top(largest[h], c);
      const float subtracted = subtrahend(top[h]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        s[n][2 * h] = softmax_weight(s[n][2 * h], c, subtracted);
        s[n][2 * h + 1] = softmax_weight(s[n][2 * h + 1], c, subtracted);
      }
    }
    share_weights(buffer, s, scaled);
    uint32_t p[kTile / 16][4];
    load_weights(buffer.keys, p);
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) multiply(sum, p[k], kHalfOnes, kHalfOnes);
    if (scaled) load_weights(buffer.keys + kDecodeVectors * kWeightStride, p);
    float o[State::kColumns][4] = {};
    weigh_values(buffer, p, o);
    const float sums[2] = {sum[0], sum[2]};
    if constexpr (kSplit) {
      leave(o, top, sums, tile / kTile);
    } else {
      merge(o, top, sums, state);
    }
  }

  __device__ __forceinline__ void merge(const float (&o)[State::kColumns][4], const float (&top)[2],
                                        const float (&sums)[2], State& state) const {
    Merge by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      by[h] = merge_top(state.maximum[h], top[h]);
      state.sum[h] = merged(state.sum[h], sums[h], by[h]);
    }
#pragma unroll
    for (int n = 0; n < State::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[n][i] = merged(state.o[n][i], o[n][i], by[i / 2]);
    }
  }

  __device__ __forceinline__ void leave(const float (&o)[State::kColumns][4], const float (&top)[2],
                                        const float (&sums)[2], int tile) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int vector = lane() / 4 + h * 8;
      if (vector >= a.group) continue;
      const int64_t head =
          (static_cast<int64_t>(blockIdx.y) * a.n_kv_heads + place.kv_head) * a.group + vector;
      const int64_t at = head * a.partials.tiles + tile;
      if (warp() == 0 && lane() % 4 == 0) a.partials.tops[at] = make_float2(top[h], sums[h]);
      float* to = a.partials.outputs + at * kDim + warp() * State::kColumns * 8 + lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < State::kColumns; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * h], o[n][2 * h + 1]);
      }
    }
  }

  __device__ __forceinline__ void store(const State& state, int64_t row) const {
    __half* heads =
        a.out + row * a.out_stride + static_cast<int64_t>(place.kv_head) * a.group * place.head_dim;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int vector = lane() / 4 + h * 8;
      if (vector >= a.group) continue;
      const float inverse = divisor(state.sum[h]);
#pragma unroll
      for (int n = 0; n < State::kColumns; ++n) {
        const int column = (warp() * State::kColumns + n) * 8 + lane() % 4 * 2;
        if (column >= place.head_dim) continue;
        const __half2 pair = __floats2half2_rn(quotient(state.o[n][2 * h], inverse),
                                               quotient(state.o[n][2 * h + 1], inverse));
        __half* to = heads + vector * place.head_dim + column;
        if (a.paired_out) {
          *reinterpret_cast<__half2*>(to) = pair;
        } else {
          to[0] = __low2half(pair);
          to[1] = __high2half(pair);
        }
      }
    }
  }

  // Tiles [begin, end) of positions, the keys below `keys`; end > begin. Two tiles are on their way
  // before the first is folded, and then whenever one is waited for.
  __device__ __forceinline__ void run(const Prefix& prefix, const AttentionPiece& piece, int begin,
                                      int end, int keys) {
    const Source own = source_of(piece.own, place);
    Cursor cursor;
    // Also behind the last tile, as a group of no copies, so that the groups can be counted.
    const auto ask = [&](int stage, int tile) {
      if (tile >= end) {
        commit_copies();
        return Arriving{};
      }
      const int limit = min(tile + kTile, keys);
      const int first = seek(shared.window, cursor, prefix, tile, place, BlockSync{});
      return copier.start(shared.buffers[stage], shared.window, first, own, tile, limit);
    };
    Arriving came = ask(0, begin), coming = ask(1, begin + kTile);
    uint32_t q[kDim / 16][4];
    load_queries(piece.row, q);
    State state;
    state.maximum[0] = state.maximum[1] = minus_infinity();
    const float c = score_factor(place.head_dim);
    int stage = 0;
    for (int tile = begin; tile < end; tile += kTile, stage ^= 1) {
      wait_for_copies<1>();
      copier.finish(shared.buffers[stage], came);
      __syncthreads();
      fold(shared.buffers[stage], q, came.scaled, tile, keys - tile, c, state);
      came = coming;
      if (tile + 2 * kTile < end) __syncthreads();  // all have read the tile
      coming = ask(stage, tile + 2 * kTile);
    }
    if constexpr (!kSplit) store(state, piece.row);
  }
};

template <int kDim, bool kSplit>
__global__ void __launch_bounds__(kThreads, kDim > 128 ? 1 : 3)
    decode_kernel(const DecodeArguments a) {
  extern __shared__ __align__(16) unsigned char memory[];
  // Copies write the plan, no kernel does, and they have ended before the first kernel of a pass
  // begins: so it may be read while the kernel before this one still runs. Every thread waits, also
  // one without work: else this kernel could end before the one before it.
  const Item item = a.plan.items[blockIdx.y];
  auto& shared = *reinterpret_cast<DecodeShared<kDim>*>(memory);
  const HeadPlace place = {a.plane, static_cast<int>(blockIdx.x), a.n_kv_heads, a.head_dim};
  const Prefix prefix = {a.plan.segments + item.first_segment, item.n_segments,
                         static_cast<int>(item.prefix_length)};
  const AttentionPiece& piece = a.plan.pieces[item.rows == 0 ? 0 : item.first_piece];
  const int keys = item.rows == 0 ? 0 : keys_of(piece);
  const int tiles = (keys + kTile - 1) / kTile;
  const int run = (tiles + static_cast<int>(gridDim.z) - 1) / static_cast<int>(gridDim.z);
  const int begin = static_cast<int>(blockIdx.z) * run * kTile;
  const int end = min(begin + run * kTile, tiles * kTile);
  if (begin < end && threadIdx.x < 32) fill_window(shared.window, prefix, begin, place);
  wait_for_previous();
  let_next_start();
  if (begin >= end) return;
  __syncthreads();
  DecodeBlock<kDim, kSplit> block{shared, a, place, {place}};
  block.run(prefix, piece, begin, end, keys);
}

// One head of one item: its tiles in position order, two columns a thread.
template <int kDim>
__global__ void __launch_bounds__(kDim / 2) merge_kernel(const DecodeArguments a) {
  constexpr int kAtOnce = 8;
  const Item item = a.plan.items[blockIdx.y];  // before the wait, as above
  const AttentionPiece& piece = a.plan.pieces[item.rows == 0 ? 0 : item.first_piece];
  const int tiles = item.rows == 0 ? 0 : (keys_of(piece) + kTile - 1) / kTile;
  const int64_t row = item.rows == 0 ? 0 : piece.row;
  wait_for_previous();
  let_next_start();
  if (tiles == 0) return;
  const int64_t head = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const float2* tops = a.partials.tops + head * a.partials.tiles;
  const float2* outputs =
      reinterpret_cast<const float2*>(a.partials.outputs + head * a.partials.tiles * kDim) +
      threadIdx.x;
  float maximum = minus_infinity(), sum = 0.0f, low = 0.0f, high = 0.0f;
  for (int first = 0; first < tiles; first += kAtOnce) {
    float2 top[kAtOnce], o[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= tiles) continue;
      top[i] = tops[first + i];
      o[i] = outputs[static_cast<int64_t>(first + i) * (kDim / 2)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= tiles) continue;
      const Merge by = merge_top(maximum, top[i].x);
      sum = merged(sum, top[i].y, by);
      low = merged(low, o[i].x, by);
      high = merged(high, o[i].y, by);
    }
  }
  const int column = static_cast<int>(threadIdx.x) * 2;
  if (column >= a.head_dim) return;
  const float inverse = divisor(sum);
  __half* to = a.out + row * a.out_stride + static_cast<int64_t>(blockIdx.x) * a.head_dim + column;
  to[0] = __float2half_rn(quotient(low, inverse));
  to[1] = __float2half_rn(quotient(high, inverse));
}

bool paired(const Rows& rows) {
  return reinterpret_cast<uintptr_t>(rows.data) % 4 == 0 && rows.stride % 2 == 0;
}

template <int kDim, bool kSplit>
void launch_tiles(cudaStream_t stream, const DecodeArguments& a, int splits) {
  constexpr size_t kBytes = sizeof(DecodeShared<kDim>);
  static_assert((kDim > 128 ? 1 : 3) * (kBytes + 1024) <= 228 * 1024);
  check(cudaFuncSetAttribute(decode_kernel<kDim, kSplit>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "give the attention kernel its shared memory");
  const Grid grid{dim3(static_cast<unsigned>(a.n_kv_heads), static_cast<unsigned>(a.plan.n_items),
                       static_cast<unsigned>(splits)),
                  kThreads, kBytes};
  launch(stream, grid, decode_kernel<kDim, kSplit>, a);
}

template <int kDim>
void launch_decode(cudaStream_t stream, const DecodeArguments& a, int splits) {
  if (splits == 1) return launch_tiles<kDim, false>(stream, a, splits);
  launch_tiles<kDim, true>(stream, a, splits);
  const Grid grid{
      dim3(static_cast<unsigned>(a.n_kv_heads * a.group), static_cast<unsigned>(a.plan.n_items)),
      kDim / 2};
  launch(stream, grid, merge_kernel<kDim>, a);
}

}  // namespace

void attention_decode(cudaStream_t stream, const AttentionCall& call, int splits, void* scratch) {
  const HeadShape& shape = call.shape;
  DecodeArguments a;
  a.plan = call.plan;
  a.plane = call.plane;
  a.queries = reinterpret_cast<const __half*>(call.queries.data);
  a.out = reinterpret_cast<__half*>(call.out.data);
  a.query_stride = call.queries.stride;
  a.out_stride = call.out.stride;
  a.group = static_cast<int>(shape.n_q_heads / shape.n_kv_heads);
  a.n_kv_heads = static_cast<int>(shape.n_kv_heads);
  a.head_dim = static_cast<int>(shape.head_dim);
  a.paired_queries = paired(call.queries);
  a.paired_out = paired(call.out);
  a.partials = {};
  if (splits > 1) {
    const int64_t places = int64_t{call.plan.n_items} * shape.n_q_heads * call.plan.max_spans;
    a.partials.outputs = static_cast<float*>(scratch);
    a.partials.tops =
        reinterpret_cast<float2*>(a.partials.outputs + places * padded_head_dim(shape.head_dim));
    a.partials.tiles = call.plan.max_spans;
  }
  switch (padded_head_dim(shape.head_dim)) {
    case 32:
      return launch_decode<32>(stream, a, splits);
    case 64:
      return launch_decode<64>(stream, a, splits);
    case 96:
      return launch_decode<96>(stream, a, splits);
    case 128:
      return launch_decode<128>(stream, a, splits);
    default:
      return launch_decode<256>(stream, a, splits);
  }
}

}  // namespace tinyloop::cuda
