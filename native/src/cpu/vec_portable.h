// Vec: 16 floats in plain C++. Defines what the AVX2 and AVX-512 versions must compute, bit for
// bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/half.h"

namespace tinyloop::cpu::TINYLOOP_ISA {

inline constexpr int kRowsPerTile = 4;    // rows of C that one micro-kernel holds in registers
inline constexpr int kPanelsPerTile = 1;  // panels of 16 columns beside each other, likewise
inline constexpr int kFewRows = 2;        // at most so many rows dequantize in registers
constexpr int few_rows_panels_at_once(int, bool) { return 1; }

struct Vec {
  float lane[16];
};

#define TINYLOOP_LANES for (int i = 0; i < 16; ++i)

inline Vec set1(float x) {
  Vec r;
  TINYLOOP_LANES r.lane[i] = x;
  return r;
}
inline Vec load(const float* p) {
  Vec r;
  std::memcpy(r.lane, p, sizeof(r.lane));
  return r;
}
inline void store(float* p, Vec a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
inline Vec add(Vec a, Vec b) {
  TINYLOOP_LANES a.lane[i] += b.lane[i];
  return a;
}
inline Vec sub(Vec a, Vec b) {
  TINYLOOP_LANES a.lane[i] -= b.lane[i];
  return a;
}
inline Vec mul(Vec a, Vec b) {
  TINYLOOP_LANES a.lane[i] *= b.lane[i];
  return a;
}
inline Vec div(Vec a, Vec b) {
  TINYLOOP_LANES a.lane[i] /= b.lane[i];
  return a;
}
// a * b + c, rounded once.
inline Vec fma(Vec a, Vec b, Vec c) {
  TINYLOOP_LANES c.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}
// The second operand where they are unordered, as the x86 instruction does.
inline Vec max(Vec a, Vec b) {
  TINYLOOP_LANES a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
inline Vec min(Vec a, Vec b) {
  TINYLOOP_LANES a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
inline Vec round_even(Vec a) {
  TINYLOOP_LANES a.lane[i] = std::nearbyint(a.lane[i]);
  return a;
}
// 2^n for integral n in [-126, 127].
inline Vec power_of_two(Vec n) {
  TINYLOOP_LANES n.lane[i] =
      bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n.lane[i]) + 127) << 23);
  return n;
}
inline Vec times_power_of_two(Vec a, Vec n) { return mul(a, power_of_two(n)); }
// Lane by lane: x < limit ? 0 : value.
inline Vec zero_below(Vec x, Vec limit, Vec value) {
  TINYLOOP_LANES value.lane[i] = x.lane[i] < limit.lane[i] ? 0.0f : value.lane[i];
  return value;
}
// The first n lanes of a, `other` in the rest.
inline Vec first_lanes(Vec a, int n, float other) {
  for (int i = n < 0 ? 0 : n; i < 16; ++i) a.lane[i] = other;
  return a;
}
// bf16 is the upper half of a float: high_part() cuts a float to it and reads the one in the upper
// half of a word, low_part() reads the one in the lower half, join_parts() puts two in a word, and
// to_bf16() rounds to the nearest, ties away from zero.
inline Vec high_part(Vec a) {
  TINYLOOP_LANES a.lane[i] = bits_to_float(float_to_bits(a.lane[i]) & 0xFFFF0000u);
  return a;
}
inline Vec low_part(Vec a) {
  TINYLOOP_LANES a.lane[i] = bits_to_float(float_to_bits(a.lane[i]) << 16);
  return a;
}
inline Vec join_parts(Vec high, Vec low) {
  TINYLOOP_LANES high.lane[i] =
      bits_to_float(float_to_bits(high.lane[i]) | (float_to_bits(low.lane[i]) >> 16));
  return high;
}
inline Vec to_bf16(Vec a) {
  TINYLOOP_LANES a.lane[i] = bits_to_float((float_to_bits(a.lane[i]) + 0x8000u) & 0xFFFF0000u);
  return a;
}
inline void store_high_parts(uint16_t* p, Vec a) {
  TINYLOOP_LANES p[i] = static_cast<uint16_t>(float_to_bits(a.lane[i]) >> 16);
}
inline Vec load_high_parts(const uint16_t* p) {
  Vec r;
  TINYLOOP_LANES r.lane[i] = bits_to_float(static_cast<uint32_t>(p[i]) << 16);
  return r;
}
// Lane by lane: |x| < limit ? 0 : x.
inline Vec zero_small(Vec x, float limit) {
  TINYLOOP_LANES x.lane[i] = std::fabs(x.lane[i]) < limit ? 0.0f : x.lane[i];
  return x;
}
inline Vec load_half(const uint16_t* p) {
  Vec r;
  TINYLOOP_LANES r.lane[i] = half_to_float(p[i]);
  return r;
}
inline void store_half(uint16_t* p, Vec a) { TINYLOOP_LANES p[i] = float_to_half(a.lane[i]); }
inline Vec load_i8(const int8_t* p) {
  Vec r;
  TINYLOOP_LANES r.lane[i] = static_cast<float>(p[i]);
  return r;
}
// Lanes that are integers in [-128, 127].
inline void store_i8(int8_t* p, Vec a) { TINYLOOP_LANES p[i] = static_cast<int8_t>(a.lane[i]); }
inline Vec load_u8(const uint8_t* p) {
  Vec r;
  TINYLOOP_LANES r.lane[i] = static_cast<float>(p[i]);
  return r;
}
// 16 codes of 4 bits: lanes 0..7 in the low nibbles of the 8 bytes, lanes 8..15 in the high ones.
inline Vec load_u4(const uint8_t* p) {
  Vec r;
  for (int i = 0; i < 8; ++i) r.lane[i] = static_cast<float>(p[i] & 15);
  for (int i = 0; i < 8; ++i) r.lane[i + 8] = static_cast<float>(p[i] >> 4);
  return r;
}
// Two times 16 codes, each less 8, as bf16: the first 16 in the lower halves of words.
inline Vec load_two_u4_less_8(const uint8_t* p) {
  return join_parts(sub(load_u4(p + 8), set1(8.0f)), sub(load_u4(p), set1(8.0f)));
}
// 16 codes of 4 bits side by side: the even lanes in the low nibbles.
inline Vec load_u4_pairs(const uint8_t* p) {
  Vec r;
  TINYLOOP_LANES r.lane[i] = static_cast<float>((p[i / 2] >> (i % 2 * 4)) & 15);
  return r;
}
// Lanes 1, 0, 3, 2, ...
inline Vec swap_pairs(Vec a) {
  Vec r;
  TINYLOOP_LANES r.lane[i] = a.lane[i ^ 1];
  return r;
}
// Sum and maximum of the lanes in one fixed order: halves, quarters, eighths, the last two.
inline float sum_lanes(Vec a) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) a.lane[i] += a.lane[i + step];
  }
  return a.lane[0];
}
inline float max_lane(Vec a) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) {
      a.lane[i] = a.lane[i] > a.lane[i + step] ? a.lane[i] : a.lane[i + step];
    }
  }
  return a.lane[0];
}

// to[c][r] = from[r][c] for 16 x 16 floats.
inline void transpose(const float* from, float* to) {
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 16; ++c) to[c * 16 + r] = from[r * 16 + c];
  }
}

#undef TINYLOOP_LANES

}  // namespace tinyloop::cpu::TINYLOOP_ISA
