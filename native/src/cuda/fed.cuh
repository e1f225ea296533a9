// The product of few rows on sm_90a, as fast as a chain of tensor-core sums goes.
//
// A block has chains and feeders, a warp each. A chain has the 16 outputs of a tile through one
// part of the inputs; it only takes fragments of the weight and of the rows to registers and
// multiplies. The feeders dequantize slab after slab into the chains' rings in shared memory. The
// packed slabs come to rings of their own by bulk copies, the first of them before the kernel
// before this one has ended. FP16 weights are fragments already and are copied straight to the
// chains' rings.
//
// Rows of activations come by bulk copies, a chunk of inputs after the other; up to 8 rows of other
// inputs the block forms itself. Blocks go on to other tiles where there are more than fit the
// device. The bits are those of the narrow kernel.
#pragma once

#include "cuda/fed_plan.h"
#include "cuda/narrow.cuh"
#include "cuda/wgmma.cuh"

namespace tinyloop::cuda {

struct FedArguments {
  const uint8_t* data;
  int64_t outputs, inputs, tiles;
  int rows, slabs;
  int formers;  // warps that form the rows, not the last one; 0: bulk copies bring them
  FedPlan plan;
  LinearInput input;
  LinearOutput output;
};

// ---- feeding ----------------------------------------------------------------------------------

// A feeder's place among the runs of slabs of the block (of one slab each, but of chains that
// dequantize themselves), in which the feeders take turns: run by run, in each the chains.
struct FeederCursor {
  const FedArguments& args;
  int chains, whole, rest;  // feeders by chains
  int item, slab, chain, stage;
  uint32_t phase;  // of the chain's ring

  // The block's `unit`th.
  __device__ __forceinline__ FeederCursor(const FedArguments& args, int feeders, int unit)
      : args(args), chains(args.plan.slots * args.plan.parts) {
    whole = feeders / chains;
    rest = feeders % chains;
    const int ordinal = unit / chains;
    chain = unit % chains;
    item =
        static_cast<int>(blockIdx.x) + ordinal / args.plan.part_runs * static_cast<int>(gridDim.x);
    slab = ordinal % args.plan.part_runs;
    stage = ordinal % args.plan.stages;
    phase = static_cast<uint32_t>(ordinal / args.plan.stages % 2);
  }
  __device__ __forceinline__ bool valid() const { return item < args.plan.items; }
  __device__ __forceinline__ int ring_slot() const { return chain * args.plan.stages + stage; }
  // Beyond the last tile and slab: the last once more, which is not used.
  __device__ __forceinline__ const uint8_t* source(int slab_bytes) const {
    int slabs = 0;
    return run(slab_bytes, slabs);
  }
  // Where this run of slabs begins, and how many it has.
  __device__ __forceinline__ const uint8_t* run(int slab_bytes, int& slabs) const {
    const int slot = args.plan.parts == 1 ? chain : chain / args.plan.parts;
    const int part = chain - slot * args.plan.parts;
    const int tile = min(item * args.plan.slots + slot, static_cast<int>(args.tiles) - 1);
    const int begin = part * args.plan.part_slabs + slab * args.plan.run_slabs;
    const int end = min((part + 1) * args.plan.part_slabs, args.slabs);
    const int at = min(begin, args.slabs - 1);
    slabs = max(1, min(args.plan.run_slabs, end - at));
    return args.data + (static_cast<int64_t>(tile) * args.slabs + at) * slab_bytes;
  }
  // To this feeder's next.
  __device__ __forceinline__ void advance() {
    int slabs = whole;
    chain += rest;
    if (chain >= chains) {
      chain -= chains;
      ++slabs;
    }
    stage += slabs;
    while (stage >= args.plan.stages) {
      stage -= args.plan.stages;
      phase ^= 1;
    }
    slab += slabs;
    while (slab >= args.plan.part_runs) {
      slab -= args.plan.part_runs;
      item += static_cast<int>(gridDim.x);
    }
  }
};

__device__ __forceinline__ void store_fragment(uint32_t to, const uint32_t (&a)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]),
               "r"(a[3])
               : "memory");
}

// A warp that dequantizes.
template <TensorKind kKind, int kGroup>
struct Feeder {
  static constexpr int kBytes = slab_bytes(kKind, kGroup);
  const FedArguments& args;
  const uint8_t* ring;         // of packed slabs
  uint32_t ring_at, barriers;  // the same as an address; a barrier each
  uint32_t fragments, full, empty;
  int feeder, lane;

  // The first slabs, a lane each.
  __device__ __forceinline__ void start() const {
    if (lane < args.plan.packed_stages) {
      init_barrier(barriers + lane * 8, 1);
      publish_barriers();
      const FeederCursor at(args, args.plan.feeders, feeder + lane * args.plan.feeders);
      if (at.valid()) {
        copy_bulk(ring_at + lane * kBytes, at.source(kBytes), kBytes, barriers + lane * 8);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void dequantize_to(const SlabRegisters<kKind, kGroup>& slab,
                                                uint32_t to) const {
    LaneConstants constants{};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if (step * 16 % kGroup == 0) {
        constants =
            lane_constants<kKind>(slab.low[step * 16 / kGroup], slab.high[step * 16 / kGroup]);
      }
      uint32_t a[4];
      unit_fragment<kKind>(slab.units[step / kUnitSteps<kKind>], step % kUnitSteps<kKind>,
                           constants, a);
      store_fragment(to + step * 512, a);
    }
  }
  // Every slab of this warp.
  __device__ __forceinline__ void feed() const {
    FeederCursor now(args, args.plan.feeders, feeder);
    FeederCursor next(args, args.plan.feeders,
                      feeder + args.plan.packed_stages * args.plan.feeders);
    int stage = 0;
    uint32_t phase = 0;
#pragma unroll 1
    while (now.valid()) {
      wait_for_phase(barriers + stage * 8, phase);
      SlabRegisters<kKind, kGroup> slab;
      slab.load(ring + stage * kBytes, lane);
      const int slot = now.ring_slot();
      wait_for_phase(empty + slot * 8, now.phase ^ 1);
      dequantize_to(slab, fragments + slot * kFragmentBytes + lane * 16);
      __syncwarp();  // all of the slab is taken, and its fragments are there
      if (lane == 0) {
        arrive(full + slot * 8);
        if (next.valid()) {
          copy_bulk(ring_at + stage * kBytes, next.source(kBytes), kBytes, barriers + stage * 8);
        }
      }
      now.advance();
      next.advance();
      if (++stage == args.plan.packed_stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

template <TensorKind kKind, int kGroup>
__device__ __forceinline__ Feeder<kKind, kGroup> feeder_of(const FedArguments& args,
                                                           uint8_t* shared, int feeder, int lane) {
  const uint32_t begin = shared_address(shared);
  const uint32_t packed =
      args.plan.packed + feeder * args.plan.packed_stages * Feeder<kKind, kGroup>::kBytes;
  return {args,
          shared + packed,
          begin + packed,
          begin + args.plan.packed_full + feeder * args.plan.packed_stages * 8,
          begin + args.plan.fragments,
          begin + args.plan.full,
          begin + args.plan.empty,
          feeder,
          lane};
}

// By one thread: every slab of an FP16 weight, straight to the chains' rings.
__device__ __forceinline__ void copy_fragments(const FedArguments& args, uint32_t begin) {
#pragma unroll 1
  for (FeederCursor at(args, 1, 0); at.valid(); at.advance()) {
    const int slot = at.ring_slot();
    wait_for_phase(begin + args.plan.empty + slot * 8, at.phase ^ 1);
    copy_bulk(begin + args.plan.fragments + slot * kFragmentBytes, at.source(kFragmentBytes),
              kFragmentBytes, begin + args.plan.full + slot * 8);
  }
}

// ---- the rows ---------------------------------------------------------------------------------

// The rows of a block.
struct BlockRows {
  int64_t first;
  int rows;
};

// What lies behind the inputs of a row in its last slab, where rows are copied.
__device__ __forceinline__ void clear_behind(const FedArguments& args, const BlockRows& block,
                                             uint8_t* rows, int lane) {
  const int64_t pitch = row_pitch(args.slabs);
  const int pieces = static_cast<int>(args.slabs * kSlabInputs - args.inputs) / 8;
#pragma unroll 1
  for (int i = lane; i < block.rows * pieces; i += 32) {
    *reinterpret_cast<uint4*>(rows + i / pieces * pitch + args.inputs * 2 + i % pieces * 16) =
        make_uint4(0, 0, 0, 0);
  }
}

// Rows of activations, by a warp: a lane each.
__device__ __forceinline__ void bring_rows(const FedArguments& args, const BlockRows& block,
                                           uint32_t to, uint32_t barriers, int lane) {
  constexpr int kInputs = kChunkSlabs * kSlabInputs;
  const auto* row =
      static_cast<const __half*>(args.input.rows) + (block.first + lane) * args.input.stride;
  const auto at = to + lane * static_cast<uint32_t>(row_pitch(args.slabs));
#pragma unroll 1
  for (int chunk = 0; chunk < args.plan.row_chunks; ++chunk) {
    const int first = chunk * kInputs;
    const int bytes = min(kInputs, static_cast<int>(args.inputs) - first) * 2;
    if (lane == 0) expect_bytes(barriers + chunk * 8, block.rows * bytes);
    __syncwarp();
    if (lane < block.rows) start_copy(at + first * 2, row + first, bytes, barriers + chunk * 8);
  }
}

// This warp's share of rows that the block forms.
__device__ __forceinline__ void form_share(const FedArguments& args, uint8_t* to, uint32_t barriers,
                                           int warp, int lane) {
  const int64_t pitch = row_pitch(args.slabs), padded = args.slabs * kSlabInputs;
  int shares = args.formers > args.rows ? args.formers / args.rows : 1;
  if (args.input.kind == InputKind::kState) shares = min(shares, kNormShares);
#pragma unroll 1
  for (int i = warp; i < args.rows * shares; i += args.formers) {
    const int row = i % args.rows;
    form_row<__half>(args.input, row, args.inputs, i / args.rows, shares,
                     reinterpret_cast<__half*>(to + row * pitch), padded);
  }
  __syncwarp();
#pragma unroll 1
  for (int chunk = lane; chunk < args.plan.row_chunks; chunk += 32) arrive(barriers + chunk * 8);
}

// ---- chains -----------------------------------------------------------------------------------

// multiply(), in its place among loads and waits.
__device__ __forceinline__ void multiply_here(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Steps of 16 inputs that a chain holds in registers, twice.
template <int kGroups>
inline constexpr int kHeldSteps = kGroups == 1 ? 4 : 2;

// Some steps in registers: the weight's fragments, and the rows' for each group of 8 rows.
template <int kGroups>
struct HeldSteps {
  static constexpr int kSteps = kHeldSteps<kGroups>;
  uint32_t a[kSteps][4], b[kGroups][kSteps / 2][4];

  // `rows`: a lane's addresses for load_matrices(), of which the steps are `at` bytes on.
  __device__ __forceinline__ void load(uint32_t fragments, const uint32_t (&rows)[kGroups],
                                       uint32_t at) {
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) load_matrices(b[g][pair], rows[g] + at + pair * 64);
#pragma unroll
      for (int i = pair * 2; i < pair * 2 + 2; ++i) {
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3])
                     : "r"(fragments + i * 512));
      }
    }
  }
  // Steps [begin, end).
  __device__ __forceinline__ void multiply_into(float (&c)[kGroups][4], int begin, int end) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i < begin || i >= end) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        multiply_here(c[g], a[i], b[g][i / 2][i % 2 * 2], b[g][i / 2][i % 2 * 2 + 1]);
      }
    }
  }
};

template <int kGroups>
struct Chain {
  static constexpr int kSteps = kHeldSteps<kGroups>;
  static constexpr int kFragments = kSteps * 512, kRowBytes = kSteps * 32;  // of what is held
  uint32_t ring;         // this lane's first 16 bytes
  uint32_t full, empty;  // barriers of its stages
  int stages;
  uint32_t rows[kGroups];  // this lane's addresses for load_matrices() in slab 0 of all
  uint32_t rows_full;
  int first_slab, count, part_slabs;
  int lane;
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void wait_for_rows(int slab) const {
    wait_for_phase(rows_full + slab / kChunkSlabs * 8, 0);
  }
  __device__ __forceinline__ void give_back(int from) const {
    __syncwarp();
    if (lane == 0) arrive(empty + from * 8);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // sums += this chain's slabs of the next tile in the ring, in order. Two sets of registers take
  // turns: one is multiplied while the other is loaded.
  __device__ __forceinline__ void run(float (&sums)[kGroups][4]) {
    HeldSteps<kGroups> early, late;
    if (count > 0) {
      wait_for_rows(first_slab);
      wait_for_phase(full + stage * 8, phase);
      early.load(ring + stage * kFragmentBytes, rows, first_slab * (kSlabInputs * 2));
    }
#pragma unroll 1
    for (int slab = first_slab; slab < first_slab + count; ++slab) {
      const uint32_t row = slab * (kSlabInputs * 2);
      const uint32_t fragments = ring + stage * kFragmentBytes;
#pragma unroll
      for (int i = 0; i + 2 < 8 / kSteps; i += 2) {
        late.load(fragments + (i + 1) * kFragments, rows, row + (i + 1) * kRowBytes);
        early.multiply_into(sums, 0, kSteps);
        early.load(fragments + (i + 2) * kFragments, rows, row + (i + 2) * kRowBytes);
        late.multiply_into(sums, 0, kSteps);
      }
      constexpr int kLast = 8 / kSteps - 1;
      late.load(fragments + kLast * kFragments, rows, row + kLast * kRowBytes);
      early.multiply_into(sums, 0, kSteps - 1);
      const int now = stage;
      advance();
      const bool more = slab + 1 < first_slab + count;
      const bool there = is_over(full + stage * 8, phase);
      early.multiply_into(sums, kSteps - 1, kSteps);
      late.multiply_into(sums, 0, 1);
      if (more) {
        if (!there) wait_for_phase(full + stage * 8, phase);
        if ((slab + 1) % kChunkSlabs == 0) wait_for_rows(slab + 1);
        early.load(ring + stage * kFragmentBytes, rows, row + kSlabInputs * 2);
      }
      late.multiply_into(sums, 1, kSteps);
      give_back(now);
    }
    // A last part that is shorter than the others is fed as many slabs.
    for (int i = count; i < part_slabs; ++i) {
      wait_for_phase(full + stage * 8, phase);
      give_back(stage);
      advance();
    }
  }
};

// The sums of a tile's parts added in order, in the warp of the first.
template <int kGroups>
__device__ __forceinline__ void add_parts(const FedArguments& args, float4* partials, int slot,
                                          int part, int lane, float (&sums)[kGroups][4]) {
  float4* mine = partials + (slot * args.plan.parts + part) * kGroups * 32 + lane;
  if (part > 0) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      mine[g * 32] = make_float4(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
    }
  }
  asm volatile("bar.sync %0, %1;" ::"r"(slot + 1), "r"(args.plan.parts * 32) : "memory");
  if (part > 0) return;
#pragma unroll 1
  for (int p = 1; p < args.plan.parts && p * args.plan.part_slabs < args.slabs; ++p) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float4 more = mine[(p * kGroups + g) * 32];
      sums[g][0] = __fadd_rn(sums[g][0], more.x);
      sums[g][1] = __fadd_rn(sums[g][1], more.y);
      sums[g][2] = __fadd_rn(sums[g][2], more.z);
      sums[g][3] = __fadd_rn(sums[g][3], more.w);
    }
  }
}

// Every tile of a chain.
template <int kGroups, typename AChain>
__device__ __forceinline__ void chain_tiles(const FedArguments& args, const BlockRows& block,
                                            AChain& chain, uint8_t* partials, int warp) {
  const int slot = args.plan.parts == 1 ? warp : warp / args.plan.parts;
  const int part = warp - slot * args.plan.parts;
  const int lane = chain.lane;
  const int row = lane % 4 * 2;
  int buffer = 0;  // of partial sums: they are read while the next tile's are written
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < args.plan.items;
       item += static_cast<int>(gridDim.x)) {
    const int64_t tile = static_cast<int64_t>(item) * args.plan.slots + slot;
    const int64_t output = tile * kTileOutputs + lane / 4;
    // This lane's elements of the output: register i of group g is row i % 2 of two, output
    // i / 2 * 8 on.
    const auto owned = [&](int g, int i) {
      return part == 0 && g * 8 + row + i % 2 < block.rows && output + i / 2 * 8 < args.outputs;
    };
    float before[kGroups][4] = {};
    if (args.output.kind == OutputKind::kAdd) {
#pragma unroll
      for (int i = 0; i < kGroups * 4; ++i) {
        const int g = i / 4, r = i % 4;
        if (owned(g, r)) {
          before[g][r] =
              before_of(args.output, block.first + g * 8 + row + r % 2, output + r / 2 * 8);
        }
      }
    }
    float sums[kGroups][4] = {};
    chain.run(sums);
    if (args.plan.parts > 1) {
      auto* of_tile = reinterpret_cast<float4*>(partials) +
                      buffer * args.plan.slots * args.plan.parts * kGroups * 32;
      add_parts<kGroups>(args, of_tile, slot, part, lane, sums);
      buffer ^= 1;
    }
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i) {
      const int g = i / 4, r = i % 4;
      if (owned(g, r)) {
        store_output(args.output, block.first + g * 8 + row + r % 2, output + r / 2 * 8, sums[g][r],
                     before[g][r]);
      }
    }
  }
}

// ---- a block ----------------------------------------------------------------------------------

// The barriers of rings and rows, by a warp.
__device__ __forceinline__ void init_block(const FedArguments& args, uint32_t begin, int lane) {
  const int chains = args.plan.slots * args.plan.parts;
#pragma unroll 1
  for (int i = lane; i < chains * args.plan.stages; i += 32) {
    init_barrier(begin + args.plan.full + i * 8, 1);
    init_barrier(begin + args.plan.empty + i * 8, 1);
  }
#pragma unroll 1
  for (int i = lane; i < args.plan.row_chunks; i += 32) {
    init_barrier(begin + args.plan.rows_full + i * 8, max(args.formers, 1));
  }
  publish_barriers();
}

template <int kGroups>
__device__ __forceinline__ BlockRows rows_of_block(const FedArguments& args) {
  BlockRows block{static_cast<int64_t>(blockIdx.y) * kGroups * 8, 0};
  block.rows = static_cast<int>(min(args.rows - block.first, int64_t{kGroups * 8}));
  return block;
}

// All of a chain but where its ring lies, by its warp; the first one asks for the rows.
template <typename AChain>
__device__ __forceinline__ void place_chain(const FedArguments& args, const BlockRows& block,
                                            uint32_t begin, int warp, int lane, AChain& chain) {
  const uint32_t rows_full = begin + args.plan.rows_full;
  if (args.formers == 0 && warp == 0) bring_rows(args, block, begin, rows_full, lane);
  const int part = args.plan.parts == 1 ? 0 : warp % args.plan.parts;
  chain.full = begin + args.plan.full + warp * args.plan.stages * 8;
  chain.empty = begin + args.plan.empty + warp * args.plan.stages * 8;
  chain.stages = args.plan.stages;
#pragma unroll
  for (int g = 0; g < static_cast<int>(sizeof(chain.rows) / sizeof(chain.rows[0])); ++g) {
    // A lane for a row beyond the last repeats the last one.
    const int row = min(g * 8 + lane % 8, block.rows - 1);
    chain.rows[g] = begin + row * static_cast<int>(row_pitch(args.slabs)) + lane / 8 * 16;
  }
  chain.rows_full = rows_full;
  chain.first_slab = part * args.plan.part_slabs;
  chain.count = max(0, min(args.plan.part_slabs, args.slabs - chain.first_slab));
  chain.part_slabs = args.plan.part_slabs;
  chain.lane = lane;
}

template <TensorKind kKind, int kGroup, int kGroups>
__global__ void __launch_bounds__(kFedWarps<kGroups> * 32, 1)
    fed_kernel(const __grid_constant__ FedArguments args) {
#ifdef TINYLOOP_WARPGROUPS
  extern __shared__ __align__(16) uint8_t shared[];
  constexpr bool kDequantizes = kKind != TensorKind::kF16;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The same in all lanes, and known to be.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  const int feeder = warp - args.plan.slots * args.plan.parts;
  const uint32_t begin = shared_address(shared);
  const uint32_t rows_full = begin + args.plan.rows_full;
  const BlockRows block = rows_of_block<kGroups>(args);
  if constexpr (kDequantizes) {
    // Its rings are its own: no other warp need know of them before it asks for its slabs.
    if (feeder >= 0) feeder_of<kKind, kGroup>(args, shared, feeder, lane).start();
  }
  if (warp == 0) {
    init_block(args, begin, lane);
    if (args.formers == 0) clear_behind(args, block, shared, lane);
  }
  __syncthreads();
  let_next_start();

  if constexpr (kGroups == 1) {
    if (warp < args.formers) {
      wait_for_previous();
      form_share(args, shared, rows_full, warp, lane);
    }
  }
  if (feeder >= 0) {
    if constexpr (kDequantizes) {
      feeder_of<kKind, kGroup>(args, shared, feeder, lane).feed();
    } else {
      if (feeder == args.plan.feeders - 1 && lane == 0) copy_fragments(args, begin);
    }
    wait_for_previous();
    return;
  }
  wait_for_previous();
  Chain<kGroups> chain{};
  place_chain(args, block, begin, warp, lane, chain);
  chain.ring = begin + args.plan.fragments + warp * args.plan.stages * kFragmentBytes + lane * 16;
  chain_tiles<kGroups>(args, block, chain, shared + args.plan.partials, warp);
#else
  __trap();
#endif
}

}  // namespace tinyloop::cuda
