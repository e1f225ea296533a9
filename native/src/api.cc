// The public C++ calls over the engine.
#include <memory>
#include <string>
#include <vector>

#include "calls.h"
#include "tinyloop/tinyloop.h"

// The opaque handle of the public header.
struct tinyloop::Model {
  std::shared_ptr<tinyloop::Engine> engine;
};

namespace tinyloop {

namespace {

std::string& last_error_slot() {
  thread_local std::string message;
  return message;
}

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

void score(Model* model, const std::vector<ScoreRequest>& requests, int depth, float* logprobs,
           uint8_t* greedy) {
  // Owned for the length of the call: handles and the model may be freed while it runs.
  const std::shared_ptr<Engine> engine = model->engine;
  std::vector<std::shared_ptr<PrefixState>> prefixes;
  std::vector<ScoreItem> items;
  for (const ScoreRequest& r : requests) {
    prefixes.push_back(r.prefix != nullptr ? r.prefix->state : nullptr);
    items.push_back({r.ids, r.n_ids, r.n_scored, prefixes.back().get()});
  }
  score(*engine, items, depth, logprobs, greedy);
}

PrefixCache* build_prefix(Model* model, const int32_t* ids, size_t n_ids, int depth,
                          const PrefixCache* parent) {
  const std::shared_ptr<Engine> engine = model->engine;  // may be freed while the call runs
  auto cache = std::make_unique<PrefixCache>();
  cache->state = prefill(engine, ids, n_ids, depth, parent != nullptr ? parent->state : nullptr);
  return cache.release();
}

void free_prefix(PrefixCache* prefix) { delete prefix; }
size_t prefix_length(const PrefixCache* prefix) {
  prefix->state->require_open();
  return static_cast<size_t>(prefix->state->length());
}
size_t prefix_bytes(const PrefixCache* prefix) {
  prefix->state->require_open();
  return prefix->state->memory.bytes();
}

}  // namespace tinyloop
