#include "cuda/products.cuh"

namespace tinyloop::cuda {

const KindKernels kQ4Kernels = kind_kernels<TensorKind::kQ4>();

}  // namespace tinyloop::cuda
