// Tiles of keys and values on their way into shared memory, and the segments they come from.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/attention_fold.cuh"
#include "cuda/attention_kernels.h"
#include "cuda/launch.cuh"
#include "kv.h"

namespace tinyloop::cuda {

inline constexpr int kTile = static_cast<int>(kKeyTile);

// One head of a segment's plane.
struct Source {
  const uint8_t* keys = nullptr;  // of token `begin`
  const uint8_t* values = nullptr;
  const __half* scales = nullptr;  // of the key of token `begin`; null: elements are halves
  int begin = 0;
  int end = 0;
  bool aligned = false;  // eight elements can be copied at once
};

// Which head of which plane, and how rows of it lie.
struct HeadPlace {
  int64_t plane;
  int kv_head, n_kv_heads, head_dim;
};

__device__ __forceinline__ bool holds_plane(const KvSegment& segment, int64_t plane) {
  return plane >= segment.first_plane && plane < segment.last_plane;
}

__device__ __forceinline__ Source source_of(const KvSegment& segment, const HeadPlace& at) {
  const bool codes = segment.format == KvFormat::kInt8;
  const auto plane = static_cast<size_t>(at.plane - segment.first_plane);
  const int bytes = codes ? 1 : 2;
  const size_t offset =
      plane * segment.plane_bytes + static_cast<size_t>(at.kv_head) * at.head_dim * bytes;
  Source source;
  source.keys = segment.keys + offset;
  source.values = segment.values + offset;
  if (codes) {
    source.scales =
        reinterpret_cast<const __half*>(segment.scales) + plane * segment.plane_scales + at.kv_head;
  }
  source.begin = static_cast<int>(segment.begin);
  source.end = static_cast<int>(segment.end);
  const auto bits = reinterpret_cast<uintptr_t>(source.keys) |
                    reinterpret_cast<uintptr_t>(source.values) |
                    static_cast<uintptr_t>(at.n_kv_heads) * at.head_dim * bytes;
  source.aligned = bits % (8 * bytes) == 0;
  return source;
}

// ---- the segments of a prefix -------------------------------------------------------------------

// Those of the plane, in position order, from one that holds keys of the current tile on. As many
// as a tile can touch; it moves on when the tiles leave it.
struct Window {
  static constexpr int kSources = kTile;
  Source sources[kSources];
  int count;
  int next;     // segment behind the last one taken
  int covered;  // tokens before this position are held
};

// A prefix: segments that cover the positions below `end`.
struct Prefix {
  const KvSegment* segments;
  int count;
  int end;
};

// By one warp: the window becomes what ends behind `position`.
__device__ __forceinline__ void fill_window(Window& window, const Prefix& prefix, int position,
                                            const HeadPlace& place) {
  const int lane = threadIdx.x % 32, n = prefix.count;
  int from = 0, count = 0, covered = position;
  while (from < n && count < Window::kSources) {
    const int i = from + lane;
    bool wanted = false;
    if (i < n) {
      const KvSegment& s = prefix.segments[i];
      wanted = holds_plane(s, place.plane) && s.end > position &&
               s.begin < min(s.end, int64_t{prefix.end});
    }
    const unsigned all = __ballot_sync(0xFFFFFFFFu, wanted);
    const int at = count + __popc(all & ((1u << lane) - 1));
    const bool taken = wanted && at < Window::kSources;
    if (taken) {
      Source source = source_of(prefix.segments[i], place);
      source.end = min(source.end, prefix.end);
      window.sources[at] = source;
      covered = source.end;
    }
    const unsigned took = __ballot_sync(0xFFFFFFFFu, taken);
    if (took != 0) covered = __shfl_sync(0xFFFFFFFFu, covered, 31 - __clz(took));
    count += __popc(took);
    // Where not all of them fit, the first one left out is the next.
    from += took == all ? 32 : __ffs(all & ~took) - 1;
  }
  if (lane == 0) {
    window.count = count;
    window.next = from < n ? from : n;
    window.covered = covered;
  }
}

// The first source with keys of a tile; the same in all threads. Tiles come in ascending order, but
// the last one that the prefix has keys of may come again.
struct Cursor {
  int at = 0;
};

// Joins all threads of a block.
struct BlockSync {
  __device__ __forceinline__ void operator()() const { __syncthreads(); }
};

// By all threads that move tiles, which `sync` joins: where the tile's sources begin in a window
// that covers them.
template <typename Sync>
__device__ __forceinline__ int seek(Window& window, Cursor& cursor, const Prefix& prefix, int tile,
                                    const HeadPlace& place, Sync sync) {
  if (tile >= prefix.end) return window.count;
  if (window.covered < min(tile + kTile, prefix.end) && window.next < prefix.count) {
    sync();
    if (threadIdx.x < 32) fill_window(window, prefix, tile, place);
    sync();
    cursor.at = 0;
  }
  while (cursor.at < window.count && window.sources[cursor.at].end <= tile) ++cursor.at;
  return cursor.at;
}

// ---- tiles in shared memory ---------------------------------------------------------------------

// Rows are padded by 16 bytes, so that eight rows of a matrix lie in different banks.
template <int kDim>
inline constexpr int kRowStride = kDim + 8;

template <int kDim>
struct TileBuffer {
  static constexpr int kStride = kRowStride<kDim>;
  static constexpr int kUnrolled = 32;  // of a thread's rows: all
  // Where a chunk of eight elements lies.
  static __device__ __forceinline__ int place(int row, int chunk) {
    return row * kStride + chunk * 8;
  }
  __half keys[kTile * kRowStride<kDim>];
  __half values[kTile * kRowStride<kDim>];
  float key_scales[kTile];
  float value_scales[kTile];
};

// What a thread must know about the copies it has started.
struct Arriving {
  uint32_t codes = 0;   // bit i: its row i came as codes
  float scale = 0.0f;   // of key (or, from thread kTile on, value) threadIdx.x % kTile
  bool scaled = false;  // the same in all threads: some row came as codes
};

__device__ __forceinline__ void copy_async_8(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// All of 8 or 16 bytes. A number of bytes that is not known takes ten instructions more for each
// copy, and a warp that fetches by itself is then slower than the products.
template <int kBytes>
__device__ __forceinline__ void copy_async_all(uint32_t to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
  }
}

// Bytes that are not aligned, one element after the other, and zeros up to `room`.
static __device__ __noinline__ void copy_elements(uint8_t* to, const uint8_t* from, int bytes,
                                                  int room) {
  if (room == 16) {
    for (int i = 0; i < 8; ++i) {
      reinterpret_cast<uint16_t*>(to)[i] =
          2 * i < bytes ? reinterpret_cast<const uint16_t*>(from)[i] : uint16_t{0};
    }
    return;
  }
  for (int i = 0; i < room; ++i) to[i] = i < bytes ? from[i] : uint8_t{0};
}

// Of two halves, bits that say which are infinite or no numbers: an exponent of ones carries into
// the sign.
__device__ __forceinline__ uint32_t broken_halves(uint32_t pair) {
  return ((pair & 0x7C007C00u) + 0x04000400u) & 0x80008000u;
}

// Moves tiles with all of a block's threads. A thread has one chunk of eight elements in each of
// kPasses rows. Codes are copied into the first half of the chunk that they become.
template <int kDim, int kThreads, typename BufferType = TileBuffer<kDim>>
struct TileCopier {
  static constexpr int kChunks = kDim / 8;
  static constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  static constexpr int kPassRows = kThreads / kLanes;
  static constexpr int kPasses = kTile / kPassRows;
  static_assert(kPasses * kPassRows == kTile && kThreads >= 2 * kTile);
  using Buffer = BufferType;

  const HeadPlace& place;

  __device__ __forceinline__ int chunk() const { return threadIdx.x % kLanes; }
  __device__ __forceinline__ int row(int pass) const {
    return threadIdx.x / kLanes + pass * kPassRows;
  }
  __device__ __forceinline__ int offset(int pass) const {
    return Buffer::place(row(0), chunk()) + pass * kPassRows * Buffer::kStride;
  }

  // Copies this thread's chunk of rows [begin, end): kBytes each, of which `bytes` are read; kAll:
  // all of them.
  template <int kBytes, bool kAll>
  __device__ __forceinline__ void copy_rows(__half* to, const uint8_t* from, int64_t row_bytes,
                                            int bytes, int begin, int end) const {
    const uint32_t at = shared_address(to + offset(0));
    const auto rows = static_cast<unsigned>(end - begin);
#pragma unroll(kAll ? Buffer::kUnrolled : 1)
    for (int i = 0; i < kPasses; ++i) {
      if (static_cast<unsigned>(row(i) - begin) < rows) {
        const uint32_t place = at + i * kPassRows * Buffer::kStride * 2;
        if constexpr (kAll) {
          copy_async_all<kBytes>(place, from);
        } else if constexpr (kBytes == 16) {
          copy_async(place, from, bytes);
        } else {
          copy_async_8(place, from, bytes);
        }
      }
      from += kPassRows * row_bytes;
    }
  }
  __device__ __forceinline__ void copy_rows_by_elements(__half* to, const uint8_t* from,
                                                        int64_t row_bytes, int bytes, int room,
                                                        int begin, int end) const {
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
      if (row(i) >= begin && row(i) < end) {
        copy_elements(reinterpret_cast<uint8_t*>(to + offset(i)), from, bytes, room);
      }
      from += kPassRows * row_bytes;
    }
  }
  // Keys, then values.
  template <int kBytes>
  __device__ __forceinline__ void copy_both(Buffer& to, const uint8_t* keys, const uint8_t* values,
                                            int64_t row_bytes, int bytes, int begin, int end,
                                            bool aligned) const {
    if (aligned && place.head_dim == kDim) {
      copy_rows<kBytes, true>(to.keys, keys, row_bytes, bytes, begin, end);
      copy_rows<kBytes, true>(to.values, values, row_bytes, bytes, begin, end);
      return;
    }
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      __half* const rows = which == 0 ? to.keys : to.values;
      const uint8_t* const from = which == 0 ? keys : values;
      if (aligned) {
        copy_rows<kBytes, false>(rows, from, row_bytes, bytes, begin, end);
      } else {
        copy_rows_by_elements(rows, from, row_bytes, bytes, kBytes, begin, end);
      }
    }
  }

  // Rows [begin, end) of the tile come from the source.
  __device__ __forceinline__ void start_rows(Buffer& to, const Source& from, int tile, int begin,
                                             int end, Arriving& arriving) const {
    const bool codes = from.scales != nullptr;
    const int element = codes ? 1 : 2;
    const int64_t row_bytes = static_cast<int64_t>(place.n_kv_heads) * place.head_dim * element;
    const int first = tile - from.begin;  // token of the tile's first row
    if (kLanes == kChunks || chunk() < kChunks) {
      const int bytes = min(max(place.head_dim - chunk() * 8, 0), 8) * element;
      // Where nothing is read, the address is of no meaning.
      const int64_t at = bytes == 0 ? 0 : (first + row(0)) * row_bytes + chunk() * 8 * element;
      const uint8_t *keys = from.keys + at, *values = from.values + at;
      if (codes) {
        copy_both<8>(to, keys, values, row_bytes, bytes, begin, end, from.aligned);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (row(i) >= begin && row(i) < end) arriving.codes |= 1u << i;
        }
      } else {
        copy_both<16>(to, keys, values, row_bytes, bytes, begin, end, from.aligned);
      }
    }
    const int key = threadIdx.x % kTile, which = threadIdx.x / kTile;
    if (which < 2 && key >= begin && key < end) {
      arriving.scale = 1.0f;
      if (codes) {
        const int64_t at = (static_cast<int64_t>(first + key) * 2 + which) * place.n_kv_heads;
        arriving.scale = __half2float(from.scales[at]);
      }
    }
    arriving.scaled |= codes;
  }

  // Keys from `limit` on do not exist.
  __device__ __forceinline__ void clear_rows(Buffer& to, int tile, int limit) const {
    if (kLanes != kChunks && chunk() >= kChunks) return;
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
      if (tile + row(i) < limit) continue;
      *reinterpret_cast<uint4*>(to.keys + offset(i)) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(to.values + offset(i)) = uint4{0, 0, 0, 0};
    }
  }

  // The tile's keys below `limit`: those of the window from source `first` on, then `own`,
  // which may be empty.
  __device__ __forceinline__ Arriving start(Buffer& to, const Window& window, int first,
                                            const Source& own, int tile, int limit) const {
    Arriving arriving;
    if (limit < tile + kTile) clear_rows(to, tile, limit);
    int i = first;
    while (true) {
      const bool shared = i < window.count && window.sources[i].begin < limit;
      const Source source = shared ? window.sources[i] : own;
      const int begin = max(source.begin - tile, 0), end = min(source.end, limit) - tile;
      if (begin < end) start_rows(to, source, tile, begin, end, arriving);
      if (!shared || source.end >= limit) break;
      ++i;
    }
    commit_copies();
    return arriving;
  }

  // When this thread's copies have arrived: codes become halves. A barrier is still to come.
  __device__ __forceinline__ void finish(Buffer& to, const Arriving& arriving) const {
    if (!arriving.scaled) return;
    if (threadIdx.x < kTile) {
      to.key_scales[threadIdx.x] = arriving.scale;
    } else if (threadIdx.x < 2 * kTile) {
      to.value_scales[threadIdx.x - kTile] = arriving.scale;
    }
    if (arriving.codes == (uint64_t{1} << kPasses) - 1) return expand_all(to);
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
      if ((arriving.codes >> i & 1) == 0) continue;
      expand(to.keys + offset(i));
      expand(to.values + offset(i));
    }
  }
  // Loads before stores, which the compiler may not exchange.
  __device__ __forceinline__ void expand_all(Buffer& to) const {
    constexpr int kAtOnce = kPasses < 4 ? kPasses : 4;
    static_assert(kPasses % kAtOnce == 0);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      __half* const rows = which == 0 ? to.keys : to.values;
#pragma unroll
      for (int first = 0; first < kPasses; first += kAtOnce) {
        uint2 codes[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          codes[i] = *reinterpret_cast<const uint2*>(rows + offset(first + i));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) store_halves(rows + offset(first + i), codes[i]);
      }
    }
  }
  // Whether this thread's part of the values holds what is no number.
  __device__ __forceinline__ bool has_broken_values(const Buffer& buffer) const {
    if (kLanes != kChunks && chunk() >= kChunks) return false;
    uint32_t broken = 0;
#pragma unroll Buffer::kUnrolled
    for (int i = 0; i < kPasses; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(buffer.values + offset(i));
      broken |= broken_halves(x.x) | broken_halves(x.y) | broken_halves(x.z) | broken_halves(x.w);
    }
    return broken != 0;
  }
  __device__ __forceinline__ void clear_value(Buffer& buffer, int key) const {
    if (threadIdx.x >= kChunks) return;
    *reinterpret_cast<uint4*>(buffer.values + Buffer::place(key, threadIdx.x)) = uint4{0, 0, 0, 0};
  }

  static __device__ __forceinline__ void expand(__half* chunk) {
    store_halves(chunk, *reinterpret_cast<const uint2*>(chunk));
  }
  static __device__ __forceinline__ void store_halves(__half* chunk, uint2 codes) {
    const uint2 low = halves_of_codes(codes.x), high = halves_of_codes(codes.y);
    *reinterpret_cast<uint4*>(chunk) = uint4{low.x, low.y, high.x, high.y};
  }
};

}  // namespace tinyloop::cuda
