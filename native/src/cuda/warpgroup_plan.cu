#include "cuda/fed.cuh"
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
constexpr double kSharedBytes = 128.0;  // of shared memory, in or out

// Two blocks' share of a multiprocessor's shared memory each: of one kernel, or of this one and of
// the next, whose weights can come while this one runs.
constexpr size_t kHalfShared = 112 * 1024;
constexpr size_t kStreamedRing = 160 * 1024;
constexpr int kLeastFragmentStages = 4;
constexpr int kMostFragmentStages = 12;
constexpr int kLeastPackedStages = 4;
constexpr size_t kFragmentRing = 48 * 1024;

int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// use(rows of a block as a type).
template <typename Use>
auto with_rows(int rows, Use use) {
  switch (rows) {
    case 8:
      return use(std::integral_constant<int, 8>{});
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

// ---- dequantized in registers -----------------------------------------------------------------

void finish(const WarpgroupWork& work, size_t shared_limit, WarpgroupPlan& plan) {
  const int streams = plan.groups * plan.active, stage = work.slab_bytes + 8;
  const auto fixed = static_cast<size_t>(with_rows(plan.rows, [&](auto n) {
    return rows_bytes<n.value>(work.rows, work.slabs) + kRowStages<n.value> * 16;
  }));
  const size_t most = shared_limit > fixed ? shared_limit - fixed : 0;
  const auto fit =
      static_cast<int>(std::min(kStreamedRing, most) / static_cast<size_t>(streams * stage));
  const auto rounds = static_cast<int>(up(plan.items, plan.blocks));
  plan.stages = std::clamp(fit, 2, std::clamp(work.slabs * rounds, 2, kMostStages));
  plan.shared_bytes = fixed + static_cast<size_t>(plan.stages * streams * stage);
  plan.threads = (plan.groups * kGroupWarps + 1) * 32;
}

// ---- fed --------------------------------------------------------------------------------------

// Rings of slabs, packed and dequantized, into `shared` bytes, or as little as goes.
template <int kRows>
void finish_fed(const WarpgroupWork& work, size_t shared, size_t shared_limit,
                WarpgroupPlan& plan) {
  const int tiles = plan.groups * plan.active;
  const auto rounds = static_cast<int>(up(plan.items, plan.blocks));
  plan.feeders = kFeeders<kRows>;
  plan.threads = (plan.groups * kGroupWarps + plan.feeders + (kRows > kResidentRows ? 1 : 0)) * 32;
  const auto bytes = [&](int stages, int packed) {
    return static_cast<size_t>(
        FedLayout<kRows>(0, work.rows, work.slabs, work.slab_bytes, tiles, stages, packed).end);
  };
  const int slabs = rounds * work.slabs;
  const int most_packed =
      std::clamp(static_cast<int>(up(slabs * tiles, plan.feeders)), 2, kMostPackedStages);
  const auto fit = static_cast<int>(kFragmentRing / static_cast<size_t>(tiles * kFragmentBytes));
  plan.stages = std::clamp(fit, kLeastFragmentStages, kMostFragmentStages);
  plan.packed_stages = 2;
  if (bytes(plan.stages, plan.packed_stages) > shared_limit) plan.stages = kLeastFragmentStages;
  // Rows that leave no room in the share for what memory needs under way go beyond it.
  const bool fits = bytes(plan.stages, std::min(kLeastPackedStages, most_packed)) <= shared;
  const size_t most = fits ? std::min(shared, shared_limit) : shared_limit;
  while (plan.packed_stages < most_packed && bytes(plan.stages, plan.packed_stages + 1) <= most) {
    ++plan.packed_stages;
  }
  plan.shared_bytes = bytes(plan.stages, plan.packed_stages);
}

// One warpgroup a block; tiles spread so that the most of a multiprocessor is least.
WarpgroupPlan resident(const WarpgroupWork& work, int multiprocessors, size_t shared_limit) {
  WarpgroupPlan plan;
  plan.rows = kResidentRows;
  plan.groups = 1;
  int64_t least = INT64_MAX;
  for (int active = 1; active <= kGroupWarps; ++active) {
    const int64_t share = up(up(work.tiles, active), multiprocessors) * active;
    if (share > least) continue;
    least = share;
    plan.active = active;
  }
  count_blocks(work, multiprocessors, plan);
  const bool crowded = plan.items > multiprocessors;
  if (crowded) plan.blocks = std::min(plan.items, 2 * multiprocessors);
  finish_fed<kResidentRows>(work, kHalfShared, shared_limit, plan);
  if (crowded && plan.shared_bytes > kHalfShared) {
    plan.blocks = std::min(plan.items, multiprocessors);
    finish_fed<kResidentRows>(work, shared_limit, shared_limit, plan);
  }
  plan.cycles = cycles(work, plan, multiprocessors, plan.active * halves_or(work, 32.0) / 4.0);
  return plan;
}

// Cycles a step of a block of fed warpgroups.
double fed_step(const WarpgroupWork& work, const WarpgroupPlan& plan) {
  const double tiles = plan.groups * plan.active;
  const double fragments = tiles * kFragmentBytes / 8.0 * 2.0,
               packed = tiles * work.slab_bytes / 4.0;
  const double rows = (plan.groups + 1) * plan.rows * 32.0;
  return std::max((fragments + packed + rows) / kSharedBytes,
                  tiles * halves_or(work, kDequantizeStep) / 4.0);
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

WarpgroupPlan fed_plan(const WarpgroupWork& work, int multiprocessors, size_t shared_limit) {
  if (work.rows <= kResidentRows) return resident(work, multiprocessors, shared_limit);
  WarpgroupPlan best;
  for (const int rows : {32, 16}) {
    if (rows > 16 && work.rows <= rows / 2) continue;
    for (const int groups : {2, 1}) {
      for (const int active : {4, 3, 2, 1}) {
        if (groups > 1 && active < 3) continue;
        WarpgroupPlan plan;
        plan.rows = rows;
        plan.groups = groups;
        plan.active = active;
        count_blocks(work, multiprocessors, plan);
        plan.cycles = cycles(work, plan, multiprocessors, fed_step(work, plan));
        const bool fits = best.items > 0 && best.shared_bytes <= shared_limit;
        if (fits && plan.cycles >= best.cycles) continue;
        if (rows == 16) {
          finish_fed<16>(work, shared_limit, shared_limit, plan);
        } else {
          finish_fed<32>(work, shared_limit, shared_limit, plan);
        }
        if (best.items == 0 || plan.shared_bytes <= shared_limit) best = plan;
      }
    }
  }
  return best;
}

}  // namespace tinyloop::cuda
