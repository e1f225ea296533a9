// Two warps take a row. A thread holds elements k and k + 1 of each 128: two of the 128 chains that
// row_norm.cuh sums, so nothing but the lanes' sums goes through shared memory. A thread needs few
// enough registers that ten rows of a multiprocessor are on their way at once, and all loads of
// a row are issued before the first is waited for.
#include "cuda/elements.cuh"
#include "cuda/norms_many.h"

namespace tinyloop::cuda {

namespace {

constexpr int kThreads = 64;
constexpr int kMostGroups = 32;  // of 128 elements
constexpr int kAtOnce = 4;       // groups whose weights are loaded together

// Two elements as they lie in memory, converted only when they are used: a conversion beside the
// load would wait for it.
template <typename T>
struct TwoOf;
template <>
struct TwoOf<float> {
  using Type = float2;
};
template <>
struct TwoOf<__half> {
  using Type = __half2;
};
template <typename T>
using Two = typename TwoOf<T>::Type;

__device__ __forceinline__ float2 floats_of(const float2& x) { return x; }
__device__ __forceinline__ float2 floats_of(const __half2& x) { return __half22float2(x); }
__device__ __forceinline__ void store_two(float* p, const float2& x) {
  *reinterpret_cast<float2*>(p) = x;
}
__device__ __forceinline__ void store_two(__half* p, const float2& x) {
  *reinterpret_cast<__half2*>(p) = __floats2half2_rn(x.x, x.y);
}

template <typename T>
struct ManyCall {
  float* state;
  const T* branch;
  int64_t branch_stride;
  T* out;
  int64_t out_stride;
  NormSpec norm, next;
  int width;
};

__device__ __forceinline__ void add_squares(float2& sums, const float2& x) {
  sums.x = __fmaf_rn(x.x, x.x, sums.x);
  sums.y = __fmaf_rn(x.y, x.y, sums.y);
}

// The row's factor in all threads, from their sums: thread t has two of lane t / 2 of row_norm.cuh.
__device__ __forceinline__ float factor_of(const float2& sums, const NormSpec& norm, int width,
                                           float (&lanes)[32]) {
  if (!norm.present) return 1.0f;
  const float half = __fadd_rn(sums.x, sums.y);
  const float whole = __fadd_rn(half, __shfl_xor_sync(kAllLanes, half, 1));
  if (threadIdx.x % 2 == 0) lanes[threadIdx.x / 2] = whole;
  __syncthreads();
  return inverse_rms_of_sum(sum_of_lanes(lanes[threadIdx.x % 32]), width, norm.eps);
}

// A norm's weight, a few groups at a time; ones where there is none: to multiply by one changes no
// bit. Nothing branches, so that the loads are on their way together.
struct Weights {
  const float* at = nullptr;
  float2 group[kAtOnce];

  __device__ __forceinline__ Weights(const NormSpec& norm, int first)
      : at(norm.present && norm.weight != nullptr ? norm.weight + first : nullptr) {}
  // Those of groups from i on, below `width`.
  __device__ __forceinline__ void load(int i, int first, int width) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int k = (i + j) * 128;
      group[j] = make_float2(1.0f, 1.0f);
      if (at != nullptr && k + first < width) {
        group[j] = __ldg(reinterpret_cast<const float2*>(at + k));
      }
    }
  }
  __device__ __forceinline__ float2 scaled(const float2& x, float factor, int j) const {
    return make_float2(__fmul_rn(__fmul_rn(x.x, factor), group[j].x),
                       __fmul_rn(__fmul_rn(x.y, factor), group[j].y));
  }
};

// Rows pass the first-level cache by (__ldcg): it keeps the weights.
template <typename T, int kGroups, bool kGives>
__global__ void __launch_bounds__(kThreads, kGroups <= 16 ? 10 : 6)
    many_kernel(const __grid_constant__ ManyCall<T> c) {
  __shared__ float lanes[2][32];
  wait_for_previous();
  let_next_start();
  const int64_t r = blockIdx.x;
  const int width = c.width, first = 2 * static_cast<int>(threadIdx.x);
  float* const row = c.state + r * width + first;
  const T* const from = c.branch + r * c.branch_stride + first;
  Two<T> branch[kGroups];
  float2 state[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    branch[i] = Two<T>{};
    if (i * 128 + first < width) {
      branch[i] = __ldcg(reinterpret_cast<const Two<T>*>(from + i * 128));
    }
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    state[i] = make_float2(0.0f, 0.0f);
    if (i * 128 + first < width) state[i] = __ldcg(reinterpret_cast<float2*>(row + i * 128));
  }
  float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) add_squares(sums, floats_of(branch[i]));
  const float factor = factor_of(sums, c.norm, width, lanes[0]);
  sums = make_float2(0.0f, 0.0f);
  Weights weights(c.norm, first);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (i % kAtOnce == 0) weights.load(i, first, width);
    const float2 y = weights.scaled(floats_of(branch[i]), factor, i % kAtOnce);
    state[i] = make_float2(__fadd_rn(state[i].x, y.x), __fadd_rn(state[i].y, y.y));
    if (i * 128 + first < width) store_two(row + i * 128, state[i]);
    add_squares(sums, state[i]);
  }
  if constexpr (kGives) {
    const float next = factor_of(sums, c.next, width, lanes[1]);
    T* const to = c.out + r * c.out_stride + first;
    Weights next_weights(c.next, first);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i % kAtOnce == 0) next_weights.load(i, first, width);
      const float2 y = next_weights.scaled(state[i], next, i % kAtOnce);
      if (i * 128 + first < width) store_two(to + i * 128, y);
    }
  }
}

template <typename T, int kGroups>
void launch_many(cudaStream_t stream, const NormCall& call) {
  const ManyCall<T> c{call.state,         reinterpret_cast<const T*>(call.branch.data),
                      call.branch.stride, reinterpret_cast<T*>(call.out.data),
                      call.out.stride,    call.norm,
                      call.next,          static_cast<int>(call.width)};
  const Grid grid{dim3(static_cast<unsigned>(call.rows)), kThreads, 0};
  if (call.out.data != nullptr) return launch(stream, grid, many_kernel<T, kGroups, true>, c);
  launch(stream, grid, many_kernel<T, kGroups, false>, c);
}

bool is_by_two(const void* p, size_t element) {
  return reinterpret_cast<uintptr_t>(p) % (2 * element) == 0;
}

}  // namespace

bool takes_many(bool fp32, const NormCall& call) {
  const size_t element = fp32 ? sizeof(float) : sizeof(__half);
  const bool even = call.width % 2 == 0 && call.branch.stride % 2 == 0 && call.out.stride % 2 == 0;
  return call.rows > 0 && call.branch.data != nullptr && even && call.width <= kMostGroups * 128 &&
         is_by_two(call.state, sizeof(float)) && is_by_two(call.branch.data, element) &&
         is_by_two(call.out.data, element) && is_by_two(call.norm.weight, sizeof(float)) &&
         is_by_two(call.next.weight, sizeof(float));
}

void norms_many(cudaStream_t stream, bool fp32, const NormCall& call) {
  with_element(fp32, [&](auto element) {
    with_fours<kMostGroups>(call.width, [&](auto groups) {
      if constexpr (groups.value > 0) launch_many<decltype(element), groups.value>(stream, call);
    });
  });
}

}  // namespace tinyloop::cuda
