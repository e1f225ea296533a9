// A chunk's work, uploaded: the arrays that kernels read.
#pragma once

#include <cstdint>
#include <vector>

#include "backend.h"
#include "cuda/pinned.h"
#include "cuda/plan.h"
#include "cuda/rows.h"
#include "memory.h"

namespace tinyloop::cuda {

// Device memory for the plans of one pass. Plans are carved off one after the other; when the last
// one is gone the next begins at the front again, so that the same step finds its plan in the same
// place. Grows when a pass needs more than any before.
class PlanArena {
 public:
  // Of a first block that holds a pass of so many rows on a few prefixes.
  static size_t first_bytes(int64_t rows);
  void allocate(int64_t rows, Account& account);

  uint8_t* take(size_t bytes, Account& account);
  void give_back();

 private:
  std::vector<Block> blocks_;  // those that were outgrown stay: graphs may read them
  size_t used_ = 0;            // of the last one
  int64_t plans_ = 0;
};

class DevicePlan : public ChunkPlan {
 public:
  DevicePlan(const ChunkWork& work, PlanArena& arena, Account& account, PinnedRing& ring);
  ~DevicePlan() override { arena_.give_back(); }

  AttentionPlan attention;
  RunTable<KvRun> kv;
  RunTable<HiddenRun> hidden;
  int64_t rows = 0;
  const void* place = nullptr;  // the first byte of its arrays

 private:
  PlanArena& arena_;
};

inline const DevicePlan& device_plan(const ChunkPlan& plan) {
  return static_cast<const DevicePlan&>(plan);
}

}  // namespace tinyloop::cuda
