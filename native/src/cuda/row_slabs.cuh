// The rows' side of the products by warpgroups: the B operand in shared memory. Up to 8 rows lie
// there as a whole, formed by the block itself; more rows come in slabs of 128 inputs, brought by
// the copy engine at one thread's word.
#pragma once

#include <cuda.h>

#include "cuda/input_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/wgmma.cuh"

namespace tinyloop::cuda {

inline constexpr int kGroupWarps = 4;    // of a warpgroup
inline constexpr int kResidentRows = 8;  // up to so many rows the block forms its input
inline constexpr int kHalfSlab = 64;     // inputs of a run of 128 bytes

// Slabs of rows under way in a block that streams them.
template <int kRows>
inline constexpr int kRowStages = kRows == 64   ? 4
                                  : kRows == 32 ? 6
                                                : 8;

// Bytes of half a slab of rows in shared memory.
__host__ __device__ constexpr int half_slab_bytes(int rows) {
  return rows == 1 ? kHalfSlab * 2 : (rows + 7) / 8 * 8 * kHalfSlab * 2;
}
// Behind a single row, what the tensor cores read for the seven that are not there.
inline constexpr int kBehindRow = 128;

// Shared memory of the rows: all of them up to 8, or the ring.
template <int kRows>
__host__ __device__ constexpr int rows_bytes(int64_t rows, int slabs) {
  return kRows > kResidentRows ? kRowStages<kRows> * 2 * half_slab_bytes(kRows)
                               : slabs * 2 * half_slab_bytes(static_cast<int>(rows)) + kBehindRow;
}

// Where elements of row `row` of eight go: to + k as form_row() wants it.
struct SwizzledRow {
  __half* first;  // of the eight rows
  int row;
  __device__ __forceinline__ __half* operator+(int64_t k) const {
    const int at = static_cast<int>(k);
    return first + at / kHalfSlab * (8 * kHalfSlab) + row * kHalfSlab +
           ((at % kHalfSlab / 8) ^ row) * 8 + at % 8;
  }
};

// Up to 8 rows into shared memory, by `warps` warps of which this is number `warp`.
__device__ __forceinline__ void form_resident(const LinearInput& input, int rows, int64_t inputs,
                                              int slabs, uint8_t* to, int warp, int warps) {
  const int shares = warps > rows ? warps / rows : 1;
  const int64_t padded = static_cast<int64_t>(slabs) * kSlabInputs;
  auto* halves = reinterpret_cast<__half*>(to);
  for (int i = warp; i < rows * shares; i += warps) {
    const int row = i % rows;
    if (rows == 1) {
      form_row<__half>(input, row, inputs, i / rows, shares, halves, padded);
    } else {
      form_row<__half>(input, row, inputs, i / rows, shares, SwizzledRow{halves, row}, padded);
    }
  }
  publish_to_products();
}

// What a multiplying warp knows of the rows.
template <int kRows>
struct RowSlabs {
  static constexpr bool kStreams = kRows > kResidentRows;
  static constexpr int kStages = kRowStages<kRows>;
  uint64_t first;  // where the first half slab lies
  int half_bytes;
  uint32_t full, empty;  // barriers
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ RowSlabs(uint32_t address, int64_t rows, uint32_t full, uint32_t empty)
      : full(full), empty(empty) {
    half_bytes = half_slab_bytes(kStreams ? kRows : static_cast<int>(rows));
    first = rows_at(!kStreams && rows == 1 ? plain_rows(16) : kSwizzledRows, address);
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kStreams) wait_for_phase(full + stage * 8, phase);
  }
  __device__ __forceinline__ uint64_t at(int slab) const {
    return first + (kStreams ? stage : slab) * (2 * half_bytes >> 4);
  }
  // From step `step` of a slab on.
  __device__ __forceinline__ uint64_t of_step(uint64_t slab, int step) const {
    return slab + ((step / 4 * half_bytes + step % 4 * 32) >> 4);
  }
  __device__ __forceinline__ void advance() {
    if constexpr (kStreams) {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
  // The slab before stage `stage` is done with.
  __device__ __forceinline__ void release_last(int lane) const {
    if constexpr (kStreams) {
      if (lane == 0) arrive(empty + (stage == 0 ? kStages - 1 : stage - 1) * 8);
    }
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
