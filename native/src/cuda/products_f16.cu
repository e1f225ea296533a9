#include "cuda/products.cuh"

namespace tinyloop::cuda {

const KindKernels kF16Kernels = kind_kernels<TensorKind::kF16>();

}  // namespace tinyloop::cuda
