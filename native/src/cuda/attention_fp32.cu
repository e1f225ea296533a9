// Attention of FP32 activations, for tests: a warp has one query vector and takes 32 keys at a
// time, cut by absolute position. Sums are in double, so that nothing depends on their order.
#include <cuda_fp16.h>

#include "cuda/attention_kernels.h"
#include "cuda/launch.cuh"

namespace tinyloop::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kThreads = 128;
constexpr int kKeys = 32;
constexpr int kMaxColumns = 256 / 32;  // of a lane

struct Fp32Arguments {
  AttentionPlan plan;
  int64_t plane;
  const float* queries;
  float* out;
  int64_t query_stride, out_stride;
  int group, n_kv_heads, head_dim;
};

// One token's head of keys or values.
struct HeadRow {
  const void* data = nullptr;
  float scale = 1.0f;
  bool codes = false;

  __device__ __forceinline__ float at(int i) const {
    if (!codes) return static_cast<const float*>(data)[i];
    return static_cast<float>(static_cast<const int8_t*>(data)[i]) * scale;
  }
};

__device__ __forceinline__ HeadRow from_lane(const HeadRow& row, int lane) {
  HeadRow other;
  const auto address = reinterpret_cast<unsigned long long>(row.data);
  other.data = reinterpret_cast<const void*>(__shfl_sync(kAll, address, lane));
  other.scale = __shfl_sync(kAll, row.scale, lane);
  other.codes = __shfl_sync(kAll, static_cast<int>(row.codes), lane) != 0;
  return other;
}

struct Token {
  HeadRow key, value;
};

__device__ __forceinline__ bool holds(const KvSegment& s, int64_t plane, int64_t position) {
  return plane >= s.first_plane && plane < s.last_plane && position >= s.begin && position < s.end;
}

__device__ __forceinline__ Token token_of(const Fp32Arguments& a, const KvSegment& s,
                                          int64_t position, int kv_head) {
  const int64_t plane = a.plane - s.first_plane, row = position - s.begin;
  const bool codes = s.format == KvFormat::kInt8;
  const int64_t bytes = codes ? 1 : 4;
  const int64_t element = (row * a.n_kv_heads + kv_head) * a.head_dim;
  const int64_t offset = plane * static_cast<int64_t>(s.plane_bytes) + element * bytes;
  Token token;
  token.key = {s.keys + offset, 1.0f, codes};
  token.value = {s.values + offset, 1.0f, codes};
  if (codes) {
    const __half* scales = reinterpret_cast<const __half*>(s.scales) +
                           plane * static_cast<int64_t>(s.plane_scales) + row * 2 * a.n_kv_heads +
                           kv_head;
    token.key.scale = __half2float(scales[0]);
    token.value.scale = __half2float(scales[a.n_kv_heads]);
  }
  return token;
}

__device__ __forceinline__ Token find_token(const Fp32Arguments& a, const Item& item,
                                            const AttentionPiece& piece, int64_t position,
                                            int kv_head) {
  if (position >= item.prefix_length) return token_of(a, piece.own, position, kv_head);
  const KvSegment* segments = a.plan.segments + item.first_segment;
  for (int i = 0; i < item.n_segments; ++i) {
    if (holds(segments[i], a.plane, position)) return token_of(a, segments[i], position, kv_head);
  }
  return {};
}

__device__ __forceinline__ double lane_sum(double x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}
__device__ __forceinline__ float lane_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

__device__ void attend(const Fp32Arguments& a, const Item& item, const AttentionPiece& piece,
                       int64_t row, int head) {
  const int lane = threadIdx.x % 32, kv_head = head / a.group;
  const int64_t position = piece.position + row;
  const int64_t keys = max(position + 1, piece.open_end);
  const float* q =
      a.queries + (piece.row + row) * a.query_stride + static_cast<int64_t>(head) * a.head_dim;
  const double scale = 1.0 / sqrt(static_cast<double>(a.head_dim));
  double o[kMaxColumns] = {}, sum = 0.0;
  float maximum = __int_as_float(0xFF800000);
  for (int64_t first = 0; first < keys; first += kKeys) {
    const bool seen = first + lane < keys;
    Token token;
    float score = __int_as_float(0xFF800000);
    if (seen) {
      token = find_token(a, item, piece, first + lane, kv_head);
      double dot = 0.0;
      for (int i = 0; i < a.head_dim; ++i) {
        dot += static_cast<double>(q[i]) * static_cast<double>(token.key.at(i));
      }
      score = static_cast<float>(dot * scale);
    }
    const float top = fmaxf(maximum, lane_max(score));
    const float keep = expf(maximum - top);
    const float weight = seen ? expf(score - top) : 0.0f;
    maximum = top;
    sum = sum * keep + lane_sum(weight);
    for (double& x : o) x *= keep;
    const int n = static_cast<int>(min(keys - first, int64_t{kKeys}));
    for (int j = 0; j < n; ++j) {
      const HeadRow value = from_lane(token.value, j);
      const double w = __shfl_sync(kAll, weight, j);
#pragma unroll
      for (int c = 0; c < kMaxColumns; ++c) {
        const int column = c * 32 + lane;
        if (column < a.head_dim) o[c] += w * static_cast<double>(value.at(column));
      }
    }
  }
  float* out = a.out + (piece.row + row) * a.out_stride + static_cast<int64_t>(head) * a.head_dim;
#pragma unroll
  for (int c = 0; c < kMaxColumns; ++c) {
    const int column = c * 32 + lane;
    if (column < a.head_dim) out[column] = static_cast<float>(o[c] / sum);
  }
}

__global__ void __launch_bounds__(kThreads) fp32_kernel(const Fp32Arguments a) {
  wait_for_previous();
  let_next_start();
  const Item item = a.plan.items[blockIdx.y];
  if (item.rows == 0) return;
  const int warp = threadIdx.x / 32;
  int64_t at = 0;
  for (int p = 0; p < item.n_pieces; ++p) {
    const AttentionPiece& piece = a.plan.pieces[item.first_piece + p];
    for (int64_t row = 0; row < piece.rows; ++row, ++at) {
      if (at % (kThreads / 32) == warp) attend(a, item, piece, row, blockIdx.x);
    }
  }
}

}  // namespace

void attention_fp32(cudaStream_t stream, const AttentionCall& call) {
  const HeadShape& shape = call.shape;
  Fp32Arguments a;
  a.plan = call.plan;
  a.plane = call.plane;
  a.queries = reinterpret_cast<const float*>(call.queries.data);
  a.out = reinterpret_cast<float*>(call.out.data);
  a.query_stride = call.queries.stride;
  a.out_stride = call.out.stride;
  a.group = static_cast<int>(shape.n_q_heads / shape.n_kv_heads);
  a.n_kv_heads = static_cast<int>(shape.n_kv_heads);
  a.head_dim = static_cast<int>(shape.head_dim);
  const Grid grid{
      dim3(static_cast<unsigned>(shape.n_q_heads), static_cast<unsigned>(call.plan.n_items)),
      kThreads};
  launch(stream, grid, fp32_kernel, a);
}

}  // namespace tinyloop::cuda
