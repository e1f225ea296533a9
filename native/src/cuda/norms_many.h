// The sum of a state and a norm at many rows, where memory is to be kept busy.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/norms_few.h"

namespace tinyloop::cuda {

// Whether norms_many() takes the call: something is added, to rows of an even width that fit into
// registers and lie so that two elements load at once.
bool takes_many(bool fp32, const NormCall& call);
void norms_many(cudaStream_t stream, bool fp32, const NormCall& call);

}  // namespace tinyloop::cuda
