#include "cuda/address_space.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tinyloop::cuda {

AddressSpace::AddressSpace(size_t bytes, size_t chunk, size_t alignment, Mapping mapping)
    : chunk_(chunk),
      alignment_(alignment),
      mapping_(std::move(mapping)),
      ranges_{{0, {bytes, true}}},
      first_(bytes / chunk, kUnmapped),
      chunks_(bytes / chunk, 0) {}

std::optional<size_t> AddressSpace::allocate(size_t bytes) {
  if (bytes > first_.size() * chunk_) return std::nullopt;
  const size_t rounded = (std::max(bytes, size_t{1}) + alignment_ - 1) / alignment_ * alignment_;
  const auto range = best_fit(rounded);
  if (range == ranges_.end()) return std::nullopt;
  const size_t offset = range->first;
  const std::vector<Run> missing = missing_runs(offset, offset + rounded);
  // The rest first: from here on only the mapping can fail.
  if (range->second.bytes > rounded) {
    ranges_.emplace_hint(std::next(range), offset + rounded,
                         Range{range->second.bytes - rounded, true});
  }
  range->second = {rounded, false};
  if (!map_runs(missing)) {
    range->second.free = true;
    join(range);
    return std::nullopt;
  }
  live_ += rounded;
  return offset;
}

void AddressSpace::release(size_t offset, bool hold) noexcept {
  auto range = ranges_.find(offset);
  if (range == ranges_.end() || range->second.free) return;
  const size_t end = offset + range->second.bytes;
  live_ -= range->second.bytes;
  range->second.free = true;
  range = join(range);
  if (!hold) unmap_within(offset, end, range->second, range->first);
}

void AddressSpace::unmap_free() noexcept {
  for (const auto& [offset, range] : ranges_) {
    if (range.free) unmap_within(offset, offset + range.bytes, range, offset);
  }
}

void AddressSpace::unmap_all() noexcept {
  const size_t bytes = first_.size() * chunk_;
  unmap_within(0, bytes, {bytes, true}, 0);
}

AddressSpace::Ranges::iterator AddressSpace::best_fit(size_t bytes) {
  auto best = ranges_.end();
  for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
    if (!range->second.free || range->second.bytes < bytes) continue;
    if (best == ranges_.end() || range->second.bytes < best->second.bytes) best = range;
  }
  return best;
}

// A free range with its free neighbours.
AddressSpace::Ranges::iterator AddressSpace::join(Ranges::iterator range) noexcept {
  const auto next = std::next(range);
  if (next != ranges_.end() && next->second.free) {
    range->second.bytes += next->second.bytes;
    ranges_.erase(next);
  }
  if (range == ranges_.begin()) return range;
  const auto before = std::prev(range);
  if (!before->second.free) return range;
  before->second.bytes += range->second.bytes;
  ranges_.erase(range);
  return before;
}

// What is unmapped of the chunks that [begin, end) touches. The chunks that it covers wholly come
// and go together, so they are mapped together; those at its ends may outlive it.
std::vector<AddressSpace::Run> AddressSpace::missing_runs(size_t begin, size_t end) const {
  const size_t last = (end + chunk_ - 1) / chunk_;
  const auto covered = [&](size_t c) { return c * chunk_ >= begin && (c + 1) * chunk_ <= end; };
  std::vector<Run> runs;
  for (size_t c = begin / chunk_; c < last; ++c) {
    if (first_[c] != kUnmapped) continue;
    const bool extends = !runs.empty() && runs.back().first + runs.back().chunks == c &&
                         covered(c) && covered(c - 1);
    if (extends) {
      ++runs.back().chunks;
    } else {
      runs.push_back({c, 1});
    }
  }
  return runs;
}

// All of them or none.
bool AddressSpace::map_runs(const std::vector<Run>& runs) {
  for (size_t i = 0; i < runs.size(); ++i) {
    if (mapping_.map(runs[i].first * chunk_, runs[i].chunks * chunk_)) {
      mark(runs[i], true);
      continue;
    }
    while (i > 0) unmap_run(runs[--i]);
    return false;
  }
  return true;
}

void AddressSpace::mark(const Run& run, bool mapped) noexcept {
  for (size_t c = run.first; c < run.first + run.chunks; ++c) {
    first_[c] = mapped ? static_cast<uint32_t>(run.first) : kUnmapped;
  }
  chunks_[run.first] = mapped ? static_cast<uint32_t>(run.chunks) : 0;
  mapped_ = mapped ? mapped_ + run.chunks * chunk_ : mapped_ - run.chunks * chunk_;
}

void AddressSpace::unmap_run(const Run& run) noexcept {
  mapping_.unmap(run.first * chunk_, run.chunks * chunk_);
  mark(run, false);
}

// Of the runs that [begin, end) touches, those that lie in the free range at `offset`.
void AddressSpace::unmap_within(size_t begin, size_t end, const Range& free,
                                size_t offset) noexcept {
  const size_t last = (end + chunk_ - 1) / chunk_;
  size_t next = 0;
  for (size_t c = begin / chunk_; c < last; c = next) {
    next = c + 1;
    if (first_[c] == kUnmapped) continue;
    const Run run{first_[c], chunks_[first_[c]]};
    next = run.first + run.chunks;
    const bool inside = run.first * chunk_ >= offset && next * chunk_ <= offset + free.bytes;
    if (inside) unmap_run(run);
  }
}

}  // namespace tinyloop::cuda
