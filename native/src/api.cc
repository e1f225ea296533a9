// The public C++ calls over the engine. Each holds what it uses for the length of the call: handles
// and the model may be freed while it runs.
#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "generate.h"
#include "handles.h"
#include "plan.h"
#include "score.h"

namespace tinyloop {

namespace {

std::string& last_error_slot() {
  thread_local std::string message;
  return message;
}

int default_depth(const Engine& engine, int depth) {
  return depth != 0 ? depth : static_cast<int>(engine.descriptor.loops);
}

std::shared_ptr<PrefixState> state_of(const PrefixCache* prefix,
                                      const std::string& what = "the prefix") {
  if (prefix == nullptr) return nullptr;
  prefix->state->require_open(what);
  return prefix->state;
}

// Of one of several.
std::shared_ptr<PrefixState> state_of(const PrefixCache* prefix, const char* whose, size_t index) {
  return state_of(prefix, "the prefix of " + (whose + (" " + std::to_string(index))));
}

GenerateItem item_of(const Engine& engine, const GenerateRequest& r, size_t index) {
  return {r.ids,
          r.n_ids,
          state_of(r.prefix, "request", index),
          default_depth(engine, r.depth),
          r.max_new_tokens,
          r.stop_ids,
          r.sampling,
          r.seed,
          r.exit_threshold,
          r.min_depth};
}

// Requests as the engine takes them, and what keeps their prefixes alive.
struct ScoreItems {
  std::vector<std::shared_ptr<PrefixState>> prefixes;
  std::vector<ScoreItem> items;
  int64_t max_depth = 0;

  ScoreItems(const std::vector<ScoreRequest>& requests, int depth) {
    for (const ScoreRequest& r : requests) {
      prefixes.push_back(state_of(r.prefix, "item", prefixes.size()));
      const int own = r.depth != 0 ? r.depth : depth;
      items.push_back({r.ids, r.n_ids, r.n_scored, prefixes.back().get(), own, r.prompt_len});
      max_depth = std::max<int64_t>(max_depth, own);
    }
  }
};

}  // namespace

Model* load_model(const std::string& path, const LoadOptions& options) {
  try {
    auto model = std::make_unique<Model>();
    model->engine = Engine::load(path, options);
    last_error_slot().clear();
    return model.release();
  } catch (const std::exception& error) {
    last_error_slot() = error.what();
    return nullptr;
  }
}

Model* load_model(const std::string& path, int max_seq_len, int prefill_chunk) {
  LoadOptions options;
  options.max_seq_len = max_seq_len;
  options.prefill_chunk = prefill_chunk;
  return load_model(path, options);
}

void free_model(Model* model) {
  if (model == nullptr) return;
  model->engine->close();
  delete model;
}

size_t vram_usage_bytes(Model* model) { return model->engine->account->live_bytes(); }
const std::string& last_error() { return last_error_slot(); }
const Descriptor& descriptor(const Model* model) { return model->engine->descriptor; }
std::string numerics_id(const Model* model) { return model->engine->numerics_id(); }
std::map<std::string, size_t> memory_report(const Model* model) {
  return model->engine->account->report();
}

std::string cache_mode_warning(const Model* model) {
  return cache_mode_warning(model->engine->descriptor, model->engine->options.cache_mode);
}

void score(Model* model, const std::vector<ScoreRequest>& requests, int depth, float* logprobs,
           uint8_t* greedy) {
  score(model, requests, depth, logprobs, greedy, ScoreExtras());
}

void score(Model* model, const std::vector<ScoreRequest>& requests, int depth, float* logprobs,
           uint8_t* greedy, const ScoreExtras& extras) {
  const std::shared_ptr<Engine> engine = model->engine;
  const ScoreItems call(requests, depth);
  ScoreOutput out;
  out.logprobs = logprobs;
  out.greedy = greedy;
  out.depths = extras.depths;
  out.by_depth = extras.by_depth;
  out.gates = extras.gates;
  out.max_depth = call.max_depth;
  score(*engine, call.items, {extras.exit_threshold, extras.min_depth}, out);
}

PrefixCache* build_prefix(Model* model, const int32_t* ids, size_t n_ids, int depth,
                          const PrefixCache* parent, bool upgradable) {
  const std::shared_ptr<Engine> engine = model->engine;
  auto cache = std::make_unique<PrefixCache>();
  cache->state = prefill(engine, ids, n_ids, depth, state_of(parent), upgradable);
  return cache.release();
}

PrefixCache* upgrade_prefix(const PrefixCache* prefix, int depth, const PrefixCache* parent) {
  auto cache = std::make_unique<PrefixCache>();
  cache->state = upgrade_prefix(state_of(prefix), depth, state_of(parent));
  return cache.release();
}

void free_prefix(PrefixCache* prefix) { delete prefix; }
size_t prefix_length(const PrefixCache* prefix) {
  return static_cast<size_t>(state_of(prefix)->length());
}
size_t prefix_bytes(const PrefixCache* prefix) { return state_of(prefix)->bytes(); }
int prefix_depth(const PrefixCache* prefix) { return state_of(prefix)->depth; }

std::vector<ResumeHandle*> start_resume(Model* model, const std::vector<ScoreRequest>& requests,
                                        int depth, int max_depth, bool keep_cache) {
  const std::shared_ptr<Engine> engine = model->engine;
  std::vector<StartItem> items;
  for (const ScoreRequest& r : requests) {
    std::shared_ptr<PrefixState> prefix = state_of(r.prefix, "item", items.size());
    items.push_back({r.ids, r.n_ids, r.n_scored, std::move(prefix), r.prompt_len});
  }
  std::vector<std::unique_ptr<ResumeHandle>> handles(items.size());
  for (auto& handle : handles) handle = std::make_unique<ResumeHandle>();
  auto states = start(engine, items, depth, max_depth, keep_cache);
  std::vector<ResumeHandle*> out(handles.size());
  for (size_t i = 0; i < handles.size(); ++i) {
    handles[i]->state = std::move(states[i]);
    out[i] = handles[i].release();
  }
  return out;
}

void upgrade_resume(Model* model, const std::vector<ResumeHandle*>& handles, int depth,
                    const std::vector<const PrefixCache*>& prefixes) {
  const std::shared_ptr<Engine> engine = model->engine;
  if (!prefixes.empty() && prefixes.size() != handles.size()) {
    throw InvalidInputError("cannot upgrade " + std::to_string(handles.size()) + " handles on " +
                            std::to_string(prefixes.size()) + " prefixes: give one for each");
  }
  std::vector<std::shared_ptr<ResumeState>> states;
  std::vector<std::shared_ptr<PrefixState>> parents;
  for (const ResumeHandle* handle : handles) {
    const std::string what = "handle " + std::to_string(states.size());
    if (handle == nullptr) throw InvalidInputError("cannot upgrade " + what + ": it is null");
    handle->state->require_open(what);
    states.push_back(handle->state);
  }
  for (const PrefixCache* prefix : prefixes) {
    parents.push_back(state_of(prefix, "handle", parents.size()));
  }
  upgrade(engine, states, depth, prefixes.empty() ? nullptr : &parents);
}

void free_resume(ResumeHandle* handle) { delete handle; }
int resume_depth(const ResumeHandle* handle) {
  handle->state->require_open();
  return handle->state->depth();
}
size_t resume_bytes(const ResumeHandle* handle) {
  handle->state->require_open();
  return handle->state->bytes();
}
const std::vector<float>& resume_logprobs(const ResumeHandle* handle) {
  handle->state->require_open();
  return handle->state->logprobs;
}
const std::vector<uint8_t>& resume_greedy(const ResumeHandle* handle) {
  handle->state->require_open();
  return handle->state->greedy;
}
PrefixCache* resume_prefix(const ResumeHandle* handle) {
  handle->state->require_open();
  auto cache = std::make_unique<PrefixCache>();
  cache->state = handle->state->as_prefix();
  return cache.release();
}

PrefixPool* make_pool(Model* model, size_t budget_bytes, EvictPolicy policy) {
  return new PrefixPool{Pool(model->engine, budget_bytes, policy)};
}
void free_pool(PrefixPool* pool) { delete pool; }
int64_t pool_create(PrefixPool* pool, const int32_t* ids, size_t n_ids, int depth, int64_t parent,
                    bool upgradable) {
  return pool->pool.create({ids, n_ids}, depth, parent != 0 ? std::optional(parent) : std::nullopt,
                           upgradable);
}
int64_t pool_put(PrefixPool* pool, const PrefixCache* prefix) {
  return pool->pool.put(state_of(prefix));
}
PrefixCache* pool_get(PrefixPool* pool, int64_t key) {
  auto cache = std::make_unique<PrefixCache>();
  cache->state = pool->pool.get(key);
  return cache.release();
}
int64_t pool_find(const PrefixPool* pool, const int32_t* ids, size_t n_ids, int depth) {
  return pool->pool.find({ids, n_ids}, depth).value_or(0);
}
void pool_pin(PrefixPool* pool, int64_t key) { pool->pool.ledger.pin(key); }
void pool_unpin(PrefixPool* pool, int64_t key) { pool->pool.ledger.unpin(key); }
void pool_evict(PrefixPool* pool, int64_t key) { pool->pool.ledger.evict(key); }
std::vector<Eviction> pool_evictions(PrefixPool* pool) { return pool->pool.ledger.evicted(); }
size_t pool_bytes(const PrefixPool* pool) { return pool->pool.ledger.bytes(); }

std::vector<Completion> generate(Model* model, const std::vector<GenerateRequest>& requests,
                                 int max_batch, const OnToken& on_token) {
  const std::shared_ptr<Engine> engine = model->engine;
  std::vector<GenerateItem> items;
  for (const GenerateRequest& r : requests) items.push_back(item_of(*engine, r, items.size()));
  return generate(engine, items, max_batch, on_token);
}

Generation* make_generation(Model* model, int max_batch) {
  return new Generation{model->engine, start_batch(model->engine, max_batch)};
}
void free_generation(Generation* generation) { delete generation; }
size_t generation_add(Generation* generation, const GenerateRequest& request) {
  const std::shared_ptr<Engine> engine = generation->engine;
  const std::shared_ptr<GenerateBatch> batch = generation->batch;
  const ForwardGuard guard(*engine);
  return batch->add(item_of(*engine, request, 0));
}
bool generation_cancel(Generation* generation, size_t key) {
  const std::shared_ptr<Engine> engine = generation->engine;
  const std::shared_ptr<GenerateBatch> batch = generation->batch;
  const ForwardGuard guard(*engine);
  return batch->cancel(key);
}
bool generation_step(Generation* generation, GenerateEvents* events) {
  const std::shared_ptr<Engine> engine = generation->engine;
  const std::shared_ptr<GenerateBatch> batch = generation->batch;
  const ForwardGuard guard(*engine);
  const bool ran = batch->step();
  GenerateEvents came = batch->take_events();
  const auto move_to = [](auto& from, auto& to) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  move_to(came.tokens, events->tokens);
  move_to(came.finished, events->finished);
  move_to(came.failed, events->failed);
  return ran;
}
void generation_put_back(Generation* generation) {
  const std::shared_ptr<Engine> engine = generation->engine;
  const std::shared_ptr<GenerateBatch> batch = generation->batch;
  const ForwardGuard guard(*engine);
  batch->put_back();
}

}  // namespace tinyloop
