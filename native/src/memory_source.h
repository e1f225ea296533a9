// Where the blocks of an account come from: the host's allocator, or a device's memory.
#pragma once

#include <cstddef>
#include <string>

namespace tinyloop {

// Thread: any.
class MemorySource {
 public:
  virtual ~MemorySource() = default;

  // nullptr on failure, with nothing changed and no error left pending anywhere.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data, size_t bytes) noexcept = 0;
  // Of every block; sizes are rounded up to it.
  virtual size_t alignment() const = 0;
  // For messages: what is short when allocate() fails.
  virtual std::string describe() const = 0;
};

}  // namespace tinyloop
