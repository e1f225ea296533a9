#include "cuda/warpgroup.cuh"
#include "cuda/warpgroup_plan.h"

namespace tinyloop::cuda {

namespace {

// Measured on an H200, in cycles and bytes a cycle.
constexpr double kStepLatency = 14.0;     // of one chain of products, a step of 16 inputs
constexpr double kDequantizeStep = 20.0;  // a warp's instructions for a step
constexpr double kHalvesStep = 10.0;
constexpr double kBytesOfMultiprocessor = 48.0;
constexpr double kBytesOfDevice = 4400.0;

// What a multiprocessor keeps under way at least, and how much of its shared memory blocks of few
// rows take: half, so that the next kernel's weights can come while this one runs.
constexpr int kLeastRing = 32 * 1024;
constexpr int kResidentShared = 110 * 1024;
constexpr int kStreamedRing = 160 * 1024;
constexpr int kLeastStages = 4;

int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

int row_bytes(const WarpgroupWork& work, int rows) {
  switch (rows) {
    case 8:
      return rows_bytes<8, false>(work.rows, work.slabs);
    case 16:
      return rows_bytes<16, true>(work.rows, work.slabs);
    case 32:
      return rows_bytes<32, true>(work.rows, work.slabs);
    default:
      return rows_bytes<64, true>(work.rows, work.slabs);
  }
}
int barrier_bytes(int rows) {
  return rows == 8 ? 0
                   : (rows == 16   ? kRowStages<16>
                      : rows == 32 ? kRowStages<32>
                                   : kRowStages<64>)*16;
}

void finish(const WarpgroupWork& work, size_t ring, size_t shared_limit, WarpgroupPlan& plan) {
  const int streams = plan.groups * plan.active, stage = work.slab_bytes + 8;
  const size_t fixed = static_cast<size_t>(row_bytes(work, plan.rows)) +
                       static_cast<size_t>(barrier_bytes(plan.rows));
  const size_t most = shared_limit > fixed ? shared_limit - fixed : 0;
  const auto fit = static_cast<int>(std::min(ring, most) / static_cast<size_t>(streams * stage));
  const auto rounds = static_cast<int>(up(plan.items, plan.blocks));
  plan.stages = std::clamp(fit, 2, std::clamp(work.slabs * rounds, 2, kMostStages));
  plan.shared_bytes = fixed + static_cast<size_t>(plan.stages * streams * stage);
}

// One warpgroup a block; tiles spread so that the most of a multiprocessor is least.
WarpgroupPlan resident(const WarpgroupWork& work, int multiprocessors, size_t shared_limit) {
  WarpgroupPlan plan;
  plan.rows = kResidentRows;
  plan.groups = plan.row_blocks = 1;
  int64_t least = INT64_MAX;
  for (int active = 1; active <= kGroupWarps; ++active) {
    const int64_t share = up(up(work.tiles, active), multiprocessors) * active;
    if (share > least) continue;
    least = share;
    plan.active = active;
  }
  plan.items = static_cast<int>(up(work.tiles, plan.active));
  const int side_by_side = plan.items > multiprocessors ? 2 : 1;
  plan.blocks = std::min(plan.items, side_by_side * multiprocessors);
  // Where a multiprocessor has one block, other warps help to form the input.
  plan.threads = side_by_side == 1 ? work.resident_threads : kGroupWarps * 32;
  const int shared = kResidentShared / side_by_side, rows = row_bytes(work, plan.rows);
  const int least_ring =
      std::max(kLeastRing / side_by_side, kLeastStages * plan.active * (work.slab_bytes + 8));
  finish(work, static_cast<size_t>(std::max(shared - rows, least_ring)), shared_limit, plan);
  return plan;
}

// Cycles a step of the multiprocessor that has most to do.
double cycles(const WarpgroupWork& work, const WarpgroupPlan& plan, int multiprocessors) {
  const double rounds = static_cast<double>(up(plan.items, multiprocessors));
  const double bytes = plan.groups * plan.active * work.slab_bytes / 8.0 + plan.rows * 32.0;
  const double together = std::min(plan.items, multiprocessors);
  return rounds *
         std::max({plan.groups * std::max(kStepLatency, plan.rows / 2.0),
                   plan.groups * (work.halves ? kHalvesStep : kDequantizeStep), kStepLatency,
                   bytes / kBytesOfMultiprocessor, together * bytes / kBytesOfDevice});
}

WarpgroupPlan streamed(const WarpgroupWork& work, int multiprocessors, size_t shared_limit) {
  WarpgroupPlan best;
  double least = 0.0;
  for (const int rows : {64, 32, 16}) {
    if (rows > 16 && work.rows <= rows / 2) continue;
    for (const int groups : {2, 1}) {
      for (const int active : {4, 2, 1}) {
        if (groups == 2 && active < 4) continue;
        WarpgroupPlan plan;
        plan.rows = rows;
        plan.groups = groups;
        plan.active = active;
        plan.row_blocks = static_cast<int>(up(work.rows, rows));
        plan.items = static_cast<int>(up(work.tiles, groups * active)) * plan.row_blocks;
        const double taken = cycles(work, plan, multiprocessors);
        if (best.items > 0 && taken >= least) continue;
        least = taken;
        best = plan;
      }
    }
  }
  best.blocks = std::min(best.items, multiprocessors);
  best.threads = (best.groups + 1) * kGroupWarps * 32;
  finish(work, kStreamedRing, shared_limit, best);
  return best;
}

}  // namespace

WarpgroupPlan warpgroup_plan(const WarpgroupWork& work, int multiprocessors, size_t shared_limit) {
  return work.rows <= kResidentRows ? resident(work, multiprocessors, shared_limit)
                                    : streamed(work, multiprocessors, shared_limit);
}

}  // namespace tinyloop::cuda
