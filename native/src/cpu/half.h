// IEEE binary16 <-> binary32 without hardware: exact one way, round to nearest even the other.
// The vector units' own conversions give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace tinyloop::cpu {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7FFFu;
  if (rest >= 0x7C00u) {  // infinity, or NaN made quiet as the hardware does
    const uint32_t nan = rest > 0x7C00u ? 0x00400000u : 0u;
    return bits_to_float(sign | 0x7F800000u | ((rest & 0x3FFu) << 13) | nan);
  }
  if (rest < 0x0400u) {  // zero or subnormal: an integer multiple of 2^-24
    return bits_to_float(sign | float_to_bits(static_cast<float>(rest) * 0x1p-24f));
  }
  return bits_to_float(sign | ((rest << 13) + 0x38000000u));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return sign | 0x7E00u | static_cast<uint16_t>((rest >> 13) & 0x3FFu);
  if (rest >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and above round to infinity
  if (rest < 0x38800000u) {                        // below 2^-14: the half is subnormal
    // Adding 0.5 puts the value's 2^-24 units at the end of the mantissa; the FPU rounds.
    const float shifted = bits_to_float(rest) + 0.5f;
    return sign | static_cast<uint16_t>(float_to_bits(shifted) - 0x3F000000u);
  }
  const uint32_t odd = (rest >> 13) & 1u;
  return sign | static_cast<uint16_t>((rest + 0xFFFu + odd - 0x38000000u) >> 13);
}

}  // namespace tinyloop::cpu
