#include "cuda/dequantize.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear_fp32.h"

namespace tinyloop::cuda {

namespace {

constexpr int kSide = 16;  // outputs and rows of a block

// One chain of fused multiply-adds per element, inputs ascending, whatever the rows beside it.
__global__ void __launch_bounds__(kSide* kSide)
    linear_fp32_kernel(DeviceWeight w, const float* in, int64_t stride, int64_t rows,
                       LinearOutput out) {
  __shared__ float weights[kSlabInputs][kSide + 1];
  __shared__ float inputs[kSide][kSlabInputs];
  wait_for_previous();
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x), n = thread % kSide, r = thread / kSide;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x) * kSide;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kSide;
  float sum = 0.0f;
  for (int64_t slab = 0; slab < w.inputs; slab += kSlabInputs) {
    for (int i = thread; i < kSide * kSlabInputs; i += kSide * kSide) {
      const int side = i / kSlabInputs, column = i % kSlabInputs;
      const int64_t k = slab + column;
      // A tile's 16 outputs are always in memory, whether they exist or not.
      weights[column][side] = exact_weight_at(w, first_output + side, k);
      const int64_t row = min(first_row + side, rows - 1);
      inputs[side][column] = k < w.inputs ? in[row * stride + k] : 0.0f;
    }
    __syncthreads();
    for (int k = 0; k < kSlabInputs; ++k) sum = __fmaf_rn(inputs[r][k], weights[k][n], sum);
    __syncthreads();
  }
  const int64_t row = first_row + r, output = first_output + n;
  if (row >= rows || output >= w.outputs) return;
  float* to = static_cast<float*>(out.data) + row * out.stride + output;
  *to = out.kind == OutputKind::kAdd ? __fadd_rn(*to, sum) : sum;
}

}  // namespace

void linear_fp32(cudaStream_t stream, const LinearCall& call) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>((call.weight.outputs + kSide - 1) / kSide),
                     static_cast<unsigned>((call.rows + kSide - 1) / kSide));
  grid.threads = kSide * kSide;
  launch(stream, grid, linear_fp32_kernel, call.weight, static_cast<const float*>(call.input.rows),
         call.input.stride, call.rows, call.output);
}

}  // namespace tinyloop::cuda
