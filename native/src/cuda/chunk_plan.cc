#include "cuda/chunk_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>

namespace tinyloop::cuda {

namespace {

// Rows up to which a step of single rows is attended to row by row: each work item then reads its
// prefix itself, from the L2 where rows share it, and spans are spread over the device.
constexpr int64_t kDecodeRows = 128;
constexpr size_t kAlignment = 16;

// Arrays side by side, to be uploaded at once.
class Packer {
 public:
  template <typename T>
  size_t add(const std::vector<T>& values) {
    const size_t at = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
    bytes_.resize(at + values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(bytes_.data() + at, values.data(), values.size() * sizeof(T));
    return at;
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

template <typename Run>
std::vector<int32_t> run_of_row(const std::vector<Run>& runs) {
  std::vector<int32_t> of_row;
  for (size_t i = 0; i < runs.size(); ++i) {
    of_row.insert(of_row.end(), static_cast<size_t>(runs[i].rows), static_cast<int32_t>(i));
  }
  return of_row;
}

bool single_rows(const ChunkWork& work) {
  int64_t rows = 0;
  for (const AttentionChunk& chunk : work.attention) {
    for (const AttentionPiece& piece : chunk.pieces) {
      if (piece.rows != 1) return false;
    }
    rows += chunk.rows;
  }
  return rows > 0 && rows <= kDecodeRows;
}

// One more than the last key that any row of the piece sees.
int64_t keys_end(const AttentionPiece& piece) {
  return std::max(piece.open_end, piece.position + piece.rows);
}

struct Items {
  std::vector<Item> items;
  std::vector<AttentionPiece> pieces;
  std::vector<KvSegment> segments;
  int64_t spans = 0;
};

Items flatten(const ChunkWork& work, bool row_by_row) {
  Items out;
  std::map<const std::vector<KvSegment>*, int32_t> first_segments;
  for (const AttentionChunk& chunk : work.attention) {
    const auto [at, is_new] =
        first_segments.try_emplace(chunk.prefix, static_cast<int32_t>(out.segments.size()));
    if (is_new) out.segments.insert(out.segments.end(), chunk.prefix->begin(), chunk.prefix->end());
    Item item;
    item.first_segment = at->second;
    item.n_segments = static_cast<int32_t>(chunk.prefix->size());
    item.prefix_length = chunk.prefix_length;
    const auto add = [&](int64_t rows, size_t n_pieces) {
      item.rows = rows;
      item.n_pieces = static_cast<int32_t>(n_pieces);
      out.items.push_back(item);
    };
    if (!row_by_row) {
      item.first_piece = static_cast<int32_t>(out.pieces.size());
      add(chunk.rows, chunk.pieces.size());
    }
    for (const AttentionPiece& piece : chunk.pieces) {
      if (row_by_row) {
        item.first_piece = static_cast<int32_t>(out.pieces.size());
        add(1, 1);
      }
      out.pieces.push_back(piece);
      out.spans = std::max(out.spans, (keys_end(piece) + kSpan - 1) / kSpan);
    }
  }
  return out;
}

}  // namespace

size_t PlanArena::first_bytes(int64_t rows) {
  constexpr size_t kEach = 2 * sizeof(int32_t) + sizeof(KvRun) + sizeof(HiddenRun) + sizeof(Item) +
                           sizeof(AttentionPiece) + 2 * sizeof(KvSegment);
  return static_cast<size_t>(rows) * kEach + 4096;
}

void PlanArena::allocate(int64_t rows, Account& account) {
  blocks_.push_back(account.allocate(first_bytes(rows), Owner::kWorkspace, "plans of a pass"));
}

uint8_t* PlanArena::take(size_t bytes, Account& account) {
  if (used_ + bytes > blocks_.back().bytes()) {
    const size_t larger = std::max(2 * blocks_.back().bytes(), bytes);
    blocks_.push_back(account.allocate(larger, Owner::kWorkspace, "plans of a larger pass"));
    used_ = 0;
  }
  uint8_t* at = blocks_.back().as<uint8_t>() + used_;
  used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  ++plans_;
  return at;
}

void PlanArena::give_back() {
  if (--plans_ == 0) used_ = 0;
}

DevicePlan::DevicePlan(const ChunkWork& work, PlanArena& arena, Account& account, PinnedRing& ring)
    : arena_(arena) {
  const bool row_by_row = single_rows(work);
  const Items flat = flatten(work, row_by_row);
  // What a step of as many rows always has the same number of comes first.
  Packer packer;
  const size_t kv_of_row = packer.add(run_of_row(work.kv)), kv_runs = packer.add(work.kv);
  const size_t hidden_of_row = packer.add(run_of_row(work.hidden));
  const size_t hidden_runs = packer.add(work.hidden);
  const size_t turns = packer.add(std::vector<uint32_t>(2));
  const size_t items = packer.add(flat.items), pieces = packer.add(flat.pieces);
  const size_t segments = packer.add(flat.segments);

  uint8_t* const memory = arena.take(packer.bytes().size(), account);
  place = memory;
  for (const KvRun& run : work.kv) rows += run.rows;
  kv = {reinterpret_cast<const int32_t*>(memory + kv_of_row),
        reinterpret_cast<const KvRun*>(memory + kv_runs),
        {}};
  hidden = {reinterpret_cast<const int32_t*>(memory + hidden_of_row),
            reinterpret_cast<const HiddenRun*>(memory + hidden_runs),
            {}};
  attention.items = reinterpret_cast<const Item*>(memory + items);
  attention.pieces = reinterpret_cast<const AttentionPiece*>(memory + pieces);
  attention.segments = reinterpret_cast<const KvSegment*>(memory + segments);
  attention.n_items = static_cast<int32_t>(flat.items.size());
  attention.decode = row_by_row;
  attention.turns = reinterpret_cast<uint32_t*>(memory + turns);
  // As a capacity, so that a recorded step serves until the context has doubled.
  const auto spans = static_cast<uint64_t>(flat.spans);
  attention.max_spans = static_cast<int32_t>(row_by_row ? std::bit_ceil(spans) : spans);
  try {
    ring.write(memory, packer.bytes().data(), packer.bytes().size());
  } catch (...) {
    arena.give_back();  // no destructor will
    throw;
  }
}

}  // namespace tinyloop::cuda
