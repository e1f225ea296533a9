#include "cuda/warpgroup.cuh"
#include "cuda/warpgroup_plan.h"

namespace tinyloop::cuda {

namespace {

// An H200's, in cycles and bytes a cycle.
constexpr double kStepLatency = 18.0;     // of one chain of products, a step of 16 inputs
constexpr double kDequantizeStep = 32.0;  // a warp's instructions for a step
constexpr double kAloneStep = 48.0;       // the same where no other warp fills its waits
constexpr double kHalvesStep = 10.0;
constexpr double kBytesOfMultiprocessor = 48.0;
constexpr double kBytesOfDevice = 4400.0;

constexpr size_t kStreamedRing = 160 * 1024;

int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// use(rows of a block as a type).
template <typename Use>
auto with_rows(int rows, Use use) {
  switch (rows) {
    case 16:
      return use(std::integral_constant<int, 16>{});
    case 32:
      return use(std::integral_constant<int, 32>{});
    default:
      return use(std::integral_constant<int, 64>{});
  }
}

double halves_or(const WarpgroupWork& work, double dequantizing) {
  return work.halves ? kHalvesStep : dequantizing;
}

// Bytes that a block of the plan takes from the device's cache for a step.
double step_bytes(const WarpgroupWork& work, const WarpgroupPlan& plan) {
  return plan.groups * plan.active * work.slab_bytes / 8.0 + plan.rows * 32.0;
}

void count_blocks(const WarpgroupWork& work, int multiprocessors, WarpgroupPlan& plan) {
  plan.row_blocks = static_cast<int>(up(work.rows, plan.rows));
  plan.items = static_cast<int>(up(work.tiles, plan.groups * plan.active)) * plan.row_blocks;
  plan.blocks = std::min(plan.items, multiprocessors);
}

// Cycles of the multiprocessor that has most to do, `step` of them a step at least.
double cycles(const WarpgroupWork& work, const WarpgroupPlan& plan, int multiprocessors,
              double step) {
  const double rounds = static_cast<double>(up(plan.items, multiprocessors));
  const double together = std::min(plan.items, multiprocessors), bytes = step_bytes(work, plan);
  return rounds * work.slabs * 8.0 *
         std::max({step, kStepLatency, plan.groups * plan.rows / 2.0,
                   bytes / kBytesOfMultiprocessor, together * bytes / kBytesOfDevice});
}

void finish(const WarpgroupWork& work, size_t shared_limit, WarpgroupPlan& plan) {
  const int streams = plan.groups * plan.active, stage = work.slab_bytes + 8;
  const auto fixed = static_cast<size_t>(
      with_rows(plan.rows, [&](auto n) { return kRowsBytes<n.value> + kRowStages<n.value> * 16; }));
  const size_t most = shared_limit > fixed ? shared_limit - fixed : 0;
  const auto fit =
      static_cast<int>(std::min(kStreamedRing, most) / static_cast<size_t>(streams * stage));
  const auto rounds = static_cast<int>(up(plan.items, plan.blocks));
  plan.stages = std::clamp(fit, 2, std::clamp(work.slabs * rounds, 2, kMostStages));
  plan.shared_bytes = fixed + static_cast<size_t>(plan.stages * streams * stage);
  plan.threads = (plan.groups * kGroupWarps + 1) * 32;
}

}  // namespace

WarpgroupPlan warpgroup_plan(const WarpgroupWork& work, int multiprocessors, size_t shared_limit) {
  WarpgroupPlan best;
  for (const int rows : {64, 32, 16}) {
    if (rows > 16 && work.rows <= rows / 2) continue;
    for (const int groups : {kMostGroups, 1}) {
      for (const int active : {4, 2, 1}) {
        if (groups > 1 && active < 4) continue;
        WarpgroupPlan plan;
        plan.rows = rows;
        plan.groups = groups;
        plan.active = active;
        count_blocks(work, multiprocessors, plan);
        const double step =
            groups > 1 ? groups * halves_or(work, kDequantizeStep) : halves_or(work, kAloneStep);
        plan.cycles = cycles(work, plan, multiprocessors, step);
        if (best.items == 0 || plan.cycles < best.cycles) best = plan;
      }
    }
  }
  finish(work, shared_limit, best);
  return best;
}

}  // namespace tinyloop::cuda
