// cuBLASLt, opened when it is first needed and only if it is there: nothing links to it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "cuda/linear.h"

namespace tinyloop::cuda {

// out = weight * in, both FP16; out FP16 (kActivations) or FP32. Strides in elements.
struct LtProduct {
  int64_t outputs = 0;
  int64_t inputs = 0;
  int64_t rows = 0;
  const void* weight = nullptr;
  int64_t weight_stride = 0;
  const void* in = nullptr;
  int64_t in_stride = 0;
  LinearOutput output;
};

// One handle on the device that was current when it was opened. Not for two threads at once.
class CublasLt {
 public:
  // What TINYLOOP_CUBLASLT says: a file, "off" for our own kernels, or nothing.
  static std::string named_file();
  // The named file and no other; else what is under `packages` (a folder that holds the nvidia
  // wheels), then where the loader looks. Null if there is none; then why_not says what was tried.
  static std::unique_ptr<CublasLt> open(const std::string& packages, std::string& why_not);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // One algorithm for a shape (outputs, inputs, kind of output), chosen for 2,048 rows and used for
  // any number: without split sums, without workspace. False if there is none or it refuses these
  // rows; nothing was launched then.
  bool multiply(cudaStream_t stream, const LtProduct& product);

  size_t version() const;
  // The shape's algorithm in words.
  std::string algorithm(int64_t outputs, int64_t inputs, OutputKind kind);

 private:
  struct Library;
  CublasLt();
  std::unique_ptr<Library> library_;
};

}  // namespace tinyloop::cuda
