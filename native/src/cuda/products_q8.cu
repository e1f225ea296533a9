#include "cuda/products.cuh"

namespace tinyloop::cuda {

const KindKernels kQ8Kernels = kind_kernels<TensorKind::kQ8>();

}  // namespace tinyloop::cuda
