// Attention over keys and values where they lie: softmax(q k / sqrt(head_dim)) v for each head of
// each row of a plan.
//
// Keys are folded in tiles of kKeyTile cut by absolute position. A tile's softmax is its own: its
// own maximum, weights rounded to FP16, products from zero. Its result (m, l, o) is then merged
// into the row's, tile after tile in position order (attention_fold.cuh). What a row gets
// thus depends on nothing but its queries and the keys it sees: not on its neighbours, nor on where
// a prefix ends, nor on which kernel read the tile, nor on how many thread blocks shared the work.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend.h"
#include "cuda/plan.h"

namespace tinyloop::cuda {

// Most rows of one work item: as many as fill a thread block with query vectors.
int64_t attention_rows(const HeadShape& shape);

// What decode items want so that the tiles of one sequence can be shared by several thread blocks:
// partial results of up to max_spans tiles for each. Less is right too, and slower for long
// sequences. May be 0.
size_t attention_scratch_bytes(const HeadShape& shape, int64_t max_decode_items, int64_t max_spans);

// Rows that no item of the plan names are left as they are. scratch: aligned to 16 bytes; its
// content means nothing before and after.
void attention(cudaStream_t stream, const AttentionPlan& plan, const HeadShape& shape,
               int64_t plane, Rows queries, Rows out, bool fp32, void* scratch,
               size_t scratch_bytes);

}  // namespace tinyloop::cuda
