// Norms of few rows, where a warp per row would wait for its loads one after the other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend.h"

namespace tinyloop::cuda {

// state += norm(branch) where branch is given, then out = round(next(state)) where out is given;
// the bits of norm_add() and norm_rows() of rows.h.
struct NormCall {
  float* state = nullptr;
  Rows branch;    // data null: nothing is added
  NormSpec norm;  // of the branch
  NormSpec next;  // of the state
  Rows out;       // data null: none
  int64_t rows = 0;
  int64_t width = 0;
};

// Whether norms_few() takes the call and is the faster way.
bool takes_few(const NormCall& call);
void norms_few(cudaStream_t stream, bool fp32, const NormCall& call);

}  // namespace tinyloop::cuda
