// The bookkeeping of one large range of addresses into which memory is mapped on demand. Knows
// nothing of any device: mapping is the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace tinyloop::cuda {

// Offsets and bytes within the range, in whole chunks. Each call of unmap names what exactly one
// call of map did; unmap must not throw.
struct Mapping {
  std::function<bool(size_t offset, size_t bytes)> map;  // false: no memory, nothing was mapped
  std::function<void(size_t offset, size_t bytes)> unmap;
};

// Blocks lie side by side, in the smallest free range that holds them, the lowest of equal ones. A
// chunk is mapped while a block touches it and unmapped when none does any more. So mapped bytes
// are less than live bytes plus two chunks for each gap before, between and behind the blocks
// (unless chunks are held), where live bytes count each block at its rounded size.
//
// Thread: one at a time.
class AddressSpace {
 public:
  // Blocks are multiples of `alignment`, chunks multiples of it, and the range of chunks.
  AddressSpace(size_t bytes, size_t chunk, size_t alignment, Mapping mapping);

  // nullopt where no free range holds the block or the n-th call of map fails; then all is as
  // before. No bytes count as one.
  std::optional<size_t> allocate(size_t bytes);
  // Of a block that allocate() gave and that was not released yet. hold: chunks stay mapped until
  // unmap_free().
  void release(size_t offset, bool hold = false) noexcept;
  // What was held.
  void unmap_free() noexcept;
  // At the end, live blocks or not; nothing may follow.
  void unmap_all() noexcept;

  size_t live_bytes() const { return live_; }
  size_t mapped_bytes() const { return mapped_; }

 private:
  struct Range {
    size_t bytes;
    bool free;
  };
  using Ranges = std::map<size_t, Range>;
  struct Run {
    size_t first, chunks;
  };
  static constexpr uint32_t kUnmapped = UINT32_MAX;

  Ranges::iterator best_fit(size_t bytes);
  Ranges::iterator join(Ranges::iterator range) noexcept;
  std::vector<Run> missing_runs(size_t begin, size_t end) const;
  bool map_runs(const std::vector<Run>& runs);
  void mark(const Run& run, bool mapped) noexcept;
  void unmap_run(const Run& run) noexcept;
  void unmap_within(size_t begin, size_t end, const Range& free, size_t offset) noexcept;

  size_t chunk_, alignment_;
  Mapping mapping_;
  Ranges ranges_;                 // all of the range, by offset; no two free ones touch
  std::vector<uint32_t> first_;   // of each chunk: the first chunk of its run, or kUnmapped
  std::vector<uint32_t> chunks_;  // of each run's first chunk: the run's chunks
  size_t live_ = 0, mapped_ = 0;
};

}  // namespace tinyloop::cuda
