// How every kernel is launched: in stream order, and where the device can, so that it may start
// while the one before it drains (programmatic dependent launch).
//
// The rule that makes this safe: every kernel calls wait_for_previous() in all of its threads
// before it reads anything that another kernel writes and before it writes anything at all. Only
// reads of weights and of tables that live as long as the model may come before it.
#pragma once

#include <cuda_runtime.h>

#include "cuda/check.h"

namespace tinyloop::cuda {

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// From here on the next kernel may be scheduled beside this one.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

struct Grid {
  dim3 blocks{1, 1, 1};
  unsigned threads = 128;
  size_t shared_bytes = 0;  // dynamic; above 48 KB the kernel's attribute must have been raised
};

template <typename... Parameters, typename... Arguments>
void launch(cudaStream_t stream, const Grid& grid, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...),
        "launch a kernel");
}

}  // namespace tinyloop::cuda
