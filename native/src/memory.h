// The accounting allocator: every byte of a model and of its handles passes through here.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "memory_source.h"

namespace tinyloop {

// Who holds a block; the keys of memory_report().
enum class Owner {
  kWeights,
  kTables,
  kMain,
  kScratch,
  kLogitRow,
  kWorkspace,
  kRebuild,
  kPrefix,
  kResume,
  kRequest,
};
inline constexpr size_t kOwnerCount = 10;
const char* owner_name(Owner owner);

class Account;

// What one allocation costs: its size rounded up to the alignment of where it comes from.
inline size_t accounted_bytes(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// One owned block, aligned as its source says. Movable; gives its bytes back to its account when
// destroyed.
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept { *this = std::move(other); }
  Block& operator=(Block&& other) noexcept;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { reset(); }
  void reset() noexcept;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  friend class Account;
  std::shared_ptr<Account> account_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Owner owner_ = Owner::kWeights;
};

// Live bytes of one model against a hard budget. Handles share it, so it outlives the model.
// Thread: any; a handle may be freed while another call runs.
class Account : public std::enable_shared_from_this<Account> {
 public:
  explicit Account(size_t budget_bytes, std::shared_ptr<MemorySource> source = host_memory())
      : source_(std::move(source)), budget_(budget_bytes) {}

  // Bytes are rounded up to alignment(), and the rounded size is what counts. `what` names the
  // buffer in the error. The content is not initialised. Throws OutOfMemoryError and changes
  // nothing.
  Block allocate(size_t bytes, Owner owner, const char* what);

  size_t live_bytes() const;
  size_t budget_bytes() const { return budget_; }
  int64_t allocations() const;  // that succeeded, since the beginning
  size_t alignment() const { return source_->alignment(); }
  std::map<std::string, size_t> report() const;

  // Tests: the n-th allocation from now on fails (1: the next); 0 switches this off.
  void fail_allocation(int64_t n) { fail_in_ = n; }

 private:
  friend class Block;
  void release(void* data, size_t bytes, Owner owner) noexcept;

  const std::shared_ptr<MemorySource> source_;
  mutable std::mutex mutex_;
  std::array<size_t, kOwnerCount> live_{};
  size_t total_ = 0;
  size_t budget_ = 0;
  int64_t allocations_ = 0;
  int64_t fail_in_ = 0;
};

}  // namespace tinyloop
