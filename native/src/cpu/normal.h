// The seeded normal that a loop's state may start from. Not a vector kernel: the same code, and the
// same bits, on every instruction set.
#pragma once

#include <cstdint>

namespace tinyloop::cpu {

// out[c] = std * a normal cut at three deviations, a pure function of (seed, position, c).
void fill_normal(uint64_t seed, int64_t position, int64_t width, float std, float* out);

}  // namespace tinyloop::cpu
