// Random bits as a pure function of what they are for: no state, no order of calls, no batch.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TINYLOOP_ANYWHERE __host__ __device__
#else
#define TINYLOOP_ANYWHERE
#endif

namespace tinyloop {

// The finalizer of splitmix64: a bijection of 64 bits in which every bit of the input reaches every
// bit of the output.
TINYLOOP_ANYWHERE constexpr uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// One position of a sequence under a seed.
TINYLOOP_ANYWHERE constexpr uint64_t counter_row(uint64_t seed, uint64_t position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio, as in splitmix64
  return mix(mix(seed + kGolden) + position * kGolden);
}

// 64 bits for one channel of a row.
TINYLOOP_ANYWHERE constexpr uint64_t counter_bits(uint64_t row, uint64_t channel) {
  return mix(row + channel * 0xD1B54A32D192ED03u);
}

}  // namespace tinyloop

#undef TINYLOOP_ANYWHERE
