// The memory of one device, given out in blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>

#include "cuda/current_device.h"
#include "memory_source.h"

namespace tinyloop::cuda {

class AddressSpace;

// One range of addresses is reserved, twice as large as the device's memory, and physical memory is
// mapped into it in chunks of 2 MiB while blocks lie there, so that blocks lie side by side without
// rounding each to a chunk, and what is free goes back to the device. AddressSpace says by how much
// mapped bytes may pass live bytes. Where the device cannot do this, or TINYLOOP_CUDA_BLOCKS is
// "single", each block is a cudaMalloc: then a memory checker sees where each one ends.
//
// Thread: any. Releases do nothing while the process exits, or in a forked child.
class DeviceMemory : public MemorySource {
 public:
  explicit DeviceMemory(int device);
  ~DeviceMemory() override;  // everything, blocks that are still live included
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* allocate(size_t bytes) override;
  void release(void* data, size_t bytes) noexcept override;
  size_t alignment() const override;
  std::string describe() const override;

  // A chunk goes back only after the device has finished all work, and waiting for that while a
  // stream is being captured would spoil the capture. Between the two calls nothing goes back; then
  // what became free does. Pairs may nest.
  void hold_chunks();
  void let_chunks_go() noexcept;

  // The one stream whose work reads and writes this memory, until it is null again: before a chunk
  // goes back it is waited for, and nothing else of the device.
  void use_stream(cudaStream_t stream);

  size_t live_bytes() const;    // blocks at their rounded sizes
  size_t mapped_bytes() const;  // what they cost the device
  bool maps_chunks() const { return space_ != nullptr; }

 private:
  struct Driver;

  bool map(size_t offset, size_t bytes);
  void unmap(size_t offset, size_t bytes) noexcept;
  void* allocate_alone(size_t bytes);

  const int device_;
  const HomeProcess home_;
  mutable std::mutex mutex_;
  std::unique_ptr<Driver> driver_;
  std::unique_ptr<AddressSpace> space_;
  size_t reserved_ = 0;
  unsigned long long base_ = 0;  // CUdeviceptr of the range
  int holds_ = 0;
  cudaStream_t stream_ = nullptr;
  bool finished_ = false;  // the device has been waited for since this call began
  size_t alone_ = 0;       // bytes of blocks by cudaMalloc
};

}  // namespace tinyloop::cuda
