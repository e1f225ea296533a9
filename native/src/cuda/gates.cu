#include "cuda/elements.cuh"
#include "cuda/rows.h"

namespace tinyloop::cuda {

namespace {

constexpr int kMostThreads = 256;
constexpr int kFewThreads = 64;
constexpr int64_t kFewRows = 16;  // their blocks of kFewThreads find room at once

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

// Halves that lie so that a thread's vector loads at once, both vectors before either is used: of
// eight at many rows; of two at few, where more threads with less to do each end sooner.
template <typename Vector>
__global__ void __launch_bounds__(kMostThreads)
    silu_mul_whole_kernel(RowsOf<__half> gate_up, int width, RowsOf<__half> out) {
  constexpr int kPairs = sizeof(Vector) / sizeof(__half2);
  wait_for_previous();
  let_next_start();
  const int64_t r = blockIdx.x;
  const int k = 2 * kPairs * static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (k >= width) return;
  const __half* gate = gate_up.row(r) + k;
  const Vector gates = *reinterpret_cast<const Vector*>(gate);
  const Vector ups = *reinterpret_cast<const Vector*>(gate + width);
  Vector result;
  const auto* g = reinterpret_cast<const __half2*>(&gates);
  const auto* u = reinterpret_cast<const __half2*>(&ups);
  auto* to = reinterpret_cast<__half2*>(&result);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 a = __half22float2(g[i]), b = __half22float2(u[i]);
    to[i] = __floats2half2_rn(silu_mul(a.x, b.x), silu_mul(a.y, b.y));
  }
  *reinterpret_cast<Vector*>(out.row(r) + k) = result;
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

// Whether vectors of eight halves may be loaded everywhere.
bool is_whole(Rows rows) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % 8 == 0;
}

void silu_mul_whole(cudaStream_t stream, Rows gate_up, int64_t rows, int64_t width, Rows out) {
  const RowsOf<__half> from(gate_up), to(out);
  const int n = static_cast<int>(width);
  if (rows > kFewRows) {
    const Grid grid = eight_per_thread(rows, width);
    return launch(stream, grid, silu_mul_whole_kernel<uint4>, from, n, to);
  }
  const Grid grid{dim3(static_cast<unsigned>(rows), blocks_for(width, 2 * kFewThreads)),
                  kFewThreads, 0};
  launch(stream, grid, silu_mul_whole_kernel<__half2>, from, n, to);
}

}  // namespace

void silu_mul(cudaStream_t stream, bool fp32, Rows gate_up, int64_t rows, int64_t width, Rows out) {
  if (rows == 0) return;
  if (!fp32 && width % 8 == 0 && width <= INT32_MAX / 2 && is_whole(gate_up) && is_whole(out)) {
    return silu_mul_whole(stream, gate_up, rows, width, out);
  }
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
