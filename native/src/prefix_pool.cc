#include "prefix_pool.h"

#include <algorithm>

#include "tinyloop/errors.h"

namespace tinyloop {

namespace {

std::string text(size_t value) { return std::to_string(value); }
std::string text(int64_t value) { return std::to_string(value); }

size_t common_length(std::span<const int32_t> a, std::span<const int32_t> b) {
  return static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

}  // namespace

bool PoolLedger::IdsLess::operator()(std::span<const int32_t> a, std::span<const int32_t> b) const {
  return std::ranges::lexicographical_compare(a, b);
}

void PoolLedger::require_open() const {
  if (closed_) throw ClosedHandleError("cannot use the pool: it was closed");
}

PoolLedger::Held& PoolLedger::held(int64_t key, const char* what) {
  const auto found = held_.find(key);
  if (found != held_.end()) return found->second;
  refuse_key(key, what);
}

void PoolLedger::refuse_key(int64_t key, const char* what) const {
  const bool was_held = key >= 1 && key < next_key_;
  throw InvalidInputError("cannot " + std::string(what) + " the pool's entry " + text(key) + ": " +
                          (was_held ? "it was evicted" : "there never was one"));
}

void PoolLedger::check(const PoolEntry& entry) {
  if (entry.ids.empty() || entry.depth < 1) {
    throw InvalidInputError("cannot hold a prefix of " + text(entry.ids.size()) + " ids at depth " +
                            std::to_string(entry.depth) +
                            ": it needs an id and a depth of 1 or more");
  }
  if (!entry.parent) return;
  const std::vector<int32_t>& base = held(*entry.parent, "extend").entry.ids;
  const size_t common = common_length(base, entry.ids);
  if (common < base.size() || entry.ids.size() == base.size()) {
    throw MismatchError("cannot hold a prefix of " + text(entry.ids.size()) +
                        " ids as a child of entry " + text(*entry.parent) + ": it shares " +
                        text(common) + " of the parent's " + text(base.size()) +
                        " ids; it must begin with all of them and have more");
  }
}

int64_t PoolLedger::put(PoolEntry entry) {
  require_open();
  check(entry);
  if (const auto equal = find_equal(entry.ids, entry.depth, entry.variant)) {
    touch(held_.at(*equal));
    return *equal;
  }
  make_room(entry.bytes, entry.parent);
  const int64_t key = next_key_++;
  Held& kept = held_[key];
  kept.entry = std::move(entry);
  by_ids_[kept.entry.ids][{kept.entry.depth, key}] = &kept;
  if (kept.entry.parent) ++held_.at(*kept.entry.parent).children;
  bytes_ += kept.entry.bytes;
  by_use_[kept.last_use = ++clock_] = key;
  touch(kept);
  return key;
}

// The entry first, its ancestors after it, so that no child is younger than its parent.
void PoolLedger::touch(Held& used) {
  for (Held* at = &used;; at = &held_.at(*at->entry.parent)) {
    auto use = by_use_.extract(at->last_use);
    use.key() = at->last_use = ++clock_;
    by_use_.insert(std::move(use));
    if (!at->entry.parent) return;
  }
}

bool PoolLedger::make_room(size_t bytes, std::optional<int64_t> keep) {
  const std::vector<int64_t> gone = room_for(bytes, keep);
  for (const int64_t key : gone) drop(key, false);
  return !gone.empty();
}

void PoolLedger::check_room(size_t bytes, std::optional<int64_t> keep) const {
  room_for(bytes, keep);
}

// Who must go for `bytes` more, in order.
std::vector<int64_t> PoolLedger::room_for(size_t bytes, std::optional<int64_t> keep) const {
  require_open();
  if (keep && held_.count(*keep) == 0) refuse_key(*keep, "keep");
  if (budget_ == 0 || (bytes <= budget_ && bytes_ <= budget_ - bytes)) return {};
  // Not a sum of the two: that could pass the largest size.
  const size_t allowed = bytes <= budget_ ? budget_ - bytes : 0;
  auto gone = victims(bytes_ - std::min(bytes_, allowed), keep);
  if (bytes > budget_ || gone.empty()) {
    throw OutOfMemoryError(
        "cannot hold " + text(bytes) + " bytes more in the pool: it holds " + text(bytes_) +
        " of " + text(budget_) + " bytes in " + text(held_.size()) +
        " entries, and too few may be evicted " +
        (policy_ == EvictPolicy::kNever ? "(evict is never)" : "(pinned ones and parents stay)") +
        ": evict or unpin some, or raise the budget");
  }
  return gone;
}

// The oldest entries that together free `excess` bytes, in an order in which they may go; none if
// there are not enough. One pass is enough: a parent comes later than all its children.
std::vector<int64_t> PoolLedger::victims(size_t excess, std::optional<int64_t> keep) const {
  if (policy_ == EvictPolicy::kNever) return {};
  std::vector<int64_t> chosen;
  std::map<int64_t, int64_t> children_gone;
  size_t freed = 0;
  for (const auto& [use, key] : by_use_) {
    const Held& candidate = held_.at(key);
    if (candidate.pins > 0 || key == keep || candidate.children > children_gone[key]) continue;
    chosen.push_back(key);
    freed += candidate.entry.bytes;
    if (freed >= excess) return chosen;
    if (candidate.entry.parent) ++children_gone[*candidate.entry.parent];
  }
  return {};
}

std::shared_ptr<void> PoolLedger::get(int64_t key) {
  require_open();
  Held& found = held(key, "get");
  touch(found);
  return found.entry.payload;
}

std::optional<int64_t> PoolLedger::find_equal(std::span<const int32_t> ids, int depth,
                                              int64_t variant) const {
  require_open();
  const auto same_ids = by_ids_.find(ids);
  if (same_ids == by_ids_.end()) return std::nullopt;
  const ByDepth& by_depth = same_ids->second;
  for (auto at = by_depth.lower_bound({depth, 0}); at != by_depth.end(); ++at) {
    const auto& [of_depth, key] = at->first;
    if (of_depth != depth) break;
    if (at->second->entry.variant == variant) return key;
  }
  return std::nullopt;
}

// Prefixes of one sequence stand in the order of their length, and whatever stands between the
// longest of them and the sequence itself begins with that prefix. So the last key that is not
// beyond the sequence either is its longest prefix, or tells how short the next try must be.
std::optional<int64_t> PoolLedger::find(std::span<const int32_t> ids, int depth,
                                        DepthRule rule) const {
  require_open();
  for (auto after = by_ids_.upper_bound(ids); after != by_ids_.begin();
       after = by_ids_.upper_bound(ids)) {
    const auto& [candidate, by_depth] = *std::prev(after);
    size_t common = common_length(candidate, ids);
    if (common == candidate.size()) {
      const auto deep = by_depth.lower_bound({depth, 0});
      const bool serves =
          deep != by_depth.end() && (rule == DepthRule::kAtLeast || deep->first.first == depth);
      if (serves) return deep->first.second;
      --common;  // the next shorter one
    }
    ids = ids.first(common);
  }
  return std::nullopt;
}

void PoolLedger::pin(int64_t key) {
  require_open();
  ++held(key, "pin").pins;
}

void PoolLedger::unpin(int64_t key) {
  require_open();
  Held& found = held(key, "unpin");
  if (found.pins == 0) {
    throw InvalidInputError("cannot unpin the pool's entry " + text(key) + ": it is not pinned");
  }
  --found.pins;
}

void PoolLedger::evict(int64_t key) {
  require_open();
  const Held& found = held(key, "evict");
  if (found.pins > 0 || found.children > 0) {
    throw InvalidInputError("cannot evict the pool's entry " + text(key) + ": it has " +
                            text(found.children) + " held children and " + text(found.pins) +
                            " pins: evict the children and unpin it first");
  }
  drop(key, true);
}

void PoolLedger::drop(int64_t key, bool asked) {
  const auto found = held_.find(key);
  const PoolEntry& entry = found->second.entry;
  const auto same_ids = by_ids_.find(entry.ids);
  same_ids->second.erase({entry.depth, key});
  if (same_ids->second.empty()) by_ids_.erase(same_ids);
  by_use_.erase(found->second.last_use);
  if (entry.parent) --held_.at(*entry.parent).children;
  bytes_ -= entry.bytes;
  report_.push_back({key, entry.bytes, asked});
  held_.erase(found);
}

std::vector<Eviction> PoolLedger::evicted() {
  require_open();
  return std::exchange(report_, {});
}

size_t PoolLedger::bytes() const {
  require_open();
  return bytes_;
}

std::vector<int64_t> PoolLedger::keys() const {
  require_open();
  std::vector<int64_t> keys;
  for (const auto& [use, key] : by_use_) keys.push_back(key);
  return keys;
}

void PoolLedger::close() {
  closed_ = true;
  by_ids_.clear();
  by_use_.clear();
  // A child's key is above its parent's.
  while (!held_.empty()) held_.erase(std::prev(held_.end()));
  bytes_ = 0;
}

}  // namespace tinyloop
