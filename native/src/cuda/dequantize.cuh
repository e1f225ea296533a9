// What a stored code means, and where it lies. The one definition: the products, the FP16 cache
// and the embedding all come here, so they see the same bits.
//
//   w = fma(code - near, scale, (near - zero) * scale)      in FP16, near = zero to within FP16's
//                                                           step at offset + zero
//
// A code is read as the mantissa of a half: offset + code, with offset 1024 (bits 0..3 or a byte)
// or 64 (bits 4..7, after an exact division by 16). offset + near is that half's neighbour, so
// code - near is exact for usual zeros, and what is left of the zero goes into the sum of the fused
// multiply-add: one rounding of consequence.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/weight.h"

namespace tinyloop::cuda {

// ---- where elements lie -----------------------------------------------------------------------

// Of mma.m16n8k16's A operand: lane and register (two halves each) of element (n, k), and which of
// the two. Register 0: outputs 0..7, inputs 0..7; 1: outputs 8..15; 2: inputs 8..15; 3: both.
struct FragmentPlace {
  int lane, reg, half;
};
__host__ __device__ constexpr FragmentPlace fragment_place(int n, int k) {
  return {(n % 8) * 4 + (k % 8) / 2, (k % 16) / 8 * 2 + (n % 16) / 8, k % 2};
}

// Byte offset in its slab of the 32-bit word (kQ4), the byte (kQ8), the half or the float that
// holds element (n, k).
__host__ __device__ constexpr int element_offset(TensorKind kind, int n, int k) {
  const FragmentPlace at = fragment_place(n, k);
  const int step = k % kSlabInputs / 16;
  switch (kind) {
    case TensorKind::kQ4:
      return step / 4 * 512 + at.lane * 16 + step % 4 * 4;
    case TensorKind::kQ8:
      return step / 2 * 512 + at.lane * 16 + step % 2 * 8 + at.reg * 2 + at.half;
    case TensorKind::kF16:
      return step * 512 + at.lane * 16 + at.reg * 4 + at.half * 2;
    case TensorKind::kF32:
      break;
  }
  return step * 1024 + at.lane * 32 + at.reg * 8 + at.half * 4;
}
// Of the nibble in its word: register r at bits 4 r, the odd input 16 bits higher.
__host__ __device__ constexpr int nibble_shift(int n, int k) {
  const FragmentPlace at = fragment_place(n, k);
  return at.reg * 4 + at.half * 16;
}

// Where a slab's scales begin; each group has 16 pairs of scale and zero.
__host__ __device__ constexpr int constants_offset(TensorKind kind) {
  return kTileOutputs * kSlabInputs / (kind == TensorKind::kQ4 ? 2 : 1);
}

__device__ __forceinline__ const uint8_t* slab_of(const DeviceWeight& w, int64_t n, int64_t k) {
  const int64_t slab = n / kTileOutputs * weight_slabs(w.inputs) + k / kSlabInputs;
  return w.data + slab * slab_bytes(w.kind, static_cast<int>(w.group));
}

// ---- what codes mean --------------------------------------------------------------------------

__device__ __forceinline__ __half2 as_half2(uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}
__device__ __forceinline__ uint32_t as_bits(__half2 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Of one output and group, the same in both halves.
struct GroupConstants {
  __half2 shifted_zero;  // offset + near
  __half2 scale;
  __half2 rest;  // (near - zero) * scale
};

// From the word of scale (low) and zero (high).
template <int kOffset>
__device__ __forceinline__ GroupConstants group_constants(uint32_t scale_and_zero) {
  const __half2 offset = __float2half2_rn(static_cast<float>(kOffset));
  const __half2 scale = as_half2(__byte_perm(scale_and_zero, 0, 0x1010));
  const __half2 zero = as_half2(__byte_perm(scale_and_zero, 0, 0x3232));
  GroupConstants c;
  // The largest finite half: a zero near the end of the range must not become infinite.
  c.shifted_zero = __hmin2(__hadd2_rn(zero, offset), as_half2(0x7BFF7BFFu));
  const __half2 near = __hsub2_rn(c.shifted_zero, offset);
  c.scale = scale;
  c.rest = __hmul2_rn(__hsub2_rn(near, zero), scale);
  return c;
}

// The zeros of registers 1 and 3 of 4-bit codes are shifted by 64, all others by 1024.
template <TensorKind kKind>
inline constexpr int kHighOffset = kKind == TensorKind::kQ4 ? 64 : 1024;

__device__ __forceinline__ __half2 scaled(__half2 difference, const GroupConstants& c) {
  return __hfma2(difference, c.scale, c.rest);
}

// Two codes, as halves of 1024 + code.
__device__ __forceinline__ __half2 dequantize_low(uint32_t pair, const GroupConstants& c) {
  return scaled(__hsub2_rn(as_half2(pair), c.shifted_zero), c);
}
// Two codes, as halves of 1024 + 16 code.
__device__ __forceinline__ __half2 dequantize_high(uint32_t pair, const GroupConstants& c) {
  const __half2 sixteenth = __float2half2_rn(0.0625f);
  return scaled(__hfma2(as_half2(pair), sixteenth, __hneg2(c.shifted_zero)), c);
}

// word & kMask | exponent in one instruction; the exponent must come in a register for that.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked(uint32_t word, uint32_t exponent) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "n"(kMask), "r"(exponent));
  return result;
}

// Four registers of the A operand from a word of 4-bit codes.
__device__ __forceinline__ void dequantize_q4(uint32_t word, const GroupConstants& low,
                                              const GroupConstants& high, uint32_t (&a)[4]) {
  constexpr uint32_t kExponent = 0x64006400u;  // 1024
  constexpr uint32_t kLow = 0x000F000Fu, kHigh = 0x00F000F0u;
  const uint32_t upper = word >> 8;
  a[0] = as_bits(dequantize_low(masked<kLow>(word, kExponent), low));
  a[1] = as_bits(dequantize_high(masked<kHigh>(word, kExponent), high));
  a[2] = as_bits(dequantize_low(masked<kLow>(upper, kExponent), low));
  a[3] = as_bits(dequantize_high(masked<kHigh>(upper, kExponent), high));
}

// Four registers of the A operand from two words of 8-bit codes.
__device__ __forceinline__ void dequantize_q8(uint32_t first, uint32_t second,
                                              const GroupConstants& low, const GroupConstants& high,
                                              uint32_t (&a)[4]) {
  constexpr uint32_t kExponent = 0x64646464u;
  a[0] = as_bits(dequantize_low(__byte_perm(first, kExponent, 0x4140), low));
  a[1] = as_bits(dequantize_low(__byte_perm(first, kExponent, 0x4342), high));
  a[2] = as_bits(dequantize_low(__byte_perm(second, kExponent, 0x4140), low));
  a[3] = as_bits(dequantize_low(__byte_perm(second, kExponent, 0x4342), high));
}

// ---- single elements, for the embedding -------------------------------------------------------

__device__ __forceinline__ uint32_t scale_and_zero_of(const DeviceWeight& w, const uint8_t* slab,
                                                      int64_t n, int64_t k) {
  const auto* constants = reinterpret_cast<const uint32_t*>(slab + constants_offset(w.kind));
  return constants[k % kSlabInputs / w.group * kTileOutputs + n % kTileOutputs];
}

__device__ __forceinline__ uint32_t code_at(const DeviceWeight& w, const uint8_t* slab, int64_t n,
                                            int64_t k) {
  const int row = static_cast<int>(n % kTileOutputs), column = static_cast<int>(k % kSlabInputs);
  const uint8_t* at = slab + element_offset(w.kind, row, column);
  if (w.kind == TensorKind::kQ8) return *at;
  return *reinterpret_cast<const uint32_t*>(at) >> nibble_shift(row, column) & 15u;
}

// Element (n, k) as the products see it. Not for kF32.
__device__ __forceinline__ __half weight_at(const DeviceWeight& w, int64_t n, int64_t k) {
  const uint8_t* slab = slab_of(w, n, k);
  const int row = static_cast<int>(n % kTileOutputs), column = static_cast<int>(k % kSlabInputs);
  if (w.kind == TensorKind::kF16) {
    return *reinterpret_cast<const __half*>(slab + element_offset(w.kind, row, column));
  }
  const uint32_t word = scale_and_zero_of(w, slab, n, k);
  const uint32_t code = code_at(w, slab, n, k);
  if (w.kind == TensorKind::kQ4 && row >= 8) {
    return __low2half(dequantize_high(0x6400u | code << 4, group_constants<64>(word)));
  }
  return __low2half(dequantize_low(0x6400u | code, group_constants<1024>(word)));
}

// Element (n, k) in FP32, as the CPU computes it: for the FP32 mode.
__device__ __forceinline__ float exact_weight_at(const DeviceWeight& w, int64_t n, int64_t k) {
  const uint8_t* slab = slab_of(w, n, k);
  const int row = static_cast<int>(n % kTileOutputs), column = static_cast<int>(k % kSlabInputs);
  const uint8_t* at = slab + element_offset(w.kind, row, column);
  if (w.kind == TensorKind::kF32) return *reinterpret_cast<const float*>(at);
  if (w.kind == TensorKind::kF16) return __half2float(*reinterpret_cast<const __half*>(at));
  const float2 pair = __half22float2(as_half2(scale_and_zero_of(w, slab, n, k)));
  const float code = static_cast<float>(code_at(w, slab, n, k));
  return __fmul_rn(__fsub_rn(code, pair.y), pair.x);
}

}  // namespace tinyloop::cuda
