#include "cuda/current_device.h"

#include "cuda/driver.h"

namespace tinyloop::cuda {

namespace {

bool is_in_use(int device) {
  using State = decltype(&cuDevicePrimaryCtxGetState);
  static const auto state = entry_point<State>("cuDevicePrimaryCtxGetState");
  unsigned flags = 0;
  int active = 0;
  return state != nullptr && state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

}  // namespace

CurrentDevice::CurrentDevice(int device) {
  ok_ = cudaGetDevice(&before_) == cudaSuccess;
  if (ok_ && before_ != device) {
    restore_ = is_in_use(before_);
    ok_ = cudaSetDevice(device) == cudaSuccess;
  }
  if (!ok_) cudaGetLastError();
}

CurrentDevice::~CurrentDevice() {
  if (restore_ && cudaSetDevice(before_) != cudaSuccess) cudaGetLastError();
}

}  // namespace tinyloop::cuda
