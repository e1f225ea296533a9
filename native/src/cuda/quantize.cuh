// Codes with FP16 scales for the caches, with the CPU's arithmetic (cpu/quantize.inc): everything
// in float32, each operation rounded by itself.
//
// A scale is NaN where any value is not finite, so that no code hides it.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace tinyloop::cuda {

inline constexpr unsigned kInfinityBits = 0x7F800000u;

// Bits of |x|: they compare as |x| does, and as kInfinityBits or above where x is not finite.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// `width` lanes side by side, a power of two.
__device__ __forceinline__ unsigned largest_of_lanes(unsigned x, int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) {
    x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
  }
  return x;
}

// Of -127 .. 127, from the largest magnitude.
__device__ __forceinline__ __half int8_scale(unsigned largest) {
  if (largest >= kInfinityBits) return __ushort_as_half(0x7FFF);
  return __float2half_rn(__fdiv_rn(__uint_as_float(largest), 127.0f));
}

// A NaN becomes `most`, as on the CPU.
__device__ __forceinline__ int to_code(float x, float least, float most) {
  return __float2int_rn(fmaxf(fminf(rintf(x), most), least));
}

__device__ __forceinline__ int int8_code(float x, float scale) {
  return scale == 0.0f ? 0 : to_code(__fdiv_rn(x, scale), -127.0f, 127.0f);
}

__device__ __forceinline__ unsigned pack_codes(int a, int b, int c, int d) {
  return (a & 0xFF) | (b & 0xFF) << 8 | (c & 0xFF) << 16 | static_cast<unsigned>(d & 0xFF) << 24;
}

// A group of 4-bit codes: value = code * scale + least.
struct Int4Scale {
  __half scale, least;
};

// below: the largest of 0 - x, so that a least value of zero is -0 as on the CPU.
__device__ __forceinline__ Int4Scale int4_scale(float below, float most, bool finite) {
  const float least = -below;
  const float step = __fdiv_rn(__fsub_rn(most, least), 15.0f);
  return {finite ? __float2half_rn(step) : __ushort_as_half(0x7FFF), __float2half_rn(least)};
}

__device__ __forceinline__ int int4_code(float x, float scale, float least) {
  return scale == 0.0f ? 0 : to_code(__fdiv_rn(__fsub_rn(x, least), scale), 0.0f, 15.0f);
}

__device__ __forceinline__ float int4_value(int code, float scale, float least) {
  return __fadd_rn(__fmul_rn(static_cast<float>(code), scale), least);
}

}  // namespace tinyloop::cuda
