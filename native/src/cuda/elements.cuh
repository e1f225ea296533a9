// Elements of activations and states in registers, four or eight at a time, and how rows are spread
// over a grid.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "backend.h"
#include "cuda/launch.cuh"
#include "cuda/row_norm.cuh"

namespace tinyloop::cuda {

// Rows as a kernel sees them.
template <typename T>
struct RowsOf {
  T* data;
  int64_t stride;

  explicit RowsOf(const Rows& rows) : data(reinterpret_cast<T*>(rows.data)), stride(rows.stride) {}
  __device__ __forceinline__ T* row(int64_t r) const { return data + r * stride; }
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T rounded(float x);
template <>
__device__ __forceinline__ float rounded<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half rounded<__half>(float x) {
  return __float2half_rn(x);
}

template <typename T>
__device__ __forceinline__ float4 rounded_four(const float4& x) {
  return make_float4(to_float(rounded<T>(x.x)), to_float(rounded<T>(x.y)),
                     to_float(rounded<T>(x.z)), to_float(rounded<T>(x.w)));
}

// ---- four ---------------------------------------------------------------------------------------

__device__ __forceinline__ void store_four(float* p, const float4& x) {
  *reinterpret_cast<float4*>(p) = x;
}
__device__ __forceinline__ void store_four(__half* p, const float4& x) {
  const __half2 low = __floats2half2_rn(x.x, x.y), high = __floats2half2_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(p) = make_uint2(*reinterpret_cast<const unsigned*>(&low),
                                            *reinterpret_cast<const unsigned*>(&high));
}

// Elements k .. k + 3, those from `width` on left out. by_four: loads_by_four() of the row.
template <typename T>
__device__ __forceinline__ void store_some(T* row, int64_t k, int64_t width, bool by_four,
                                           const float4& x) {
  if (by_four && k + 4 <= width) return store_four(row + k, x);
  if (k < width) row[k] = rounded<T>(x.x);
  if (k + 1 < width) row[k + 1] = rounded<T>(x.y);
  if (k + 2 < width) row[k + 2] = rounded<T>(x.z);
  if (k + 3 < width) row[k + 3] = rounded<T>(x.w);
}

// ---- eight --------------------------------------------------------------------------------------

struct Eight {
  float at[8];
};

template <typename T>
__device__ __forceinline__ bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

__device__ __forceinline__ Eight load_whole(const float* p) {
  const float4 low = load_four(p), high = load_four(p + 4);
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
__device__ __forceinline__ Eight load_whole(const __half* p) {
  const uint4 bits = *reinterpret_cast<const uint4*>(p);
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  const float2 c = __half22float2(*reinterpret_cast<const __half2*>(&bits.z));
  const float2 d = __half22float2(*reinterpret_cast<const __half2*>(&bits.w));
  return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}
__device__ __forceinline__ void store_whole(float* p, const Eight& x) {
  store_four(p, make_float4(x.at[0], x.at[1], x.at[2], x.at[3]));
  store_four(p + 4, make_float4(x.at[4], x.at[5], x.at[6], x.at[7]));
}
__device__ __forceinline__ void store_whole(__half* p, const Eight& x) {
  uint4 bits;
  auto* pairs = reinterpret_cast<__half2*>(&bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(x.at[2 * i], x.at[2 * i + 1]);
  *reinterpret_cast<uint4*>(p) = bits;
}

// The first n of eight elements, n at most 8 and perhaps not positive; zeros behind them.
template <typename T>
__device__ __forceinline__ Eight load_eight(const T* p, int64_t n, bool aligned) {
  if (aligned && n >= 8) return load_whole(p);
  Eight x;
#pragma unroll
  for (int i = 0; i < 8; ++i) x.at[i] = i < n ? to_float(p[i]) : 0.0f;
  return x;
}
template <typename T>
__device__ __forceinline__ void store_eight(T* p, int64_t n, bool aligned, const Eight& x) {
  if (aligned && n >= 8) return store_whole(p, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < n) p[i] = rounded<T>(x.at[i]);
  }
}

// ---- grids --------------------------------------------------------------------------------------

inline unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

// A warp for each row. Few rows go to as many multiprocessors as there are rows.
inline constexpr int kRowWarps = 4;
inline Grid warp_per_row(int64_t rows) {
  const int warps = rows <= 512 ? 1 : kRowWarps;
  return {dim3(blocks_for(rows, warps)), static_cast<unsigned>(warps * 32), 0};
}
__device__ __forceinline__ int64_t warp_row() {
  return static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
}
__device__ __forceinline__ int64_t lane() { return threadIdx.x % 32; }

// A row in the registers of a warp, as row_norm.cuh spreads it over the lanes: of at most
// kFours * 128 elements. kFours = 0: it stays in memory and is read each time.
template <typename T, int kFours>
struct WarpRow {
  const T* row;
  int64_t width;
  bool by_four;
  float4 held[kFours == 0 ? 1 : kFours];

  __device__ __forceinline__ WarpRow(const T* from, int64_t n)
      : row(from), width(n), by_four(loads_by_four(from)) {
    if constexpr (kFours > 0) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) held[i] = load_some(row, first(i), width, by_four);
    }
  }
  static __device__ __forceinline__ int64_t first(int i) { return i * 128 + 4 * lane(); }

  // take(k, element k .. k + 3 by reference) by all lanes together for each 128 elements; zeros
  // from `width` on. What take() changes stays changed only in registers.
  template <typename Take>
  __device__ __forceinline__ void each(Take take) {
    if constexpr (kFours > 0) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        if (i * 128 < width) take(first(i), held[i]);
      }
    } else {
#pragma unroll 4
      for (int64_t k = 4 * lane(); k - 4 * lane() < width; k += 128) {
        float4 x = load_some(row, k, width, by_four);
        take(k, x);
      }
    }
  }

  __device__ __forceinline__ float factor(const NormSpec& norm) {
    if (!norm.present) return 1.0f;
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    each([&](int64_t, const float4& x) { add_squares(sums, x); });
    return inverse_rms_of_sums(sums, width, norm.eps);
  }
};

// call(constant) with the least of 4, 8, 16 and, up to kMost, 32 that holds a row; 0 above.
template <int kN>
struct Fours {
  static constexpr int value = kN;
};
template <int kMost, typename Call>
void with_fours(int64_t width, Call call) {
  if (width <= 4 * 128) return call(Fours<4>{});
  if (width <= 8 * 128) return call(Fours<8>{});
  if (width <= 16 * 128) return call(Fours<16>{});
  if constexpr (kMost >= 32) {
    if (width <= 32 * 128) return call(Fours<32>{});
  }
  call(Fours<0>{});
}

// call(an element of the activations' type)
template <typename Call>
void with_element(bool fp32, Call call) {
  if (fp32) return call(float{});
  call(__half{});
}

}  // namespace tinyloop::cuda
