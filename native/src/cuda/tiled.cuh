// The product of any number of rows by tiles of outputs and rows, the weight dequantized on its
// way into the tensor cores. The bits are those of the narrow kernel.
#pragma once

#include "cuda/fragments.cuh"
#include "cuda/input_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"

namespace tinyloop::cuda {

struct TiledArguments {
  const uint8_t* data;
  const __half* in;
  int64_t stride;
  int64_t outputs, inputs, rows;
  int64_t tiles;
  int slabs, slab_bytes, group;
  int part_slabs;
  bool aligned;  // rows of the input may be read by 16 bytes
  LinearOutput output;
};

// Warps kAlong (outputs) x kAcross (rows), each with kTiles x kRowTiles accumulators of 16 outputs
// and 8 rows.
template <int kTiles_, int kRowTiles_, int kAlong_, int kAcross_, int kStages_>
struct Tiling {
  static constexpr int kTiles = kTiles_, kRowTiles = kRowTiles_, kAlong = kAlong_,
                       kAcross = kAcross_, kStages = kStages_;
  static constexpr int kThreads = kAlong * kAcross * 32;
  static constexpr int kBlockTiles = kTiles * kAlong;
  static constexpr int kBlockRows = kRowTiles * kAcross * 8;
  static constexpr int kPitch = kSlabInputs * 2 + 16;  // bytes of a row of the input in a stage
  __host__ __device__ static constexpr int stage_bytes(int slab) {
    return kBlockTiles * slab + kBlockRows * kPitch;
  }
};

// One slab of the block's weight tiles: a warp a tile.
template <typename T>
__device__ __forceinline__ void fetch_weight(const TiledArguments& args, int64_t first_tile,
                                             int slab, uint32_t stage) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int t = static_cast<int>(threadIdx.x) / 32; t < T::kBlockTiles; t += T::kThreads / 32) {
    if (first_tile + t >= args.tiles)
      break;  // its outputs are not stored: anything may stand there
    const uint8_t* from =
        args.data + ((first_tile + t) * args.slabs + slab) * static_cast<int64_t>(args.slab_bytes);
    const uint32_t to = stage + t * args.slab_bytes;
    for (int at = lane * 16; at < args.slab_bytes; at += 512) copy_async(to + at, from + at);
  }
}

// One slab's inputs of the block's rows; rows beyond the last repeat it.
template <typename T>
__device__ __forceinline__ void fetch_rows(const TiledArguments& args, int64_t first_row, int slab,
                                           uint32_t stage) {
  constexpr int kChunks = kSlabInputs / 8;
  const uint32_t rows = stage + T::kBlockTiles * args.slab_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < T::kBlockRows * kChunks; i += T::kThreads) {
    const int r = i / kChunks, chunk = i % kChunks;
    const __half* row = args.in + min(first_row + r, args.rows - 1) * args.stride;
    const int64_t k = static_cast<int64_t>(slab) * kSlabInputs + chunk * 8;
    const uint32_t to = rows + r * T::kPitch + chunk * 16;
    if (!args.aligned) {
      copy_singly(row, k, args.inputs, to);
    } else {
      const int64_t left = (args.inputs - k) * 2;
      const int bytes = left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
      copy_async(to, bytes > 0 ? row + k : row, bytes);
    }
  }
}

template <TensorKind kKind, typename T>
struct TileSums {
  float sums[T::kTiles][T::kRowTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < T::kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < T::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ void add(const TileSums& more) {
#pragma unroll
    for (int m = 0; m < T::kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < T::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = __fadd_rn(sums[m][n][i], more.sums[m][n][i]);
      }
    }
  }

  // One slab in shared memory: `weight` is the warp's first tile, `rows` the lane's address of its
  // first row tile for load_matrices().
  __device__ __forceinline__ void multiply_slab(const uint8_t* weight, int slab_bytes, int group,
                                                uint32_t rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint4 units[T::kTiles];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {  // 32 inputs: the least group
      LaneConstants constants[T::kTiles];
#pragma unroll
      for (int m = 0; m < T::kTiles; ++m) {
        if constexpr (kKind == TensorKind::kF16) {
          constants[m] = LaneConstants{};
        } else {
          const auto* words =
              reinterpret_cast<const uint32_t*>(weight + m * slab_bytes + constants_offset(kKind)) +
              quarter * 32 / group * kTileOutputs + lane / 4;
          constants[m] = lane_constants<kKind>(words[0], words[8]);
        }
      }
      uint32_t b[T::kRowTiles][4];
#pragma unroll
      for (int n = 0; n < T::kRowTiles; ++n) {
        load_matrices(b[n], rows + n * 8 * T::kPitch + quarter * 64);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = quarter * 2 + half;
#pragma unroll
        for (int m = 0; m < T::kTiles; ++m) {
          if (step % kUnitSteps<kKind> == 0) {
            units[m] = reinterpret_cast<const uint4*>(
                weight + m * slab_bytes)[step / kUnitSteps<kKind> * 32 + lane];
          }
          uint32_t a[4];
          unit_fragment<kKind>(units[m], step % kUnitSteps<kKind>, constants[m], a);
#pragma unroll
          for (int n = 0; n < T::kRowTiles; ++n) {
            multiply(sums[m][n], a, b[n][half * 2], b[n][half * 2 + 1]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store(const TiledArguments& args, int64_t first_output,
                                        int64_t first_row) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool adds = args.output.kind == OutputKind::kAdd;
#pragma unroll
    for (int n = 0; n < T::kRowTiles; ++n) {
#pragma unroll
      for (int m = 0; m < T::kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int64_t output = first_output + m * kTileOutputs + lane / 4 + i / 2 * 8;
          const int64_t row = first_row + n * 8 + lane % 4 * 2 + i % 2;
          if (output >= args.outputs || row >= args.rows) continue;
          const float before = adds ? before_of(args.output, row, output) : 0.0f;
          store_output(args.output, row, output, sums[m][n][i], before);
        }
      }
    }
  }
};

template <TensorKind kKind, typename T, bool kParted>
__global__ void __launch_bounds__(T::kThreads, 1)
    tiled_kernel(const __grid_constant__ TiledArguments args) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int along = warp % T::kAlong, across = warp / T::kAlong;
  // Blocks that are under way together share rows: outputs run fastest.
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x) * T::kBlockTiles;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * T::kBlockRows;
  const int stage_bytes = T::stage_bytes(args.slab_bytes);
  const auto stage = [&](int slab) {
    return shared_address(shared) + slab % T::kStages * stage_bytes;
  };

  for (int s = 0; s < T::kStages - 1 && s < args.slabs; ++s) {
    fetch_weight<T>(args, first_tile, s, stage(s));
  }
  let_next_start();
  wait_for_previous();
#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) {
    if (s < args.slabs) fetch_rows<T>(args, first_row, s, stage(s));
    commit_copies();  // the first group holds all of the weight above
  }

  TileSums<kKind, T> sums, total;
  sums.clear();
#pragma unroll 1
  for (int slab = 0; slab < args.slabs; ++slab) {
    wait_for_copies<T::kStages - 2>();
    __syncthreads();  // this slab is there, and the one before it is done with
    const int ahead = slab + T::kStages - 1;
    if (ahead < args.slabs) {
      fetch_weight<T>(args, first_tile, ahead, stage(ahead));
      fetch_rows<T>(args, first_row, ahead, stage(ahead));
    }
    commit_copies();
    if constexpr (kParted) {
      if (slab > 0 && slab % args.part_slabs == 0) {
        if (slab == args.part_slabs) {
          total = sums;
        } else {
          total.add(sums);
        }
        sums.clear();
      }
    }
    const uint8_t* at = shared + slab % T::kStages * stage_bytes;
    const uint32_t rows = stage(slab) + T::kBlockTiles * args.slab_bytes +
                          (across * T::kRowTiles * 8 + lane % 8) * T::kPitch + lane / 8 * 16;
    sums.multiply_slab(at + along * T::kTiles * args.slab_bytes, args.slab_bytes, args.group, rows);
  }
  const int64_t output = (first_tile + along * T::kTiles) * kTileOutputs;
  const int64_t row = first_row + across * T::kRowTiles * 8;
  if constexpr (kParted) {
    if (args.slabs > args.part_slabs) {
      total.add(sums);
      return total.store(args, output, row);
    }
  }
  sums.store(args, output, row);
}

}  // namespace tinyloop::cuda
