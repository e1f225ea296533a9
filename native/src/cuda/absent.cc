// Stands in for the CUDA backend in a build without nvcc.
#include "backend.h"
#include "tinyloop/errors.h"

namespace tinyloop {

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  throw LoadError("cannot load with device='cuda:" + std::to_string(options.device) +
                  "': this build has no CUDA backend; install with nvcc on the path, or use "
                  "device='cpu'");
}

bool has_cuda_backend() { return false; }
std::vector<CudaDevice> cuda_devices() { return {}; }

}  // namespace tinyloop
