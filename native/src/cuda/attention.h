#pragma once
#include <cuda_runtime_api.h>
#include "backend.h"
#include "cuda/plan.h"
namespace tinyloop::cuda {
int64_t attention_rows(const HeadShape& shape);
size_t attention_scratch_bytes(const HeadShape& shape, int64_t max_decode_items, int64_t max_spans);
void attention(cudaStream_t, const AttentionPlan&, const HeadShape&, int64_t plane, Rows queries, Rows out, bool fp32, void* scratch, size_t scratch_bytes);
}
