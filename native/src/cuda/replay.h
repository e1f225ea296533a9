// Decode steps recorded as CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <list>
#include <map>

#include "backend.h"
#include "cuda/current_device.h"

namespace tinyloop::cuda {

// Everything besides memory and the content of plans that decides what a step launches.
struct ReplayKey {
  StepKey step;
  int32_t spans = 0;       // capacity
  int64_t generation = 0;  // of the plan's place
  auto operator<=>(const ReplayKey&) const = default;
};

// Keeps the graphs of the steps seen last. A step is recorded the second time that it is seen: a
// sequence's first steps do not pay for graphs that nobody needs again.
class Replays {
 public:
  explicit Replays(cudaStream_t stream) : stream_(stream) {}
  ~Replays();
  Replays(const Replays&) = delete;
  Replays& operator=(const Replays&) = delete;

  // False: the step was launched. True: the caller launches its operations, then calls end().
  bool begin(const ReplayKey& key);
  void end();
  // After an exception between begin() and end().
  void abandon() noexcept;
  bool recording() const { return recording_; }
  int64_t recorded() const { return recorded_; }

 private:
  struct Entry {
    cudaGraphExec_t graph = nullptr;
    std::list<ReplayKey>::iterator used;
  };
  void forget_oldest();

  const cudaStream_t stream_;
  const HomeProcess home_;
  std::map<ReplayKey, Entry> entries_;
  std::list<ReplayKey> order_;  // the one used last comes first
  ReplayKey current_;
  bool recording_ = false;
  int64_t recorded_ = 0;
};

}  // namespace tinyloop::cuda
