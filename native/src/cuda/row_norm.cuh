// The RMS norm of a row and the gating functions, defined once so that a fused and a separate
// kernel give equal bits.
//
// A warp takes a row. Element k belongs to lane (k / 4) % 32, whatever the width of the loads; a
// lane has four sums, one for each k % 4, chained in order of k; they are added as (0 + 1) +
// (2 + 3), and the lanes by the xor tree 16, 8, 4, 2, 1.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "backend.h"

namespace tinyloop::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ float4 load_four(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}
__device__ __forceinline__ float4 load_four(const __half* p) {
  const uint2 bits = *reinterpret_cast<const uint2*>(p);
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float load_one(const float* p) { return *p; }
__device__ __forceinline__ float load_one(const __half* p) { return __half2float(*p); }

// Whether four elements from any multiple of 4 on may be loaded at once. Rows that follow each
// other without gaps are aligned alike only if the width is a multiple of 4.
template <typename T>
__device__ __forceinline__ bool loads_by_four(const T* row) {
  return reinterpret_cast<uintptr_t>(row) % (4 * sizeof(T)) == 0;
}

// Elements k .. k + 3; zeros from `width` on.
template <typename T>
__device__ __forceinline__ float4 load_some(const T* row, int64_t k, int64_t width, bool by_four) {
  if (by_four && k + 4 <= width) return load_four(row + k);
  float4 some = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (k < width) some.x = load_one(row + k);
  if (k + 1 < width) some.y = load_one(row + k + 1);
  if (k + 2 < width) some.z = load_one(row + k + 2);
  if (k + 3 < width) some.w = load_one(row + k + 3);
  return some;
}

// Elements k .. k + 3 of a vector that no kernel writes: such loads need not wait for stores before
// them, of which the compiler cannot know that they go elsewhere.
__device__ __forceinline__ float4 load_constant(const float* row, int64_t k, int64_t width) {
  if (loads_by_four(row) && k + 4 <= width) return __ldg(reinterpret_cast<const float4*>(row + k));
  float4 some = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (k < width) some.x = __ldg(row + k);
  if (k + 1 < width) some.y = __ldg(row + k + 1);
  if (k + 2 < width) some.z = __ldg(row + k + 2);
  if (k + 3 < width) some.w = __ldg(row + k + 3);
  return some;
}

__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, distance));
  }
  return sum;
}

struct SquareSums {
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  __device__ __forceinline__ void add(float4 x) {
    sums.x = __fmaf_rn(x.x, x.x, sums.x);
    sums.y = __fmaf_rn(x.y, x.y, sums.y);
    sums.z = __fmaf_rn(x.z, x.z, sums.z);
    sums.w = __fmaf_rn(x.w, x.w, sums.w);
  }
  __device__ __forceinline__ float of_warp() const {
    return sum_of_lanes(__fadd_rn(__fadd_rn(sums.x, sums.y), __fadd_rn(sums.z, sums.w)));
  }
};

__device__ __forceinline__ void add_squares(float4& sums, const float4& x) {
  sums.x = __fmaf_rn(x.x, x.x, sums.x);
  sums.y = __fmaf_rn(x.y, x.y, sums.y);
  sums.z = __fmaf_rn(x.z, x.z, sums.z);
  sums.w = __fmaf_rn(x.w, x.w, sums.w);
}

// 1 / sqrt(mean of squares + eps).
__device__ __forceinline__ float inverse_rms_of_sum(float sum, int64_t width, float eps) {
  const float mean = __fdiv_rn(sum, static_cast<float>(width));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}
// From the lanes' sums, in all lanes. Called by a whole warp.
__device__ __forceinline__ float inverse_rms_of_sums(const float4& sums, int64_t width, float eps) {
  const float sum = sum_of_lanes(__fadd_rn(__fadd_rn(sums.x, sums.y), __fadd_rn(sums.z, sums.w)));
  return inverse_rms_of_sum(sum, width, eps);
}

template <typename T>
__device__ __forceinline__ float inverse_rms(const T* row, int64_t width, float eps) {
  const bool by_four = loads_by_four(row);
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  // Zeros behind the end leave the sums as they are.
#pragma unroll 8
  for (int64_t k = 4 * static_cast<int64_t>(threadIdx.x % 32); k < width; k += 128) {
    add_squares(sums, load_some(row, k, width, by_four));
  }
  return inverse_rms_of_sums(sums, width, eps);
}

// What a norm multiplies a row by: 1 and no weight where it is not present.
template <typename T>
__device__ __forceinline__ float norm_factor(const T* row, const NormSpec& norm, int64_t width) {
  return norm.present ? inverse_rms(row, width, norm.eps) : 1.0f;
}

// Elements k .. k + 3 of a row's norm, given the row's and its factor. A factor of 1 and no weight
// change no bit, so a norm that is not present needs no case of its own.
__device__ __forceinline__ float4 normed_four(float4 x, const NormSpec& norm, float factor,
                                              int64_t k, int64_t width) {
  x.x = __fmul_rn(x.x, factor);
  x.y = __fmul_rn(x.y, factor);
  x.z = __fmul_rn(x.z, factor);
  x.w = __fmul_rn(x.w, factor);
  if (norm.present && norm.weight != nullptr) {
    const float4 w = load_constant(norm.weight, k, width);
    x.x = __fmul_rn(x.x, w.x);
    x.y = __fmul_rn(x.y, w.y);
    x.z = __fmul_rn(x.z, w.z);
    x.w = __fmul_rn(x.w, w.w);
  }
  return x;
}

// The same from the row itself; zeros from `width` on.
template <typename T>
__device__ __forceinline__ float4 load_normed(const T* row, const NormSpec& norm, float factor,
                                              int64_t k, int64_t width, bool by_four) {
  return normed_four(load_some(row, k, width, by_four), norm, factor, k, width);
}

// ---- gates ------------------------------------------------------------------------------------

// 1 + e^-x: what sigmoid(x) and silu(x) divide by. It may be infinite, never NaN for a number.
__device__ __forceinline__ float sigmoid_divisor(float x) { return __fadd_rn(1.0f, expf(-x)); }

__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.0f, sigmoid_divisor(x)); }

// silu(gate) * up
__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, sigmoid_divisor(gate)), up);
}

// x * sigmoid(gate)
__device__ __forceinline__ float gate_mul(float x, float gate) {
  return __fdiv_rn(x, sigmoid_divisor(gate));
}

}  // namespace tinyloop::cuda
