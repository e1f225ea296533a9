// The kernels of the products, one source file per kind of weight.
#pragma once

#include "cuda/fed_plan.h"
#include "cuda/linear.h"
#include "cuda/warpgroup_plan.h"

namespace tinyloop::cuda {

// Each launches one product, the input formed by itself (narrow) or rows of activations (tiled).
// `rows` is the call's; `shape` is not kChoose.
struct KindKernels {
  // Bytes of shared memory that the launch would ask for.
  size_t (*narrow_shared)(const LinearCall& call, const LinearContext& context);
  size_t (*tiled_shared)(const LinearCall& call, TileShape shape);
  void (*narrow)(cudaStream_t stream, const LinearCall& call, const LinearContext& context);
  void (*tiled)(cudaStream_t stream, const LinearCall& call, const LinearContext& context,
                TileShape shape);
  // By warpgroups (sm_90a), for parts = 1: any number of rows of activations.
  WarpgroupPlan (*warpgroup_plan)(const LinearCall& call, const LinearContext& context);
  void (*warpgroup)(cudaStream_t stream, const LinearCall& call, const LinearContext& context);
  // By chains that are fed (sm_90a): up to 8 rows of any input but a pair, or any number of rows
  // of activations that copies_rows() takes. direct: the chains dequantize themselves.
  FedPlan (*fed_plan)(const LinearCall& call, const LinearContext& context, bool direct);
  void (*fed)(cudaStream_t stream, const LinearCall& call, const LinearContext& context,
              bool direct);
};

extern const KindKernels kQ4Kernels;
extern const KindKernels kQ8Kernels;
extern const KindKernels kF16Kernels;

// Whether rows may come by bulk copies.
inline bool copies_rows(const LinearCall& call) {
  return call.input.kind == InputKind::kRows && call.weight.inputs % 8 == 0 &&
         call.input.stride % 8 == 0 && reinterpret_cast<uintptr_t>(call.input.rows) % 16 == 0;
}

// Slabs of each of the chains that an output is the sum of.
inline int part_slabs(int64_t inputs, int parts) {
  return static_cast<int>((weight_slabs(inputs) + parts - 1) / parts);
}

}  // namespace tinyloop::cuda
