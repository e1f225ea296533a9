#include "cuda/dequantize.cuh"
#include "cuda/elements.cuh"
#include "cuda/rows.h"

namespace tinyloop::cuda {

namespace {

constexpr int kThreads = 128;

template <bool kExact>
__device__ __forceinline__ float embedded(const DeviceWeight& weight, int64_t id, int64_t k) {
  if (k >= weight.inputs) return 0.0f;
  if constexpr (kExact) return exact_weight_at(weight, id, k);
  if (weight.cache != nullptr) {
    return __half2float(__ushort_as_half(weight.cache[id * weight.cache_stride + k]));
  }
  return __half2float(weight_at(weight, id, k));
}

// Four elements a thread, as the products see them.
template <bool kExact>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(DeviceWeight weight, const int32_t* ids, float scale, float* state) {
  wait_for_previous();
  let_next_start();
  const int64_t r = blockIdx.x, width = weight.inputs, id = ids[r];
  const int64_t k = 4 * (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x);
  const float4 x = make_float4(__fmul_rn(embedded<kExact>(weight, id, k), scale),
                               __fmul_rn(embedded<kExact>(weight, id, k + 1), scale),
                               __fmul_rn(embedded<kExact>(weight, id, k + 2), scale),
                               __fmul_rn(embedded<kExact>(weight, id, k + 3), scale));
  float* row = state + r * width;
  store_some(row, k, width, loads_by_four(row), x);
}

}  // namespace

void embed(cudaStream_t stream, bool fp32, const DeviceWeight& weight, const int32_t* ids,
           int64_t rows, float scale, float* state) {
  if (rows == 0) return;
  const Grid grid{dim3(static_cast<unsigned>(rows), blocks_for(weight.inputs, 4 * kThreads)),
                  kThreads, 0};
  launch(stream, grid, fp32 ? embed_kernel<true> : embed_kernel<false>, weight, ids, scale, state);
}

}  // namespace tinyloop::cuda
