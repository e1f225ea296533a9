// How the tiles of attention by warpgroups come into shared memory: each of four warps fills a
// place of a ring by itself, with copies of 16 bytes that report to the place's barrier.
#pragma once

#include <type_traits>

#include "cuda/attention_item.cuh"
#include "cuda/attention_products.cuh"

namespace tinyloop::cuda {

// 64 rows as the tensor cores read them.
template <int kDim>
struct SwizzledRows {
  static constexpr int kHalf = 64 * 64;  // elements of 64 columns
  static constexpr int kHalves = (kDim + 63) / 64;
  static constexpr int kElements = kHalves * kHalf;
  static __device__ __forceinline__ int place(int row, int chunk) {
    return chunk / 8 * kHalf + row * 64 + (chunk % 8 ^ row % 8) * 8;
  }
};

// How a tile's keys and values are stored.
enum class Coded : int {
  kNo,     // as halves
  kYes,    // some as codes; each scale of the values is a number, and not below zero
  kOddly,  // some as codes, with other scales
};

template <int kDim>
struct alignas(1024) RingPlace {
  __half keys[SwizzledRows<kDim>::kElements];
  __half values[SwizzledRows<kDim>::kElements];
  float key_scales[kTile];
  float value_scales[kTile];
  Coded coded;
};

// This thread's arrival, once its copies so far have arrived.
__device__ __forceinline__ void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Bytes that are not aligned, one after the other (kHalves: two), and zeros up to 16.
template <bool kHalves>
__device__ __forceinline__ void copy_16_slowly(__half* to, const uint8_t* from, int bytes) {
  using Element = std::conditional_t<kHalves, uint16_t, uint8_t>;
  constexpr int kElement = sizeof(Element);
#pragma unroll 1
  for (int i = 0; i < 16; i += kElement) {
    Element x = 0;
    if (i < bytes) x = *reinterpret_cast<const Element*>(from + i);
    *reinterpret_cast<Element*>(reinterpret_cast<uint8_t*>(to) + i) = x;
  }
}

// Sixteen bytes of each row are a part: eight halves, or sixteen codes. The codes of a part lie
// where the first or, in the second half of a row, the last eight halves will lie that they become:
// so the parts of eight threads lie in different banks.
template <int kDim, bool kCodes>
struct RowParts {
  static constexpr int kParts = kCodes ? kDim / 16 : kDim / 8;
  static constexpr int kLanes = kParts <= 4 ? 4 : kParts <= 8 ? 8 : 16;
  static constexpr int kRows = 32 / kLanes;    // that a warp has at once
  static constexpr int kPatterns = 8 / kRows;  // of places in eight rows
  static constexpr int kEight = 8 * 64 * 2;    // bytes between rows that are eight apart

  const int lane;

  __device__ __forceinline__ int part() const { return lane % kLanes; }
  __device__ __forceinline__ int row() const { return lane / kLanes; }
  __device__ __forceinline__ bool idle() const { return kLanes != kParts && part() >= kParts; }
  __device__ __forceinline__ int chunk() const { return kCodes ? 2 * part() + part() / 4 : part(); }
  // The first eight rows' places of this thread's part, in bytes.
  __device__ __forceinline__ void places(uint32_t rows, uint32_t (&at)[kPatterns]) const {
#pragma unroll
    for (int j = 0; j < kPatterns; ++j) {
      at[j] = rows + 2 * SwizzledRows<kDim>::place(j * kRows + row(), chunk());
    }
  }

  // Rows [begin, end) of a tile; from: where its row 0 would lie; width: bytes of a head. kWhole:
  // all rows, of heads that fill them.
  template <bool kWhole>
  __device__ __forceinline__ void copy(const __half* to, const uint8_t* from, int64_t row_bytes,
                                       int width, int begin, int end) const {
    if (idle()) return;
    const int bytes = min(max(width - part() * 16, 0), 16);
    // Where nothing is read, the address is of no meaning.
    from += row() * row_bytes + (bytes == 0 ? 0 : part() * 16);
    uint32_t at[kPatterns];
    places(shared_address(to), at);
#pragma unroll kWhole ? 8 : 1
    for (int g = 0; g < kTile / 8; ++g) {
#pragma unroll
      for (int j = 0; j < kPatterns; ++j) {
        const int r = g * 8 + j * kRows + row();
        if constexpr (kWhole) {
          copy_async_all<16>(at[j] + g * kEight, from);
        } else if (r >= begin && r < end) {
          copy_async(at[j] + g * kEight, from, bytes);
        }
        from += kRows * row_bytes;
      }
    }
  }
  __device__ __forceinline__ void copy_slowly(__half* to, const uint8_t* from, int64_t row_bytes,
                                              int width, int begin, int end) const {
    if (idle()) return;
    const int bytes = min(max(width - part() * 16, 0), 16);
    from += bytes == 0 ? 0 : part() * 16;
#pragma unroll 1
    for (int r = row(); r < kTile; r += kRows) {
      if (r < begin || r >= end) continue;
      copy_16_slowly<!kCodes>(to + SwizzledRows<kDim>::place(r, chunk()), from + r * row_bytes,
                              bytes);
    }
  }
};

// Codes in place become halves, those of the rows whose bit is set; kWhole: of all.
template <int kDim, bool kWhole>
__device__ __forceinline__ void expand_codes(int lane, const __half* rows, uint64_t coded) {
  using Parts = RowParts<kDim, true>;
  constexpr int kPatterns = Parts::kPatterns, kSteps = kTile / Parts::kRows;
  constexpr int kAtOnce = 2 * kPatterns;  // loads before stores: they cannot be exchanged
  static_assert(kSteps % kAtOnce == 0);
  const Parts parts{lane};
  if (parts.idle()) return;
  const bool last_first = parts.part() >= 4;
  uint32_t at[kPatterns];
  parts.places(shared_address(rows), at);
#pragma unroll 1
  for (int first = 0; first < kSteps; first += kAtOnce) {
    uint4 codes[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      codes[i] = load_shared(at[i % kPatterns] + i / kPatterns * Parts::kEight);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t place = at[i % kPatterns] + i / kPatterns * Parts::kEight;
      const int row = (first + i) * Parts::kRows + parts.row();
      if (!kWhole && (coded >> row & 1) == 0) continue;
      const uint4 x = codes[i];
      const uint2 near = last_first ? uint2{x.z, x.w} : uint2{x.x, x.y};
      const uint2 far = last_first ? uint2{x.x, x.y} : uint2{x.z, x.w};
      const uint2 a = halves_of_codes(near.x), b = halves_of_codes(near.y);
      store_shared(place, {a.x, a.y, b.x, b.y});
      const uint2 c = halves_of_codes(far.x), d = halves_of_codes(far.y);
      store_shared(place ^ 16, {c.x, c.y, d.x, d.y});
    }
#pragma unroll
    for (int j = 0; j < kPatterns; ++j) at[j] += 2 * Parts::kEight;
  }
}

// ---- one warp, one tile -------------------------------------------------------------------------

// Where a warp's tiles come from; moves on with them.
struct Finder {
  Window& window;
  int at = 0;

  // Before an item's first tile.
  __device__ __forceinline__ void begin() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) window.count = window.next = window.covered = 0;
    __syncwarp();
    at = 0;
  }
  // The window's first source with keys of the tile.
  __device__ __forceinline__ int seek(const Prefix& prefix, int tile, const HeadPlace& place) {
    if (tile >= prefix.end) return window.count;
    if (window.covered < min(tile + kTile, prefix.end) && window.next < prefix.count) {
      __syncwarp();
      fill_window(window, prefix, tile, place);
      __syncwarp();
      at = 0;
    }
    while (at < window.count && window.sources[at].end <= tile) ++at;
    return at;
  }
};

// The lane anew for each tile: else what follows from it is kept across tiles, in more registers
// than there are.
__device__ __forceinline__ int lane_of_tile() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A tile on its way.
struct Coming {
  uint64_t coded = 0;   // bit r: row r comes as codes
  bool odd = false;     // this thread saw a scale of values that is negative or no number
  bool stored = false;  // some of the tile came by stores
};

template <int kDim>
struct TileFetch {
  RingPlace<kDim>& to;
  int n_kv_heads, head_dim;
  int lane = lane_of_tile();

  template <bool kCodes>
  __device__ __forceinline__ void copy_rows(const uint8_t* keys, const uint8_t* values,
                                            int64_t row_bytes, int begin, int end,
                                            bool aligned) const {
    const RowParts<kDim, kCodes> parts{lane};
    const int width = kCodes ? head_dim : 2 * head_dim;
    if (aligned && end - begin == kTile && head_dim == kDim) {
      parts.template copy<true>(to.keys, keys, row_bytes, width, begin, end);
      parts.template copy<true>(to.values, values, row_bytes, width, begin, end);
      return;
    }
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      __half* const rows = which == 0 ? to.keys : to.values;
      const uint8_t* const from = which == 0 ? keys : values;
      if (aligned) {
        parts.template copy<false>(rows, from, row_bytes, width, begin, end);
      } else {
        parts.copy_slowly(rows, from, row_bytes, width, begin, end);
      }
    }
  }
  // Those of rows [begin, end); of rows that are no codes, 1.
  __device__ __forceinline__ void store_scales(const Source& from, int first, int begin, int end,
                                               Coming& coming) const {
    uint16_t of_key[2], of_value[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = lane + i * 32;
      of_key[i] = of_value[i] = 0x3C00;
      if (from.scales != nullptr && key >= begin && key < end) {
        const auto* scales = reinterpret_cast<const uint16_t*>(from.scales) +
                             static_cast<int64_t>(first + key) * 2 * n_kv_heads;
        of_key[i] = scales[0];
        of_value[i] = scales[n_kv_heads];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = lane + i * 32;
      if (key < begin || key >= end) continue;
      to.key_scales[key] = __half2float(__ushort_as_half(of_key[i]));
      to.value_scales[key] = __half2float(__ushort_as_half(of_value[i]));
      coming.odd |= of_value[i] >= 0x7C00;  // infinite, no number, or with a sign
    }
  }

  // Rows [begin, end) of the tile come from the source.
  __device__ __forceinline__ void start_rows(const Source& from, int tile, int begin, int end,
                                             Coming& coming) const {
    const bool codes = from.scales != nullptr;
    const int64_t row_bytes = static_cast<int64_t>(n_kv_heads) * head_dim * (codes ? 1 : 2);
    const int first = tile - from.begin;  // token of the tile's first row
    const uint8_t *keys = from.keys + first * row_bytes, *values = from.values + first * row_bytes;
    const auto bits = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(keys)) |
                      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(values)) |
                      static_cast<uint32_t>(row_bytes);
    const bool aligned = bits % 16 == 0;
    coming.stored |= !aligned;
    if (codes) {
      copy_rows<true>(keys, values, row_bytes, begin, end, aligned);
      coming.coded |= (~uint64_t{0} >> (kTile - (end - begin))) << begin;
    } else {
      copy_rows<false>(keys, values, row_bytes, begin, end, aligned);
    }
    if (codes || end - begin < kTile) store_scales(from, first, begin, end, coming);
  }

  // Keys from row `first` on do not exist.
  __device__ __forceinline__ void clear_rows(int first) const {
#pragma unroll 1
    for (int i = first * (kDim / 8) + lane; i < kTile * (kDim / 8); i += 32) {
      const int at = SwizzledRows<kDim>::place(i / (kDim / 8), i % (kDim / 8));
      *reinterpret_cast<uint4*>(to.keys + at) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(to.values + at) = uint4{0, 0, 0, 0};
    }
  }

  // The tile's keys below `limit`: those of the window from source `i` on, then `own`, which may be
  // empty.
  __device__ __forceinline__ Coming start(const Window& window, int i, const Source& own, int tile,
                                          int limit) const {
    Coming coming;
    if (limit < tile + kTile) {
      clear_rows(limit - tile);
      coming.stored = true;
    }
#pragma unroll 1
    while (true) {
      const bool shared = i < window.count && window.sources[i].begin < limit;
      const Source source = shared ? window.sources[i] : own;
      const int begin = max(source.begin - tile, 0), end = min(source.end, limit) - tile;
      if (begin < end) start_rows(source, tile, begin, end, coming);
      if (!shared || source.end >= limit) break;
      ++i;
    }
    return coming;
  }

  // Codes become halves. Of other tiles the copies may still be under way.
  __device__ __forceinline__ void finish(const Coming& coming) const {
    Coded coded = Coded::kNo;
    if (coming.coded != 0) {
      commit_copies();
      wait_for_copies<0>();
      if (coming.coded == ~uint64_t{0}) {
        expand_codes<kDim, true>(lane, to.keys, 0);
        expand_codes<kDim, true>(lane, to.values, 0);
      } else {
#pragma unroll 1
        for (int which = 0; which < 2; ++which) {
          expand_codes<kDim, false>(lane, which == 0 ? to.keys : to.values, coming.coded);
        }
      }
      coded = __any_sync(0xFFFFFFFFu, coming.odd) ? Coded::kOddly : Coded::kYes;
    }
    if (lane == 0) to.coded = coded;
    if (coming.coded != 0 || coming.stored) publish_to_products();
  }
};

}  // namespace tinyloop::cuda
