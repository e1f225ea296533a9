#include "cuda/elements.cuh"
#include "cuda/norms_few.h"

namespace tinyloop::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kFourthsPerThread = 4 * kThreads;  // elements that the block takes in one go
constexpr int kMostPerThread = 8;
constexpr int64_t kMostRows = 256;  // about two blocks for each multiprocessor

template <typename T>
struct FewCall {
  float* state;
  const T* branch;
  int64_t branch_stride;
  T* out;
  int64_t out_stride;
  NormSpec norm, next;
  int64_t width;
};

// The weight's elements k .. k + 3, ones where there is none: to multiply by one changes no bit.
// Constant for the model's life, so they may be read before the previous kernel has ended.
__device__ __forceinline__ float4 weight_four(const NormSpec& norm, int64_t k, int64_t width) {
  if (!norm.present || norm.weight == nullptr) return make_float4(1.0f, 1.0f, 1.0f, 1.0f);
  return load_constant(norm.weight, k, width);
}

__device__ __forceinline__ float4 scaled(const float4& x, float factor, const float4& weight) {
  return make_float4(
      __fmul_rn(__fmul_rn(x.x, factor), weight.x), __fmul_rn(__fmul_rn(x.y, factor), weight.y),
      __fmul_rn(__fmul_rn(x.z, factor), weight.z), __fmul_rn(__fmul_rn(x.w, factor), weight.w));
}

// The row's factor in all threads. Every warp sums the whole row from shared memory in the order of
// row_norm.cuh, so that no second barrier is needed. shared: the row, zeros behind its end.
template <int kPer>
__device__ __forceinline__ float block_factor(const float4 (&x)[kPer], const NormSpec& norm,
                                              int64_t width, float4* shared) {
  if (!norm.present) return 1.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) shared[i * kThreads + threadIdx.x] = x[i];
  __syncthreads();
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kPer * (kThreads / 32); ++i) {
    add_squares(sums, shared[i * 32 + threadIdx.x % 32]);
  }
  return inverse_rms_of_sums(sums, width, norm.eps);
}

template <typename T, int kPer, bool kAdds, bool kGives>
__global__ void __launch_bounds__(kThreads) few_kernel(const __grid_constant__ FewCall<T> c) {
  __shared__ float4 shared[kPer * kThreads];
  const int64_t width = c.width;
  float4 add_weight[kPer], give_weight[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t k = 4 * static_cast<int64_t>(i * kThreads + threadIdx.x);
    if constexpr (kAdds) add_weight[i] = weight_four(c.norm, k, width);
    if constexpr (kGives) give_weight[i] = weight_four(c.next, k, width);
  }
  wait_for_previous();
  let_next_start();
  const int64_t r = blockIdx.x;
  float* const row = c.state + r * width;
  const bool by_four = loads_by_four(row);
  float4 state[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    state[i] = load_some(row, 4 * static_cast<int64_t>(i * kThreads + threadIdx.x), width, by_four);
  }
  if constexpr (kAdds) {
    const T* from = c.branch + r * c.branch_stride;
    const bool branch_by_four = loads_by_four(from);
    float4 x[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      x[i] = load_some(from, 4 * static_cast<int64_t>(i * kThreads + threadIdx.x), width,
                       branch_by_four);
    }
    const float factor = block_factor<kPer>(x, c.norm, width, shared);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float4 y = scaled(x[i], factor, add_weight[i]);
      state[i] = make_float4(__fadd_rn(state[i].x, y.x), __fadd_rn(state[i].y, y.y),
                             __fadd_rn(state[i].z, y.z), __fadd_rn(state[i].w, y.w));
      store_some(row, 4 * static_cast<int64_t>(i * kThreads + threadIdx.x), width, by_four,
                 state[i]);
    }
  }
  if constexpr (kGives) {
    if constexpr (kAdds) __syncthreads();  // all have read the branch from it
    const float factor = block_factor<kPer>(state, c.next, width, shared);
    T* to = c.out + r * c.out_stride;
    const bool out_by_four = loads_by_four(to);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      store_some(to, 4 * static_cast<int64_t>(i * kThreads + threadIdx.x), width, out_by_four,
                 scaled(state[i], factor, give_weight[i]));
    }
  }
}

template <typename T, int kPer>
void launch_few(cudaStream_t stream, const NormCall& call) {
  const FewCall<T> c{call.state,         reinterpret_cast<const T*>(call.branch.data),
                     call.branch.stride, reinterpret_cast<T*>(call.out.data),
                     call.out.stride,    call.norm,
                     call.next,          call.width};
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(call.rows));
  grid.threads = kThreads;
  const bool adds = call.branch.data != nullptr, gives = call.out.data != nullptr;
  if (adds && gives) return launch(stream, grid, few_kernel<T, kPer, true, true>, c);
  if (adds) return launch(stream, grid, few_kernel<T, kPer, true, false>, c);
  launch(stream, grid, few_kernel<T, kPer, false, true>, c);
}

}  // namespace

// A row may be its own norm's output: a thread writes only the elements that it holds.
bool takes_few(const NormCall& call) {
  return call.rows > 0 && call.rows <= kMostRows &&
         call.width <= kFourthsPerThread * kMostPerThread;
}

void norms_few(cudaStream_t stream, bool fp32, const NormCall& call) {
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    if (call.width <= kFourthsPerThread) return launch_few<T, 1>(stream, call);
    if (call.width <= 2 * kFourthsPerThread) return launch_few<T, 2>(stream, call);
    if (call.width <= 4 * kFourthsPerThread) return launch_few<T, 4>(stream, call);
    launch_few<T, kMostPerThread>(stream, call);
  });
}

}  // namespace tinyloop::cuda
