// Vec: 16 floats in one AVX-512 register. Same bits as vec_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/transpose_avx.h"

namespace tinyloop::cpu::TINYLOOP_ISA {

// 12 rows x 32 columns: 24 accumulators hide the latency of both FMA units, 2 registers of B.
inline constexpr int kRowsPerTile = 12;
inline constexpr int kPanelsPerTile = 2;

// Products of at most kFewRows rows dequantize in registers. Four panels of four rows: 16 sums, 8
// of zeros and scales, 8 to work with.
inline constexpr int kFewRows = 8;
constexpr int few_rows_panels_at_once(int rows, bool) { return rows <= 4 ? 4 : 2; }

using Vec = __m512;

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round_even(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec times_power_of_two(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
inline Vec zero_below(Vec x, Vec limit, Vec value) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ);
  return _mm512_maskz_mov_ps(keep, value);
}
inline Vec first_lanes(Vec a, int n, float other) {
  const int count = n < 0 ? 0 : (n > 16 ? 16 : n);
  const auto keep = static_cast<__mmask16>((1u << count) - 1u);
  return _mm512_mask_blend_ps(keep, _mm512_set1_ps(other), a);
}
inline __m512i bits_of(Vec a) { return _mm512_castps_si512(a); }
inline Vec of_bits(__m512i a) { return _mm512_castsi512_ps(a); }
inline Vec high_part(Vec a) {
  return of_bits(_mm512_and_si512(bits_of(a), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline Vec low_part(Vec a) { return of_bits(_mm512_slli_epi32(bits_of(a), 16)); }
inline Vec join_parts(Vec high, Vec low) {
  return of_bits(_mm512_or_si512(bits_of(high), _mm512_srli_epi32(bits_of(low), 16)));
}
inline Vec to_bf16(Vec a) {
  return high_part(of_bits(_mm512_add_epi32(bits_of(a), _mm512_set1_epi32(0x8000))));
}
inline void store_high_parts(uint16_t* p, Vec a) {
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits_of(a), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}
inline Vec load_high_parts(const uint16_t* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return of_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
inline Vec zero_small(Vec x, float limit) {
  const __m512 size = of_bits(_mm512_and_si512(bits_of(x), _mm512_set1_epi32(0x7FFFFFFF)));
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(size, set1(limit), _CMP_NLT_UQ), x);
}
inline Vec load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_half(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load_i8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline void store_i8(int8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
inline Vec load_u8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}
inline Vec load_u4(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i nibble = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(bytes, nibble);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, high)));
}
// bf16 of -8 .. 7, twice: what a nibble is less 8, whatever the bit above it.
alignas(64) inline constexpr uint16_t kNibblesLess8[32] = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
    0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
// Words of bytes n and 8 + n, for n = 0 .. 7 and again: 0x80 is a zero.
alignas(64) inline constexpr uint8_t kPairsOfBytes[64] = {
    0, 0x80, 8,  0x80, 1, 0x80, 9,  0x80, 2, 0x80, 10, 0x80, 3, 0x80, 11, 0x80,
    4, 0x80, 12, 0x80, 5, 0x80, 13, 0x80, 6, 0x80, 14, 0x80, 7, 0x80, 15, 0x80,
    0, 0x80, 8,  0x80, 1, 0x80, 9,  0x80, 2, 0x80, 10, 0x80, 3, 0x80, 11, 0x80,
    4, 0x80, 12, 0x80, 5, 0x80, 13, 0x80, 6, 0x80, 14, 0x80, 7, 0x80, 15, 0x80};
inline Vec load_two_u4_less_8(const uint8_t* p) {
  const __m512i bytes =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i pairs = _mm512_shuffle_epi8(bytes, _mm512_load_si512(kPairsOfBytes));
  // Outputs 8 .. 15 are the upper nibbles.
  const __m512i nibbles = _mm512_mask_srli_epi16(pairs, 0xFFFF0000u, pairs, 4);
  return of_bits(_mm512_permutexvar_epi16(nibbles, _mm512_load_si512(kNibblesLess8)));
}
inline Vec load_u4_pairs(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, nibble);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd)));
}
inline Vec swap_pairs(Vec a) { return _mm512_permute_ps(a, 0xB1); }
inline float sum_lanes(Vec a) {
  const __m256 upper = _mm512_castps512_ps256(_mm512_shuffle_f32x4(a, a, 0x4E));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), upper);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lane(Vec a) {
  const __m256 upper = _mm512_castps512_ps256(_mm512_shuffle_f32x4(a, a, 0x4E));
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), upper);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace tinyloop::cpu::TINYLOOP_ISA
