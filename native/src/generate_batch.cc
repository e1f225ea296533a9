#include "generate_batch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "head.h"
#include "pass.h"
#include "sequence_memory.h"

namespace tinyloop {

namespace {

// Sequences at a time where the caller does not say.
constexpr int kDefaultBatch = 64;

// Rows that one sequence brings to a step.
struct StepRows {
  Sequence* sequence = nullptr;
  int64_t rows = 0;
  bool decodes = false;  // one generated token that is not the last of a longer rest
};

class Batch final : public GenerateBatch {
 public:
  Batch(const std::shared_ptr<Engine>& engine, int max_batch)
      : keep_(engine),
        engine_(*engine),
        max_batch_(static_cast<size_t>(max_batch > 0 ? max_batch : kDefaultBatch)),
        head_(*engine),
        memory_(*engine) {}

  size_t add(const GenerateItem& item) override {
    check_item(engine_, item, next_key_);
    // Before it takes memory as a sequence: later there might be none left.
    if (!takes_best(item)) need_logits();
    auto sequence = std::make_unique<Sequence>();
    sequence->ids.assign(item.ids, item.ids + item.n_ids);
    Job& job = jobs_[next_key_];
    job.key = next_key_++;
    job.item = item;
    job.item.ids = nullptr;
    sequence->job = &job;
    waiting_.push_back(std::move(sequence));
    return job.key;
  }

  bool cancel(size_t key) override {
    const auto at = jobs_.find(key);
    if (at == jobs_.end()) return false;
    const auto is_its = [&](const auto& s) { return s->job == &at->second; };
    std::erase_if(waiting_, is_its);
    std::erase_if(running_, is_its);
    forget(at->second);
    return true;
  }

  bool step() override {
    if (waiting_.empty() && running_.empty()) return false;
    const std::vector<StepRows> rows = choose_rows();
    if (rows.empty()) return true;  // whoever was to run failed for want of memory
    run(rows);
    return true;
  }

  void put_back() override {
    while (put_back_youngest(0)) {
    }
    drop_idle_views(nullptr);
  }

  GenerateEvents take_events() override { return std::exchange(events_, {}); }
  size_t running() const override { return running_.size(); }
  size_t waiting() const override { return waiting_.size(); }

 private:
  // Whether its ids are the likeliest ones, which need no logits in memory.
  static bool takes_best(const GenerateItem& item) {
    return item.sampling.temperature == 0.0 && item.sampling.repetition_penalty == 1.0;
  }

  void need_logits() {
    for (;;) {
      try {
        return head_.need_logits();
      } catch (const OutOfMemoryError&) {
        if (!drop_idle_views(nullptr) && !put_back_youngest(0)) throw;
      }
    }
  }

  // A job has ended, and its sequence is gone.
  void forget(Job& job) {
    const std::shared_ptr<const PrefixState> prefix = job.item.prefix;
    jobs_.erase(job.key);
    const auto knows = [&](const auto& entry) { return entry.second.item.prefix == prefix; };
    if (std::none_of(jobs_.begin(), jobs_.end(), knows)) memory_.forget(prefix.get());
  }

  void fail(Job& job, std::exception_ptr why) {
    events_.failed.emplace_back(job.key, std::move(why));
    const auto is_its = [&](const auto& s) { return s->job == &job; };
    std::erase_if(waiting_, is_its);
    std::erase_if(running_, is_its);
    forget(job);
  }

  // ---- memory ----------------------------------------------------------------------------------

  // Frees what was rebuilt of prefixes that no running sequence stands on, but for `kept`. False if
  // there was none.
  bool drop_idle_views(const PrefixState* kept) {
    return memory_.drop_views([&](const PrefixState* prefix, const CacheView& view) {
      return prefix != kept && std::none_of(running_.begin(), running_.end(),
                                            [&](const auto& s) { return s->prefix == &view; });
    });
  }

  // Puts the youngest sequence back, its memory freed. What exits early would not come to the same
  // numbers again; it never asks for more, so whoever does can itself be put back. False if no more
  // than `kept` would be left to run.
  bool put_back_youngest(size_t kept) {
    if (running_.size() <= kept) return false;
    const auto age = [&](const std::unique_ptr<Sequence>& s) {
      return std::pair(!exits(s->job->item), s->order);
    };
    const auto youngest =
        std::max_element(running_.begin(), running_.end(),
                         [&](const auto& a, const auto& b) { return age(a) < age(b); });
    if (kept == 0 && exits((*youngest)->job->item)) return false;
    auto again = std::make_unique<Sequence>();
    again->job = (*youngest)->job;
    again->ids = std::move((*youngest)->ids);
    waiting_.push_front(std::move(again));
    running_.erase(youngest);
    return true;
  }

  // Whether it is among the running ones; it may be gone altogether.
  bool runs(const Sequence* s) const {
    return std::any_of(running_.begin(), running_.end(),
                       [&](const auto& other) { return other.get() == s; });
  }

  // Makes room for the next rows of a running sequence; false if it was itself put back, or failed
  // since it does not fit alone.
  bool make_room(Sequence* s, int64_t rows) {
    for (;;) {
      try {
        memory_.grow(*s, s->position() + rows);
        return true;
      } catch (const OutOfMemoryError&) {
        if (drop_idle_views(s->job->item.prefix.get())) continue;
        if (!put_back_youngest(1)) {
          fail(*s->job, std::current_exception());
          return false;
        }
        if (!runs(s)) return false;
      }
    }
  }

  // ---- one step --------------------------------------------------------------------------------

  // Whether another sequence may join. Where those that decode leave it too few rows of a step, one
  // at a time does, and takes turns with them: otherwise it would wait until one of them ends. One,
  // since a prompt holds its memory from when it joins.
  bool may_join(int64_t rows_left) const {
    if (waiting_.empty() || running_.size() >= max_batch_) return false;
    const GenerateItem& next = waiting_.front()->job->item;
    const int64_t needed = item_is_whole(next) ? static_cast<int64_t>(next.n_ids) : 1;
    return needed <= rows_left || std::all_of(running_.begin(), running_.end(),
                                              [](const auto& s) { return s->pending() == 1; });
  }

  // Lets waiting sequences join while the batch, the rows and the memory have room.
  void admit(int64_t rows_left) {
    while (may_join(rows_left)) {
      Sequence& s = *waiting_.front();
      const GenerateItem& item = s.job->item;
      try {
        s.prefix = memory_.prefix_view(item);
        s.start = item.prefix != nullptr ? item.prefix->length() : 0;
        memory_.grow(s, s.start + static_cast<int64_t>(s.ids.size()));
      } catch (const OutOfMemoryError&) {
        if (drop_idle_views(item.prefix.get())) continue;
        if (!running_.empty()) return;
        fail(*s.job, std::current_exception());
        continue;
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
      // Making room for an earlier one may have put this one back.
      if (!runs(s)) continue;
      const int64_t n = std::min(left, s->pending());
      const GenerateItem& item = s->job->item;
      const bool splits = item_is_whole(item) && n < static_cast<int64_t>(item.n_ids);
      if (n == 0 || (s->stored == 0 && splits)) continue;
      if (!make_room(s, n)) continue;
      rows.push_back({s, n, false});
      left -= n;
    }
    // Making room for a later one may have put back an earlier one.
    std::erase_if(rows, [&](const StepRows& r) { return !runs(r.sequence); });
    for (StepRows& r : rows) r.decodes = r.rows == 1 && generated(*r.sequence) > 0;
    return rows;
  }

  static size_t generated(const Sequence& s) { return s.job->completion.ids.size(); }

  void run(const std::vector<StepRows>& rows) {
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
    const GenerateItem& item = s.job->item;
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
        const GenerateItem& item = rows[i].sequence->job->item;
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
      if (!rows[i].decodes || !exits(rows[i].sequence->job->item)) continue;
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
    for (int64_t to = schedule.planes(loops); to < schedule.planes(r.sequence->job->item.depth);
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
      const bool best = takes_best(rows[i].sequence->job->item);
      (best ? greedy : sampled).push_back({i, pass.first_row(i) + rows[i].rows - 1});
    }
    std::vector<Sample> samples(rows.size());
    std::vector<std::exception_ptr> faults(rows.size());
    take_best(pass, greedy, samples, faults);
    draw(pass, rows, sampled, samples, faults);
    for (const std::vector<Choice>* choices : {&greedy, &sampled}) {
      for (const Choice& c : *choices) {
        Sequence& s = *rows[c.index].sequence;
        if (faults[c.index]) {
          fail(*s.job, named(*s.job, faults[c.index]));
        } else {
          take_id(s, samples[c.index], depths[c.index]);
        }
      }
    }
  }

  void take_best(const Pass& pass, const std::vector<Choice>& choices, std::vector<Sample>& samples,
                 std::vector<std::exception_ptr>& faults) {
    if (choices.empty()) return;
    head_.clear();
    for (const Choice& c : choices) head_.add(c.row, 0);
    head_.best(pass);
    for (size_t k = 0; k < choices.size(); ++k) {
      samples[choices[k].index] = {head_.best_ids()[k], head_.best_logprobs()[k]};
      if (head_.best_ids()[k] >= 0) continue;
      faults[choices[k].index] = std::make_exception_ptr(
          Error("no logit of its next token is a number; the model's activations overflow"));
    }
  }

  void draw(const Pass& pass, const std::vector<StepRows>& rows, const std::vector<Choice>& choices,
            std::vector<Sample>& samples, std::vector<std::exception_ptr>& faults) {
    const auto vocab = static_cast<size_t>(engine_.descriptor.vocab_size);
    for (size_t first = 0; first < choices.size(); first += kLogitRows) {
      const size_t n = std::min<size_t>(kLogitRows, choices.size() - first);
      head_.clear();
      for (size_t k = 0; k < n; ++k) head_.add(choices[first + k].row, 0);
      std::array<double, kLogitRows> log_sums{};
      const float* logits = head_.logits(pass, log_sums.data());
      for (size_t k = 0; k < n; ++k) {
        const size_t index = choices[first + k].index;
        const Sequence& s = *rows[index].sequence;
        const GenerateItem& item = s.job->item;
        const float* row = logits + k * vocab;
        const SampleKey key{item.seed, static_cast<uint64_t>(s.position())};
        try {
          const int32_t id = choose_id({row, vocab}, item.sampling, seen(s), key, scratch_);
          const double logit = row[static_cast<size_t>(id)];
          samples[index] = {id, static_cast<float>(logit - log_sums[k])};
        } catch (const Error&) {
          faults[index] = std::current_exception();
        }
      }
    }
  }

  // What is wrong with its logits, with the request's name.
  static std::exception_ptr named(const Job& job, const std::exception_ptr& fault) {
    try {
      std::rethrow_exception(fault);
    } catch (const Error& error) {
      return std::make_exception_ptr(
          Error("cannot generate for " + request_name(job.key) + ": " + error.what()));
    }
  }

  // All ids of the prefix, the prompt and the output.
  std::vector<int32_t> seen(const Sequence& s) const {
    const GenerateItem& item = s.job->item;
    if (item.sampling.repetition_penalty == 1.0) return {};
    std::vector<int32_t> ids =
        item.prefix != nullptr ? item.prefix->all_ids() : std::vector<int32_t>();
    ids.insert(ids.end(), s.ids.begin(), s.ids.end());
    return ids;
  }

  void take_id(Sequence& s, const Sample& sample, int depth) {
    Job& job = *s.job;
    const GenerateItem& item = job.item;
    Completion& completion = job.completion;
    completion.ids.push_back(sample.id);
    completion.logprobs.push_back(sample.logprob);
    completion.depths.push_back(depth);
    s.ids.push_back(sample.id);
    events_.tokens.push_back({job.key, sample.id, sample.logprob, depth});
    const bool stops =
        std::find(item.stop_ids.begin(), item.stop_ids.end(), sample.id) != item.stop_ids.end();
    const bool full = completion.ids.size() >= static_cast<size_t>(item.max_new_tokens);
    if (!stops && !full) return;
    completion.finish = stops ? Finish::kStop : Finish::kLength;
    events_.finished.emplace_back(job.key, std::move(completion));
    std::erase_if(running_, [&](const auto& other) { return other.get() == &s; });
    forget(job);
  }

  const std::shared_ptr<Engine> keep_;
  Engine& engine_;
  const size_t max_batch_;
  HeadRows head_;
  SequenceMemory memory_;
  std::map<size_t, Job> jobs_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;
  GenerateEvents events_;
  SampleScratch scratch_;
  size_t next_key_ = 0;
  size_t joined_ = 0;
  size_t steps_ = 0;
};

}  // namespace

std::unique_ptr<GenerateBatch> start_batch(const std::shared_ptr<Engine>& engine, int max_batch) {
  if (max_batch < 0) {
    throw InvalidInputError("cannot generate with max_batch=" + std::to_string(max_batch) +
                            ": it must be at least 1, or 0 for 64");
  }
  return std::make_unique<Batch>(engine, max_batch);
}

}  // namespace tinyloop
