// The product of few rows on sm_90a where many tiles share a multiprocessor: chains as of fed.cuh
// that dequantize their own weights, in registers, in the shade of the products before. Copying
// warps bring the packed slabs to each chain's ring, several slabs at a time. The bits are those of
// the narrow kernel.
#pragma once

#include "cuda/fed.cuh"

namespace tinyloop::cuda {

// By one thread of each copying warp, which take turns: every run of slabs of the block, to the
// chains' rings.
template <int kBytes>
__device__ __forceinline__ void copy_runs(const FedArguments& args, uint32_t begin, int copier) {
  const uint32_t stage_bytes = kRunSlabs * kBytes;
#pragma unroll 1
  for (FeederCursor at(args, args.plan.copiers, copier); at.valid(); at.advance()) {
    const int slot = at.ring_slot();
    wait_for_phase(begin + args.plan.empty + slot * 8, at.phase ^ 1);
    int slabs = 0;
    const uint8_t* source = at.run(kBytes, slabs);
    copy_bulk(begin + args.plan.fragments + slot * stage_bytes, source, slabs * kBytes,
              begin + args.plan.full + slot * 8);
  }
}

template <TensorKind kKind, int kGroup, int kGroups>
struct DirectChain {
  static constexpr int kBytes = slab_bytes(kKind, kGroup);
  using Stored = SlabRegisters<kKind, kGroup>;
  const uint8_t* ring;
  uint32_t full, empty;  // barriers of its stages
  int stages;
  uint32_t rows[kGroups];  // this lane's addresses for load_matrices() in slab 0 of all
  uint32_t rows_full;
  int first_slab, count, part_slabs;
  int lane;
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void give_back() {
    __syncwarp();
    if (lane == 0) arrive(empty + stage * 8);
    advance();
  }
  // Slab `i` of this chain's to registers, as it is stored. The stage before its own is given back
  // when its last slab has become fragments.
  __device__ __forceinline__ void take(Stored& stored, int i) {
    if (i % kRunSlabs == 0) {
      if (i > 0) give_back();
      wait_for_phase(full + stage * 8, phase);
    }
    if (i == 0 || (first_slab + i) % kChunkSlabs == 0) {
      wait_for_phase(rows_full + (first_slab + i) / kChunkSlabs * 8, 0);
    }
    stored.load(ring + (stage * kRunSlabs + i % kRunSlabs) * kBytes, lane);
  }
  __device__ __forceinline__ void load_rows(uint32_t (&b)[kGroups][4], int pair) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) load_matrices(b[g], rows[g] + pair * 64);
  }
  __device__ __forceinline__ static void unpack(const Stored& stored, int step,
                                                LaneConstants& constants, uint32_t (&a)[4]) {
    if (step * 16 % kGroup == 0) {
      constants =
          lane_constants<kKind>(stored.low[step * 16 / kGroup], stored.high[step * 16 / kGroup]);
    }
    unit_fragment<kKind>(stored.units[step / kUnitSteps<kKind>], step % kUnitSteps<kKind>,
                         constants, a);
  }
  __device__ __forceinline__ static void multiply_step(float (&sums)[kGroups][4],
                                                       const uint32_t (&a)[4],
                                                       const uint32_t (&b)[kGroups][4], int step) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      multiply_here(sums[g], a, b[g][step % 2 * 2], b[g][step % 2 * 2 + 1]);
    }
  }
  // sums += this chain's slabs of the next tile in the ring, in order. While a step is multiplied
  // the one two on is dequantized, and the next slab is on its way to registers.
  __device__ __forceinline__ void run(float (&sums)[kGroups][4]) {
    Stored now, next;
    LaneConstants constants{};
    uint32_t a[4][4], b[2][kGroups][4];  // by step and pair of steps
    const int pairs = first_slab * 4;
    if (count > 0) {
      take(now, 0);
      load_rows(b[0], pairs);
      unpack(now, 0, constants, a[0]);
      unpack(now, 1, constants, a[1]);
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool more = i + 1 < count;
      if (more) take(next, i + 1);
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const int pair = pairs + i * 4 + step / 2;
        if (step % 2 == 0 && (step < 6 || more)) load_rows(b[(step / 2 + 1) % 2], pair + 1);
        multiply_step(sums, a[step % 4], b[step / 2 % 2], step);
        if (step < 6) {
          unpack(now, step + 2, constants, a[(step + 2) % 4]);
        } else {
          unpack(next, step - 6, constants, a[(step + 2) % 4]);  // behind the last: not used
        }
      }
      now = next;
    }
    if (count > 0) give_back();
    // A last part that is shorter than the others is fed as many runs.
    for (int i = (count + kRunSlabs - 1) / kRunSlabs; i < (part_slabs + kRunSlabs - 1) / kRunSlabs;
         ++i) {
      wait_for_phase(full + stage * 8, phase);
      give_back();
    }
  }
};

template <TensorKind kKind, int kGroup, int kGroups>
__global__ void __launch_bounds__(kDirectWarps<kGroups> * 32, 1)
    direct_kernel(const __grid_constant__ FedArguments args) {
#ifdef TINYLOOP_WARPGROUPS
  extern __shared__ __align__(16) uint8_t shared[];
  using Chains = DirectChain<kKind, kGroup, kGroups>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The same in all lanes, and known to be.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const uint32_t begin = shared_address(shared);
  const BlockRows block = rows_of_block<kGroups>(args);
  if (warp == 0) init_block(args, begin, lane);
  if (warp == 1 && args.formers == 0) clear_behind(args, block, shared, lane);
  __syncthreads();
  let_next_start();

  const int copier = warps - 1 - warp;  // the last warps; they form nothing
  if (copier < args.plan.copiers) {
    if (lane == 0) copy_runs<Chains::kBytes>(args, begin, copier);
    wait_for_previous();
    return;
  }
  wait_for_previous();
  if constexpr (kGroups == 1) {
    if (warp < args.formers) form_share(args, shared, begin + args.plan.rows_full, warp, lane);
  }
  if (warp >= args.plan.slots * args.plan.parts) return;
  Chains chain{};
  place_chain(args, block, begin, warp, lane, chain);
  chain.ring = shared + args.plan.fragments + warp * args.plan.stages * kRunSlabs * Chains::kBytes;
  chain_tiles<kGroups>(args, block, chain, shared + args.plan.partials, warp);
#else
  __trap();
#endif
}

}  // namespace tinyloop::cuda
