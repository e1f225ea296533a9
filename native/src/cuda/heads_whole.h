// Heads of FP16 that are whole vectors, as those of nearly all models are.
#pragma once

#include <cuda_runtime_api.h>

#include "backend.h"

namespace tinyloop::cuda {

struct Heads;
enum class HeadWork;

// Whether whole_heads() takes them: every lane has eight pairs or none, all lies at multiples of 16
// bytes, and no norm is over all heads.
bool takes_whole(const Heads& h, Rows qkv, HeadWork work);
// Heads [first_head, first_head + n_heads) of each row.
void whole_heads(cudaStream_t stream, const Heads& h, Rows qkv, HeadWork work, int first_head,
                 int n_heads);

}  // namespace tinyloop::cuda
