#include "cuda/dequantize.cuh"
#include "cuda/launch.cuh"
#include "cuda/weight.h"

namespace tinyloop::cuda {

namespace {

constexpr int kWarpsPerBlock = 4;

// Reads of the file's bytes: row-major, any alignment that the element type itself allows. Inputs
// beyond the last repeat the last code; outputs beyond the last are zero.
struct Source {
  StagedRows from;
  int64_t rows = 0;
  int64_t inputs = 0;
  int64_t group = 0;

  __device__ int64_t groups() const { return (inputs + group - 1) / group; }

  __device__ uint32_t code(int64_t n, int64_t k) const {
    if (n >= rows) return 0;
    if (k >= inputs) k = inputs - 1;
    if (from.kind == TensorKind::kQ8) return from.rows[n * inputs + k];
    return from.rows[n * (inputs / 2) + k / 2] >> (k % 2 * 4) & 15;
  }
  __device__ float value(int64_t n, int64_t k) const {
    if (n >= rows || k >= inputs) return 0.0f;
    if (from.kind == TensorKind::kF32) {
      return reinterpret_cast<const float*>(from.rows)[n * inputs + k];
    }
    return __half2float(reinterpret_cast<const __half*>(from.rows)[n * inputs + k]);
  }
  // Groups beyond the last repeat it: their codes do too.
  __device__ uint32_t scale_and_zero(int64_t n, int64_t g) const {
    if (n >= rows) return 0;
    const int64_t at = n * groups() + min(g, groups() - 1);
    return from.scales[at] | static_cast<uint32_t>(from.zeros[at]) << 16;
  }
};

// A lane's 16 bytes of unit `unit` of a slab (512 bytes each) whose first element is (n, k).
template <TensorKind kKind>
__device__ uint4 gather(const Source& source, int64_t n, int64_t k, int unit, int lane) {
  uint32_t words[4] = {};
  const int64_t row = n + lane / 4, column = k + lane % 4 * 2;
  for (int reg = 0; reg < 4; ++reg) {
    const int64_t i = row + reg % 2 * 8;
    for (int half = 0; half < 2; ++half) {
      const int64_t j = column + reg / 2 * 8 + half;
      if constexpr (kKind == TensorKind::kQ4) {
        for (int step = 0; step < 4; ++step) {
          words[step] |= source.code(i, j + (unit * 4 + step) * 16) << (reg * 4 + half * 16);
        }
      } else if constexpr (kKind == TensorKind::kQ8) {
        for (int step = 0; step < 2; ++step) {
          words[step * 2 + reg / 2] |= source.code(i, j + (unit * 2 + step) * 16)
                                       << (reg % 2 * 16 + half * 8);
        }
      } else {
        const __half value = __float2half_rn(source.value(i, j + unit * 16));
        words[reg] |= static_cast<uint32_t>(__half_as_ushort(value)) << (half * 16);
      }
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// One warp a slab; tile 0 is the first of `data`.
template <TensorKind kKind>
__global__ void repack_kernel(Source source, int64_t tiles, int64_t slabs, uint8_t* data) {
  wait_for_previous();
  constexpr int kUnits = kTileOutputs * kSlabInputs / 512 *
                         (kKind == TensorKind::kQ4   ? 1
                          : kKind == TensorKind::kQ8 ? 2
                                                     : 4) /
                         2;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (at >= tiles * slabs) return;
  const int64_t n = at / slabs * kTileOutputs, k = at % slabs * kSlabInputs;
  uint8_t* slab = data + at * slab_bytes(kKind, static_cast<int>(source.group));
  for (int unit = 0; unit < kUnits; ++unit) {
    reinterpret_cast<uint4*>(slab)[unit * 32 + lane] = gather<kKind>(source, n, k, unit, lane);
  }
  if constexpr (kKind != TensorKind::kF16) {
    auto* constants = reinterpret_cast<uint32_t*>(slab + constants_offset(kKind));
    const int64_t first = k / source.group;
    const int count = static_cast<int>(kSlabInputs / source.group) * kTileOutputs;
    for (int i = lane; i < count; i += 32) {
      constants[i] = source.scale_and_zero(n + i % kTileOutputs, first + i / kTileOutputs);
    }
  }
}

// The FP32 mode's own: not in a hurry.
__global__ void repack_floats_kernel(Source source, int64_t tiles, int64_t slabs, uint8_t* data) {
  wait_for_previous();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (at >= tiles * slabs) return;
  const int64_t n = at / slabs * kTileOutputs, k = at % slabs * kSlabInputs;
  uint8_t* slab = data + at * slab_bytes(TensorKind::kF32, 0);
  for (int i = static_cast<int>(threadIdx.x) % 32; i < kTileOutputs * kSlabInputs; i += 32) {
    const int row = i / kSlabInputs, column = i % kSlabInputs;
    *reinterpret_cast<float*>(slab + element_offset(TensorKind::kF32, row, column)) =
        source.value(n + row, k + column);
  }
}

// One warp a slab: its 16 rows of 128 halves are put in order in shared memory, and leave it in
// runs of 256 bytes.
template <TensorKind kKind>
__global__ void dequantize_kernel(DeviceWeight w, int64_t begin, int64_t end, __half* out,
                                  int64_t stride) {
  constexpr int kRow = kSlabInputs + 8;  // halves; padded against bank conflicts
  __shared__ __align__(16) __half rows[kWarpsPerBlock][kTileOutputs * kRow];
  wait_for_previous();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __half* mine = rows[threadIdx.x / 32];
  const int64_t slabs = weight_slabs(w.inputs);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int64_t n = begin + at / slabs * kTileOutputs, k = at % slabs * kSlabInputs;
  if (n >= end) return;
  const uint8_t* slab = slab_of(w, n, k);
  for (int step = 0; step < kSlabInputs / 16; ++step) {
    uint32_t a[4];
    const uint8_t* codes = slab + element_offset(kKind, lane / 4, step * 16 + lane % 4 * 2);
    if constexpr (kKind == TensorKind::kF16) {
      *reinterpret_cast<uint4*>(a) = *reinterpret_cast<const uint4*>(codes);
    } else {
      const auto* constants = reinterpret_cast<const uint32_t*>(slab + constants_offset(kKind)) +
                              step * 16 / static_cast<int>(w.group) * kTileOutputs;
      const GroupConstants low = group_constants<1024>(constants[lane / 4]);
      const GroupConstants high = group_constants<kHighOffset<kKind>>(constants[lane / 4 + 8]);
      if constexpr (kKind == TensorKind::kQ4) {
        dequantize_q4(*reinterpret_cast<const uint32_t*>(codes), low, high, a);
      } else {
        const uint2 words = *reinterpret_cast<const uint2*>(codes);
        dequantize_q8(words.x, words.y, low, high, a);
      }
    }
    for (int reg = 0; reg < 4; ++reg) {
      const int row = lane / 4 + reg % 2 * 8, column = step * 16 + lane % 4 * 2 + reg / 2 * 8;
      uint32_t pair = a[reg];
      if (k + column >= w.inputs) pair &= 0xFFFF0000u;
      if (k + column + 1 >= w.inputs) pair &= 0x0000FFFFu;
      *reinterpret_cast<uint32_t*>(mine + row * kRow + column) = pair;
    }
  }
  __syncwarp();
  for (int i = lane; i < kTileOutputs * kSlabInputs / 8; i += 32) {
    const int row = i / (kSlabInputs / 8), column = i % (kSlabInputs / 8) * 8;
    if (n + row >= end || k + column >= stride) continue;
    *reinterpret_cast<uint4*>(out + (n + row - begin) * stride + k + column) =
        *reinterpret_cast<const uint4*>(mine + row * kRow + column);
  }
}

Grid warps(int64_t count) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>((count + kWarpsPerBlock - 1) / kWarpsPerBlock));
  grid.threads = kWarpsPerBlock * 32;
  return grid;
}

}  // namespace

size_t weight_bytes(TensorKind kind, int64_t outputs, int64_t inputs, int64_t group, bool fp32) {
  return static_cast<size_t>(weight_tiles(outputs) * weight_slabs(inputs)) *
         static_cast<size_t>(slab_bytes(stored_kind(kind, fp32), static_cast<int>(group)));
}

DeviceWeight weight_shape(TensorKind kind, int64_t outputs, int64_t inputs, int64_t group,
                          bool fp32) {
  DeviceWeight w;
  w.kind = stored_kind(kind, fp32);
  w.outputs = outputs;
  w.inputs = inputs;
  w.group = group;
  return w;
}

void repack(cudaStream_t stream, const StagedRows& from, const DeviceWeight& shape, int64_t begin,
            int64_t end, uint8_t* data) {
  Source source;
  source.from = from;
  source.rows = end - begin;
  source.inputs = shape.inputs;
  source.group = shape.group;
  const int64_t tiles = weight_tiles(end - begin), slabs = weight_slabs(shape.inputs);
  uint8_t* to =
      data + begin / kTileOutputs * slabs * slab_bytes(shape.kind, static_cast<int>(shape.group));
  const Grid grid = warps(tiles * slabs);
  switch (shape.kind) {
    case TensorKind::kQ4:
      return launch(stream, grid, repack_kernel<TensorKind::kQ4>, source, tiles, slabs, to);
    case TensorKind::kQ8:
      return launch(stream, grid, repack_kernel<TensorKind::kQ8>, source, tiles, slabs, to);
    case TensorKind::kF16:
      return launch(stream, grid, repack_kernel<TensorKind::kF16>, source, tiles, slabs, to);
    case TensorKind::kF32:
      return launch(stream, grid, repack_floats_kernel, source, tiles, slabs, to);
  }
}

void dequantize(cudaStream_t stream, const DeviceWeight& weight, int64_t begin, int64_t end,
                uint16_t* out, int64_t stride) {
  const Grid grid = warps(weight_tiles(end - begin) * weight_slabs(weight.inputs));
  auto* to = reinterpret_cast<__half*>(out);
  switch (weight.kind) {
    case TensorKind::kQ4:
      return launch(stream, grid, dequantize_kernel<TensorKind::kQ4>, weight, begin, end, to,
                    stride);
    case TensorKind::kQ8:
      return launch(stream, grid, dequantize_kernel<TensorKind::kQ8>, weight, begin, end, to,
                    stride);
    case TensorKind::kF16:
      return launch(stream, grid, dequantize_kernel<TensorKind::kF16>, weight, begin, end, to,
                    stride);
    case TensorKind::kF32:
      break;
  }
  throw DeviceError("cannot dequantize a weight of the FP32 mode to FP16");
}

}  // namespace tinyloop::cuda
