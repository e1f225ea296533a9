#include "score.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "checks.h"
#include "head.h"
#include "packing.h"
#include "pass.h"

namespace tinyloop {

namespace {

std::string item_name(size_t index) { return "item " + std::to_string(index); }

void check_item(const Engine& engine, const ScoreItem& item, int min_depth, size_t index) {
  const std::string what = item_name(index);
  check_depth(item.depth, what);
  if (min_depth > item.depth) {
    throw InvalidInputError("cannot run " + what + " at depth " + std::to_string(item.depth) +
                            " with min_depth=" + std::to_string(min_depth) +
                            ": it must be at least as deep");
  }
  check_scored(item.n_ids, item.n_scored, what);
  check_ids(engine, item.ids, item.n_ids, what);
  check_prompt(engine, item.n_ids, item.prompt_len, item.prefix != nullptr, what);
  if (item.prefix != nullptr) check_prefix(engine, *item.prefix, item.depth, what);
  check_rows(engine, item.n_ids - 1, item.prefix != nullptr ? item.prefix->length() : 0, what);
}

// A score call: its items, and where each one's results begin.
class ScoreCall {
 public:
  ScoreCall(Engine& engine, const std::vector<ScoreItem>& items, const ScoreOptions& options,
            const ScoreOutput& out)
      : engine_(engine), items_(items), options_(options), out_(out), head_(engine) {
    for (const ScoreItem& item : items) {
      offsets_.push_back(total_);
      total_ += static_cast<int64_t>(item.n_scored);
    }
    for (float* values : {out.by_depth, out.gates}) {
      if (values != nullptr) std::fill_n(values, out.max_depth * total_, std::nanf(""));
    }
    if (gated()) alive_.assign(static_cast<size_t>(total_), 1.0);
  }

  void run() {
    std::vector<PassNeeds> needs;
    for (const ScoreItem& item : items_) {
      needs.push_back({item.prefix, static_cast<int64_t>(item.n_ids) - 1});
    }
    const Packed packed = pack(engine_, needs);
    for (const std::vector<size_t>& members : packed.passes) run_pass(packed, members);
  }

 private:
  bool exits() const { return options_.exit_threshold < 1.0; }
  bool gated() const { return exits() || out_.gates != nullptr; }

  PassSequence sequence(const Packed& packed, const ScoreItem& item) const {
    PassSequence s;
    s.ids = item.ids;
    s.rows = static_cast<int64_t>(item.n_ids) - 1;
    s.position = item.prefix != nullptr ? item.prefix->length() : 0;
    s.open_end = std::min(item.prompt_len, s.rows);
    s.before = packed.view(item.prefix);
    return s;
  }

  void run_pass(const Packed& packed, const std::vector<size_t>& members) {
    std::vector<PassSequence> sequences;
    for (const size_t i : members) sequences.push_back(sequence(packed, items_[i]));
    Pass pass(engine_, std::move(sequences));
    std::vector<size_t> running(members.size());
    std::iota(running.begin(), running.end(), size_t{0});
    while (!running.empty()) {
      pass.run_loop();
      observe(pass, members, running);
      std::vector<size_t> done, left;
      for (const size_t s : running) {
        (is_done(members[s], pass.loops()) ? done : left).push_back(s);
      }
      for (const size_t s : done) note_depth(members[s], pass.loops());
      if (!left.empty()) pass.retire(done);
      running = std::move(left);
    }
    pass.finish();
    take(pass, members, all_of(members));
    head_.score(pass);
    deliver(members, all_of(members), [&](int64_t at, int64_t from, int64_t n) {
      std::copy_n(head_.logprobs() + from, n, out_.logprobs + at);
      std::copy_n(head_.greedy() + from, n, out_.greedy + at);
    });
  }

  static std::vector<size_t> all_of(const std::vector<size_t>& members) {
    std::vector<size_t> all(members.size());
    std::iota(all.begin(), all.end(), size_t{0});
    return all;
  }

  // The head rows of some sequences of the pass, one after the other.
  void take(const Pass& pass, const std::vector<size_t>& members,
            const std::vector<size_t>& which) {
    head_.clear();
    for (const size_t s : which) {
      const ScoreItem& item = items_[members[s]];
      const size_t first = item.n_ids - item.n_scored;  // of the scored ids
      for (size_t j = first; j < item.n_ids; ++j) {
        head_.add(pass.first_row(s) + static_cast<int64_t>(j) - 1, item.ids[j]);
      }
    }
  }

  // Calls copy(place in the results, place in the head rows, count) for the same sequences.
  template <typename Copy>
  void deliver(const std::vector<size_t>& members, const std::vector<size_t>& which, Copy copy) {
    int64_t from = 0;
    for (const size_t s : which) {
      const auto n = static_cast<int64_t>(items_[members[s]].n_scored);
      copy(offsets_[members[s]], from, n);
      from += n;
    }
  }

  // What is asked for after each loop.
  void observe(const Pass& pass, const std::vector<size_t>& members,
               const std::vector<size_t>& running) {
    if (!gated() && out_.by_depth == nullptr) return;
    take(pass, members, running);
    const int64_t row = (pass.loops() - 1) * total_;
    if (out_.by_depth != nullptr) {
      head_.score(pass);
      deliver(members, running, [&](int64_t at, int64_t from, int64_t n) {
        std::copy_n(head_.logprobs() + from, n, out_.by_depth + row + at);
      });
    }
    if (!gated()) return;
    head_.gates(pass);
    deliver(members, running, [&](int64_t at, int64_t from, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        const float gate = head_.gate()[from + i];
        alive_[static_cast<size_t>(at + i)] *= 1.0 - static_cast<double>(gate);
        if (out_.gates != nullptr) out_.gates[row + at + i] = gate;
      }
    });
  }

  // After its depth, or once every scored row has left: its chance to still run is 1 - q or less.
  bool is_done(size_t item, int loops) const {
    if (loops >= items_[item].depth) return true;
    if (!exits() || loops < options_.min_depth) return false;
    const auto first = static_cast<size_t>(offsets_[item]);
    return std::all_of(alive_.begin() + static_cast<std::ptrdiff_t>(first),
                       alive_.begin() + static_cast<std::ptrdiff_t>(first + items_[item].n_scored),
                       [&](double alive) { return 1.0 - alive >= options_.exit_threshold; });
  }

  void note_depth(size_t item, int loops) {
    if (out_.depths != nullptr) out_.depths[item] = loops;
  }

  Engine& engine_;
  const std::vector<ScoreItem>& items_;
  const ScoreOptions& options_;
  const ScoreOutput& out_;
  HeadRows head_;
  std::vector<int64_t> offsets_;
  int64_t total_ = 0;
  std::vector<double> alive_;  // of each scored row: product of 1 - gate so far
};

void check_options(const Engine& engine, const ScoreOptions& options, const ScoreOutput& out) {
  if (std::isnan(options.exit_threshold) || options.exit_threshold <= 0.0) {
    throw InvalidInputError(
        "cannot score with exit_threshold=" + std::to_string(options.exit_threshold) +
        ": it must be above 0; 1 or more means a fixed depth");
  }
  if (options.min_depth < 1) {
    throw InvalidInputError("cannot score with min_depth=" + std::to_string(options.min_depth) +
                            ": it must be at least 1");
  }
  const bool gated = options.exit_threshold < 1.0 || out.gates != nullptr;
  if (gated && !engine.descriptor.exit_gate) {
    throw InvalidInputError("cannot read the exit gate: the model has none");
  }
}

// Where layers or a norm follow the loops, a depth's states are not what the next loop starts from:
// each depth is a run of its own.
void score_each_depth(Engine& engine, const std::vector<ScoreItem>& items, const ScoreOutput& out) {
  int64_t total = 0;
  for (const ScoreItem& item : items) total += static_cast<int64_t>(item.n_scored);
  std::fill_n(out.by_depth, out.max_depth * total, std::nanf(""));
  for (int depth = 1; depth <= out.max_depth; ++depth) {
    std::vector<ScoreItem> at_depth;
    std::vector<int64_t> places;
    int64_t place = 0, scored = 0;
    for (const ScoreItem& item : items) {
      if (item.depth >= depth) {
        at_depth.push_back(item);
        at_depth.back().depth = depth;
        places.push_back(place);
        scored += static_cast<int64_t>(item.n_scored);
      }
      place += static_cast<int64_t>(item.n_scored);
    }
    std::vector<float> logprobs(static_cast<size_t>(scored));
    std::vector<uint8_t> greedy(static_cast<size_t>(scored));
    ScoreOutput one;
    one.logprobs = logprobs.data();
    one.greedy = greedy.data();
    ScoreCall(engine, at_depth, {}, one).run();
    const float* from = logprobs.data();
    for (size_t i = 0; i < at_depth.size(); ++i) {
      const auto n = static_cast<int64_t>(at_depth[i].n_scored);
      std::copy_n(from, n, out.by_depth + (depth - 1) * total + places[i]);
      from += n;
    }
  }
}

}  // namespace

void score(Engine& engine, const std::vector<ScoreItem>& items, const ScoreOptions& options,
           const ScoreOutput& out) {
  ForwardGuard guard(engine);
  check_options(engine, options, out);
  for (size_t i = 0; i < items.size(); ++i) check_item(engine, items[i], options.min_depth, i);
  if (out.by_depth != nullptr && engine.schedule.has_coda()) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].prefix == nullptr) continue;
      throw MismatchError("cannot score " + item_name(i) +
                          " by depth on a prefix: the layers after the loops keep planes for its "
                          "own depth alone; score without prefixes");
    }
  }
  const bool apart = out.by_depth != nullptr && !engine.schedule.after.empty();
  ScoreOutput main = out;
  if (apart) main.by_depth = nullptr;
  ScoreCall(engine, items, options, main).run();
  if (apart) score_each_depth(engine, items, out);
}

}  // namespace tinyloop
