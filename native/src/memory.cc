#include "memory.h"

#include <cstdlib>
#include <limits>

#include "tinyloop/errors.h"

namespace tinyloop {

namespace {

class HostMemory : public MemorySource {
 public:
  void* allocate(size_t bytes) override { return std::aligned_alloc(kHostAlignment, bytes); }
  void release(void* data, size_t /*bytes*/) noexcept override { std::free(data); }
  size_t alignment() const override { return kHostAlignment; }
  std::string describe() const override {
    return "the system refused, free memory on this machine";
  }
};

}  // namespace

std::shared_ptr<MemorySource> host_memory() {
  static const auto source = std::make_shared<HostMemory>();
  return source;
}

const char* owner_name(Owner owner) {
  static constexpr std::array<const char*, kOwnerCount> kNames = {
      "weights",   "tables",  "main",   "scratch", "logit_row",
      "workspace", "rebuild", "prefix", "resume",  "request"};
  return kNames[static_cast<size_t>(owner)];
}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    reset();
    account_ = std::move(other.account_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    owner_ = other.owner_;
  }
  return *this;
}

void Block::reset() noexcept {
  if (data_ == nullptr) return;
  account_->release(data_, bytes_, owner_);
  data_ = nullptr;
  bytes_ = 0;
  account_.reset();
}

Block Account::allocate(size_t bytes, Owner owner, const char* what) {
  if (bytes > std::numeric_limits<size_t>::max() / 2) {
    throw OutOfMemoryError(std::string("cannot allocate ") + what + ": its size passes 64 bits");
  }
  const size_t rounded = accounted_bytes(bytes, alignment());
  Block block;
  std::lock_guard<std::mutex> lock(mutex_);
  const bool injected = fail_in_ > 0 && --fail_in_ == 0;
  const bool over_budget = budget_ != 0 && (rounded > budget_ || total_ > budget_ - rounded);
  void* data = injected || over_budget || rounded == 0 ? nullptr : source_->allocate(rounded);
  if (data == nullptr && rounded != 0) {
    const std::string limit = budget_ ? std::to_string(budget_) + " bytes" : "unlimited";
    throw OutOfMemoryError(std::string("cannot allocate ") + std::to_string(rounded) +
                           " bytes for " + what + ": " + std::to_string(total_) +
                           " bytes are live, the budget is " + limit +
                           (over_budget ? std::string("; raise budget_bytes or lower max_seq_len")
                                        : "; " + source_->describe()));
  }
  block.account_ = shared_from_this();
  block.data_ = data;
  block.bytes_ = rounded;
  block.owner_ = owner;
  ++allocations_;
  total_ += rounded;
  live_[static_cast<size_t>(owner)] += rounded;
  return block;
}

void Account::release(void* data, size_t bytes, Owner owner) noexcept {
  source_->release(data, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  total_ -= bytes;
  live_[static_cast<size_t>(owner)] -= bytes;
}

size_t Account::live_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total_;
}

int64_t Account::allocations() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return allocations_;
}

std::map<std::string, size_t> Account::report() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, size_t> report;
  for (size_t i = 0; i < kOwnerCount; ++i) report[owner_name(static_cast<Owner>(i))] = live_[i];
  return report;
}

}  // namespace tinyloop
