// The rows' side of the products by warpgroups: the B operand in shared memory, in slabs of 128
// inputs that the copy engine brings at one thread's word.
#pragma once

#include <cuda.h>

#include "cuda/launch.cuh"
#include "cuda/row_norm.cuh"
#include "cuda/wgmma.cuh"

namespace tinyloop::cuda {

inline constexpr int kGroupWarps = 4;  // of a warpgroup
inline constexpr int kHalfSlab = 64;   // inputs of a run of 128 bytes

// Slabs of rows under way in a block.
template <int kRows>
inline constexpr int kRowStages = kRows == 64   ? 4
                                  : kRows == 32 ? 6
                                                : 8;

// Bytes of half a slab of rows in shared memory.
__host__ __device__ constexpr int half_slab_bytes(int rows) { return rows * kHalfSlab * 2; }

// Shared memory of the rows' ring.
template <int kRows>
inline constexpr int kRowsBytes = kRowStages<kRows> * 2 * half_slab_bytes(kRows);

// What a multiplying warp knows of the rows.
template <int kRows>
struct RowSlabs {
  static constexpr int kStages = kRowStages<kRows>;
  static constexpr int kHalf = half_slab_bytes(kRows);
  uint64_t first;        // where the first half slab lies
  uint32_t full, empty;  // barriers
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ RowSlabs(uint32_t address, uint32_t full, uint32_t empty)
      : first(rows_at(kSwizzledRows, address)), full(full), empty(empty) {}
  __device__ __forceinline__ void wait() const { wait_for_phase(full + stage * 8, phase); }
  __device__ __forceinline__ uint64_t at_stage() const { return first + stage * (2 * kHalf >> 4); }
  // From step `step` of a slab on.
  __device__ __forceinline__ uint64_t of_step(uint64_t slab, int step) const {
    return slab + ((step / 4 * kHalf + step % 4 * 32) >> 4);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // The slab before stage `stage` is done with.
  __device__ __forceinline__ void release_last(int lane) const {
    if (lane == 0) arrive(empty + (stage == 0 ? kStages - 1 : stage - 1) * 8);
  }
};

// By one thread: every slab of the rows of every item of the block, as fast as they are taken.
template <int kRows>
__device__ __forceinline__ void bring_row_slabs(const CUtensorMap& map, int items, int row_blocks,
                                                int slabs, uint32_t to, uint32_t full,
                                                uint32_t empty) {
  constexpr int kHalf = half_slab_bytes(kRows);
  int stage = 0;
  uint32_t phase = 1;
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const int row = item % row_blocks * kRows;
#pragma unroll 1
    for (int slab = 0; slab < slabs; ++slab) {
      wait_for_phase(empty + stage * 8, phase);
      const uint32_t at = to + stage * 2 * kHalf;
      expect_bytes(full + stage * 8, 2 * kHalf);
      copy_box(at, map, slab * kSlabInputs, row, full + stage * 8);
      copy_box(at + kHalf, map, slab * kSlabInputs + kHalfSlab, row, full + stage * 8);
      if (++stage == kRowStages<kRows>) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

// The sums of a warp's tile to the output.
struct TileOutput {
  const LinearOutput& out;
  int64_t rows, outputs;
  int64_t output;  // of register 0
  int64_t row;
  bool stores;

  __device__ __forceinline__ bool owned(int i) const {
    return stores && row + i / 4 * 8 + i % 2 < rows && output + i % 4 / 2 * 8 < outputs;
  }
  __device__ __forceinline__ float before(int i) const {
    return owned(i) ? before_of(out, row + i / 4 * 8 + i % 2, output + i % 4 / 2 * 8) : 0.0f;
  }
  __device__ __forceinline__ void store(int i, float sum, float before) const {
    if (owned(i)) {
      store_output(out, row + i / 4 * 8 + i % 2, output + i % 4 / 2 * 8, sum, before);
    }
  }
};

}  // namespace tinyloop::cuda
