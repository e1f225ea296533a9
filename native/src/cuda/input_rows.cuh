// A product's input, formed element by element: the same bits whether it goes to shared memory of
// the product itself or to rows in memory.
#pragma once

#include "cuda/linear.h"
#include "cuda/row_norm.cuh"

namespace tinyloop::cuda {

__device__ __forceinline__ int64_t state_row(const LinearInput& input, int64_t r) {
  return input.index == nullptr ? r : input.index[r];
}

// What the norm of row r multiplies it by, in all lanes of a warp.
__device__ __forceinline__ float input_factor(const LinearInput& input, int64_t r, int64_t inputs) {
  if (input.kind != InputKind::kState) return 1.0f;
  return norm_factor(input.state + state_row(input, r) * inputs, input.norm, inputs);
}

__device__ __forceinline__ float4 load_pair(const LinearInput& input, int64_t r, int64_t k,
                                            int64_t inputs) {
  const int64_t width = inputs / 2;
  const float* state = input.state + r * width;
  const float* other = input.other + r * width;
  if (k + 4 <= width) return load_some(state, k, width, loads_by_four(state));
  if (width % 4 == 0) return load_some(other, k - width, width, loads_by_four(other));
  float x[4];
  for (int i = 0; i < 4; ++i) {
    const int64_t j = k + i;
    x[i] = j >= inputs ? 0.0f : j < width ? state[j] : other[j - width];
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

// Elements k .. k + 3 of row r before rounding, zeros from `inputs` on; k is a multiple of 4. T is
// the type of activations.
template <typename T>
__device__ __forceinline__ float4 load_input(const LinearInput& input, float factor, int64_t r,
                                             int64_t k, int64_t inputs) {
  switch (input.kind) {
    case InputKind::kRows: {
      const T* row = static_cast<const T*>(input.rows) + r * input.stride;
      return load_some(row, k, inputs, loads_by_four(row));
    }
    case InputKind::kState: {
      const float* row = input.state + state_row(input, r) * inputs;
      return load_normed(row, input.norm, factor, k, inputs, loads_by_four(row));
    }
    case InputKind::kGateUp: {
      const T* gates = static_cast<const T*>(input.rows) + r * input.stride;
      const T* ups = gates + inputs;
      const float4 gate = load_some(gates, k, inputs, loads_by_four(gates));
      const float4 up = load_some(ups, k, inputs, loads_by_four(ups));
      return make_float4(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y), silu_mul(gate.z, up.z),
                         silu_mul(gate.w, up.w));
    }
    case InputKind::kPair:
      break;
  }
  return load_pair(input, r, k, inputs);
}

// Four rounded elements to an address that is a multiple of 4 of them.
__device__ __forceinline__ void store_four(__half* to, float4 x) {
  const __half2 low = __floats2half2_rn(x.x, x.y), high = __floats2half2_rn(x.z, x.w);
  uint2 bits;
  bits.x = *reinterpret_cast<const uint32_t*>(&low);
  bits.y = *reinterpret_cast<const uint32_t*>(&high);
  *reinterpret_cast<uint2*>(to) = bits;
}
__device__ __forceinline__ void store_four(float* to, float4 x) {
  *reinterpret_cast<float4*>(to) = x;
}

// Eight halves from k on, zeros from `inputs` on, one by one, to
// shared memory.
__device__ __forceinline__ void copy_singly(const __half* row, int64_t k, int64_t inputs,
                                            uint32_t to) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = k + i < inputs ? __half_as_ushort(row[k + i]) : 0u;
    words[i / 2] |= bits << (i % 2 * 16);
  }
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// ---- rows whose elements may all be loaded by four --------------------------------------------

template <typename T>
struct Four {};
template <>
struct Four<__half> {
  using Bits = uint2;
};
template <>
struct Four<float> {
  using Bits = float4;
};
template <typename T>
using FourBits = typename Four<T>::Bits;

__device__ __forceinline__ float4 unpack(uint2 bits) {
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float4 unpack(float4 x) { return x; }

// to[k ..] = finish(k, fetch(k)) for k = begin, begin + step, .. below inputs, zeros from there up
// to padded. Loads go ahead of all that waits for them.
template <typename To, typename Fetch, typename Finish>
__device__ __forceinline__ void form_fours(int64_t begin, int64_t step, int64_t inputs,
                                           int64_t padded, To to, Fetch fetch, Finish finish) {
  constexpr int kAtOnce = 4;
  for (int64_t k = begin; k < padded; k += kAtOnce * step) {
    decltype(fetch(k)) raw[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (k + i * step < inputs) raw[i] = fetch(k + i * step);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = k + i * step;
      const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (at < padded) store_four(to + at, at < inputs ? finish(raw[i]) : zeros);
    }
  }
}

struct Normed {
  float4 x, weight;
};
template <typename T>
struct Gated {
  FourBits<T> gate, up;
};

// A norm in this many shares reads its row once, where it has no more than so many inputs.
inline constexpr int kNormShares = 4;
inline constexpr int kHeldShare = 4;  // times four elements of a lane, kept while the row is summed
inline constexpr int64_t kHeldInputs = kHeldShare * kNormShares * 128;

// Share `share` of kNormShares of a normed row.
template <typename To>
__device__ __forceinline__ void form_held_share(const float* row, const float* weight, float eps,
                                                int inputs, int share, To to, int padded) {
  constexpr int kStep = kNormShares * 128;
  const int lane = static_cast<int>(threadIdx.x % 32) * 4, mine = lane + share * 128;
  const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 sums = zeros, held[kHeldShare] = {};
  // Half of the loads at once: more would not fit the registers.
#pragma unroll 1
  for (int begin = 0; begin < kHeldShare * kStep; begin += 2 * kStep) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      held[i] = held[i + 2];
#pragma unroll
      for (int j = 0; j < kNormShares; ++j) {
        const int k = begin + i * kStep + j * 128 + lane;
        const float4 x = k < inputs ? load_four(row + k) : zeros;  // which change no sum
        add_squares(sums, x);
        if (j == share) held[i + 2] = x;
      }
    }
  }
  float4 weights[kHeldShare];
#pragma unroll
  for (int i = 0; i < kHeldShare; ++i) {
    weights[i] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);  // change no bit
    if (weight != nullptr && i * kStep + mine < inputs) {
      weights[i] = load_four(weight + i * kStep + mine);
    }
  }
  const float factor = inverse_rms_of_sums(sums, inputs, eps);
#pragma unroll
  for (int i = 0; i < kHeldShare; ++i) {
    const int k = i * kStep + mine;
    const float4 x = held[i], w = weights[i];
    const float4 normed =
        make_float4(__fmul_rn(__fmul_rn(x.x, factor), w.x), __fmul_rn(__fmul_rn(x.y, factor), w.y),
                    __fmul_rn(__fmul_rn(x.z, factor), w.z), __fmul_rn(__fmul_rn(x.w, factor), w.w));
    if (k < padded) store_four(to + k, k < inputs ? normed : zeros);
  }
}

// form_row() where it can; false where rows are not aligned.
template <typename T, typename To>
__device__ __forceinline__ bool form_row_by_four(const LinearInput& input, int64_t r,
                                                 int64_t inputs, int share, int shares, To to,
                                                 int64_t padded) {
  if (inputs % 4 != 0) return false;
  const int64_t begin = share * 128 + static_cast<int64_t>(threadIdx.x % 32) * 4;
  const int64_t step = static_cast<int64_t>(shares) * 128;
  if (input.kind == InputKind::kState) {
    const float* row = input.state + state_row(input, r) * inputs;
    const float* weight = input.norm.present ? input.norm.weight : nullptr;
    if (!loads_by_four(row) || !loads_by_four(weight)) return false;
    if (input.norm.present && shares == kNormShares && padded <= kHeldInputs) {
      form_held_share(row, weight, input.norm.eps, static_cast<int>(inputs), share, to,
                      static_cast<int>(padded));
      return true;
    }
    const float factor = norm_factor(row, input.norm, inputs);
    const auto fetch = [&](int64_t k) {
      const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f);  // change no bit
      return Normed{load_four(row + k), weight != nullptr ? load_four(weight + k) : ones};
    };
    form_fours(begin, step, inputs, padded, to, fetch, [&](const Normed& n) {
      return make_float4(__fmul_rn(__fmul_rn(n.x.x, factor), n.weight.x),
                         __fmul_rn(__fmul_rn(n.x.y, factor), n.weight.y),
                         __fmul_rn(__fmul_rn(n.x.z, factor), n.weight.z),
                         __fmul_rn(__fmul_rn(n.x.w, factor), n.weight.w));
    });
    return true;
  }
  const T* row = static_cast<const T*>(input.rows) + r * input.stride;
  if (input.kind == InputKind::kPair || !loads_by_four(row)) return false;
  if (input.kind == InputKind::kRows) {
    const auto fetch = [&](int64_t k) { return *reinterpret_cast<const FourBits<T>*>(row + k); };
    form_fours(begin, step, inputs, padded, to, fetch,
               [](FourBits<T> bits) { return unpack(bits); });
    return true;
  }
  const auto fetch = [&](int64_t k) {
    return Gated<T>{*reinterpret_cast<const FourBits<T>*>(row + k),
                    *reinterpret_cast<const FourBits<T>*>(row + inputs + k)};
  };
  form_fours(begin, step, inputs, padded, to, fetch, [](const Gated<T>& bits) {
    const float4 gate = unpack(bits.gate), up = unpack(bits.up);
    return make_float4(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y), silu_mul(gate.z, up.z),
                       silu_mul(gate.w, up.w));
  });
  return true;
}

// Share `share` of `shares` of row r to `to`, zeros from `inputs` up to `padded` (a multiple of 4).
// Called by a whole warp; the row is the same in all lanes. `to` + k is where element k goes.
template <typename T, typename To>
__device__ __forceinline__ void form_row(const LinearInput& input, int64_t r, int64_t inputs,
                                         int share, int shares, To to, int64_t padded) {
  if (form_row_by_four<T>(input, r, inputs, share, shares, to, padded)) return;
  const int64_t begin = share * 128 + static_cast<int64_t>(threadIdx.x % 32) * 4;
  const int64_t step = static_cast<int64_t>(shares) * 128;
  const float factor = input_factor(input, r, inputs);
#pragma unroll 1
  for (int64_t k = begin; k < padded; k += step) {
    store_four(to + k, load_input<T>(input, factor, r, k, inputs));
  }
}

}  // namespace tinyloop::cuda
