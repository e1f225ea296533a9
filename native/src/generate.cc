#include "generate.h"

#include <string>
#include <utility>

#include "checks.h"
#include "generate_batch.h"

namespace tinyloop {

std::string request_name(size_t index) { return "request " + std::to_string(index); }

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

std::vector<Completion> generate(const std::shared_ptr<Engine>& engine,
                                 const std::vector<GenerateItem>& items, int max_batch,
                                 const OnToken& on_token) {
  const ForwardGuard guard(*engine);
  const std::unique_ptr<GenerateBatch> generation = start_batch(engine, max_batch);
  for (size_t i = 0; i < items.size(); ++i) check_item(*engine, items[i], i);
  for (const GenerateItem& item : items) generation->add(item);
  std::vector<Completion> completions(items.size());
  bool goes_on = true;
  while (goes_on) {
    goes_on = generation->step();
    GenerateEvents events = generation->take_events();
    if (!events.failed.empty()) std::rethrow_exception(events.failed.front().second);
    for (const GeneratedToken& t : events.tokens) {
      if (on_token) on_token(t.key, t.id, t.logprob);
    }
    for (auto& [key, completion] : events.finished) completions[key] = std::move(completion);
  }
  return completions;
}

}  // namespace tinyloop
