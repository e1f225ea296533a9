#include "calls.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "pass.h"

namespace tinyloop {

namespace {

void check_ids(const Engine& engine, const int32_t* ids, size_t n, const std::string& what) {
  const int64_t vocab = engine.descriptor.vocab_size;
  for (size_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      throw InvalidInputError("cannot run " + what + ": token id " + std::to_string(ids[i]) +
                              " at index " + std::to_string(i) + " is outside the vocabulary 0.." +
                              std::to_string(vocab - 1));
    }
  }
}

void check_depth(int depth) {
  if (depth < 1 || depth > 4096) {
    throw InvalidInputError("cannot run at depth " + std::to_string(depth) +
                            ": it must be 1..4096");
  }
}

void check_rows(const Engine& engine, size_t rows, int64_t prefix_length, const std::string& what) {
  const auto limit = static_cast<size_t>(engine.options.max_seq_len);
  if (rows > limit) {
    throw RowBudgetError("cannot run " + what + ": it has " + std::to_string(rows) +
                         " new rows, a pass has " + std::to_string(limit) +
                         "; load with a larger max_seq_len or build a prefix first");
  }
  if (prefix_length + static_cast<int64_t>(rows) > engine.descriptor.max_positions) {
    throw InvalidInputError("cannot run " + what + ": it ends at position " +
                            std::to_string(prefix_length + static_cast<int64_t>(rows)) +
                            ", the model has " + std::to_string(engine.descriptor.max_positions));
  }
}

// A prefix that can serve an item of this engine at this depth.
void check_prefix(const Engine& engine, const PrefixState& prefix, int depth,
                  const std::string& what) {
  if (prefix.engine.get() != &engine) {
    throw MismatchError("cannot run " + what + ": its prefix belongs to another model");
  }
  if (prefix.depth < depth) {
    throw MismatchError("cannot run " + what + " at depth " + std::to_string(depth) +
                        ": its prefix was built at depth " + std::to_string(prefix.depth));
  }
}

std::string item_name(size_t index) { return "item " + std::to_string(index); }

void check_item(const Engine& engine, const ScoreItem& item, size_t index, int depth) {
  const std::string what = item_name(index);
  if (item.n_ids < 2 || item.n_scored < 1 || item.n_scored > item.n_ids - 1) {
    throw InvalidInputError("cannot run " + what + ": it scores " + std::to_string(item.n_scored) +
                            " of " + std::to_string(item.n_ids) +
                            " ids; at least 1 and at most all but the first can be scored");
  }
  check_ids(engine, item.ids, item.n_ids, what);
  const PrefixState* prefix = item.prefix;
  if (prefix != nullptr) check_prefix(engine, *prefix, depth, what);
  check_rows(engine, item.n_ids - 1, prefix != nullptr ? prefix->length() : 0, what);
}

// One pass of a score call: items order[first .. last) and where their results go.
void score_pass(Engine& engine, const std::vector<ScoreItem>& items,
                const std::vector<size_t>& order, size_t first, size_t last,
                const std::vector<size_t>& offsets, int depth, float* logprobs, uint8_t* greedy) {
  std::vector<PassSequence> sequences;
  for (size_t i = first; i < last; ++i) {
    const ScoreItem& item = items[order[i]];
    sequences.push_back({item.ids, static_cast<int64_t>(item.n_ids) - 1, item.prefix});
  }
  run_pass(engine, sequences, depth, nullptr);

  const int64_t rows = engine.options.max_seq_len;
  int32_t* scored_rows = engine.buffers.row_ids.as<int32_t>() + rows;
  int32_t* targets = scored_rows + rows;
  float* scores = engine.buffers.row_scores.as<float>();
  auto* flags = reinterpret_cast<uint8_t*>(scores + rows);
  int64_t n = 0, row = 0;
  for (size_t i = first; i < last; ++i) {
    const ScoreItem& item = items[order[i]];
    row += static_cast<int64_t>(item.n_ids) - 1;
    for (size_t j = 0; j < item.n_scored; ++j, ++n) {
      scored_rows[n] = static_cast<int32_t>(row - static_cast<int64_t>(item.n_scored - j));
      targets[n] = item.ids[item.n_ids - item.n_scored + j];
    }
  }
  engine.backend->score_head(engine.buffers.main.as<float>(), scored_rows, targets, n,
                             engine.weights.output_head(), scores, flags);
  engine.counters.head_rows += n;
  size_t at = 0;
  for (size_t i = first; i < last; ++i) {
    const size_t count = items[order[i]].n_scored;
    std::copy_n(scores + at, count, logprobs + offsets[order[i]]);
    std::copy_n(flags + at, count, greedy + offsets[order[i]]);
    at += count;
  }
}

// The order in which items run: those on one prefix side by side, so that a pass reads its tiles
// once; prefixes by first appearance.
std::vector<size_t> pass_order(const std::vector<ScoreItem>& items) {
  std::map<const PrefixState*, size_t> rank;
  for (const ScoreItem& item : items) rank.emplace(item.prefix, rank.size());
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return rank.at(items[a].prefix) < rank.at(items[b].prefix);
  });
  return order;
}

}  // namespace

void score(Engine& engine, const std::vector<ScoreItem>& items, int depth, float* logprobs,
           uint8_t* greedy) {
  ForwardGuard guard(engine);
  check_depth(depth);
  std::vector<size_t> offsets(items.size() + 1, 0);
  for (size_t i = 0; i < items.size(); ++i) {
    check_item(engine, items[i], i, depth);
    offsets[i + 1] = offsets[i] + items[i].n_scored;
  }
  const std::vector<size_t> order = pass_order(items);
  const auto budget = static_cast<size_t>(engine.options.max_seq_len);
  for (size_t first = 0; first < order.size();) {
    size_t last = first, rows = 0;
    while (last < order.size() && rows + items[order[last]].n_ids - 1 <= budget) {
      rows += items[order[last++]].n_ids - 1;
    }
    score_pass(engine, items, order, first, last, offsets, depth, logprobs, greedy);
    first = last;
  }
}

std::shared_ptr<PrefixState> prefill(const std::shared_ptr<Engine>& engine, const int32_t* ids,
                                     size_t n_ids, int depth, std::shared_ptr<PrefixState> parent) {
  ForwardGuard guard(*engine);
  check_depth(depth);
  if (n_ids == 0) throw InvalidInputError("cannot build a prefix of 0 tokens");
  check_ids(*engine, ids, n_ids, "the prefix");
  if (parent) {
    check_prefix(*engine, *parent, depth, "the prefix");
    if (parent->depth != depth) {
      throw MismatchError("cannot extend a prefix of depth " + std::to_string(parent->depth) +
                          " at depth " + std::to_string(depth));
    }
  }
  check_rows(*engine, n_ids, parent ? parent->length() : 0, "the prefix");
  const PrefixState* base = parent.get();
  auto state = make_prefix_state(engine, std::move(parent), static_cast<int64_t>(n_ids), depth);
  run_pass(*engine, {{ids, static_cast<int64_t>(n_ids), base}}, depth, state.get());
  return state;
}

}  // namespace tinyloop
