#include "cuda/row_map.h"

#include <string>

#include "cuda/driver.h"
#include "tinyloop/errors.h"

namespace tinyloop::cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encode() {
  static const auto function = entry_point<Encode>("cuTensorMapEncodeTiled");
  return function;
}

}  // namespace

bool can_map_rows(const void* rows, int64_t stride) {
  return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && stride % 8 == 0 && encode() != nullptr;
}

CUtensorMap map_rows(const void* from, int64_t stride, int64_t inputs, int64_t rows, int box_rows) {
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inputs), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {kMappedInputs, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult status =
      encode()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(from), sizes, strides,
               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw DeviceError("cannot map " + std::to_string(rows) + " rows of " + std::to_string(inputs) +
                      " halves, " + std::to_string(stride) +
                      " apart, for the copy engine: the driver answers " + std::to_string(status));
  }
  return map;
}

}  // namespace tinyloop::cuda
