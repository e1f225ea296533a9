// AddressSpace against a plain model of it, on a random walk. One line a check; the exit status is
// 1 if any failed. Arguments: steps of each walk, seed.
#include "cuda/address_space.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>

namespace tinyloop::cuda {
namespace {

constexpr size_t kChunk = 64, kAlignment = 4, kChunks = 50;

// What a device would do: it knows which chunks are mapped, and in which calls.
struct Chunks {
  std::map<size_t, size_t> calls;  // offset to bytes
  std::set<size_t> mapped;
  int fail_in = 0;  // the n-th call from now on fails; 0: none
  std::string wrong;

  bool map(size_t offset, size_t bytes) {
    if (fail_in > 0 && --fail_in == 0) return false;
    if (offset % kChunk != 0 || bytes % kChunk != 0 || bytes == 0) wrong = "no whole chunks";
    for (size_t at = offset; at < offset + bytes; at += kChunk) {
      if (!mapped.insert(at).second) wrong = "mapped twice";
    }
    calls[offset] = bytes;
    return true;
  }
  void unmap(size_t offset, size_t bytes) {
    const auto call = calls.find(offset);
    if (call == calls.end() || call->second != bytes) {
      wrong = "unmapped what no call mapped";
      return;
    }
    calls.erase(call);
    for (size_t at = offset; at < offset + bytes; at += kChunk) mapped.erase(at);
  }
};

size_t rounded(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

class Walk {
 public:
  explicit Walk(unsigned seed) : random_(seed) {}

  void step() {
    if (below(3) > 0 && live_bytes() < kChunks * kChunk * 3 / 4) {
      allocate(below(6) == 0 ? below(8 * kChunk) : below(kChunk));
    } else if (!blocks_.empty()) {
      auto block = blocks_.begin();
      std::advance(block, static_cast<long>(below(blocks_.size())));
      space_.release(block->first);
      blocks_.erase(block);
    }
    check();
  }
  void release_all() {
    for (const auto& [offset, bytes] : blocks_) space_.release(offset);
    blocks_.clear();
    check();
    need(chunks_.mapped.empty(), "chunks are left when no block is");
    const auto whole = space_.allocate(kChunks * kChunk);
    need(whole == size_t{0}, "the range did not grow together again");
    if (whole) space_.release(*whole);
  }
  const std::string& wrong() const { return wrong_; }

 private:
  size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }
  void need(bool good, const std::string& text) {
    if (!good && wrong_.empty()) wrong_ = text;
  }
  size_t live_bytes() const {
    size_t sum = 0;
    for (const auto& [offset, bytes] : blocks_) sum += bytes;
    return sum;
  }

  // Gaps between blocks, the end's last.
  std::map<size_t, size_t> gaps() const {
    std::map<size_t, size_t> gaps;
    size_t at = 0;
    for (const auto& [offset, bytes] : blocks_) {
      if (offset > at) gaps[at] = offset - at;
      at = offset + bytes;
    }
    if (at < kChunks * kChunk) gaps[at] = kChunks * kChunk - at;
    return gaps;
  }
  std::optional<size_t> best_gap(size_t bytes) const {
    std::optional<size_t> best;
    const auto all = gaps();
    for (const auto& [offset, size] : all) {
      if (size >= bytes && (!best || size < all.at(*best))) best = offset;
    }
    return best;
  }

  void allocate(size_t bytes) {
    const auto expected = best_gap(rounded(bytes));
    if (below(4) == 0) {
      chunks_.fail_in = 1 + static_cast<int>(below(3));
      const auto before = chunks_.calls;
      const size_t mapped = space_.mapped_bytes(), live = space_.live_bytes();
      const auto offset = space_.allocate(bytes);
      const bool failed = chunks_.fail_in == 0;
      chunks_.fail_in = 0;
      need(!failed || !offset, "a block without memory");
      if (!offset) {
        need(chunks_.calls == before, "a failure changed what is mapped");
        need(mapped == space_.mapped_bytes() && live == space_.live_bytes(), "a failure counts");
        return;
      }
      need(offset == expected, "not the best gap");
      blocks_[*offset] = rounded(bytes);
      return;
    }
    const auto offset = space_.allocate(bytes);
    need(offset == expected, "not the best gap");
    if (offset) blocks_[*offset] = rounded(bytes);
  }

  void check() {
    std::set<size_t> touched;
    size_t end = 0;
    for (const auto& [offset, bytes] : blocks_) {
      need(offset >= end && offset % kAlignment == 0, "overlap or alignment");
      end = offset + bytes;
      for (size_t at = offset / kChunk * kChunk; at < end; at += kChunk) touched.insert(at);
    }
    need(end <= kChunks * kChunk, "a block beyond the end");
    need(chunks_.mapped == touched, "mapped chunks are not those that blocks touch");
    need(chunks_.wrong.empty(), chunks_.wrong);
    need(space_.live_bytes() == live_bytes(), "live bytes");
    need(space_.mapped_bytes() == touched.size() * kChunk, "mapped bytes");
    need(space_.mapped_bytes() <= live_bytes() + gaps().size() * 2 * kChunk, "the bound");
  }

  std::mt19937 random_;
  std::map<size_t, size_t> blocks_;  // offset to rounded bytes
  std::string wrong_;
  Chunks chunks_;
  AddressSpace space_{kChunks * kChunk,
                      kChunk,
                      kAlignment,
                      {[this](size_t offset, size_t bytes) { return chunks_.map(offset, bytes); },
                       [this](size_t offset, size_t bytes) { chunks_.unmap(offset, bytes); }}};
};

bool report(bool good, const std::string& text) {
  std::printf("%s %s\n", good ? "ok    " : "FAILED", text.c_str());
  return good;
}

bool walk(int steps, unsigned seed) {
  Walk walk(seed);
  for (int i = 0; i < steps && walk.wrong().empty(); ++i) walk.step();
  if (walk.wrong().empty()) walk.release_all();
  const std::string text = "a walk of " + std::to_string(steps) + " steps, seed " +
                           std::to_string(seed) + (walk.wrong().empty() ? "" : ": " + walk.wrong());
  return report(walk.wrong().empty(), text);
}

AddressSpace space_over(Chunks& chunks) {
  return {kChunks * kChunk,
          kChunk,
          kAlignment,
          {[&](size_t offset, size_t bytes) { return chunks.map(offset, bytes); },
           [&](size_t offset, size_t bytes) { chunks.unmap(offset, bytes); }}};
}

bool refuses_what_cannot_be() {
  Chunks chunks;
  AddressSpace space = space_over(chunks);
  const bool good = !space.allocate(kChunks * kChunk + 1) && !space.allocate(SIZE_MAX) &&
                    !space.allocate(SIZE_MAX / 2) && chunks.calls.empty() &&
                    space.allocate(0) == size_t{0} && space.live_bytes() == kAlignment;
  return report(good, "sizes beyond the range, and none");
}

bool one_call_maps_the_inside_of_a_block() {
  Chunks chunks;
  AddressSpace space = space_over(chunks);
  space.allocate(kChunk / 2);
  const auto large = space.allocate(10 * kChunk);
  const bool mapped = chunks.calls.size() == 3 && chunks.calls[kChunk] == 9 * kChunk;
  space.release(*large);
  const bool good = mapped && chunks.mapped == std::set<size_t>{0};
  return report(good, "one call maps the inside of a block");
}

// A held chunk is used again, and goes when it is let go while it is free.
bool holds_chunks() {
  Chunks chunks;
  AddressSpace space = space_over(chunks);
  const auto large = space.allocate(10 * kChunk);
  space.release(*large, true);
  const bool held = space.mapped_bytes() == 10 * kChunk && space.live_bytes() == 0;
  const auto small = space.allocate(kChunk);
  space.unmap_free();
  const bool in_use = chunks.wrong.empty() && chunks.mapped.count(*small) == 1;
  space.release(*small);
  const bool gone = space.mapped_bytes() == 0 && chunks.mapped.empty();
  const auto again = space.allocate(3 * kChunk);
  space.release(*again, true);
  space.unmap_free();
  return report(held && in_use && gone && chunks.mapped.empty() && chunks.wrong.empty(),
                "chunks are held and let go");
}

bool ends_with_live_blocks() {
  Chunks chunks;
  AddressSpace space = space_over(chunks);
  for (const size_t bytes : {kChunk / 2, 5 * kChunk, kChunk}) space.allocate(bytes);
  space.unmap_all();
  return report(chunks.mapped.empty() && chunks.wrong.empty(), "all is unmapped at the end");
}

}  // namespace
}  // namespace tinyloop::cuda

int main(int argc, char** argv) {
  using namespace tinyloop::cuda;
  const int steps = argc > 1 ? std::atoi(argv[1]) : 5000;
  const auto first = static_cast<unsigned>(argc > 2 ? std::atoi(argv[2]) : 1);
  bool good = refuses_what_cannot_be();
  good &= one_call_maps_the_inside_of_a_block();
  good &= holds_chunks();
  good &= ends_with_live_blocks();
  for (unsigned seed = first; seed < first + 6; ++seed) good &= walk(steps, seed);
  return good ? 0 : 1;
}
