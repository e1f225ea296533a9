// Small tables on their way to the device and results on their way back, through page-locked
// memory.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cuda/current_device.h"

namespace tinyloop::cuda {

// A ring of slots that belongs to one stream and is used by one thread at a time. Not while the
// stream is being captured.
class PinnedRing {
 public:
  PinnedRing(int device, cudaStream_t stream);
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // In stream order. `from` may change once this returns. Waits only where all slots are still on
  // their way.
  void write(void* device_to, const void* from, size_t bytes);
  // Room for at most slot_bytes() that the host fills and the device reads in place: work that is
  // launched on the stream before the next call of this ring may read it.
  unsigned char* room(size_t bytes);
  // Waits for everything before it on the stream.
  void read(void* to, const void* device_from, size_t bytes);

  int64_t waits() const { return waits_; }

  static constexpr size_t slot_bytes() { return kSlotBytes; }
  // Page-locked bytes.
  static constexpr size_t bytes() { return (kSlots + 1) * kSlotBytes; }

 private:
  static constexpr size_t kSlots = 4;
  static constexpr size_t kSlotBytes = size_t{4} << 20;

  void next_slot();

  const int device_;
  const cudaStream_t stream_;
  const HomeProcess home_;
  unsigned char* memory_ = nullptr;  // the slots, then one for reads
  // Of each slot: passed once what was written from it has arrived. No event is recorded for the
  // slot in use.
  std::array<cudaEvent_t, kSlots> arrived_{};
  size_t slot_ = 0;
  std::atomic<int64_t> waits_{0};  // read by any thread
  size_t used_ = 0;                // bytes of the slot in use
};

}  // namespace tinyloop::cuda
