// A pass's attention work as it lies in the device's memory.
#pragma once

#include <cstdint>

#include "kv.h"

namespace tinyloop::cuda {

// AttentionChunk without its vectors: segments and pieces are runs of the plan's arrays.
struct Item {
  int32_t first_segment = 0;
  int32_t n_segments = 0;
  int32_t first_piece = 0;
  int32_t n_pieces = 0;
  int64_t prefix_length = 0;
  int64_t rows = 0;  // 0: nothing to do
};

// Pointers are to device memory. In a captured graph n_items and max_spans are capacities: items
// without rows, and spans behind an item's last key, do nothing.
struct AttentionPlan {
  const Item* items = nullptr;
  const AttentionPiece* pieces = nullptr;
  const KvSegment* segments = nullptr;
  int32_t n_items = 0;
  int32_t max_spans = 0;  // most spans of kSpan keys that any item reads
  bool decode = false;    // every item is one piece of one row
  // Two counters that are zero between calls, and used by one at a time; null: none, and slower.
  uint32_t* turns = nullptr;
};

// Keys that one partial softmax covers, cut by absolute position.
inline constexpr int64_t kSpan = kKeyTile;

}  // namespace tinyloop::cuda
