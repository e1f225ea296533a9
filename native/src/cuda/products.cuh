// The launches of one kind's kernels. Included by one source file per kind.
#pragma once

#include <algorithm>
#include <atomic>

#include "cuda/direct.cuh"
#include "cuda/fed.cuh"
#include "cuda/fed_plan.h"
#include "cuda/narrow.cuh"
#include "cuda/products.h"
#include "cuda/row_map.h"
#include "cuda/tiled.cuh"
#include "cuda/warpgroup.cuh"
#include "cuda/warpgroup_plan.h"

namespace tinyloop::cuda {

// Raises a kernel's limit of dynamic shared memory to the device's, once per kernel and device.
template <typename Kernel>
void allow_shared(Kernel* kernel, std::atomic<uint64_t>& devices_done) {
  int device = 0;
  check(cudaGetDevice(&device), "ask for the current device");
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (devices_done.load(std::memory_order_relaxed) & bit) return;
  int limit = 0;
  check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "ask for the shared memory of a block");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit),
        "raise a kernel's shared memory");
  devices_done.fetch_or(bit, std::memory_order_relaxed);
}

// ---- narrow -----------------------------------------------------------------------------------

// Half of a multiprocessor's shared memory: what the next kernel can fill while this one runs.
inline constexpr int kNarrowRing = 112 * 1024;

// Tiles of a block, each with rings of tile_bytes: as many as keep the largest share of a
// multiprocessor least; on ties more, so that fewer blocks form the input.
inline int narrow_slots(int64_t tiles, int tile_bytes, int parts, int multiprocessors) {
  const int most = std::min({4, kNarrowWarps / parts, std::max(1, kNarrowRing / tile_bytes)});
  int best = 1;
  int64_t best_share = INT64_MAX;
  for (int slots = 1; slots <= most; ++slots) {
    const int64_t blocks = (tiles + slots - 1) / slots;
    const int64_t share = (blocks + multiprocessors - 1) / multiprocessors * slots;
    if (share <= best_share) {
      best = slots;
      best_share = share;
    }
  }
  return best;
}

template <TensorKind kKind>
int slab_bytes_of(const DeviceWeight& w) {
  return slab_bytes(kKind, kKind == TensorKind::kF16 ? 1 : static_cast<int>(w.group));
}

template <TensorKind kKind>
NarrowArguments narrow_arguments(const LinearCall& call, const LinearContext& context) {
  NarrowArguments args{};
  const DeviceWeight& w = call.weight;
  args.data = w.data;
  args.outputs = w.outputs;
  args.inputs = w.inputs;
  args.rows = call.rows;
  args.tiles = weight_tiles(w.outputs);
  args.slabs = static_cast<int>(weight_slabs(w.inputs));
  args.parts = context.parts;
  args.part_slabs = part_slabs(w.inputs, context.parts);
  args.stages = std::min(kNarrowStages<kKind>, args.part_slabs);
  args.slots = narrow_slots(args.tiles, args.parts * args.stages * slab_bytes_of<kKind>(w),
                            args.parts, context.multiprocessors);
  args.input = call.input;
  args.output = call.output;
  return args;
}

inline Grid narrow_grid(const NarrowArguments& args, int slab) {
  Grid grid;
  const int streams = args.slots * args.parts;
  grid.threads = static_cast<unsigned>(std::max(kFormingWarps, streams)) * 32;
  grid.blocks = dim3(static_cast<unsigned>((args.tiles + args.slots - 1) / args.slots),
                     static_cast<unsigned>((args.rows + kNarrowRows - 1) / kNarrowRows));
  const int64_t rows = std::min<int64_t>(args.rows, kNarrowRows);
  grid.shared_bytes = static_cast<size_t>(streams) * static_cast<size_t>(args.stages * slab) +
                      static_cast<size_t>(rows * row_pitch(args.slabs)) +
                      (args.parts > 1 ? grid.threads * sizeof(float4) : 0);
  return grid;
}

template <TensorKind kKind>
size_t narrow_shared(const LinearCall& call, const LinearContext& context) {
  return narrow_grid(narrow_arguments<kKind>(call, context), slab_bytes_of<kKind>(call.weight))
      .shared_bytes;
}

template <TensorKind kKind, int kGroup>
void launch_narrow(cudaStream_t stream, const NarrowArguments& args, const Grid& grid) {
  static std::atomic<uint64_t> devices_done{0};
  allow_shared(narrow_kernel<kKind, kGroup>, devices_done);
  launch(stream, grid, narrow_kernel<kKind, kGroup>, args);
}

template <TensorKind kKind>
void narrow(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  const NarrowArguments args = narrow_arguments<kKind>(call, context);
  const Grid grid = narrow_grid(args, slab_bytes_of<kKind>(call.weight));
  if constexpr (kKind == TensorKind::kF16) {
    launch_narrow<kKind, 0>(stream, args, grid);
  } else {
    if (call.weight.group == 32) return launch_narrow<kKind, 32>(stream, args, grid);
    if (call.weight.group == 64) return launch_narrow<kKind, 64>(stream, args, grid);
    launch_narrow<kKind, 128>(stream, args, grid);
  }
}

// ---- tiled ------------------------------------------------------------------------------------

template <typename Use>
auto with_tiling(TileShape shape, Use use) {
  switch (shape) {
    case TileShape::k128x128:
      return use(Tiling<4, 4, 2, 4, 3>{});
    case TileShape::k128x64:
      return use(Tiling<2, 4, 4, 2, 3>{});
    case TileShape::k64x32:
      return use(Tiling<1, 4, 4, 1, 4>{});
    case TileShape::k64x16:
      return use(Tiling<1, 2, 4, 1, 6>{});
    default:
      return use(Tiling<1, 1, 2, 2, 6>{});
  }
}

template <TensorKind kKind>
size_t tiled_shared(const LinearCall& call, TileShape shape) {
  return with_tiling(shape, [&](auto tiling) {
    return static_cast<size_t>(tiling.kStages) *
           static_cast<size_t>(tiling.stage_bytes(slab_bytes_of<kKind>(call.weight)));
  });
}

template <TensorKind kKind, typename T, bool kParted>
void launch_tiled(cudaStream_t stream, const TiledArguments& args) {
  static std::atomic<uint64_t> devices_done{0};
  allow_shared(tiled_kernel<kKind, T, kParted>, devices_done);
  Grid grid;
  grid.threads = T::kThreads;
  grid.blocks = dim3(static_cast<unsigned>((args.tiles + T::kBlockTiles - 1) / T::kBlockTiles),
                     static_cast<unsigned>((args.rows + T::kBlockRows - 1) / T::kBlockRows));
  grid.shared_bytes =
      static_cast<size_t>(T::kStages) * static_cast<size_t>(T::stage_bytes(args.slab_bytes));
  launch(stream, grid, tiled_kernel<kKind, T, kParted>, args);
}

template <TensorKind kKind>
void tiled(cudaStream_t stream, const LinearCall& call, const LinearContext& context,
           TileShape shape) {
  const DeviceWeight& w = call.weight;
  TiledArguments args{};
  args.data = w.data;
  args.in = static_cast<const __half*>(call.input.rows);
  args.stride = call.input.stride;
  args.outputs = w.outputs;
  args.inputs = w.inputs;
  args.rows = call.rows;
  args.tiles = weight_tiles(w.outputs);
  args.slabs = static_cast<int>(weight_slabs(w.inputs));
  args.slab_bytes = slab_bytes_of<kKind>(w);
  args.group = static_cast<int>(w.group);
  args.part_slabs = part_slabs(w.inputs, context.parts);
  args.aligned = reinterpret_cast<uintptr_t>(args.in) % 16 == 0 && args.stride % 8 == 0;
  args.output = call.output;
  with_tiling(shape, [&](auto tiling) {
    using T = decltype(tiling);
    if constexpr (T::kTiles * T::kRowTiles < 16) {  // two sets of sums must fit the registers
      if (context.parts > 1) return launch_tiled<kKind, T, true>(stream, args);
    }
    if (context.parts > 1) throw DeviceError("cannot multiply tiles of 128 x 128 in parts");
    launch_tiled<kKind, T, false>(stream, args);
  });
}

// ---- warpgroups -------------------------------------------------------------------------------

template <TensorKind kKind>
WarpgroupWork warpgroup_work(const LinearCall& call) {
  const DeviceWeight& w = call.weight;
  WarpgroupWork work;
  work.tiles = weight_tiles(w.outputs);
  work.slabs = static_cast<int>(weight_slabs(w.inputs));
  work.slab_bytes = slab_bytes_of<kKind>(w);
  work.rows = call.rows;
  work.halves = kKind == TensorKind::kF16;
  return work;
}

template <TensorKind kKind>
WarpgroupPlan warpgroup_plan_of(const LinearCall& call, const LinearContext& context) {
  return warpgroup_plan(warpgroup_work<kKind>(call), context.multiprocessors, context.shared_limit);
}

inline Grid warpgroup_grid(const WarpgroupPlan& plan) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(plan.blocks));
  grid.threads = static_cast<unsigned>(plan.threads);
  grid.shared_bytes = plan.shared_bytes;
  return grid;
}

inline CUtensorMap map_of(const LinearCall& call, const WarpgroupPlan& plan) {
  return map_rows(call.input.rows, call.input.stride, call.weight.inputs, call.rows, plan.rows);
}

inline WarpgroupArguments warpgroup_arguments(const LinearCall& call, const WarpgroupPlan& plan) {
  WarpgroupArguments args{};
  const DeviceWeight& w = call.weight;
  args.data = w.data;
  args.outputs = w.outputs;
  args.inputs = w.inputs;
  args.rows = call.rows;
  args.tiles = weight_tiles(w.outputs);
  args.slabs = static_cast<int>(weight_slabs(w.inputs));
  args.active = plan.active;
  args.groups = plan.groups;
  args.stages = plan.stages;
  args.row_blocks = plan.row_blocks;
  args.items = plan.items;
  args.output = call.output;
  args.map = map_of(call, plan);
  return args;
}

// use(the weight's group as a type).
template <TensorKind kKind, typename Use>
void with_group(int64_t group, Use use) {
  if constexpr (kKind == TensorKind::kF16) {
    use(std::integral_constant<int, 0>{});
  } else {
    if (group == 32) return use(std::integral_constant<int, 32>{});
    if (group == 64) return use(std::integral_constant<int, 64>{});
    use(std::integral_constant<int, 128>{});
  }
}

template <TensorKind kKind, int kGroup, int kRows>
void launch_warpgroup(cudaStream_t stream, const WarpgroupArguments& args, const Grid& grid) {
  static std::atomic<uint64_t> devices_done{0};
  allow_shared(warpgroup_kernel<kKind, kGroup, kRows>, devices_done);
  launch(stream, grid, warpgroup_kernel<kKind, kGroup, kRows>, args);
}

template <TensorKind kKind>
void warpgroup(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  const WarpgroupPlan plan = warpgroup_plan_of<kKind>(call, context);
  const WarpgroupArguments args = warpgroup_arguments(call, plan);
  const Grid grid = warpgroup_grid(plan);
  with_group<kKind>(call.weight.group, [&](auto g) {
    if (plan.rows == 16) return launch_warpgroup<kKind, g.value, 16>(stream, args, grid);
    if (plan.rows == 32) return launch_warpgroup<kKind, g.value, 32>(stream, args, grid);
    launch_warpgroup<kKind, g.value, 64>(stream, args, grid);
  });
}

// ---- fed --------------------------------------------------------------------------------------

template <TensorKind kKind>
FedPlan fed_plan_of(const LinearCall& call, const LinearContext& context, bool direct) {
  const DeviceWeight& w = call.weight;
  FedWork work;
  work.tiles = weight_tiles(w.outputs);
  work.slabs = static_cast<int>(weight_slabs(w.inputs));
  work.slab_bytes = slab_bytes_of<kKind>(w);
  work.rows = call.rows;
  work.row_pitch = static_cast<int>(row_pitch(work.slabs));
  work.parts = context.parts;
  work.halves = kKind == TensorKind::kF16;
  work.direct = direct && !work.halves;  // which have nothing to dequantize
  return fed_plan(work, context.multiprocessors, context.shared_limit);
}

// A norm needs all of its row in each warp that forms some of it: more than a few to a row are none
// the faster. A gate is worth every warp but the last ones, which copy.
inline int fed_formers(const LinearCall& call, const FedPlan& plan) {
  if (copies_rows(call)) return 0;
  const int warps = plan.threads / 32 - plan.copiers;
  if (call.input.kind != InputKind::kState) return warps;
  return std::min(warps, static_cast<int>(call.rows) * kNormShares);
}

template <TensorKind kKind, int kGroup, int kGroups>
void launch_fed(cudaStream_t stream, const FedArguments& args) {
  Grid grid;
  grid.blocks =
      dim3(static_cast<unsigned>(args.plan.blocks), static_cast<unsigned>(args.plan.row_blocks));
  grid.threads = static_cast<unsigned>(args.plan.threads);
  grid.shared_bytes = args.plan.shared_bytes;
  if constexpr (kKind != TensorKind::kF16) {
    if (args.plan.run_slabs > 1) {
      static std::atomic<uint64_t> devices_done{0};
      allow_shared(direct_kernel<kKind, kGroup, kGroups>, devices_done);
      return launch(stream, grid, direct_kernel<kKind, kGroup, kGroups>, args);
    }
  }
  static std::atomic<uint64_t> devices_done{0};
  allow_shared(fed_kernel<kKind, kGroup, kGroups>, devices_done);
  launch(stream, grid, fed_kernel<kKind, kGroup, kGroups>, args);
}

template <TensorKind kKind>
void fed(cudaStream_t stream, const LinearCall& call, const LinearContext& context, bool direct) {
  FedArguments args{};
  const DeviceWeight& w = call.weight;
  args.plan = fed_plan_of<kKind>(call, context, direct);
  args.data = w.data;
  args.outputs = w.outputs;
  args.inputs = w.inputs;
  args.tiles = weight_tiles(w.outputs);
  args.rows = static_cast<int>(call.rows);
  args.slabs = static_cast<int>(weight_slabs(w.inputs));
  args.formers = fed_formers(call, args.plan);
  args.input = call.input;
  args.output = call.output;
  with_group<kKind>(w.group, [&](auto g) {
    if (args.plan.groups == 1) return launch_fed<kKind, g.value, 1>(stream, args);
    if (args.plan.groups == 2) return launch_fed<kKind, g.value, 2>(stream, args);
    launch_fed<kKind, g.value, 4>(stream, args);
  });
}

template <TensorKind kKind>
constexpr KindKernels kind_kernels() {
  return {narrow_shared<kKind>,     tiled_shared<kKind>, narrow<kKind>,      tiled<kKind>,
          warpgroup_plan_of<kKind>, warpgroup<kKind>,    fed_plan_of<kKind>, fed<kKind>};
}

}  // namespace tinyloop::cuda
