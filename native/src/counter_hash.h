// The counter-based generator: what is drawn depends on a key and on nothing drawn before.
#pragma once

#include <cstdint>

namespace tinyloop {

inline constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;  // 2^64 / phi

// The finalizer of splitmix64: a bijection in which every bit of the input moves half of the
// output's.
inline constexpr uint64_t mix(uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9;
  z ^= z >> 27;
  z *= 0x94D049BB133111EB;
  return z ^ z >> 31;
}

}  // namespace tinyloop
