#include <cmath>

#include "cuda/launch.cuh"
#include "cuda/row_norm.cuh"
#include "cuda/scoring.h"

namespace tinyloop::cuda {

namespace {

constexpr unsigned kWarps = 4;
constexpr int kPerLane = kHeadColumns / 32;

struct Best {
  float value = -INFINITY;
  int32_t id = -1;

  // Numbers only; the lower id on ties.
  __device__ __forceinline__ void take(float other, int32_t other_id) {
    if (other > value || (other == value && other_id >= 0 && (id < 0 || other_id < id))) {
      value = other;
      id = other_id;
    }
  }
};

// The best of all lanes, in all lanes.
__device__ __forceinline__ Best best_of_lanes(Best best) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, best.value, distance);
    const int32_t id = __shfl_xor_sync(kAllLanes, best.id, distance);
    best.take(value, id);
  }
  return best;
}

struct FoldCall {
  const float* logits;
  int64_t stride, rows, first, columns;
  const int32_t* targets;
  float* target_logits;
  HeadPartial* partials;
  int64_t partials_stride;
};

// A warp takes a row's columns of one partial: lane l those at l, l + 32, ...
__global__ void __launch_bounds__(32 * kWarps) fold_kernel(FoldCall c) {
  wait_for_previous();
  let_next_start();
  const int64_t row = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32;
  if (row >= c.rows) return;
  const int lane = threadIdx.x % 32;
  const int64_t begin = blockIdx.y * kHeadColumns;
  const int64_t left = c.columns - begin;
  const float* logits = c.logits + row * c.stride + begin;
  float x[kPerLane];
  Best best;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int at = lane + 32 * i;
    x[i] = at < left ? logits[at] : -INFINITY;
    if (x[i] > -INFINITY) best.take(x[i], static_cast<int32_t>(c.first + begin) + at);
  }
  best = best_of_lanes(best);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    // Columns of -inf, and those behind the last, add exactly nothing, also where all are.
    const float part = x[i] == -INFINITY ? 0.0f : expf(__fsub_rn(x[i], best.value));
    sum = __fadd_rn(sum, part);
  }
  sum = sum_of_lanes(sum);
  if (lane != 0) return;
  HeadPartial* to = c.partials + row * c.partials_stride + (c.first + begin) / kHeadColumns;
  to->max = best.value;
  to->sum = sum;
  to->best_id = best.id;
  if (c.targets == nullptr) return;
  const int64_t target = c.targets[row] - c.first - begin;
  if (target >= 0 && target < kHeadColumns && target < left) c.target_logits[row] = logits[target];
}

struct FinishCall {
  const HeadPartial* partials;
  int64_t n_partials, rows;
  const int32_t* targets;
  const float* target_logits;
  HeadResults out;
};

// A warp takes a row: lane l the partials l, l + 32, ... in order, then a tree over the lanes.
__global__ void __launch_bounds__(32 * kWarps) finish_kernel(FinishCall c) {
  wait_for_previous();
  let_next_start();
  const int64_t row = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32;
  if (row >= c.rows) return;
  const int lane = threadIdx.x % 32;
  const HeadPartial* partials = c.partials + row * c.n_partials;
  Best best;
  for (int64_t t = lane; t < c.n_partials; t += 32) best.take(partials[t].max, partials[t].best_id);
  best = best_of_lanes(best);
  double sum = 0.0;
  for (int64_t t = lane; t < c.n_partials; t += 32) {
    const HeadPartial p = partials[t];
    // Nothing of a partial without numbers, but NaN of one that has a NaN.
    const double scale = p.max == -INFINITY
                             ? 1.0
                             : exp(static_cast<double>(p.max) - static_cast<double>(best.value));
    sum = __dadd_rn(sum, __dmul_rn(static_cast<double>(p.sum), scale));
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum = __dadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, distance));
  }
  if (lane != 0) return;
  const double total = static_cast<double>(best.value) + log(sum);
  const HeadResults& out = c.out;
  if (out.log_sums != nullptr) out.log_sums[row] = total;
  if (out.best != nullptr) out.best[row] = best.id;
  if (out.best_logprobs != nullptr) {
    out.best_logprobs[row] = static_cast<float>(static_cast<double>(best.value) - total);
  }
  if (c.targets == nullptr) return;
  if (out.logprobs != nullptr) {
    out.logprobs[row] = static_cast<float>(static_cast<double>(c.target_logits[row]) - total);
  }
  if (out.greedy != nullptr) out.greedy[row] = best.id == c.targets[row] ? 1 : 0;
}

struct GateCall {
  const float* state;
  const int32_t* indices;
  int64_t rows, width;
  const float* weight;
  const float* bias;
  float* out;
};

__global__ void __launch_bounds__(32 * kWarps) gate_kernel(GateCall c) {
  wait_for_previous();
  let_next_start();
  const int64_t i = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32;
  if (i >= c.rows) return;
  const float* row = c.state + c.indices[i] * c.width;
  const bool by_four = loads_by_four(row), weight_by_four = loads_by_four(c.weight);
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int64_t k = 4 * (threadIdx.x % 32); k < c.width; k += 128) {
    const float4 x = load_some(row, k, c.width, by_four);
    const float4 w = load_some(c.weight, k, c.width, weight_by_four);
    sums.x = __fmaf_rn(x.x, w.x, sums.x);
    sums.y = __fmaf_rn(x.y, w.y, sums.y);
    sums.z = __fmaf_rn(x.z, w.z, sums.z);
    sums.w = __fmaf_rn(x.w, w.w, sums.w);
  }
  const float sum = sum_of_lanes(__fadd_rn(__fadd_rn(sums.x, sums.y), __fadd_rn(sums.z, sums.w)));
  if (threadIdx.x % 32 == 0) c.out[i] = sigmoid(__fadd_rn(sum, *c.bias));
}

unsigned row_blocks(int64_t rows) { return static_cast<unsigned>((rows + kWarps - 1) / kWarps); }

}  // namespace

void fold_logits(cudaStream_t stream, const float* logits, int64_t stride, int64_t rows,
                 int64_t first, int64_t columns, const int32_t* targets, float* target_logits,
                 HeadPartial* partials, int64_t partials_stride) {
  if (rows == 0 || columns == 0) return;
  Grid grid;
  grid.blocks =
      dim3(row_blocks(rows), static_cast<unsigned>((columns + kHeadColumns - 1) / kHeadColumns));
  grid.threads = 32 * kWarps;
  launch(stream, grid, fold_kernel,
         FoldCall{logits, stride, rows, first, columns, targets, target_logits, partials,
                  partials_stride});
}

void finish_rows(cudaStream_t stream, const HeadPartial* partials, int64_t n_partials, int64_t rows,
                 const int32_t* targets, const float* target_logits, const HeadResults& out) {
  if (rows == 0) return;
  Grid grid;
  grid.blocks = dim3(row_blocks(rows));
  grid.threads = 32 * kWarps;
  launch(stream, grid, finish_kernel,
         FinishCall{partials, n_partials, rows, targets, target_logits, out});
}

void exit_gate(cudaStream_t stream, const float* state, const int32_t* indices, int64_t rows,
               int64_t width, const float* weight, const float* bias, float* out) {
  if (rows == 0) return;
  Grid grid;
  grid.blocks = dim3(row_blocks(rows));
  grid.threads = 32 * kWarps;
  launch(stream, grid, gate_kernel, GateCall{state, indices, rows, width, weight, bias, out});
}

}  // namespace tinyloop::cuda
