// How a product of few rows is cut into blocks whose chains are fed. Nothing of it shows in the
// results.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "cuda/weight.h"

namespace tinyloop::cuda {

inline constexpr int kFormedRows = 8;  // most of a block that forms its input
// Most warps of a block, by its groups of 8 rows: more groups take more registers.
template <int kGroups>
inline constexpr int kFedWarps = kGroups == 1 ? 22 : 16;
// The same of a block of chains that dequantize themselves.
template <int kGroups>
inline constexpr int kDirectWarps = kGroups == 1 ? 16 : 12;
// Most chains of a block, each a warp's.
constexpr int most_chains(int groups) { return groups == 1 ? 12 : 6; }
inline constexpr int kMostPackedStages = 16;  // of a feeder's ring: a lane starts one each
inline constexpr int kRunSlabs = 4;           // copied at once, where chains dequantize themselves
inline constexpr int kChunkSlabs = 8;         // of rows, which are waited for at once
inline constexpr int kFragmentBytes = kTileOutputs * kSlabInputs * 2;  // of a slab, dequantized
inline constexpr int kPartialBytes = 32 * 16;                          // of 8 rows' sums

struct FedWork {
  int64_t tiles = 0;  // of 16 outputs
  int slabs = 0;
  int slab_bytes = 0;
  int64_t rows = 0;
  int row_pitch = 0;  // bytes of a row in shared memory
  int parts = 1;
  bool halves = false;  // the weight is FP16: nothing to dequantize
  bool direct = false;  // chains dequantize themselves
};

struct FedPlan {
  int groups = 0;      // of 8 rows of a block
  int row_blocks = 0;  // of so many rows
  int slots = 0;       // tiles of a block at a time
  int parts = 0, part_slabs = 0;
  int run_slabs = 1, part_runs = 0;  // of what a stage holds
  int copiers = 0;                   // direct: warps that copy
  int feeders = 0;                   // warps that dequantize, or only copy and form rows
  int stages = 0;                    // slabs of a chain's ring
  int packed_stages = 0;  // slabs of a feeder's ring; 0: it copies straight to the chains' rings
  int row_chunks = 0;
  int items = 0, blocks = 0, threads = 0;
  // Where things lie in shared memory, the rows first.
  uint32_t fragments = 0;                                        // [chains][stages]
  uint32_t packed = 0;                                           // [feeders][packed stages]
  uint32_t partials = 0;                                         // [2][chains]
  uint32_t full = 0, empty = 0, packed_full = 0, rows_full = 0;  // barriers
  size_t shared_bytes = 0;

  int chains() const { return slots * parts; }
};

namespace fed_planning {

// A share of a multiprocessor's shared memory that leaves room for the next kernel, whose weights
// can come while this one runs.
inline constexpr size_t kShare = 112 * 1024;

// An H200's cycles of a step of 16 inputs: of a chain, and of the instructions for it on a quarter
// of a multiprocessor.
inline constexpr double kChainStep = 25.0;
inline constexpr double kDirectStep = 29.0;
inline constexpr double kFeedStep = 5.5;
inline constexpr double kHalvesStep = 2.0;
inline constexpr double kGroupStep = 8.0;  // of a chain's 8 rows on a quarter of a multiprocessor
inline constexpr int kLeastStages = 2;     // the next slab is there before one is given back
inline constexpr int kLeastPackedStages = 3;

inline int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Of `warps` that take turns at the chains' rings: how many stages of a chain on a warp comes to it
// again. A barrier tells a phase from the next, not from the one behind that: a ring must be as
// long, or a warp takes a stage that is still full for one that is free.
inline int turn(int warps, int chains) { return warps / std::gcd(warps, chains); }

inline int feeders_of(const FedWork& work, int chains) {
  if (work.direct) return chains <= 4 ? 7 : 4;
  if (chains == 1) return 7;
  int feeders = 8;
  while (turn(feeders, chains) > std::max(3, 8 / chains)) ++feeders;
  return feeders;
}
// Most that every ring is long enough for.
inline int copiers_of(int chains) {
  int copiers = 4;
  while (turn(copiers, chains) > kLeastStages) --copiers;
  return copiers;
}

inline int rounds_of(const FedPlan& plan) { return static_cast<int>(up(plan.items, plan.blocks)); }

inline void place(const FedWork& work, FedPlan& plan) {
  const int chains = plan.chains();
  const int64_t rows = std::min<int64_t>(work.rows, plan.groups * 8);
  size_t at = static_cast<size_t>(rows) * static_cast<size_t>(work.row_pitch);
  const auto take = [&](int count, int bytes) {
    const auto begin = static_cast<uint32_t>(at);
    at += static_cast<size_t>(count) * static_cast<size_t>(bytes);
    return begin;
  };
  plan.fragments =
      take(chains * plan.stages, work.direct ? kRunSlabs * work.slab_bytes : kFragmentBytes);
  plan.packed = take(plan.feeders * plan.packed_stages, work.slab_bytes);
  plan.partials = take(plan.parts > 1 ? 2 * chains * plan.groups : 0, kPartialBytes);
  plan.full = take(chains * plan.stages, 8);
  plan.empty = take(chains * plan.stages, 8);
  plan.packed_full = take(plan.feeders * plan.packed_stages, 8);
  plan.rows_full = take(plan.row_chunks, 8);
  plan.shared_bytes = at;
}

// The rings, as deep as they are of use and fit into `shared`; false, and as little as goes, where
// that is too little to work well.
inline bool fill(const FedWork& work, size_t shared, FedPlan& plan) {
  const int chains = plan.chains(), slabs = rounds_of(plan) * plan.part_runs;
  const bool copies = work.halves || work.direct;  // nothing is packed in a ring of its own
  const auto fits = [&] {
    place(work, plan);
    return plan.shared_bytes <= shared;
  };
  const int warps = copies ? plan.copiers : plan.feeders;
  // Fewer slabs than that and no stage is used twice.
  const int right = std::max(kLeastStages, std::min(turn(warps, chains), slabs));
  const int most = std::max(right, std::min(copies ? 16 : chains == 1 ? 8 : 4, slabs));
  const int least = std::max(right, std::min(copies ? kLeastStages : 3, most));
  const auto fed_slabs = static_cast<int>(up(static_cast<int64_t>(slabs) * chains, plan.feeders));
  const int most_packed = std::clamp(fed_slabs, 1, kMostPackedStages);
  plan.stages = least;
  plan.packed_stages = copies ? 0 : std::min(kLeastPackedStages, most_packed);
  if (!fits()) {
    plan.stages = right;
    plan.packed_stages = copies ? 0 : std::min(2, most_packed);
    place(work, plan);
    return false;
  }
  while (plan.stages < most) {
    ++plan.stages;
    if (!fits()) {
      --plan.stages;
      break;
    }
  }
  while (!copies && plan.packed_stages < most_packed) {
    ++plan.packed_stages;
    if (!fits()) {
      --plan.packed_stages;
      break;
    }
  }
  place(work, plan);
  return true;
}

// Cycles of the multiprocessor that has most to do, but for a factor of its own chain's length.
inline double cycles(const FedWork& work, const FedPlan& plan, int multiprocessors) {
  const double feed = plan.chains() * (work.halves ? kHalvesStep : kFeedStep);
  const double least = work.direct ? kDirectStep : kChainStep;
  const double shared = plan.chains() * ((work.direct ? 2.0 : 10.0) + 2.0 * plan.groups);
  const double sums = static_cast<double>(up(plan.chains(), 4)) * plan.groups * kGroupStep;
  const int64_t rounds =
      rounds_of(plan) * up(static_cast<int64_t>(plan.blocks) * plan.row_blocks, multiprocessors);
  return static_cast<double>(rounds) * std::max({least, feed, sums, shared});
}

inline FedPlan cut(const FedWork& work, int groups, int slots, int multiprocessors,
                   size_t shared_limit) {
  FedPlan plan;
  plan.groups = groups;
  plan.row_blocks = static_cast<int>(up(work.rows, groups * 8));
  plan.slots = slots;
  plan.parts = work.parts;
  plan.part_slabs = static_cast<int>(up(work.slabs, work.parts));
  plan.feeders = feeders_of(work, plan.chains());
  plan.copiers = work.direct ? copiers_of(plan.chains()) : work.halves ? 1 : 0;
  plan.run_slabs = work.direct ? kRunSlabs : 1;
  plan.part_runs = static_cast<int>(up(plan.part_slabs, plan.run_slabs));
  plan.row_chunks = static_cast<int>(up(work.slabs, kChunkSlabs));
  plan.items = static_cast<int>(up(work.tiles, slots));
  plan.blocks = std::min(plan.items, multiprocessors);
  plan.threads = (plan.chains() + plan.feeders) * 32;
  if (!fill(work, std::min(kShare, shared_limit), plan)) fill(work, shared_limit, plan);
  return plan;
}

}  // namespace fed_planning

inline FedPlan fed_plan(const FedWork& work, int multiprocessors, size_t shared_limit) {
  using namespace fed_planning;
  FedPlan best;
  double least = 0.0;
  for (const int groups : {1, 2, 4}) {
    if (groups > 1 && work.rows <= groups * 4) break;
    for (int slots = 1; slots <= 6 && slots * work.parts <= most_chains(groups); ++slots) {
      const FedPlan plan = cut(work, groups, slots, multiprocessors, shared_limit);
      const double counted = cycles(work, plan, multiprocessors);
      const bool fits = plan.shared_bytes <= shared_limit;
      if (best.slots != 0 && (!fits || counted >= least)) continue;
      best = plan;
      least = counted;
    }
  }
  return best;
}

}  // namespace tinyloop::cuda
