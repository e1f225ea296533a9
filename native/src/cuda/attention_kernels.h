// The kernels behind attention(), and the sizes they share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend.h"
#include "cuda/plan.h"

namespace tinyloop::cuda {

// Query vectors (a row's heads of one K/V group) that a thread block of the many-row kernel holds.
inline constexpr int kBlockVectors = 128;
static_assert(kBlockVectors >= kMaxGroupedHeads);

// Query vectors of the decode kernel: one row's heads of a group, padded to a tile of the MMA.
inline constexpr int kDecodeVectors = 16;

// What attention() was called with.
struct AttentionCall {
  AttentionPlan plan;
  HeadShape shape;
  int64_t plane = 0;
  Rows queries, out;
};

// The head_dim a kernel is compiled for: heads are padded to it by zeros. 0: too wide.
constexpr int padded_head_dim(int64_t head_dim) {
  for (const int width : {32, 64, 96, 128, 256}) {
    if (head_dim <= width) return width;
  }
  return 0;
}

// Partial results of decode: of each (item, head, tile) o[padded head_dim], then of each (m, l).
constexpr size_t partial_bytes(const HeadShape& shape) {
  return (static_cast<size_t>(padded_head_dim(shape.head_dim)) + 2) * sizeof(float);
}

void attention_many(cudaStream_t stream, const AttentionCall& call);
// The same bits, faster. False: not on this device or with heads of this width; nothing was done.
bool attention_ring(cudaStream_t stream, const AttentionCall& call);
// splits: thread blocks that share an item and a K/V head; more than 1 need scratch for all
// (item, head, tile).
void attention_decode(cudaStream_t stream, const AttentionCall& call, int splits, void* scratch);
void attention_fp32(cudaStream_t stream, const AttentionCall& call);

}  // namespace tinyloop::cuda
