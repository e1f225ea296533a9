// A layer's normed input, stored so that keys and values can be rebuilt. A warp takes a row: four
// elements to a lane, so that 32 lanes hold a group of 128 and 16 a group of 64.
#include "cuda/elements.cuh"
#include "cuda/quantize.cuh"
#include "cuda/rows.h"

namespace tinyloop::cuda {

namespace {

static_assert(kInt8HiddenGroup == 128 && kInt4HiddenGroup == 64,
              "groups are parts of a warp's row");

// Where a token's stored form lies. codes is null where nothing is kept.
struct HiddenPlace {
  HiddenFormat format;  // kActivations for the first tokens of kInt4 too
  uint8_t* codes;
  uint16_t* scales;
};

__device__ __forceinline__ uint8_t* token_at(uint8_t* base, size_t plane, int64_t row,
                                             int64_t row_bytes) {
  return base == nullptr ? nullptr : base + plane + row * row_bytes;
}

template <typename T>
__device__ __forceinline__ HiddenPlace place_of(const HiddenSegment& s, int64_t plane,
                                                int64_t token, int64_t width) {
  const auto p = static_cast<size_t>(plane - s.first_plane);
  const int64_t row = token - s.begin;
  const int64_t whole = width * static_cast<int64_t>(sizeof(T));
  if (s.format == HiddenFormat::kActivations) {
    return {s.format, token_at(s.codes, p * s.plane_codes, row, whole), nullptr};
  }
  const bool int8 = s.format == HiddenFormat::kInt8;
  if (!int8 && token < kSinkTokens) {
    return {HiddenFormat::kActivations, token_at(s.sinks, p * s.plane_sinks, row, whole), nullptr};
  }
  const int64_t row_codes = int8 ? width : (width + 1) / 2;
  const int64_t row_scales = int8 ? (width + 127) / 128 : 2 * ((width + 63) / 64);
  auto* scales = reinterpret_cast<uint8_t*>(s.scales);
  return {s.format, token_at(s.codes, p * s.plane_codes, row, row_codes),
          reinterpret_cast<uint16_t*>(token_at(scales, p * s.plane_scales, row, 2 * row_scales))};
}

// ---- four elements of a lane --------------------------------------------------------------------

// Elements from `width` on are zeros in x and are left out.
struct Four {
  int64_t k, width;
  __device__ __forceinline__ bool has(int i) const { return k + i < width; }
};

__device__ __forceinline__ float element(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

__device__ __forceinline__ void store_int8_codes(uint8_t* row, const Four& at,
                                                 const int (&code)[4]) {
  uint8_t* to = row + at.k;
  if (at.has(3) && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<unsigned*>(to) = pack_codes(code[0], code[1], code[2], code[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at.has(i)) to[i] = static_cast<uint8_t>(code[i]);
  }
}

__device__ __forceinline__ void load_int8_codes(const uint8_t* row, const Four& at,
                                                int (&code)[4]) {
  const uint8_t* from = row + at.k;
  if (at.has(3) && reinterpret_cast<uintptr_t>(from) % 4 == 0) {
    const unsigned all = *reinterpret_cast<const unsigned*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) code[i] = static_cast<int8_t>(all >> (8 * i));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = at.has(i) ? static_cast<int8_t>(from[i]) : 0;
}

// The even element in the low nibble; codes from `width` on are 0.
__device__ __forceinline__ void store_nibbles(uint8_t* row, const Four& at, const int (&code)[4]) {
  uint8_t* to = row + at.k / 2;
  if (at.has(0)) to[0] = static_cast<uint8_t>(code[0] | (at.has(1) ? code[1] << 4 : 0));
  if (at.has(2)) to[1] = static_cast<uint8_t>(code[2] | (at.has(3) ? code[3] << 4 : 0));
}

__device__ __forceinline__ void load_nibbles(const uint8_t* row, const Four& at, int (&code)[4]) {
  const uint8_t* from = row + at.k / 2;
  const int low = at.has(0) ? from[0] : 0, high = at.has(2) ? from[1] : 0;
  code[0] = low & 15;
  code[1] = low >> 4;
  code[2] = high & 15;
  code[3] = high >> 4;
}

__device__ __forceinline__ float4 int8_values(const int (&code)[4], float scale) {
  return make_float4(
      __fmul_rn(static_cast<float>(code[0]), scale), __fmul_rn(static_cast<float>(code[1]), scale),
      __fmul_rn(static_cast<float>(code[2]), scale), __fmul_rn(static_cast<float>(code[3]), scale));
}

__device__ __forceinline__ float4 int4_values(const int (&code)[4], float scale, float least) {
  return make_float4(int4_value(code[0], scale, least), int4_value(code[1], scale, least),
                     int4_value(code[2], scale, least), int4_value(code[3], scale, least));
}

// ---- a group of a warp --------------------------------------------------------------------------

// x: what the activations hold. Returns what a reader gets. Called by a whole warp.
__device__ __forceinline__ float4 store_int8(const float4& x, const Four& at,
                                             const HiddenPlace& to) {
  const unsigned mine =
      max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
  const __half scale = int8_scale(largest_of_lanes(mine, 32));
  const float factor = __half2float(scale);
  int code[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = int8_code(element(x, i), factor);
  if (to.codes != nullptr) {
    store_int8_codes(to.codes, at, code);
    if (lane() == 0) to.scales[at.k / kInt8HiddenGroup] = __half_as_ushort(scale);
  }
  return int8_values(code, factor);
}

__device__ __forceinline__ float4 store_int4(const float4& x, const Four& at,
                                             const HiddenPlace& to) {
  const float infinity = __uint_as_float(kInfinityBits);
  float below = -infinity, most = -infinity;
  unsigned mine = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = element(x, i);
    mine = max(mine, magnitude(value));
    if (!at.has(i)) continue;
    below = fmaxf(below, __fsub_rn(0.0f, value));
    most = fmaxf(most, value);
  }
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
    below = fmaxf(below, __shfl_xor_sync(kAllLanes, below, distance));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
  }
  const Int4Scale s = int4_scale(below, most, largest_of_lanes(mine, 16) < kInfinityBits);
  const float scale = __half2float(s.scale), least = __half2float(s.least);
  int code[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = int4_code(element(x, i), scale, least);
  if (to.codes != nullptr && at.has(0)) {
    store_nibbles(to.codes, at, code);
    if (lane() % 16 == 0) {
      uint16_t* scales = to.scales + at.k / kInt4HiddenGroup * 2;
      scales[0] = __half_as_ushort(s.scale);
      scales[1] = __half_as_ushort(s.least);
    }
  }
  return int4_values(code, scale, least);
}

// ---- kernels ------------------------------------------------------------------------------------

template <typename T, int kFours>
__global__ void __launch_bounds__(32 * kRowWarps)
    norm_store_kernel(const float* state, NormSpec norm, int64_t rows, int64_t width,
                      RunTable<HiddenRun> runs, int64_t plane, RowsOf<T> out, RowsOf<T> read_back) {
  wait_for_previous();
  let_next_start();
  const int64_t r = warp_row();
  if (r >= rows) return;
  HiddenPlace to{HiddenFormat::kActivations, nullptr, nullptr};
  bool reads = false;
  const auto place = [&](const HiddenRun& run) {
    to = place_of<T>(run.to, plane, run.token + (r - run.row), width);
    reads = run.to.format != HiddenFormat::kActivations;
  };
  if (runs.run_of_row == nullptr) {
    place(runs.one);
  } else if (const int32_t index = runs.run_of_row[r]; index >= 0) {
    place(runs.runs[index]);
  }
  WarpRow<float, kFours> row(state + r * width, width);
  const float factor = row.factor(norm);
  T* rounded_row = out.row(r);
  T* back_row = reads ? read_back.row(r) : nullptr;
  const bool out_by_four = loads_by_four(rounded_row), back_by_four = loads_by_four(back_row);
  row.each([&](int64_t k, const float4& value) {
    const Four at{k, width};
    const float4 x = rounded_four<T>(normed_four(value, norm, factor, k, width));
    store_some(rounded_row, k, width, out_by_four, x);
    float4 back = x;
    if (to.format == HiddenFormat::kInt8) {
      back = store_int8(x, at, to);
    } else if (to.format == HiddenFormat::kInt4) {
      back = store_int4(x, at, to);
    } else if (to.codes != nullptr) {
      T* kept = reinterpret_cast<T*>(to.codes);
      store_some(kept, k, width, loads_by_four(kept), x);
    }
    if (reads) store_some(back_row, k, width, back_by_four, back);
  });
}

template <typename T>
__device__ __forceinline__ float4 load_stored(const HiddenPlace& from, const Four& at) {
  if (from.format == HiddenFormat::kActivations) {
    const T* row = reinterpret_cast<const T*>(from.codes);
    return load_some(row, at.k, at.width, loads_by_four(row));
  }
  int code[4];
  if (from.format == HiddenFormat::kInt8) {
    load_int8_codes(from.codes, at, code);
    return int8_values(code, __half2float(__ushort_as_half(from.scales[at.k / kInt8HiddenGroup])));
  }
  load_nibbles(from.codes, at, code);
  const uint16_t* scales = from.scales + at.k / kInt4HiddenGroup * 2;
  return int4_values(code, __half2float(__ushort_as_half(scales[0])),
                     __half2float(__ushort_as_half(scales[1])));
}

template <typename T>
__global__ void __launch_bounds__(32 * kRowWarps)
    load_hidden_kernel(HiddenSegment from, int64_t plane, int64_t token, int64_t rows,
                       int64_t width, RowsOf<T> out) {
  wait_for_previous();
  let_next_start();
  const int64_t r = warp_row();
  if (r >= rows) return;
  const HiddenPlace place = place_of<T>(from, plane, token + r, width);
  T* to = out.row(r);
  const bool by_four = loads_by_four(to);
#pragma unroll 4
  for (int64_t k = 4 * lane(); k < width; k += 128) {
    store_some(to, k, width, by_four, load_stored<T>(place, {k, width}));
  }
}

}  // namespace

void norm_store(cudaStream_t stream, bool fp32, const float* state, const NormSpec& norm,
                int64_t rows, int64_t width, const RunTable<HiddenRun>& runs, int64_t plane,
                Rows out, Rows read_back) {
  if (rows == 0) return;
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    with_fours<16>(width, [&](auto fours) {
      launch(stream, warp_per_row(rows), norm_store_kernel<T, fours.value>, state, norm, rows,
             width, runs, plane, RowsOf<T>(out), RowsOf<T>(read_back));
    });
  });
}

void load_hidden(cudaStream_t stream, bool fp32, const HiddenSegment& from, int64_t plane,
                 int64_t token, int64_t rows, int64_t width, Rows out) {
  if (rows == 0) return;
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    launch(stream, warp_per_row(rows), load_hidden_kernel<T>, from, plane, token, rows, width,
           RowsOf<T>(out));
  });
}

}  // namespace tinyloop::cuda
