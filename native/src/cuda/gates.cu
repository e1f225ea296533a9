#include "cuda/elements.cuh"
#include "cuda/rows.h"

namespace tinyloop::cuda {

namespace {

constexpr int kMostThreads = 256;

// Blocks of a row side by side in y, so many threads each that few of the last one's idle.
Grid eight_per_thread(int64_t rows, int64_t width) {
  const int64_t eights = (width + 7) / 8;
  const unsigned blocks = blocks_for(eights, kMostThreads);
  const unsigned threads = blocks_for(eights, blocks * 32) * 32;
  return {dim3(static_cast<unsigned>(rows), blocks), threads, 0};
}

__device__ __forceinline__ int64_t first_of_eight() {
  return 8 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    silu_mul_kernel(RowsOf<T> gate_up, int64_t width, RowsOf<T> out) {
  wait_for_previous();
  let_next_start();
  const int64_t r = blockIdx.x, k = first_of_eight();
  const T* gate = gate_up.row(r);
  const T* up = gate + width;
  T* to = out.row(r);
  const Eight g = load_eight(gate + k, width - k, is_aligned(gate));
  Eight u = load_eight(up + k, width - k, is_aligned(up));
#pragma unroll
  for (int i = 0; i < 8; ++i) u.at[i] = silu_mul(g.at[i], u.at[i]);
  store_eight(to + k, width - k, is_aligned(to), u);
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    gate_mul_kernel(RowsOf<T> gates, int64_t width, RowsOf<T> out) {
  wait_for_previous();
  let_next_start();
  const int64_t r = blockIdx.x, k = first_of_eight();
  const T* gate = gates.row(r);
  T* to = out.row(r);
  const Eight g = load_eight(gate + k, width - k, is_aligned(gate));
  Eight x = load_eight(to + k, width - k, is_aligned(to));
#pragma unroll
  for (int i = 0; i < 8; ++i) x.at[i] = gate_mul(x.at[i], g.at[i]);
  store_eight(to + k, width - k, is_aligned(to), x);
}

__global__ void __launch_bounds__(kMostThreads)
    add_kernel(float* state, const float* other, int64_t n) {
  wait_for_previous();
  let_next_start();
  const int64_t k = 4 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  const bool by_four = loads_by_four(state) && loads_by_four(other);
  const float4 a = load_some(state, k, n, by_four), b = load_some(other, k, n, by_four);
  const float4 sum = make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                                 __fadd_rn(a.w, b.w));
  store_some(state, k, n, by_four, sum);
}

}  // namespace

void silu_mul(cudaStream_t stream, bool fp32, Rows gate_up, int64_t rows, int64_t width, Rows out) {
  if (rows == 0) return;
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    launch(stream, eight_per_thread(rows, width), silu_mul_kernel<T>, RowsOf<T>(gate_up), width,
           RowsOf<T>(out));
  });
}

void gate_mul(cudaStream_t stream, bool fp32, Rows gate, int64_t rows, int64_t width, Rows out) {
  if (rows == 0) return;
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    launch(stream, eight_per_thread(rows, width), gate_mul_kernel<T>, RowsOf<T>(gate), width,
           RowsOf<T>(out));
  });
}

void add(cudaStream_t stream, float* state, const float* other, int64_t rows, int64_t width) {
  const int64_t n = rows * width;
  if (n == 0) return;
  const Grid grid{dim3(blocks_for(n, 4 * kMostThreads)), kMostThreads, 0};
  launch(stream, grid, add_kernel, state, other, n);
}

}  // namespace tinyloop::cuda
