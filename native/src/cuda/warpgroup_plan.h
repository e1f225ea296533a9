// How the products by warpgroups are cut into blocks. Nothing of it shows in the results.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tinyloop::cuda {

struct WarpgroupWork {
  int64_t tiles = 0;  // of 16 outputs
  int slabs = 0;
  int slab_bytes = 0;
  int64_t rows = 0;
  bool halves = false;  // the weight is FP16: nothing to dequantize
};

struct WarpgroupPlan {
  int rows = 0;    // of a block: 16, 32 or 64
  int active = 0;  // tiles of a warpgroup
  int groups = 0;  // multiplying warpgroups
  int stages = 0;  // slabs of a tile's ring
  int row_blocks = 0, items = 0;
  int blocks = 0, threads = 0;
  size_t shared_bytes = 0;
  double cycles = 0.0;  // counted, of the multiprocessor that has most to do
};

// Defined where the kernel's layout of shared memory is known.
WarpgroupPlan warpgroup_plan(const WarpgroupWork& work, int multiprocessors, size_t shared_limit);

}  // namespace tinyloop::cuda
