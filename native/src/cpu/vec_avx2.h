// Vec: 16 floats in two AVX2 registers. Same bits as vec_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/transpose_avx.h"

namespace tinyloop::cpu::TINYLOOP_ISA {

// 6 rows x 16 columns: 12 accumulators, 2 registers of B and 1 broadcast of A make 15 of 16.
inline constexpr int kRowsPerTile = 6;
inline constexpr int kPanelsPerTile = 1;

// Products of at most kFewRows rows dequantize in registers. Two panels of one row take 4 sums, 8
// zeros and scales, 3 to work with and a mask; without zeros and scales four panels fit.
inline constexpr int kFewRows = 8;
constexpr int few_rows_panels_at_once(int rows, bool quantized) {
  return rows > 2 ? 1 : (rows == 1 && !quantized ? 4 : 2);
}

struct Vec {
  __m256 low, high;
};

inline Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline Vec add(Vec a, Vec b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Vec sub(Vec a, Vec b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Vec mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Vec div(Vec a, Vec b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Vec round_even(Vec a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kMode), _mm256_round_ps(a.high, kMode)};
}
inline __m256 power_of_two(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Vec power_of_two(Vec n) { return {power_of_two(n.low), power_of_two(n.high)}; }
inline Vec times_power_of_two(Vec a, Vec n) { return mul(a, power_of_two(n)); }
inline Vec zero_below(Vec x, Vec limit, Vec value) {
  const __m256 low = _mm256_cmp_ps(x.low, limit.low, _CMP_LT_OQ);
  const __m256 high = _mm256_cmp_ps(x.high, limit.high, _CMP_LT_OQ);
  return {_mm256_andnot_ps(low, value.low), _mm256_andnot_ps(high, value.high)};
}
inline Vec first_lanes(Vec a, int n, float other) {
  const __m256i count = _mm256_set1_epi32(n);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i low = _mm256_cmpgt_epi32(count, lanes);
  const __m256i high = _mm256_cmpgt_epi32(count, _mm256_add_epi32(lanes, _mm256_set1_epi32(8)));
  const __m256 fill = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(fill, a.low, _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(fill, a.high, _mm256_castsi256_ps(high))};
}
inline __m256i bits_of(__m256 a) { return _mm256_castps_si256(a); }
inline __m256 of_bits(__m256i a) { return _mm256_castsi256_ps(a); }
inline __m256 high_part(__m256 a) {
  return of_bits(_mm256_and_si256(bits_of(a), _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline __m256 low_part(__m256 a) { return of_bits(_mm256_slli_epi32(bits_of(a), 16)); }
inline __m256 join_parts(__m256 high, __m256 low) {
  return of_bits(_mm256_or_si256(bits_of(high), _mm256_srli_epi32(bits_of(low), 16)));
}
inline __m256 to_bf16(__m256 a) {
  return high_part(of_bits(_mm256_add_epi32(bits_of(a), _mm256_set1_epi32(0x8000))));
}
inline __m256 zero_small(__m256 x, __m256 limit) {
  const __m256 size = of_bits(_mm256_and_si256(bits_of(x), _mm256_set1_epi32(0x7FFFFFFF)));
  return _mm256_andnot_ps(_mm256_cmp_ps(size, limit, _CMP_LT_OQ), x);
}
inline Vec high_part(Vec a) { return {high_part(a.low), high_part(a.high)}; }
inline Vec low_part(Vec a) { return {low_part(a.low), low_part(a.high)}; }
inline Vec join_parts(Vec high, Vec low) {
  return {join_parts(high.low, low.low), join_parts(high.high, low.high)};
}
inline Vec to_bf16(Vec a) { return {to_bf16(a.low), to_bf16(a.high)}; }
inline Vec zero_small(Vec x, float limit) {
  return {zero_small(x.low, _mm256_set1_ps(limit)), zero_small(x.high, _mm256_set1_ps(limit))};
}
inline Vec load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_half(uint16_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                   _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load_i8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline __m128i to_words(__m256 a) {
  const __m256i ints = _mm256_cvtps_epi32(a);
  return _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
}
inline void store_i8(int8_t* p, Vec a) {
  const __m128i bytes = _mm_packs_epi16(to_words(a.low), to_words(a.high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline Vec load_u8(const uint8_t* p) {
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high))};
}
inline Vec load_u4(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m256i both = _mm256_cvtepu8_epi32(bytes);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15))),
          _mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4))};
}
inline Vec load_u4_pairs(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, nibble);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
  const __m128i codes = _mm_unpacklo_epi8(even, odd);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)))};
}
inline Vec swap_pairs(Vec a) {
  return {_mm256_permute_ps(a.low, 0xB1), _mm256_permute_ps(a.high, 0xB1)};
}
inline float sum_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lane(Vec a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace tinyloop::cpu::TINYLOOP_ISA
