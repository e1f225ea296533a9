#include "cuda/device_memory.h"

#include <cuda.h>

#include <cstdlib>

#include "cuda/address_space.h"
#include "cuda/check.h"
#include "cuda/driver.h"
#include "tinyloop/errors.h"

namespace tinyloop::cuda {

namespace {

constexpr size_t kBlockAlignment = 256;
constexpr size_t kChunk = size_t{2} << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// For a memory checker, which knows blocks only by the calls that made them.
bool wants_single_blocks() {
  const char* named = std::getenv("TINYLOOP_CUDA_BLOCKS");
  const std::string wish = named == nullptr ? "" : named;
  if (wish != "" && wish != "mapped" && wish != "single") {
    throw LoadError("cannot load with TINYLOOP_CUDA_BLOCKS='" + wish +
                    "': it must be 'mapped' or 'single'");
  }
  return wish == "single";
}

std::string megabytes(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

struct DeviceMemory::Driver {
  decltype(&cuMemAddressReserve) reserve = entry_point<decltype(reserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) unreserve = entry_point<decltype(unreserve)>("cuMemAddressFree");
  decltype(&cuMemCreate) create = entry_point<decltype(create)>("cuMemCreate");
  decltype(&cuMemRelease) drop = entry_point<decltype(drop)>("cuMemRelease");
  decltype(&cuMemMap) map = entry_point<decltype(map)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = entry_point<decltype(unmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access = entry_point<decltype(set_access)>("cuMemSetAccess");
  decltype(&cuMemGetAllocationGranularity) granularity =
      entry_point<decltype(granularity)>("cuMemGetAllocationGranularity");
  decltype(&cuDeviceGetAttribute) attribute =
      entry_point<decltype(attribute)>("cuDeviceGetAttribute");

  explicit Driver(int device) {
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = device;
  }

  // The chunk's size (a device's handle is its number); 0 where virtual memory cannot be managed
  // here.
  size_t chunk(int device) const {
    const bool complete = reserve && unreserve && create && drop && map && unmap && set_access &&
                          granularity && attribute;
    int supported = 0;
    if (!complete ||
        attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) !=
            CUDA_SUCCESS ||
        supported == 0) {
      return 0;
    }
    size_t least = 0;
    const bool known =
        granularity(&least, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS && least > 0;
    return known ? round_up(kChunk, least) : 0;
  }

  CUmemAllocationProp kind{};
};

DeviceMemory::DeviceMemory(int device) : device_(device) {
  const CurrentDevice current(device);
  check(current.ok() ? cudaSuccess : cudaErrorInvalidDevice, "use the device's memory");
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "ask for the device's memory");  // makes the context too
  driver_ = std::make_unique<Driver>(device);
  const size_t chunk = driver_->chunk(device);
  if (chunk == 0 || wants_single_blocks()) return;
  // Twice: what is in use may be scattered over as much again.
  const size_t bytes = 2 * round_up(total, chunk);
  CUdeviceptr base = 0;
  if (driver_->reserve(&base, bytes, chunk, 0, 0) != CUDA_SUCCESS) return;
  base_ = base;
  reserved_ = bytes;
  space_ = std::make_unique<AddressSpace>(
      bytes, chunk, kBlockAlignment,
      Mapping{[this](size_t offset, size_t n) { return map(offset, n); },
              [this](size_t offset, size_t n) { unmap(offset, n); }});
}

DeviceMemory::~DeviceMemory() {
  if (space_ == nullptr || !home_.here()) return;
  const CurrentDevice current(device_);
  if (!current.ok()) return;
  finished_ = false;
  space_->unmap_all();
  driver_->unreserve(base_, reserved_);
}

void* DeviceMemory::allocate(size_t bytes) {
  if (!home_.here()) return nullptr;  // before the mutex: in a forked child it may be locked
  const std::lock_guard<std::mutex> lock(mutex_);
  const CurrentDevice current(device_);
  if (!current.ok()) return nullptr;
  if (space_ == nullptr) return allocate_alone(bytes);
  finished_ = false;
  const std::optional<size_t> offset = space_->allocate(bytes);
  return offset ? reinterpret_cast<void*>(base_ + *offset) : nullptr;
}

void DeviceMemory::release(void* data, size_t bytes) noexcept {
  if (data == nullptr || !home_.here()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const CurrentDevice current(device_);
  if (!current.ok()) return;
  if (space_ != nullptr) {
    finished_ = false;
    space_->release(reinterpret_cast<CUdeviceptr>(data) - base_, holds_ > 0);
    return;
  }
  alone_ -= round_up(bytes, kBlockAlignment);
  if (cudaFree(data) != cudaSuccess) cudaGetLastError();
}

size_t DeviceMemory::alignment() const { return kBlockAlignment; }

std::string DeviceMemory::describe() const {
  size_t free = 0, total = 0;
  {
    const CurrentDevice current(device_);
    if (!home_.here() || !current.ok() || cudaMemGetInfo(&free, &total) != cudaSuccess) {
      cudaGetLastError();
      return "GPU " + std::to_string(device_) + " (its memory cannot be asked for)";
    }
  }
  return "GPU " + std::to_string(device_) + ", " + megabytes(free) + " free of " +
         megabytes(total) + "; " + megabytes(mapped_bytes()) + " are mapped here";
}

void DeviceMemory::use_stream(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stream_ = stream;
}

void DeviceMemory::hold_chunks() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++holds_;
}

void DeviceMemory::let_chunks_go() noexcept {
  if (!home_.here()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--holds_ > 0 || space_ == nullptr) return;
  const CurrentDevice current(device_);
  if (!current.ok()) return;
  finished_ = false;
  space_->unmap_free();
}

size_t DeviceMemory::live_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return space_ ? space_->live_bytes() : alone_;
}

size_t DeviceMemory::mapped_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return space_ ? space_->mapped_bytes() : alone_;
}

// The mapping keeps the physical memory; its handle is not needed behind it.
bool DeviceMemory::map(size_t offset, size_t bytes) {
  CUmemGenericAllocationHandle physical{};
  if (driver_->create(&physical, bytes, &driver_->kind, 0) != CUDA_SUCCESS) return false;
  const bool mapped = driver_->map(base_ + offset, bytes, 0, physical, 0) == CUDA_SUCCESS;
  driver_->drop(physical);
  if (!mapped) return false;
  CUmemAccessDesc access{};
  access.location = driver_->kind.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (driver_->set_access(base_ + offset, bytes, &access, 1) == CUDA_SUCCESS) return true;
  driver_->unmap(base_ + offset, bytes);
  return false;
}

// Kernels that were launched before the block's release may still read it.
void DeviceMemory::unmap(size_t offset, size_t bytes) noexcept {
  if (!finished_ && stream_ != nullptr) {
    // This thread may be recording another model's step, which forbids such calls in other modes.
    auto mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (cudaStreamSynchronize(stream_) != cudaSuccess) cudaGetLastError();
    cudaThreadExchangeStreamCaptureMode(&mode);
  }
  finished_ = true;
  driver_->unmap(base_ + offset, bytes);
}

void* DeviceMemory::allocate_alone(size_t bytes) {
  void* data = nullptr;
  const size_t rounded = round_up(bytes == 0 ? 1 : bytes, kBlockAlignment);
  if (rounded < bytes || cudaMalloc(&data, rounded) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  alone_ += rounded;
  return data;
}

}  // namespace tinyloop::cuda
