// The arithmetic of attention, the same in every kernel of FP16 activations.
//
//   s_k  = q . k                          MMA chain from zero, ascending over head_dim
//   s_k  = s_k * key scale                stored as codes only
//   m    = max s_k * c                    c = log2(e) / sqrt(head_dim); over the keys seen
//   p_k  = exp2(s_k * c - m)              0 for keys not seen
//   l    = sum round(p_k)                 MMA chain from zero against ones, ascending over keys
//   o    = sum round(p_k * value scale) v MMA chain from zero, ascending over keys
// and then, tile after tile, into the row's M, L, O:
//   M' = max(M, m), O' = O * exp2(M - M') + o * exp2(m - M'), L' likewise; at the end O / L.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/mma.cuh"

namespace tinyloop::cuda {

inline constexpr uint32_t kHalfOnes = 0x3C003C00u;
inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// m of a tile from the largest score; of a tile of which nothing is seen, minus infinity.
__device__ __forceinline__ float tile_top(float largest, float c) { return __fmul_rn(largest, c); }

// What is subtracted: of a tile of which nothing is seen 0, so that its weights become 0.
__device__ __forceinline__ float subtrahend(float top) {
  return top == minus_infinity() ? 0.0f : top;
}
__device__ __forceinline__ float softmax_weight(float score, float c, float subtracted) {
  return exp2_fast(__fmaf_rn(score, c, -subtracted));
}

// A key that is not seen adds nothing, whatever its value's scale is.
__device__ __forceinline__ float scaled_weight(float weight, float scale) {
  return weight == 0.0f ? 0.0f : __fmul_rn(weight, scale);
}

// c: log2(e) / sqrt(head_dim).
__device__ __forceinline__ float score_factor(int head_dim) {
  return __fdiv_rn(kLog2E, __fsqrt_rn(static_cast<float>(head_dim)));
}

struct Merge {
  float keep, add;
};
// A tile of which nothing is seen leaves the bits of O: O * 1 + (+0 * -0), where -0 changes no sum.
__device__ __forceinline__ Merge merge_top(float& maximum, float top) {
  const float both = fmaxf(maximum, top);
  const bool unseen = top == minus_infinity();
  const Merge merge = {unseen ? 1.0f : exp2_fast(maximum - both),
                       unseen ? -0.0f : exp2_fast(top - both)};
  maximum = both;
  return merge;
}
__device__ __forceinline__ float merged(float total, float tile, const Merge& merge) {
  return __fmaf_rn(tile, merge.add, __fmul_rn(total, merge.keep));
}

__device__ __forceinline__ float divisor(float sum) { return __frcp_rn(sum); }
__device__ __forceinline__ float quotient(float total, float inverse) {
  return __fmul_rn(total, inverse);
}

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Four codes as halves, exactly: each byte becomes the mantissa of 1024 + (code + 128).
__device__ __forceinline__ uint2 halves_of_codes(uint32_t codes) {
  const uint32_t positive = codes ^ 0x80808080u;
  const uint32_t words[2] = {__byte_perm(positive, 0x64646464u, 0x4140),
                             __byte_perm(positive, 0x64646464u, 0x4342)};
  const __half2 offset = __half2half2(__ushort_as_half(0x6480));  // 1152
  const __half2 low = __hsub2(*reinterpret_cast<const __half2*>(&words[0]), offset);
  const __half2 high = __hsub2(*reinterpret_cast<const __half2*>(&words[1]), offset);
  return {*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

// Of the four lanes that hold a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

}  // namespace tinyloop::cuda
