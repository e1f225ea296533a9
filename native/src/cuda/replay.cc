#include "cuda/replay.h"

#include "cuda/check.h"

namespace tinyloop::cuda {

namespace {
// Graphs at a time: four loops at each of 128 numbers of rows. One takes some hundred kilobytes of
// the host's memory.
constexpr size_t kMost = 512;
}  // namespace

Replays::~Replays() {
  if (!home_.here()) return;
  for (auto& [key, entry] : entries_) {
    if (entry.graph != nullptr) cudaGraphExecDestroy(entry.graph);
  }
}

bool Replays::will_record(const ReplayKey& key) const {
  const auto at = entries_.find(key);
  return at != entries_.end() && at->second.graph == nullptr && !at->second.refused;
}

bool Replays::begin(const ReplayKey& key) {
  const auto [at, is_new] = entries_.try_emplace(key);
  if (is_new) {
    order_.push_front(key);
    at->second.used = order_.begin();
    if (entries_.size() > kMost) forget_oldest();
    return true;
  }
  order_.splice(order_.begin(), order_, at->second.used);
  if (at->second.refused) return true;
  if (at->second.graph != nullptr) {
    check(cudaGraphLaunch(at->second.graph, stream_), "launch a recorded step");
    return false;
  }
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "record a step");
  current_ = key;
  recording_ = true;
  return true;
}

bool Replays::end() {
  recording_ = false;
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream_, &graph), "record a step");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  Entry& entry = entries_.at(current_);
  if (made != cudaSuccess) {
    cudaGetLastError();
    entry.refused = true;
    return false;
  }
  entry.graph = executable;
  ++recorded_;
  check(cudaGraphLaunch(executable, stream_), "launch a recorded step");
  return true;
}

void Replays::abandon() noexcept {
  if (!recording_) return;
  recording_ = false;
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream_, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
}

void Replays::forget_oldest() {
  const auto oldest = entries_.find(order_.back());
  if (oldest->second.graph != nullptr) cudaGraphExecDestroy(oldest->second.graph);
  entries_.erase(oldest);
  order_.pop_back();
}

}  // namespace tinyloop::cuda
