#include "cuda/elements.cuh"
#include "cuda/norms_few.h"
#include "cuda/norms_many.h"
#include "cuda/rows.h"

namespace tinyloop::cuda {

namespace {

// out may be the state itself: a lane writes only what it has read.
template <typename T, int kFours>
__global__ void __launch_bounds__(32 * kRowWarps)
    norm_kernel(const float* state, NormSpec norm, int64_t rows, int64_t width, RowsOf<T> out) {
  wait_for_previous();
  let_next_start();
  const int64_t r = warp_row();
  if (r >= rows) return;
  WarpRow<float, kFours> row(state + r * width, width);
  const float factor = row.factor(norm);
  T* to = out.row(r);
  const bool by_four = loads_by_four(to);
  row.each([&](int64_t k, const float4& x) {
    store_some(to, k, width, by_four, normed_four(x, norm, factor, k, width));
  });
}

__device__ __forceinline__ float4 sum_of(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                     __fadd_rn(a.w, b.w));
}

struct Adding {
  NormSpec norm;
  NormSpec next;  // of the rows that follow
};

// Of rows that do not fit into registers, or lie oddly: they stay in memory and are read each time.
template <typename T, bool kThenRows>
__global__ void __launch_bounds__(32 * kRowWarps)
    norm_add_kernel(RowsOf<T> branches, Adding spec, int64_t rows, int64_t width, float* states,
                    RowsOf<T> outs) {
  wait_for_previous();
  let_next_start();
  const int64_t r = warp_row();
  if (r >= rows) return;
  float* const state_row = states + r * width;
  WarpRow<T, 0> branch(branches.row(r), width);
  WarpRow<float, 0> state(state_row, width);
  const float factor = branch.factor(spec.norm);
  branch.each([&](int64_t k, const float4& x) {
    const float4 before = load_some(state_row, k, width, state.by_four);
    store_some(state_row, k, width, state.by_four,
               sum_of(before, normed_four(x, spec.norm, factor, k, width)));
  });
  if constexpr (kThenRows) {
    T* const out = outs.row(r);
    const float next = state.factor(spec.next);
    const bool by_four = loads_by_four(out);
    state.each([&](int64_t k, const float4& x) {
      store_some(out, k, width, by_four, normed_four(x, spec.next, next, k, width));
    });
  }
}

template <bool kThenRows>
void launch_norm_add(cudaStream_t stream, bool fp32, Rows branch, const Adding& spec, int64_t rows,
                     int64_t width, float* state, Rows out) {
  if (rows == 0) return;
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    launch(stream, warp_per_row(rows), norm_add_kernel<T, kThenRows>, RowsOf<T>(branch), spec, rows,
           width, state, RowsOf<T>(out));
  });
}

}  // namespace

void norm(cudaStream_t stream, float* state, const NormSpec& norm, int64_t rows, int64_t width) {
  if (rows == 0 || !norm.present) return;
  const Rows out{reinterpret_cast<uint8_t*>(state), width};
  norm_rows(stream, true, state, norm, rows, width, out);
}

void norm_rows(cudaStream_t stream, bool fp32, const float* state, const NormSpec& norm,
               int64_t rows, int64_t width, Rows out) {
  if (rows == 0) return;
  const NormCall call{const_cast<float*>(state), {}, {}, norm, out, rows, width};
  if (takes_few(call)) return norms_few(stream, fp32, call);
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    with_fours<32>(width, [&](auto fours) {
      launch(stream, warp_per_row(rows), norm_kernel<T, fours.value>, state, norm, rows, width,
             RowsOf<T>(out));
    });
  });
}

void norm_add(cudaStream_t stream, bool fp32, Rows branch, const NormSpec& norm, int64_t rows,
              int64_t width, float* state) {
  const NormCall call{state, branch, norm, {}, {}, rows, width};
  if (takes_few(call)) return norms_few(stream, fp32, call);
  if (takes_many(fp32, call)) return norms_many(stream, fp32, call);
  launch_norm_add<false>(stream, fp32, branch, {norm, {}}, rows, width, state, {});
}

void norm_add_norm_rows(cudaStream_t stream, bool fp32, Rows branch, const NormSpec& norm,
                        int64_t rows, int64_t width, float* state, const NormSpec& next, Rows out) {
  const NormCall call{state, branch, norm, next, out, rows, width};
  if (takes_few(call)) return norms_few(stream, fp32, call);
  if (takes_many(fp32, call)) return norms_many(stream, fp32, call);
  launch_norm_add<true>(stream, fp32, branch, {norm, next}, rows, width, state, out);
}

}  // namespace tinyloop::cuda
