// The product of up to 8 rows on sm_90a, as fast as a chain of tensor-core sums goes.
//
// A block has chains and feeders, a warp each. A chain has the 16 outputs of a tile through one
// part of the inputs; it only takes fragments of the weight and of the rows to registers and
// multiplies. The feeders dequantize slab after slab into the chains' rings in shared memory. The
// packed slabs come to rings of their own by bulk copies, the first of them before the kernel
// before this one has ended. FP16 weights are fragments already and are copied straight to the
// chains' rings.
//
// Rows of activations come by bulk copies, a chunk of inputs after the other; other inputs the
// block forms itself. Blocks go on to other tiles where there are more than fit the device. The
// bits are those of the narrow kernel.
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

// A feeder's place among the slabs of the block, in which the feeders take turns: slab by slab, in
// each the chains.
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
        static_cast<int>(blockIdx.x) + ordinal / args.plan.part_slabs * static_cast<int>(gridDim.x);
    slab = ordinal % args.plan.part_slabs;
    stage = ordinal % args.plan.stages;
    phase = static_cast<uint32_t>(ordinal / args.plan.stages % 2);
  }
  __device__ __forceinline__ bool valid() const { return item < args.plan.items; }
  __device__ __forceinline__ int ring_slot() const { return chain * args.plan.stages + stage; }
  // Beyond the last tile and slab: the last once more, which is not used.
  __device__ __forceinline__ const uint8_t* source(int slab_bytes) const {
    const int slot = args.plan.parts == 1 ? chain : chain / args.plan.parts;
    const int part = chain - slot * args.plan.parts;
    const int tile = min(item * args.plan.slots + slot, static_cast<int>(args.tiles) - 1);
    const int at = min(part * args.plan.part_slabs + slab, args.slabs - 1);
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
    while (slab >= args.plan.part_slabs) {
      slab -= args.plan.part_slabs;
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

// What lies behind the inputs of a row in its last slab, where rows are copied.
__device__ __forceinline__ void clear_behind(const FedArguments& args, uint8_t* rows, int lane) {
  const int64_t pitch = row_pitch(args.slabs);
  const int pieces = static_cast<int>(args.slabs * kSlabInputs - args.inputs) / 8;
#pragma unroll 1
  for (int i = lane; i < args.rows * pieces; i += 32) {
    *reinterpret_cast<uint4*>(rows + i / pieces * pitch + args.inputs * 2 + i % pieces * 16) =
        make_uint4(0, 0, 0, 0);
  }
}

// Rows of activations, by a warp: a lane each.
__device__ __forceinline__ void bring_rows(const FedArguments& args, uint32_t to, uint32_t barriers,
                                           int lane) {
  constexpr int kInputs = kChunkSlabs * kSlabInputs;
  const auto* row = static_cast<const __half*>(args.input.rows) + lane * args.input.stride;
  const auto at = to + lane * static_cast<uint32_t>(row_pitch(args.slabs));
#pragma unroll 1
  for (int chunk = 0; chunk < args.plan.row_chunks; ++chunk) {
    const int first = chunk * kInputs;
    const int bytes = min(kInputs, static_cast<int>(args.inputs) - first) * 2;
    if (lane == 0) expect_bytes(barriers + chunk * 8, args.rows * bytes);
    __syncwarp();
    if (lane < args.rows) start_copy(at + first * 2, row + first, bytes, barriers + chunk * 8);
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

// Four steps of 16 inputs in registers.
struct HalfSlab {
  uint32_t a[4][4], b[2][4];

  __device__ __forceinline__ void load(uint32_t fragments, uint32_t rows) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      load_matrices(b[pair], rows + pair * 64);
#pragma unroll
      for (int i = pair * 2; i < pair * 2 + 2; ++i) {
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3])
                     : "r"(fragments + i * 512));
      }
    }
  }
  template <int kFirst, int kLast>
  __device__ __forceinline__ void multiply_into(float (&c)[4]) const {
#pragma unroll
    for (int i = kFirst; i <= kLast; ++i) {
      multiply_here(c, a[i], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
    }
  }
};

struct Chain {
  uint32_t ring;         // this lane's first 16 bytes
  uint32_t full, empty;  // barriers of its stages
  int stages;
  uint32_t rows;  // this lane's address for load_matrices() in slab 0 of all
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
  // sums += this chain's slabs of the next tile in the ring, in order. Two halves of slabs take
  // turns: one is multiplied while the other is loaded.
  __device__ __forceinline__ void run(float (&sums)[4]) {
    HalfSlab early, late;
    if (count > 0) {
      wait_for_rows(first_slab);
      wait_for_phase(full + stage * 8, phase);
      early.load(ring + stage * kFragmentBytes, rows + first_slab * (kSlabInputs * 2));
    }
#pragma unroll 1
    for (int slab = first_slab; slab < first_slab + count; ++slab) {
      const uint32_t row = rows + slab * (kSlabInputs * 2);
      late.load(ring + stage * kFragmentBytes + kFragmentBytes / 2, row + kSlabInputs);
      early.multiply_into<0, 2>(sums);
      const int now = stage;
      advance();
      const bool more = slab + 1 < first_slab + count;
      const bool there = is_over(full + stage * 8, phase);
      early.multiply_into<3, 3>(sums);
      late.multiply_into<0, 0>(sums);
      if (more) {
        if (!there) wait_for_phase(full + stage * 8, phase);
        if ((slab + 1) % kChunkSlabs == 0) wait_for_rows(slab + 1);
        early.load(ring + stage * kFragmentBytes, row + kSlabInputs * 2);
      }
      late.multiply_into<1, 3>(sums);
      give_back(now);
    }
    // A last part that is shorter than the others is fed as many slabs.
    for (int i = count; i < part_slabs; ++i) {
      wait_for_phase(full + stage * 8, phase);
      give_back(stage);
      advance();
    }
  }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The sums of a tile's parts added in order, in the warp of the first.
__device__ __forceinline__ void add_parts(const FedArguments& args, float4* partials, int slot,
                                          int part, int lane, float (&sums)[4]) {
  float4* mine = partials + (slot * args.plan.parts + part) * 32 + lane;
  if (part > 0) *mine = make_float4(sums[0], sums[1], sums[2], sums[3]);
  asm volatile("bar.sync %0, %1;" ::"r"(slot + 1), "r"(args.plan.parts * 32) : "memory");
  if (part > 0) return;
#pragma unroll 1
  for (int p = 1; p < args.plan.parts && p * args.plan.part_slabs < args.slabs; ++p) {
    const float4 more = mine[p * 32];
    sums[0] = __fadd_rn(sums[0], more.x);
    sums[1] = __fadd_rn(sums[1], more.y);
    sums[2] = __fadd_rn(sums[2], more.z);
    sums[3] = __fadd_rn(sums[3], more.w);
  }
}

// Every tile of a chain.
__device__ __forceinline__ void chain_tiles(const FedArguments& args, Chain& chain,
                                            uint8_t* partials, int slot, int part) {
  const int lane = chain.lane;
  const int row = lane % 4 * 2;
  int buffer = 0;  // of partial sums: they are read while the next tile's are written
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < args.plan.items;
       item += static_cast<int>(gridDim.x)) {
    const int64_t tile = static_cast<int64_t>(item) * args.plan.slots + slot;
    const int64_t output = tile * kTileOutputs + lane / 4;
    // This lane's elements of the output: register i is row i % 2 of two, output i / 2 * 8 on.
    const auto owned = [&](int i) {
      return part == 0 && row + i % 2 < args.rows && output + i / 2 * 8 < args.outputs;
    };
    float before[4] = {};
    if (args.output.kind == OutputKind::kAdd) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (owned(i)) before[i] = before_of(args.output, row + i % 2, output + i / 2 * 8);
      }
    }
    float sums[4] = {};
    chain.run(sums);
    if (args.plan.parts > 1) {
      auto* of_tile =
          reinterpret_cast<float4*>(partials) + buffer * args.plan.slots * args.plan.parts * 32;
      add_parts(args, of_tile, slot, part, lane, sums);
      buffer ^= 1;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (owned(i)) {
        store_output(args.output, row + i % 2, output + i / 2 * 8, sums[i], before[i]);
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

template <TensorKind kKind, int kGroup>
__global__ void __launch_bounds__(kFedWarps * 32, 1)
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
  if constexpr (kDequantizes) {
    // Its rings are its own: no other warp need know of them before it asks for its slabs.
    if (feeder >= 0) feeder_of<kKind, kGroup>(args, shared, feeder, lane).start();
  }
  if (warp == 0) {
    init_block(args, begin, lane);
    if (args.formers == 0) clear_behind(args, shared, lane);
  }
  __syncthreads();
  let_next_start();

  if (warp < args.formers) {
    wait_for_previous();
    form_share(args, shared, rows_full, warp, lane);
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
  if (args.formers == 0 && warp == 0) bring_rows(args, begin, rows_full, lane);
  const int slot = args.plan.parts == 1 ? warp : warp / args.plan.parts;
  const int part = warp - slot * args.plan.parts;
  const int first_slab = part * args.plan.part_slabs;
  Chain chain{};
  chain.ring = begin + args.plan.fragments + warp * args.plan.stages * kFragmentBytes + lane * 16;
  chain.full = begin + args.plan.full + warp * args.plan.stages * 8;
  chain.empty = begin + args.plan.empty + warp * args.plan.stages * 8;
  chain.stages = args.plan.stages;
  // A lane for a row beyond the last repeats the last one.
  chain.rows = begin + min(lane % 8, args.rows - 1) * static_cast<int>(row_pitch(args.slabs)) +
               lane / 8 * 16;
  chain.rows_full = rows_full;
  chain.first_slab = first_slab;
  chain.count = max(0, min(args.plan.part_slabs, args.slabs - first_slab));
  chain.part_slabs = args.plan.part_slabs;
  chain.lane = lane;
  chain_tiles(args, chain, shared + args.plan.partials, slot, part);
#else
  __trap();
#endif
}

}  // namespace tinyloop::cuda
