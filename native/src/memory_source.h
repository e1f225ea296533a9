// Where the blocks of an account come from.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace tinyloop {

// Thread: any.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  // `bytes` is a multiple of alignment(). The content is not initialised. nullptr when there is no
  // room; nothing is changed then.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data, size_t bytes) noexcept = 0;
  virtual size_t alignment() const = 0;
  // For messages: what a refusal means and what to do.
  virtual std::string describe() const = 0;
};

// The process's own memory, in cache lines.
std::shared_ptr<MemorySource> host_memory();

// One cache line and one 512-bit vector.
inline constexpr size_t kHostAlignment = 64;

}  // namespace tinyloop
