// The product of up to 8 rows: a read of the weight, at the speed of memory.
//
// A warp takes the 16 outputs of a tile through one part of the inputs; the weight comes to shared
// memory of its own, many slabs ahead, and the first of them before the kernel before this one has
// ended. The input is formed once per block, so a norm or a gate before the product costs no kernel
// of its own. A lane of the accumulator that stands for a row beyond the last repeats the last row
// and is dropped.
#pragma once

#include "cuda/fragments.cuh"
#include "cuda/input_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"

namespace tinyloop::cuda {

inline constexpr int kNarrowRows = 8;
inline constexpr int kNarrowWarps = 16;  // most of a block
inline constexpr int kFormingWarps = 4;  // least of a block: the input is formed by all of them

struct NarrowArguments {
  const uint8_t* data;
  int64_t outputs, inputs, rows;
  int64_t tiles;
  int slabs;
  int parts, part_slabs;
  int slots;   // tiles of a block
  int stages;  // slabs of shared memory per warp: kNarrowStages, or all where they are fewer
  LinearInput input;
  LinearOutput output;
};

// Slabs under way per warp: about 16 KB.
template <TensorKind kKind>
inline constexpr int kNarrowStages = kKind == TensorKind::kQ4 ? 16 : 8;

// A row of the input in shared memory: padded so that 8 rows lie in different banks.
__host__ __device__ constexpr int64_t row_pitch(int slabs) {
  return static_cast<int64_t>(slabs) * kSlabInputs * 2 + 16;
}

// A slab's share of a lane.
template <TensorKind kKind, int kGroup>
struct SlabRegisters {
  static constexpr int kGroups = kGroup == 0 ? 1 : kSlabInputs / (kGroup == 0 ? 1 : kGroup);
  uint4 units[kUnits<kKind>];
  uint32_t low[kGroups], high[kGroups];  // scale and zero

  __device__ __forceinline__ void load(const uint8_t* slab, int lane) {
#pragma unroll
    for (int i = 0; i < kUnits<kKind>; ++i) {
      units[i] = reinterpret_cast<const uint4*>(slab)[i * 32 + lane];
    }
    if constexpr (kGroup != 0) {
      const auto* constants = reinterpret_cast<const uint32_t*>(slab + constants_offset(kKind));
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        low[g] = constants[g * kTileOutputs + lane / 4];
        high[g] = constants[g * kTileOutputs + lane / 4 + 8];
      }
    }
  }

  // c += this slab times the rows at `rows`, a lane's address for load_matrices().
  __device__ __forceinline__ void multiply_into(float (&c)[4], uint32_t rows) const {
    uint32_t b[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) load_matrices(b[i], rows + i * 64);
    LaneConstants constants{};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if constexpr (kGroup != 0) {
        if (step * 16 % kGroup == 0) {
          constants = lane_constants<kKind>(low[step * 16 / kGroup], high[step * 16 / kGroup]);
        }
      }
      uint32_t a[4];
      unit_fragment<kKind>(units[step / kUnitSteps<kKind>], step % kUnitSteps<kKind>, constants, a);
      multiply(c, a, b[step / 2][step % 2 * 2], b[step / 2][step % 2 * 2 + 1]);
    }
  }
};

// A warp's stream of slabs through its ring in shared memory.
template <TensorKind kKind, int kGroup>
struct SlabStream {
  static constexpr int kBytes = slab_bytes(kKind, kGroup == 0 ? 1 : kGroup);
  static constexpr int kStages = kNarrowStages<kKind>;
  using Registers = SlabRegisters<kKind, kGroup>;
  const uint8_t* from;  // this lane's first 16 bytes of slab 0
  uint8_t* ring;
  int stages, count, lane;

  __device__ __forceinline__ void fetch(int slab, int stage) const {
    const uint8_t* source = from + static_cast<int64_t>(slab) * kBytes;
    const uint32_t to = shared_address(ring) + stage * kBytes + lane * 16;
#pragma unroll
    for (int at = 0; at < kBytes; at += 512) {
      if (at + 512 <= kBytes) {
        copy_async(to + at, source + at);
      } else {
        copy_async_if(at + lane * 16 < kBytes, to + at, source + at);
      }
    }
  }
  // Always kStages groups, some of them empty where there are fewer slabs.
  __device__ __forceinline__ void start() const {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      if (i < count) fetch(i, i);
      commit_copies();
    }
  }
  // Takes slab i + 1 to registers, asks for the slab that follows in slab i's stage, and adds slab
  // i, which is in registers already.
  __device__ __forceinline__ void step(float (&c)[4], uint32_t rows, int i, int& stage,
                                       const Registers& now, Registers& next) const {
    const int next_stage = stage + 1 == stages ? 0 : stage + 1;
    wait_for_copies<kStages - 2>();
    __syncwarp();  // slab i + 1 is there, and all lanes have taken slab i
    next.load(ring + next_stage * kBytes, lane);  // behind the last slab: not used
    if (i + stages < count) fetch(i + stages, stage);
    commit_copies();
    now.multiply_into(c, rows + i * kSlabInputs * 2);
    stage = next_stage;
  }
  // c += the slabs in order, times the rows at `rows`.
  __device__ __forceinline__ void multiply_into(float (&c)[4], uint32_t rows) const {
    Registers even, odd;
    wait_for_copies<kStages - 1>();
    __syncwarp();
    even.load(ring, lane);
    int stage = 0, i = 0;
#pragma unroll 1
    for (; i + 2 <= count; i += 2) {
      step(c, rows, i, stage, even, odd);
      step(c, rows, i + 1, stage, odd, even);
    }
    if (i < count) step(c, rows, i, stage, even, odd);
  }
};

// Rows [first, first + rows) of the input into shared memory, by all warps of the block.
__device__ __forceinline__ void form_block(const NarrowArguments& args, int64_t first, int rows,
                                           uint8_t* to) {
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const int64_t pitch = row_pitch(args.slabs), padded = args.slabs * kSlabInputs;
  const int shares = warps > rows ? warps / rows : 1;
  for (int i = warp; i < rows * shares; i += warps) {
    const int row = i % rows;
    form_row<__half>(args.input, first + row, args.inputs, i / rows, shares,
                     reinterpret_cast<__half*>(to + row * pitch), padded);
  }
}

template <TensorKind kKind, int kGroup>
__global__ void __launch_bounds__(kNarrowWarps * 32, 1)
    narrow_kernel(const __grid_constant__ NarrowArguments args) {
  extern __shared__ __align__(16) uint8_t shared[];
  using Stream = SlabStream<kKind, kGroup>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int slot = warp / args.parts, part = warp % args.parts;
  const int streams = args.slots * args.parts;  // warps behind them only form the input
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * args.slots + slot;
  const bool multiplies = warp < streams && tile < args.tiles;
  const int first_slab = part * args.part_slabs;

  Stream stream;
  stream.from = args.data + (tile * args.slabs + first_slab) * Stream::kBytes + lane * 16;
  stream.ring = shared + warp * args.stages * Stream::kBytes;
  stream.stages = args.stages;
  stream.count = multiplies ? min(args.part_slabs, args.slabs - first_slab) : 0;
  stream.lane = lane;
  stream.start();
  let_next_start();
  wait_for_previous();

  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kNarrowRows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kNarrowRows), args.rows - first_row));
  // This lane's elements of the output: register i is row i % 2 of two, output i / 2 * 8 on.
  const bool stores = multiplies && part == 0;
  const int64_t output = tile * kTileOutputs + lane / 4;
  const int row = lane % 4 * 2;
  const auto owned = [&](int i) {
    return stores && row + i % 2 < rows && output + i / 2 * 8 < args.outputs;
  };
  float before[4] = {};
  if (args.output.kind == OutputKind::kAdd) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (owned(i)) {
        before[i] = before_of(args.output, first_row + row + i % 2, output + i / 2 * 8);
      }
    }
  }

  uint8_t* formed = shared + streams * args.stages * Stream::kBytes;
  const int64_t pitch = row_pitch(args.slabs);
  form_block(args, first_row, rows, formed);
  __syncthreads();

  float sums[4] = {};
  if (stream.count > 0) {
    const uint32_t address =
        shared_address(formed) +
        static_cast<uint32_t>(min(lane % 8, rows - 1) * pitch + lane / 8 * 16 +
                              static_cast<int64_t>(first_slab) * kSlabInputs * 2);
    stream.multiply_into(sums, address);
  }
  if (args.parts > 1) {
    auto* partials = reinterpret_cast<float4*>(formed + rows * pitch);
    partials[threadIdx.x] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    __syncthreads();
    if (stores) {
      for (int p = 1; p < args.parts && p * args.part_slabs < args.slabs; ++p) {
        const float4 more = partials[threadIdx.x + p * 32];
        sums[0] = __fadd_rn(sums[0], more.x);
        sums[1] = __fadd_rn(sums[1], more.y);
        sums[2] = __fadd_rn(sums[2], more.z);
        sums[3] = __fadd_rn(sums[3], more.w);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (owned(i)) {
      store_output(args.output, first_row + row + i % 2, output + i / 2 * 8, sums[i], before[i]);
    }
  }
}

}  // namespace tinyloop::cuda
