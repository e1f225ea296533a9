// Calls of the driver itself. It is not linked: the library must load on machines without one.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace tinyloop::cuda {

// nullptr where this driver has no such function.
template <typename Function>
Function entry_point(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult answer{};
  constexpr unsigned kVersion = 12000;  // of the function's signature
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &answer);
  if (status != cudaSuccess) cudaGetLastError();
  const bool good = status == cudaSuccess && answer == cudaDriverEntryPointSuccess;
  return good ? reinterpret_cast<Function>(found) : nullptr;
}

}  // namespace tinyloop::cuda
