// The device memory that operations work in: what lies where, and how large it is. Pure sizes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend.h"
#include "cuda/attention.h"
#include "cuda/chunk_plan.h"
#include "cuda/linear.h"
#include "cuda/scoring.h"

namespace tinyloop::cuda {

// Rows of the head at a time, so that partials and logits are bounded.
inline constexpr int64_t kHeadRows = 4096;
// Logits of a tile, so that a tile and the weights it comes from stay near the L2's size.
inline constexpr int64_t kTileLogits = int64_t{16} << 20;
// Decode attention is cut into spans for at most so many (sequence, span) pairs at once.
inline constexpr int64_t kSplitItems = 128, kSplitSpans = 64;
// Weights below this in FP16 are small enough for the kernels that unpack them as they go.
inline constexpr int64_t kLeastWide = int64_t{1} << 20;

struct WorkspaceSizes {
  size_t linear = 0;       // of LinearContext
  size_t tile = 0;         // a tile of logits; rows on their way in a permutation
  size_t partials = 0;     // HeadPartial [head rows][partials]
  size_t row_results = 0;  // of the head's rows
  size_t integers = 0;     // int32 [4][rows]: ids, positions, rows, targets
  size_t gathered = 0;     // activations [head rows][hidden]
  size_t attention = 0;
  size_t plans = 0;

  std::vector<size_t> all() const {
    return {linear, tile, partials, row_results, integers, gathered, attention, plans};
  }
};

inline int64_t head_rows(const WorkspaceShape& s) { return std::min(kHeadRows, s.rows); }
inline int64_t head_partials(int64_t vocab) { return (vocab + kHeadColumns - 1) / kHeadColumns; }

// Columns of a tile of logits of so many rows: whole partials, and all where they fit.
inline int64_t tile_columns(const WorkspaceShape& s, int64_t rows) {
  const int64_t fitting = std::max<int64_t>(1, kTileLogits / rows / kHeadColumns) * kHeadColumns;
  return std::min(s.vocab_size, fitting);
}

// Of the head's results for so many rows: a double, four words and a flag each.
inline size_t results_bytes(int64_t rows) {
  return static_cast<size_t>(rows) *
         (sizeof(double) + 3 * sizeof(float) + sizeof(int32_t) + sizeof(uint8_t));
}

// Whether weights without an FP16 copy are unpacked for products of many rows.
inline bool weight_scratch(const WorkspaceShape& s, bool fp32, bool all_cached) {
  return !fp32 && !all_cached && s.scratch_rows >= 512 &&
         s.max_outputs * s.max_inputs * 2 >= kLeastWide;
}

inline WorkspaceSizes workspace_sizes(const WorkspaceShape& s, bool fp32, bool all_cached) {
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  const int64_t element = fp32 ? 4 : 2;
  const int64_t rows = head_rows(s);
  WorkspaceSizes w;
  const int64_t largest_rows = std::max(s.scratch_rows, rows);
  w.linear =
      linear_scratch_bytes(largest_rows, s.max_inputs, fp32, weight_scratch(s, fp32, all_cached));
  // No number of rows needs more: r * tile_columns(r) <= this for every r <= rows.
  static_assert(kHeadRows * kHeadColumns <= kTileLogits);
  const int64_t logits = std::min(rows * s.vocab_size, kTileLogits);
  w.tile = std::max(size(logits) * sizeof(float), size(s.rows * s.hidden_size) * sizeof(float));
  w.partials = size(rows * head_partials(s.vocab_size)) * sizeof(HeadPartial);
  w.row_results = results_bytes(rows);
  w.integers = size(4 * s.rows) * sizeof(int32_t);
  w.gathered = size(rows * s.hidden_size * element);
  w.attention = attention_scratch_bytes({s.n_q_heads, s.n_kv_heads, s.head_dim},
                                        std::min(kSplitItems, s.rows), kSplitSpans);
  w.plans = PlanArena::first_bytes(s.rows);
  return w;
}

}  // namespace tinyloop::cuda
