// Rows of activations as the copy engine of sm_90 takes them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tinyloop::cuda {

// Inputs of a copied box: 128 bytes, which it lays down swizzled.
inline constexpr int kMappedInputs = 64;

// Whether rows of halves `stride` elements apart can be mapped, by this driver at all.
bool can_map_rows(const void* rows, int64_t stride);

// Boxes of 64 inputs of `box_rows` rows of a matrix [rows, inputs] of halves; what lies outside it
// is zero. can_map_rows() must hold. Throws DeviceError where the driver refuses.
CUtensorMap map_rows(const void* from, int64_t stride, int64_t inputs, int64_t rows, int box_rows);

}  // namespace tinyloop::cuda
