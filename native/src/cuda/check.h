// CUDA failures as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "tinyloop/errors.h"

namespace tinyloop::cuda {

// Throws DeviceError that says what was attempted and what the driver answered. The error slot of
// the runtime is cleared, so that a failure which is not sticky leaves nothing behind.
inline void check(cudaError_t status, const char* attempted) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(std::string("cannot ") + attempted + ": " + cudaGetErrorName(status) + ", " +
                    cudaGetErrorString(status));
}

}  // namespace tinyloop::cuda
