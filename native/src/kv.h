// Where the keys and values of a sequence lie, and how they are stored. Plain data; read by every
// backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tinyloop {

// How keys and values lie in memory while they are attended to.
enum class KvFormat : uint8_t {
  kActivations,  // the activations' own type
  kInt8,         // codes, and one FP16 scale for each (token, K/V head)
};

// Token rows [begin, end) of some sequence in planes [first_plane, last_plane). Row t of plane p:
//   keys + (p - first_plane) * plane_bytes + (t - begin) * row bytes, the same for values;
//   kInt8: scales + (p - first_plane) * plane_scales + (t - begin) * 2 n_kv_heads: FP16, those of
//   the keys then those of the values.
// A row holds n_kv_heads * head_dim elements. plane_bytes = plane_scales = 0 means that one plane's
// memory serves all planes in turn.
struct KvSegment {
  uint8_t* keys = nullptr;
  uint8_t* values = nullptr;
  uint16_t* scales = nullptr;
  size_t plane_bytes = 0;
  size_t plane_scales = 0;  // in scales, not bytes
  int64_t first_plane = 0;
  int64_t last_plane = INT64_MAX;
  int64_t begin = 0;
  int64_t end = 0;
  KvFormat format = KvFormat::kActivations;
};

// How a layer's normed input lies in memory, from which keys and values are rebuilt (store-h).
enum class HiddenFormat : uint8_t {
  kActivations,  // [tokens, width] of the activations' type
  kInt8,         // codes [tokens, width]; scales FP16 [tokens, groups of 128]
  kInt4,         // codes [tokens, (width + 1) / 2], the even element in the low nibble;
                 // scales FP16 [tokens, groups of 64, 2]: scale, then least value
};
inline constexpr int64_t kInt8HiddenGroup = 128;
inline constexpr int64_t kInt4HiddenGroup = 64;
// kInt4 keeps this many first positions of a sequence as activations: attention sinks.
inline constexpr int64_t kSinkTokens = 8;

// Token rows [begin, end) of some sequence in planes [first_plane, last_plane); strides between
// planes in bytes. Rows below kSinkTokens lie at `sinks` when the format is kInt4.
struct HiddenSegment {
  uint8_t* codes = nullptr;
  uint16_t* scales = nullptr;
  uint8_t* sinks = nullptr;  // activations [min(end, kSinkTokens) - begin, width], kInt4 only
  size_t plane_codes = 0;
  size_t plane_scales = 0;
  size_t plane_sinks = 0;
  int64_t first_plane = 0;
  int64_t last_plane = INT64_MAX;
  int64_t begin = 0;
  int64_t end = 0;
  HiddenFormat format = HiddenFormat::kActivations;
};

// A run of rows of one sequence in a pass.
struct AttentionPiece {
  int64_t row = 0;       // first row of the run, in the pass
  int64_t rows = 0;      // at least 1
  int64_t position = 0;  // absolute position of its first row
  int64_t open_end = 0;  // prefix-LM: all keys below this position are seen by all rows of the run;
                         // 0, or at least position + rows
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

// Rows [row, row + rows) of a product become tokens [token, token + rows) (absolute positions).
struct KvRun {
  int64_t row = 0;
  int64_t rows = 0;
  int64_t token = 0;
  KvSegment to;
};
struct HiddenRun {
  int64_t row = 0;
  int64_t rows = 0;
  int64_t token = 0;
  HiddenSegment to;
};

// Key tiles are cut at multiples of this absolute position and folded in order, whatever the
// segments; that is what makes a prefix hit and a miss give the same bits.
inline constexpr int64_t kKeyTile = 64;

// Most query heads that may share a K/V head: what one attention work item holds at least.
inline constexpr int64_t kMaxGroupedHeads = 128;

}  // namespace tinyloop
