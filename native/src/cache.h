// Memory for the keys and values (or hidden states) of token ranges, in any of the storage modes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kv.h"
#include "memory.h"
#include "tinyloop/descriptor.h"

namespace tinyloop {

enum class CacheMode { kFp16, kInt8, kHFp16, kHInt8, kHInt4 };
// "fp16", "int8", "h_fp16", "h_int8", "h_int4"; LoadError for any other name.
CacheMode cache_mode(const std::string& name);
bool stores_hidden(CacheMode mode);
// How keys and values lie while they are attended to: a hidden mode attends as kFp16 does.
KvFormat kv_format(CacheMode mode);
HiddenFormat hidden_format(CacheMode mode);

// What decides the size of a token in one plane.
struct CacheShape {
  CacheMode mode = CacheMode::kFp16;
  int64_t hidden_size = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t activation_bytes = 0;

  int64_t kv_width() const { return n_kv_heads * head_dim; }
};
CacheShape cache_shape(const Descriptor& descriptor, CacheMode mode, size_t activation_bytes);

// Token positions [begin, end) in planes [first_plane, last_plane).
struct CacheRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t first_plane = 0;
  int64_t last_plane = 0;

  int64_t tokens() const { return end - begin; }
  int64_t planes() const { return last_plane - first_plane; }
};

// Bytes that hold a range; the largest size_t / 4 if they do not fit 64 bits, which no allocation
// survives.
size_t cache_bytes(const CacheShape& shape, const CacheRange& range);

// The two faces of stored tokens: exactly one of them has memory.
struct CachePlaces {
  KvSegment kv;
  HiddenSegment hidden;
};

// The places of a range in memory of cache_bytes().
CachePlaces cache_places(const CacheShape& shape, const CacheRange& range, uint8_t* memory);

// The same memory seen as fewer planes.
CachePlaces clip_planes(CachePlaces places, int64_t first_plane, int64_t last_plane);

// One allocation. Immutable once a handle shares it, but for planes nobody reads yet.
struct CacheBlock {
  Block memory;
  CachePlaces places;
};
std::shared_ptr<CacheBlock> make_cache_block(Account& account, const CacheShape& shape,
                                             const CacheRange& range, Owner owner,
                                             const char* what);

// Everything that new rows stand on: tokens [0, length), plane by plane, in position order.
struct CacheView {
  std::vector<KvSegment> kv;
  std::vector<HiddenSegment> hidden;  // cold: a pass rebuilds keys and values from them
  int64_t length = 0;

  void append(const CachePlaces& places);
};

}  // namespace tinyloop
