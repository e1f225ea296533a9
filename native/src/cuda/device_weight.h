// A weight on the device, and its way there.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "cuda/pinned.h"
#include "cuda/weight.h"
#include "memory.h"

namespace tinyloop::cuda {

class CudaWeight : public Weight {
 public:
  DeviceWeight view;
  Block data;
  Block cache;  // FP16 copy, where the weight has one
};

inline const DeviceWeight& view_of(const Weight& weight) {
  return static_cast<const CudaWeight&>(weight).view;
}

// Outputs [begin, end), each a multiple of kTileOutputs unless it is the weight's end.
DeviceWeight slice(const DeviceWeight& weight, int64_t begin, int64_t end);

// What decides the allocations of a weight.
struct WeightShape {
  TensorKind kind = TensorKind::kF16;
  int64_t outputs = 0;
  int64_t inputs = 0;
  int64_t group = 0;
  bool fp32 = false;
  bool cached = false;
};
// The weight, then its FP16 copy if it has one.
std::vector<size_t> weight_allocations(const WeightShape& shape);

// Moves weights from a mapped file to the device: runs of outputs through page-locked memory, from
// which the device reads each byte once, on its way to its place.
class Uploader {
 public:
  Uploader(cudaStream_t stream, PinnedRing& ring) : stream_(stream), ring_(ring) {}

  std::unique_ptr<Weight> upload(const TensorEntry& tensor, int64_t begin, const WeightShape& shape,
                                 Account& account);

 private:
  StagedRows stage(const TensorEntry& tensor, int64_t first, int64_t count);

  const cudaStream_t stream_;
  PinnedRing& ring_;
};

}  // namespace tinyloop::cuda
