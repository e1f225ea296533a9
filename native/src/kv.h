// Where the keys and values of a sequence lie. Plain data; read by every backend's attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tinyloop {

// Token rows [begin, end) of some sequence in every plane: row t of plane p is at
// base + p * plane_bytes + (t - begin) * row bytes. A row holds n_kv_heads * head_dim elements.
struct KvSegment {
  const uint8_t* keys = nullptr;
  const uint8_t* values = nullptr;
  size_t plane_bytes = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// A run of rows of one sequence in a pass.
struct AttentionPiece {
  int64_t row = 0;       // first row of the run, in the pass
  int64_t rows = 0;      // at least 1
  int64_t position = 0;  // absolute position of its first row
  KvSegment own;         // the sequence's own tokens; its keys begin where the prefix ends
};

// What one work item attends with: runs of sequences that stand on the same prefix, so that a tile
// of the prefix is read once for all of them.
struct AttentionChunk {
  const std::vector<KvSegment>* prefix = nullptr;  // in position order, from 0; may be empty
  int64_t prefix_length = 0;
  std::vector<AttentionPiece> pieces;
  int64_t rows = 0;
};

// Key tiles are cut at multiples of this absolute position and folded in order, whatever the
// segments; that is what makes a prefix hit and a miss give the same bits.
inline constexpr int64_t kKeyTile = 64;

// Most query heads that may share a K/V head: what one attention work item holds at least.
inline constexpr int64_t kMaxGroupedHeads = 128;

}  // namespace tinyloop
