#include "generate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "checks.h"
#include "head.h"
#include "pass.h"
#include "rebuild.h"

namespace tinyloop {

namespace {

// Tokens by which a sequence's memory grows.
constexpr int64_t kBlockTokens = 256;
// Sequences at a time where the caller does not say.
constexpr int kDefaultBatch = 64;

std::string request_name(size_t index) { return "request " + std::to_string(index); }

// One request on its way. Its tokens are those of the prefix, the item and what was generated.
struct Sequence {
  size_t item = 0;
  std::vector<int32_t> ids;  // of the item and generated, in order
  int64_t stored = 0;        // of them that are in the cache
  int64_t start = 0;         // position of ids[0]
  const CacheView* prefix = nullptr;
  CacheView before;  // the prefix and all full blocks; used once there is a full one
  std::vector<std::shared_ptr<CacheBlock>> blocks;  // the last one is being filled
  int64_t block_end = 0;                            // positions that the blocks hold
  double alive = 1.0;  // of the row that runs: product of 1 - gate so far
  size_t order = 0;    // when it joined: the greatest is the youngest
  size_t served = 0;   // the last step that had rows of it, or at which it joined

  int64_t pending() const { return static_cast<int64_t>(ids.size()) - stored; }
  int64_t position() const { return start + stored; }
  const CacheView* standing() const {
    if (blocks.size() > 1) return &before;
    return prefix != nullptr && prefix->length > 0 ? prefix : nullptr;
  }
};

// Rows that one sequence brings to a step.
struct StepRows {
  Sequence* sequence = nullptr;
  int64_t rows = 0;
  bool decodes = false;  // one generated token that is not the last of a longer rest
};

class GenerateCall {
 public:
  GenerateCall(const std::shared_ptr<Engine>& engine, const std::vector<GenerateItem>& items,
               int max_batch, const OnToken& on_token)
      : engine_(*engine),
        items_(items),
        max_batch_(static_cast<size_t>(max_batch > 0 ? max_batch : kDefaultBatch)),
        on_token_(on_token),
        head_(*engine),
        hot_(engine->cache),
        completions_(items.size()) {
    if (stores_hidden(hot_.mode)) hot_.mode = CacheMode::kFp16;
    for (size_t i = 0; i < items.size(); ++i) waiting_.push_back(first_sequence(i));
    // Before any sequence takes memory: later they might leave none.
    if (!std::all_of(items.begin(), items.end(), takes_best)) head_.need_logits();
  }

  std::vector<Completion> run() {
    while (!waiting_.empty() || !running_.empty()) step();
    return std::move(completions_);
  }

 private:
  std::unique_ptr<Sequence> first_sequence(size_t index) {
    const GenerateItem& item = items_[index];
    auto sequence = std::make_unique<Sequence>();
    sequence->item = index;
    sequence->ids.assign(item.ids, item.ids + item.n_ids);
    return sequence;
  }

  // Whether its ids are the likeliest ones, which need no logits in memory.
  static bool takes_best(const GenerateItem& item) {
    return item.sampling.temperature == 0.0 && item.sampling.repetition_penalty == 1.0;
  }

  bool exits(const GenerateItem& item) const { return item.exit_threshold < 1.0; }

  // ---- memory ----------------------------------------------------------------------------------

  // The prefix as attention reads it, in a hidden mode rebuilt once for the whole call.
  const CacheView* prefix_view(const GenerateItem& item) {
    if (item.prefix == nullptr) return nullptr;
    const auto [at, is_new] = views_.try_emplace(item.prefix);
    if (is_new) {
      try {
        at->second.view = item.prefix->view();
        if (!at->second.view.hidden.empty()) make_hot(*item.prefix, at->second);
      } catch (...) {
        views_.erase(at);
        throw;
      }
    }
    return &at->second.view;
  }

  struct PrefixView {
    CacheView view;
    std::shared_ptr<CacheBlock> hot;
  };
  void make_hot(const PrefixState& prefix, PrefixView& view) {
    const int64_t planes = engine_.schedule.planes(prefix.depth);
    view.hot = make_cache_block(*engine_.account, hot_, {0, prefix.length(), 0, planes},
                                Owner::kRequest, "rebuilt keys and values of a prefix");
    rebuild_all(engine_, view.view, prefix.depth, view.hot->places.kv);
    view.view.hidden.clear();
    view.view.kv = {view.hot->places.kv};
  }

  // Room for the positions below `end`. Throws OutOfMemoryError and changes nothing.
  void grow(Sequence& s, int64_t end) {
    if (end <= s.block_end) return;
    const GenerateItem& item = items_[s.item];
    const int64_t begin = s.blocks.empty() ? s.start : s.block_end;
    const int64_t last = s.start + static_cast<int64_t>(item.n_ids) + item.max_new_tokens - 1;
    // What exits early cannot be computed again to the same numbers, so it gets all at once.
    const int64_t wanted = exits(item) ? last : std::min(last, end + kBlockTokens);
    const int64_t planes = engine_.schedule.planes(item.depth);
    auto block = make_cache_block(*engine_.account, hot_, {begin, std::max(end, wanted), 0, planes},
                                  Owner::kRequest, "keys and values of a sequence");
    if (s.blocks.empty()) {
      if (s.prefix != nullptr) s.before = *s.prefix;
    } else {
      s.before.append(s.blocks.back()->places);
      s.before.length = s.block_end;
    }
    s.blocks.push_back(std::move(block));
    s.block_end = std::max(end, wanted);
  }

  // Frees what was rebuilt of prefixes that no running sequence stands on, but for that of `item`.
  // False if there was none.
  bool drop_idle_views(const GenerateItem& item) {
    return std::erase_if(views_, [&](const auto& entry) {
             return entry.first != item.prefix &&
                    std::none_of(running_.begin(), running_.end(),
                                 [&](const auto& s) { return s->prefix == &entry.second.view; });
           }) > 0;
  }

  // Puts the youngest sequence back, its memory freed. What exits early would not come to the same
  // numbers again; it never asks for more, so whoever does can itself be put back. False if it
  // would have to wait for nobody.
  bool put_back_youngest() {
    if (running_.size() < 2) return false;
    const auto age = [&](const std::unique_ptr<Sequence>& s) {
      return std::pair(!exits(items_[s->item]), s->order);
    };
    const auto youngest =
        std::max_element(running_.begin(), running_.end(),
                         [&](const auto& a, const auto& b) { return age(a) < age(b); });
    auto again = first_sequence((*youngest)->item);
    again->ids = (*youngest)->ids;
    waiting_.push_front(std::move(again));
    running_.erase(youngest);
    return true;
  }

  // Makes room for the next rows of a running sequence; false if it was itself put back.
  bool make_room(Sequence* s, int64_t rows) {
    for (;;) {
      try {
        grow(*s, s->position() + rows);
        return true;
      } catch (const OutOfMemoryError&) {
        if (drop_idle_views(items_[s->item])) continue;
        if (!put_back_youngest()) throw;
        const bool left = std::none_of(running_.begin(), running_.end(),
                                       [&](const auto& other) { return other.get() == s; });
        if (left) return false;
      }
    }
  }

  // ---- one step --------------------------------------------------------------------------------

  // Whether another sequence may join. Where those that decode leave it too few rows of a step, one
  // at a time does, and takes turns with them: otherwise it would wait until one of them ends. One,
  // since a prompt holds its memory from when it joins.
  bool may_join(int64_t rows_left) const {
    if (waiting_.empty() || running_.size() >= max_batch_) return false;
    const GenerateItem& next = items_[waiting_.front()->item];
    const int64_t needed = item_is_whole(next) ? static_cast<int64_t>(next.n_ids) : 1;
    return needed <= rows_left || std::all_of(running_.begin(), running_.end(),
                                              [](const auto& s) { return s->pending() == 1; });
  }

  // Lets waiting sequences join while the batch, the rows and the memory have room.
  void admit(int64_t rows_left) {
    while (may_join(rows_left)) {
      Sequence& s = *waiting_.front();
      const GenerateItem& item = items_[s.item];
      try {
        s.prefix = prefix_view(item);
        s.start = item.prefix != nullptr ? item.prefix->length() : 0;
        grow(s, s.start + static_cast<int64_t>(s.ids.size()));
      } catch (const OutOfMemoryError&) {
        if (drop_idle_views(item)) continue;
        if (running_.empty()) throw;
        return;
      }
      s.order = joined_++;
      s.served = steps_;
      rows_left -= s.pending();
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
  }

  // A prompt that is attended both ways runs in one pass.
  bool item_is_whole(const GenerateItem& item) const {
    return engine_.descriptor.prefix_lm && item.prefix == nullptr;
  }

  std::vector<StepRows> choose_rows() {
    int64_t left = engine_.options.max_seq_len;
    for (const auto& s : running_) left -= std::min(left, s->pending());
    admit(left);
    std::vector<StepRows> rows;
    left = engine_.options.max_seq_len;
    // Those that the last step had no rows for, then those that decode: a long prompt must not hold
    // them up.
    const auto turn = [](const Sequence* s) { return std::pair(s->served, s->pending() > 1); };
    std::vector<Sequence*> order;
    for (const auto& s : running_) order.push_back(s.get());
    std::stable_sort(order.begin(), order.end(),
                     [&](const Sequence* a, const Sequence* b) { return turn(a) < turn(b); });
    for (Sequence* s : order) {
      const bool here = std::any_of(running_.begin(), running_.end(),
                                    [&](const auto& r) { return r.get() == s; });
      const int64_t n = here ? std::min(left, s->pending()) : 0;
      const GenerateItem& item = items_[s->item];
      const bool splits = item_is_whole(item) && n < static_cast<int64_t>(item.n_ids);
      if (n == 0 || (s->stored == 0 && splits)) continue;
      if (!make_room(s, n)) continue;
      rows.push_back({s, n, false});
      left -= n;
    }
    // Making room for a later one may have put back an earlier one.
    std::erase_if(rows, [&](const StepRows& r) {
      return std::none_of(running_.begin(), running_.end(),
                          [&](const auto& s) { return s.get() == r.sequence; });
    });
    for (StepRows& r : rows) r.decodes = r.rows == 1 && generated(*r.sequence) > 0;
    return rows;
  }

  size_t generated(const Sequence& s) const { return completions_[s.item].ids.size(); }

  void step() {
    const std::vector<StepRows> rows = choose_rows();
    ++steps_;
    for (const StepRows& r : rows) r.sequence->served = steps_;
    std::vector<PassSequence> sequences;
    for (const StepRows& r : rows) sequences.push_back(pass_sequence(r));
    Pass pass(engine_, std::move(sequences));
    std::vector<int> depths(rows.size(), 0);
    run_loops(pass, rows, depths);
    pass.finish();
    for (const StepRows& r : rows) r.sequence->stored += r.rows;
    choose_ids(pass, rows, depths);
  }

  PassSequence pass_sequence(const StepRows& r) {
    Sequence& s = *r.sequence;
    const GenerateItem& item = items_[s.item];
    PassSequence p;
    p.ids = s.ids.data() + s.stored;
    p.rows = r.rows;
    p.position = s.position();
    // The prompt alone, also when generated ids follow it after the sequence was put back.
    const bool opens = s.stored == 0 && item_is_whole(item);
    p.open_end = opens ? static_cast<int64_t>(item.n_ids) : 0;
    p.before = s.standing();
    p.keep_once = p.keep_loops = &s.blocks.back()->places;
    s.alive = 1.0;
    return p;
  }

  void run_loops(Pass& pass, const std::vector<StepRows>& rows, std::vector<int>& depths) {
    std::vector<size_t> running(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) running[i] = i;
    while (!running.empty()) {
      pass.run_loop();
      read_gates(pass, rows, running);
      std::vector<size_t> done, left;
      for (const size_t i : running) {
        const GenerateItem& item = items_[rows[i].sequence->item];
        (is_done(rows[i], item, pass.loops()) ? done : left).push_back(i);
      }
      for (const size_t i : done) {
        depths[i] = pass.loops();
        fill_deeper_planes(rows[i], pass.loops());
      }
      if (!left.empty()) pass.retire(done);
      running = std::move(left);
    }
  }

  void read_gates(const Pass& pass, const std::vector<StepRows>& rows,
                  const std::vector<size_t>& running) {
    head_.clear();
    std::vector<Sequence*> read;
    for (const size_t i : running) {
      if (!rows[i].decodes || !exits(items_[rows[i].sequence->item])) continue;
      head_.add(pass.first_row(i), 0);
      read.push_back(rows[i].sequence);
    }
    if (read.empty()) return;
    head_.gates(pass);
    for (size_t k = 0; k < read.size(); ++k) {
      read[k]->alive *= 1.0 - static_cast<double>(head_.gate()[k]);
    }
  }

  bool is_done(const StepRows& r, const GenerateItem& item, int loops) const {
    if (loops >= item.depth) return true;
    return r.decodes && exits(item) && loops >= item.min_depth &&
           1.0 - r.sequence->alive >= item.exit_threshold;
  }

  // A token that left after `loops` loops stands in the deeper planes with what its last loop left.
  void fill_deeper_planes(const StepRows& r, int loops) {
    const Schedule& schedule = engine_.schedule;
    const KvSegment& kv = r.sequence->blocks.back()->places.kv;
    const int64_t row = r.sequence->position() - kv.begin;
    const size_t element = kv.format == KvFormat::kInt8 ? 1 : engine_.backend->activation_bytes();
    const size_t bytes = static_cast<size_t>(engine_.descriptor.kv_width()) * element;
    const auto copy = [&](auto* memory, size_t stride, int64_t from, int64_t to, size_t offset,
                          size_t count) {
      engine_.backend->copy(memory + static_cast<size_t>(to) * stride + offset,
                            memory + static_cast<size_t>(from) * stride + offset,
                            count * sizeof(*memory));
    };
    const int64_t first = schedule.planes(loops - 1);
    for (int64_t to = schedule.planes(loops); to < schedule.planes(items_[r.sequence->item].depth);
         ++to) {
      const int64_t from = first + (to - first) % schedule.loop_planes;
      const size_t at = static_cast<size_t>(row) * bytes;
      copy(kv.keys, kv.plane_bytes, from, to, at, bytes);
      copy(kv.values, kv.plane_bytes, from, to, at, bytes);
      if (kv.scales == nullptr) continue;
      const auto heads = static_cast<size_t>(2 * engine_.descriptor.n_kv_heads);
      copy(kv.scales, kv.plane_scales, from, to, static_cast<size_t>(row) * heads, heads);
    }
  }

  // ---- the next ids ----------------------------------------------------------------------------

  struct Choice {
    size_t index;  // in the step's rows
    int64_t row;
  };

  void choose_ids(const Pass& pass, const std::vector<StepRows>& rows,
                  const std::vector<int>& depths) {
    std::vector<Choice> greedy, sampled;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].sequence->pending() > 0) continue;  // a long prompt goes on
      const bool best = takes_best(items_[rows[i].sequence->item]);
      (best ? greedy : sampled).push_back({i, pass.first_row(i) + rows[i].rows - 1});
    }
    std::vector<Sample> samples(rows.size());
    head_.clear();
    for (const Choice& c : greedy) head_.add(c.row, 0);
    if (!greedy.empty()) head_.best(pass);
    for (size_t k = 0; k < greedy.size(); ++k) {
      if (head_.best_ids()[k] < 0) {
        throw Error("cannot generate for " + request_name(rows[greedy[k].index].sequence->item) +
                    ": no logit of its next token is a number; the model's activations overflow");
      }
      samples[greedy[k].index] = {head_.best_ids()[k], head_.best_logprobs()[k]};
    }
    draw(pass, rows, sampled, samples);
    for (const std::vector<Choice>* choices : {&greedy, &sampled}) {
      for (const Choice& c : *choices) {
        take_id(*rows[c.index].sequence, samples[c.index], depths[c.index]);
      }
    }
  }

  void draw(const Pass& pass, const std::vector<StepRows>& rows, const std::vector<Choice>& choices,
            std::vector<Sample>& samples) {
    const auto vocab = static_cast<size_t>(engine_.descriptor.vocab_size);
    for (size_t first = 0; first < choices.size(); first += kLogitRows) {
      const size_t n = std::min<size_t>(kLogitRows, choices.size() - first);
      head_.clear();
      for (size_t k = 0; k < n; ++k) head_.add(choices[first + k].row, 0);
      std::array<double, kLogitRows> log_sums{};
      const float* logits = head_.logits(pass, log_sums.data());
      for (size_t k = 0; k < n; ++k) {
        const Sequence& s = *rows[choices[first + k].index].sequence;
        const GenerateItem& item = items_[s.item];
        const float* row = logits + k * vocab;
        const SampleKey key{item.seed, static_cast<uint64_t>(s.position())};
        Sample& sample = samples[choices[first + k].index];
        sample.id = choose_named(s.item, {row, vocab}, seen(s), key);
        sample.logprob = static_cast<float>(
            static_cast<double>(row[static_cast<size_t>(sample.id)]) - log_sums[k]);
      }
    }
  }

  int32_t choose_named(size_t item, std::span<const float> logits, const std::vector<int32_t>& seen,
                       const SampleKey& key) {
    try {
      return choose_id(logits, items_[item].sampling, seen, key, scratch_);
    } catch (const Error& error) {
      throw Error("cannot generate for " + request_name(item) + ": " + error.what());
    }
  }

  // All ids of the prefix, the prompt and the output.
  std::vector<int32_t> seen(const Sequence& s) const {
    const GenerateItem& item = items_[s.item];
    if (item.sampling.repetition_penalty == 1.0) return {};
    std::vector<int32_t> ids =
        item.prefix != nullptr ? item.prefix->all_ids() : std::vector<int32_t>();
    ids.insert(ids.end(), s.ids.begin(), s.ids.end());
    return ids;
  }

  void take_id(Sequence& s, const Sample& sample, int depth) {
    const GenerateItem& item = items_[s.item];
    Completion& completion = completions_[s.item];
    completion.ids.push_back(sample.id);
    completion.logprobs.push_back(sample.logprob);
    completion.depths.push_back(depth);
    s.ids.push_back(sample.id);
    const size_t index = s.item;
    const bool stops =
        std::find(item.stop_ids.begin(), item.stop_ids.end(), sample.id) != item.stop_ids.end();
    const bool full = completion.ids.size() >= static_cast<size_t>(item.max_new_tokens);
    completion.finish = stops ? Finish::kStop : Finish::kLength;
    if (stops || full) {
      std::erase_if(running_, [&](const auto& other) { return other.get() == &s; });
    }
    if (on_token_) on_token_(index, sample.id, sample.logprob);
  }

  Engine& engine_;
  const std::vector<GenerateItem>& items_;
  const size_t max_batch_;
  const OnToken& on_token_;
  HeadRows head_;
  CacheShape hot_;  // running sequences keep keys and values, whatever the cache mode
  std::vector<Completion> completions_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;
  std::map<const PrefixState*, PrefixView> views_;
  SampleScratch scratch_;
  size_t joined_ = 0;
  size_t steps_ = 0;
};

void check_item(const Engine& engine, const GenerateItem& item, size_t index) {
  const std::string what = request_name(index);
  const auto refuse = [&](const std::string& why) {
    throw InvalidInputError("cannot generate for " + what + ": " + why);
  };
  check_depth(item.depth, what);
  if (item.n_ids == 0) refuse("it has no ids; at least one must follow the prefix");
  check_ids(engine, item.ids, item.n_ids, what);
  check_ids(engine, item.stop_ids.data(), item.stop_ids.size(), what + "'s stop ids");
  if (item.max_new_tokens < 1) {
    refuse("max_new_tokens is " + std::to_string(item.max_new_tokens) + ", it must be at least 1");
  }
  if (item.min_depth < 1 || item.min_depth > item.depth) {
    refuse("min_depth is " + std::to_string(item.min_depth) + ", it must be 1.." +
           std::to_string(item.depth));
  }
  if (!(item.exit_threshold > 0.0)) {
    refuse("exit_threshold is " + std::to_string(item.exit_threshold) + ", it must be above 0");
  }
  if (item.exit_threshold < 1.0 && !engine.descriptor.exit_gate) {
    refuse("it has an exit_threshold, and the model has no exit gate");
  }
  check_sampling(item.sampling, " for " + what);
  if (item.prefix != nullptr) check_prefix(engine, *item.prefix, item.depth, what);
  const int64_t start = item.prefix != nullptr ? item.prefix->length() : 0;
  const int64_t end = start + static_cast<int64_t>(item.n_ids) + item.max_new_tokens - 1;
  if (end > engine.descriptor.max_positions) {
    refuse("it could reach position " + std::to_string(end) + ", the model has " +
           std::to_string(engine.descriptor.max_positions));
  }
  if (engine.descriptor.prefix_lm && item.prefix == nullptr) {
    check_rows(engine, item.n_ids, 0, what);
  }
}

}  // namespace

std::vector<Completion> generate(const std::shared_ptr<Engine>& engine,
                                 const std::vector<GenerateItem>& items, int max_batch,
                                 const OnToken& on_token) {
  ForwardGuard guard(*engine);
  if (max_batch < 0) {
    throw InvalidInputError("cannot generate with max_batch=" + std::to_string(max_batch) +
                            ": it must be at least 1, or 0 for 64");
  }
  for (size_t i = 0; i < items.size(); ++i) check_item(*engine, items[i], i);
  return GenerateCall(engine, items, max_batch, on_token).run();
}

}  // namespace tinyloop
