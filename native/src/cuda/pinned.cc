#include "cuda/pinned.h"

#include <algorithm>
#include <cstring>

#include "cuda/check.h"

namespace tinyloop::cuda {

namespace {

constexpr size_t kAlignment = 256;  // of a write within its slot

}  // namespace

PinnedRing::PinnedRing(int device, cudaStream_t stream) : device_(device), stream_(stream) {
  const CurrentDevice current(device);
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, bytes(), cudaHostAllocDefault), "allocate page-locked memory");
  memory_ = static_cast<unsigned char*>(memory);
  for (cudaEvent_t& event : arrived_) {
    const cudaError_t status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (status == cudaSuccess) continue;
    cudaFreeHost(memory_);  // the events go with the context
    check(status, "create an event");
  }
}

PinnedRing::~PinnedRing() {
  if (!home_.here()) return;
  const CurrentDevice current(device_);
  if (!current.ok()) return;
  cudaStreamSynchronize(stream_);
  for (const cudaEvent_t event : arrived_) cudaEventDestroy(event);
  cudaFreeHost(memory_);
  cudaGetLastError();
}

void PinnedRing::write(void* device_to, const void* from, size_t bytes) {
  auto* to = static_cast<unsigned char*>(device_to);
  const auto* source = static_cast<const unsigned char*>(from);
  while (bytes > 0) {
    if (used_ == kSlotBytes) next_slot();
    const size_t n = std::min(bytes, kSlotBytes - used_);
    unsigned char* staged = memory_ + slot_ * kSlotBytes + used_;
    std::memcpy(staged, source, n);
    check(cudaMemcpyAsync(to, staged, n, cudaMemcpyHostToDevice, stream_),
          "copy a table to the device");
    used_ = std::min(kSlotBytes, (used_ + n + kAlignment - 1) / kAlignment * kAlignment);
    to += n;
    source += n;
    bytes -= n;
  }
}

unsigned char* PinnedRing::room(size_t bytes) {
  if (kSlotBytes - used_ < bytes) next_slot();
  unsigned char* const at = memory_ + slot_ * kSlotBytes + used_;
  used_ = std::min(kSlotBytes, (used_ + bytes + kAlignment - 1) / kAlignment * kAlignment);
  return at;
}

void PinnedRing::read(void* to, const void* device_from, size_t bytes) {
  auto* out = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(device_from);
  unsigned char* staged = memory_ + kSlots * kSlotBytes;
  while (bytes > 0) {
    const size_t n = std::min(bytes, kSlotBytes);
    check(cudaMemcpyAsync(staged, source, n, cudaMemcpyDeviceToHost, stream_),
          "copy a result from the device");
    ++waits_;
    check(cudaStreamSynchronize(stream_), "wait for the device");
    std::memcpy(out, staged, n);
    out += n;
    source += n;
    bytes -= n;
  }
}

// The event of a slot that was never used has passed.
void PinnedRing::next_slot() {
  check(cudaEventRecord(arrived_[slot_], stream_), "record an event");
  slot_ = (slot_ + 1) % kSlots;
  if (cudaEventQuery(arrived_[slot_]) == cudaErrorNotReady) {
    cudaGetLastError();
    ++waits_;
  }
  check(cudaEventSynchronize(arrived_[slot_]), "wait for a copy to the device");
  used_ = 0;
}

}  // namespace tinyloop::cuda
