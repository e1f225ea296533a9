// The order in which a model's parts run, compiled from its descriptor: pure data.
#pragma once

#include <cstdint>
#include <vector>

#include "tinyloop/descriptor.h"

namespace tinyloop {

// One step over all rows. States are FP32 [rows, hidden]; state 0 is `main`.
struct Step {
  enum class Kind {
    kLayer,    // state = layer(state)
    kNorm,     // state = norm(state), the final norm
    kAdapter,  // state = adapter [state, other]
    kAdd,      // state += other
    kCopy,     // state = other
    kInit,     // state = the descriptor's state_init (zeros or the seeded normal)
    kLowInit,  // state = the stored start of the low stack
  };
  Kind kind = Kind::kLayer;
  int state = 0;
  int other = 0;
  int64_t layer = 0;
  int64_t plane = 0;  // kLayer: of its keys and values; in `loop`, counted within one loop
};

// before, then `loop` as often as a request's depth says, then after. Planes: those of before and
// after first, then those of each loop, so that a deeper cache only appends.
struct Schedule {
  int states = 1;
  std::vector<Step> before, loop, after;
  int64_t fixed_planes = 0;
  int64_t loop_planes = 0;

  int64_t planes(int64_t depth) const { return fixed_planes + depth * loop_planes; }
  int64_t plane(const Step& step, int64_t loop_index) const {
    return fixed_planes + loop_index * loop_planes + step.plane;
  }
  // Layers run after the loops: their planes belong to one depth only.
  bool has_coda() const { return after_layers > 0; }
  int64_t after_layers = 0;
};

Schedule make_schedule(const Descriptor& descriptor);

}  // namespace tinyloop
