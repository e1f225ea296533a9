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
  int32_t spans = 0;            // capacity
  const void* place = nullptr;  // of the plan
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

  // Whether begin() would record: the step was seen before, and there is no graph of it yet.
  bool will_record(const ReplayKey& key) const;
  // False: the step was launched. True: the caller launches its operations, then calls end().
  bool begin(const ReplayKey& key);
  // False: the device has no room for the recording, and nothing was launched. The step is not
  // recorded again.
  bool end();
  // After an exception between begin() and end().
  void abandon() noexcept;
  bool recording() const { return recording_; }
  int64_t recorded() const { return recorded_; }

 private:
  struct Entry {
    cudaGraphExec_t graph = nullptr;
    bool refused = false;
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
