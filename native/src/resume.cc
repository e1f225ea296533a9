#include "resume.h"

#include <algorithm>
#include <map>
#include <string>

#include "checks.h"
#include "head.h"
#include "packing.h"
#include "pass.h"

namespace tinyloop {

namespace {

// What a pass writes for one handle, kept aside until every pass has succeeded.
struct Result {
  std::shared_ptr<PrefixState> rows;
  std::vector<float> logprobs;
  std::vector<uint8_t> greedy;
};

// One handle on its way: what it runs from, and what it stands on.
struct Job {
  ResumeState* handle = nullptr;
  const PrefixState* prefix = nullptr;
  const float* resume = nullptr;
  Result result;
};

// Runs jobs from loop `from` to `depth` in packed passes.
class ResumeCall {
 public:
  ResumeCall(Engine& engine, std::vector<Job>& jobs, int from, int depth)
      : engine_(engine), jobs_(jobs), from_(from), depth_(depth), head_(engine) {}

  void run() {
    std::vector<PassNeeds> needs;
    for (const Job& job : jobs_) needs.push_back({job.prefix, job.result.rows->own_length()});
    const Packed packed = pack(engine_, needs);
    for (const std::vector<size_t>& members : packed.passes) run_pass(packed, members);
  }

 private:
  PassSequence sequence(const Packed& packed, const Job& job, const KeepPlaces& keep) const {
    PassSequence s;
    s.ids = job.handle->ids.data();
    s.rows = job.result.rows->own_length();
    s.position = job.result.rows->begin;
    s.open_end = job.result.rows->open_end;
    s.before = packed.view(job.prefix);
    s.keep_once = keep.any ? &keep.once : nullptr;
    s.keep_loops = keep.any ? &keep.loops : nullptr;
    s.resume = job.resume;
    return s;
  }

  void run_pass(const Packed& packed, const std::vector<size_t>& members) {
    std::vector<KeepPlaces> keeps;
    for (const size_t i : members) keeps.push_back(keep_places(*jobs_[i].result.rows));
    std::vector<PassSequence> sequences;
    for (size_t s = 0; s < members.size(); ++s) {
      sequences.push_back(sequence(packed, jobs_[members[s]], keeps[s]));
    }
    Pass pass(engine_, std::move(sequences), from_);
    while (pass.loops() < depth_) pass.run_loop();
    for (size_t s = 0; s < members.size(); ++s) {
      pass.save(s, jobs_[members[s]].result.rows->states->as<float>());
    }
    pass.finish();
    head_.clear();
    for (size_t s = 0; s < members.size(); ++s) {
      const ResumeState& handle = *jobs_[members[s]].handle;
      for (size_t j = handle.ids.size() - handle.n_scored; j < handle.ids.size(); ++j) {
        head_.add(pass.first_row(s) + static_cast<int64_t>(j) - 1, handle.ids[j]);
      }
    }
    head_.score(pass);
    int64_t at = 0;
    for (const size_t i : members) {
      const auto n = static_cast<int64_t>(jobs_[i].handle->n_scored);
      jobs_[i].result.logprobs.assign(head_.logprobs() + at, head_.logprobs() + at + n);
      jobs_[i].result.greedy.assign(head_.greedy() + at, head_.greedy() + at + n);
      at += n;
    }
  }

  Engine& engine_;
  std::vector<Job>& jobs_;
  const int from_, depth_;
  HeadRows head_;
};

void check_item(const Engine& engine, const StartItem& item, size_t index, int depth) {
  const std::string what = "item " + std::to_string(index);
  check_scored(item.n_ids, item.n_scored, what);
  check_ids(engine, item.ids, item.n_ids, what);
  check_prompt(engine, item.n_ids, item.prompt_len, item.prefix != nullptr, what);
  if (item.prefix) check_prefix(engine, *item.prefix, depth, what);
  check_rows(engine, item.n_ids - 1, item.prefix ? item.prefix->length() : 0, what);
}

// The state of an item's rows before anything ran.
std::shared_ptr<PrefixState> make_rows(const std::shared_ptr<Engine>& engine, const StartItem& item,
                                       int depth, const std::shared_ptr<CacheBlock>& reserve) {
  auto rows = std::make_shared<PrefixState>();
  rows->engine = engine;
  rows->parent = item.prefix;
  rows->ids.assign(item.ids, item.ids + item.n_ids - 1);
  rows->begin = item.prefix ? item.prefix->length() : 0;
  rows->end = rows->begin + static_cast<int64_t>(item.n_ids) - 1;
  rows->depth = depth;
  rows->open_end = std::min(item.prompt_len, rows->own_length());
  rows->states = allocate_states(*engine, rows->own_length(), Owner::kResume);
  if (!reserve) return rows;
  const Schedule& schedule = engine->schedule;
  rows->planes.push_back({reserve, 0, schedule.planes(depth)});
  return rows;
}

std::shared_ptr<CacheBlock> make_reserve(const Engine& engine, const StartItem& item,
                                         int max_depth) {
  const int64_t begin = item.prefix ? item.prefix->length() : 0;
  const CacheRange range{begin, begin + static_cast<int64_t>(item.n_ids) - 1, 0,
                         engine.schedule.planes(max_depth)};
  return make_cache_block(*engine.account, engine.cache, range, Owner::kResume,
                          "a resume handle's planes");
}

}  // namespace

void ResumeState::require_open(const std::string& what) const {
  if (rows->engine->closed()) {
    throw ClosedHandleError("cannot use " + what + ": its model was closed");
  }
  rows->engine->require_usable();
}

size_t ResumeState::bytes() const { return rows->bytes(); }

std::shared_ptr<PrefixState> ResumeState::as_prefix() const {
  if (rows->has_planes()) return rows;
  throw MismatchError(
      "cannot use the resume handle as a prefix: it kept no cache; start it with keep_cache");
}

std::vector<std::shared_ptr<ResumeState>> start(const std::shared_ptr<Engine>& engine,
                                                const std::vector<StartItem>& items, int depth,
                                                int max_depth, bool keep_cache) {
  ForwardGuard guard(*engine);
  check_depth(depth, "the items");
  check_depth(max_depth, "the items' upgrades");
  if (max_depth < depth) {
    throw InvalidInputError("cannot start at depth " + std::to_string(depth) + " with max_depth=" +
                            std::to_string(max_depth) + ": it must be at least as deep");
  }
  for (size_t i = 0; i < items.size(); ++i) check_item(*engine, items[i], i, depth);
  std::vector<std::shared_ptr<ResumeState>> handles;
  std::vector<Job> jobs;
  for (const StartItem& item : items) {
    auto handle = std::make_shared<ResumeState>();
    handle->prefix = item.prefix;
    handle->ids.assign(item.ids, item.ids + item.n_ids);
    handle->n_scored = item.n_scored;
    handle->max_depth = max_depth;
    if (keep_cache) handle->reserve = make_reserve(*engine, item, max_depth);
    Job job{handle.get(), item.prefix.get(), nullptr, {}};
    job.result.rows = make_rows(engine, item, depth, handle->reserve);
    jobs.push_back(std::move(job));
    handles.push_back(std::move(handle));
  }
  ResumeCall(*engine, jobs, 0, depth).run();
  for (Job& job : jobs) {
    job.handle->rows = std::move(job.result.rows);
    job.handle->logprobs = std::move(job.result.logprobs);
    job.handle->greedy = std::move(job.result.greedy);
  }
  return handles;
}

namespace {

// What an upgrade computed, and the model's guard until the handles have it.
struct Computed {
  explicit Computed(std::shared_ptr<Engine> owner) : engine(std::move(owner)), guard(*engine) {}

  std::shared_ptr<Engine> engine;
  ForwardGuard guard;
  std::vector<std::shared_ptr<ResumeState>> handles;
  std::map<int, std::vector<Job>> jobs;  // by the depth they come from

  void commit() noexcept {
    for (auto& [from, group] : jobs) {
      for (Job& job : group) {
        job.handle->prefix = job.result.rows->parent;
        job.handle->rows = std::move(job.result.rows);
        job.handle->logprobs = std::move(job.result.logprobs);
        job.handle->greedy = std::move(job.result.greedy);
      }
    }
    jobs.clear();
  }
};

}  // namespace

std::function<void()> compute_upgrade(const std::shared_ptr<Engine>& engine,
                                      const std::vector<std::shared_ptr<ResumeState>>& handles,
                                      int depth,
                                      const std::vector<std::shared_ptr<PrefixState>>* prefixes) {
  auto computed = std::make_shared<Computed>(engine);
  computed->handles = handles;
  auto& jobs = computed->jobs;
  check_depth(depth, "the handles");
  for (size_t i = 0; i < handles.size(); ++i) {
    ResumeState& handle = *handles[i];
    const std::string what = "handle " + std::to_string(i);
    if (handle.rows->engine.get() != engine.get()) {
      throw MismatchError("cannot upgrade " + what + ": it belongs to another model");
    }
    if (depth > handle.max_depth) {
      throw MismatchError("cannot upgrade " + what + " to depth " + std::to_string(depth) +
                          ": it was started with max_depth=" + std::to_string(handle.max_depth));
    }
    std::shared_ptr<PrefixState> prefix = handle.prefix;
    if (prefixes != nullptr && (*prefixes)[i]) prefix = (*prefixes)[i];
    Job job{&handle, prefix.get(), handle.rows->states->as<float>(), {}};
    job.result.rows =
        prepare_upgrade({handle.rows, prefix, handle.reserve, Owner::kResume, what}, depth);
    jobs[handle.depth()].push_back(std::move(job));
  }
  for (auto& [from, group] : jobs) ResumeCall(*engine, group, from, depth).run();
  return [computed] { computed->commit(); };
}

void upgrade(const std::shared_ptr<Engine>& engine,
             const std::vector<std::shared_ptr<ResumeState>>& handles, int depth,
             const std::vector<std::shared_ptr<PrefixState>>* prefixes) {
  compute_upgrade(engine, handles, depth, prefixes)();
}

}  // namespace tinyloop
