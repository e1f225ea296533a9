// The A operand out of a slab in shared memory, and what happens to the sums.
#pragma once

#include "cuda/dequantize.cuh"
#include "cuda/linear.h"

namespace tinyloop::cuda {

// Units of 512 bytes (16 a lane) that the codes of a slab make.
template <TensorKind kKind>
inline constexpr int kUnits = constants_offset(kKind) / 512;
template <>
inline constexpr int kUnits<TensorKind::kF16> = 8;

// Steps of 16 inputs in a unit.
template <TensorKind kKind>
inline constexpr int kUnitSteps = 8 / kUnits<kKind>;

// Constants of the two outputs, 8 apart, that a lane holds fragments of.
struct LaneConstants {
  GroupConstants low, high;
};
template <TensorKind kKind>
__device__ __forceinline__ LaneConstants lane_constants(uint32_t low, uint32_t high) {
  return {group_constants<1024>(low), group_constants<kHighOffset<kKind>>(high)};
}

// The fragment of step `step` of a unit.
template <TensorKind kKind>
__device__ __forceinline__ void unit_fragment(const uint4& unit, int step, const LaneConstants& c,
                                              uint32_t (&a)[4]) {
  if constexpr (kKind == TensorKind::kQ4) {
    const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
    dequantize_q4(words[step], c.low, c.high, a);
  } else if constexpr (kKind == TensorKind::kQ8) {
    dequantize_q8(step == 0 ? unit.x : unit.z, step == 0 ? unit.y : unit.w, c.low, c.high, a);
  } else {
    a[0] = unit.x;
    a[1] = unit.y;
    a[2] = unit.z;
    a[3] = unit.w;
  }
}

__device__ __forceinline__ float before_of(const LinearOutput& out, int64_t row, int64_t n) {
  return static_cast<const float*>(out.data)[row * out.stride + n];
}

// `before`: before_of() the element, for kAdd.
__device__ __forceinline__ void store_output(const LinearOutput& out, int64_t row, int64_t n,
                                             float sum, float before) {
  const int64_t at = row * out.stride + n;
  switch (out.kind) {
    case OutputKind::kActivations:
      static_cast<__half*>(out.data)[at] = __float2half_rn(sum);
      return;
    case OutputKind::kFloat:
      static_cast<float*>(out.data)[at] = sum;
      return;
    case OutputKind::kAdd:
      static_cast<float*>(out.data)[at] = __fadd_rn(before, sum);
      return;
  }
}

}  // namespace tinyloop::cuda
