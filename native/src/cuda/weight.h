// A weight [outputs, inputs] in device memory, in the order in which the products read it.
//
// Tiles of 16 outputs, each a run of slabs of 128 inputs. A slab holds the codes in the order of
// the fragments of mma.m16n8k16 (16 bytes a lane), then per group of the slab the scale and the
// zero of each of the 16 outputs. Inputs beyond the last are values that the weight has anyway,
// so that their product with zero is zero; outputs beyond the last are zero.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "format.h"

namespace tinyloop::cuda {

inline constexpr int kTileOutputs = 16;
inline constexpr int kSlabInputs = 128;

// Plain data, passed to kernels as it is.
struct DeviceWeight {
  TensorKind kind = TensorKind::kF16;  // as it lies in device memory: see stored_kind()
  int64_t outputs = 0;
  int64_t inputs = 0;
  int64_t group = 0;  // 0 unless kQ4 or kQ8
  const uint8_t* data = nullptr;
  // The whole weight once more as FP16 rows of cache_stride elements, or null.
  const uint16_t* cache = nullptr;
  int64_t cache_stride = 0;
};

// Activations are FP16, so FP32 weights are rounded to FP16 when they are loaded; the FP32 mode
// keeps them.
inline TensorKind stored_kind(TensorKind kind, bool fp32) {
  return kind == TensorKind::kF32 && !fp32 ? TensorKind::kF16 : kind;
}

__host__ __device__ constexpr int64_t weight_tiles(int64_t outputs) {
  return (outputs + kTileOutputs - 1) / kTileOutputs;
}
__host__ __device__ constexpr int64_t weight_slabs(int64_t inputs) {
  return (inputs + kSlabInputs - 1) / kSlabInputs;
}

// Bytes of one slab of a stored kind.
__host__ __device__ constexpr int slab_bytes(TensorKind kind, int group) {
  const int elements = kTileOutputs * kSlabInputs;
  if (kind == TensorKind::kF32) return elements * 4;
  if (kind == TensorKind::kF16) return elements * 2;
  const int constants = kSlabInputs / group * kTileOutputs * 4;
  return (kind == TensorKind::kQ8 ? elements : elements / 2) + constants;
}

// Of the one allocation that holds the weight; its address must be a multiple of 16.
size_t weight_bytes(TensorKind kind, int64_t outputs, int64_t inputs, int64_t group, bool fp32);

// A weight without data.
DeviceWeight weight_shape(TensorKind kind, int64_t outputs, int64_t inputs, int64_t group,
                          bool fp32);

// The file's bytes of some outputs, in device memory. scales and zeros are null for kF32 and kF16.
struct StagedRows {
  TensorKind kind = TensorKind::kF32;  // as in the file
  const uint8_t* rows = nullptr;
  const uint16_t* scales = nullptr;  // [outputs][groups]
  const uint16_t* zeros = nullptr;
};

// Outputs [begin, end) of a weight from the file's bytes; begin is a multiple of 16, and so is end
// unless it is the last. `data` is the weight's own memory.
void repack(cudaStream_t stream, const StagedRows& from, const DeviceWeight& shape, int64_t begin,
            int64_t end, uint8_t* data);

// Outputs [begin, end) as FP16 rows: element k of output n goes to out[(n - begin) * stride + k],
// zeros from `inputs` on to the stride or the next multiple of 128, whichever comes first. begin is
// a multiple of 16, the stride of 8, the address of 16. Not for kF32.
void dequantize(cudaStream_t stream, const DeviceWeight& weight, int64_t begin, int64_t end,
                uint16_t* out, int64_t stride);

}  // namespace tinyloop::cuda
