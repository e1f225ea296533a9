// The products of the FP32 mode: FP32 throughout, for tests, not in a hurry.
#pragma once

#include "cuda/linear.h"

namespace tinyloop::cuda {

// The input must be kRows of floats; kActivations is float too.
void linear_fp32(cudaStream_t stream, const LinearCall& call);

}  // namespace tinyloop::cuda
