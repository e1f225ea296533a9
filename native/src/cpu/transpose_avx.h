// A 16 x 16 transpose in 256-bit registers, for the AVX2 and AVX-512 versions of Vec.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tinyloop::cpu::TINYLOOP_ISA {

// to[c][r] = from[r][c] for 8 x 8 floats, in rows of 16 on both sides.
inline void transpose_8x8(const float* from, float* to) {
  __m256 pairs[8], quads[8];
#pragma GCC unroll 4
  for (int r = 0; r < 8; r += 2) {
    const __m256 a = _mm256_loadu_ps(from + r * 16), b = _mm256_loadu_ps(from + (r + 1) * 16);
    pairs[r] = _mm256_unpacklo_ps(a, b);      // columns 0 and 1, 4 and 5 of two rows
    pairs[r + 1] = _mm256_unpackhi_ps(a, b);  // columns 2 and 3, 6 and 7
  }
#pragma GCC unroll 2
  for (int r = 0; r < 8; r += 4) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 a = pairs[r + half], b = pairs[r + 2 + half];
      quads[r + 2 * half] = _mm256_shuffle_ps(a, b, 0x44);
      quads[r + 2 * half + 1] = _mm256_shuffle_ps(a, b, 0xEE);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(to + c * 16, _mm256_permute2f128_ps(quads[c], quads[c + 4], 0x20));
    _mm256_storeu_ps(to + (c + 4) * 16, _mm256_permute2f128_ps(quads[c], quads[c + 4], 0x31));
  }
}

// to[c][r] = from[r][c] for 16 x 16 floats.
inline void transpose(const float* from, float* to) {
  for (int r = 0; r < 16; r += 8) {
    for (int c = 0; c < 16; c += 8) transpose_8x8(from + r * 16 + c, to + c * 16 + r);
  }
}

}  // namespace tinyloop::cpu::TINYLOOP_ISA
