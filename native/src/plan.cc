#include "plan.h"

#include <memory>

#include "backend.h"
#include "buffers.h"
#include "checks.h"
#include "load_setup.h"
#include "schedule.h"
#include "weights.h"

namespace tinyloop {

namespace {

constexpr int64_t kProductBytes = 2;  // FP16 activations

size_t token_bytes(const Descriptor& d, CacheMode mode) {
  // Far from the start, where no attention sinks lie.
  return cache_bytes(cache_shape(d, mode, kProductBytes), {1024, 1024 + 64, 0, 1}) / 64;
}

}  // namespace

std::string cache_mode_warning(const Descriptor& d, const std::string& name) {
  const CacheMode mode = cache_mode(name);
  if (!stores_hidden(mode)) return "";
  const size_t fp16 = token_bytes(d, CacheMode::kFp16), int8 = token_bytes(d, CacheMode::kInt8);
  const size_t hidden = token_bytes(d, mode);
  const std::string numbers = "a token of one plane takes " + std::to_string(hidden) +
                              " bytes in " + name + ", " + std::to_string(fp16) + " in fp16, " +
                              std::to_string(int8) + " in int8";
  if (hidden >= fp16) {
    return "cache_mode " + name + " loses memory on this model: " + numbers + " (hidden size " +
           std::to_string(d.hidden_size) + ", keys " + std::to_string(d.kv_width()) + " wide)";
  }
  if (hidden >= int8)
    return "cache_mode int8 would need no more memory than " + name + ": " + numbers;
  return "";
}

MemoryPlan plan_memory(const std::string& path, const LoadOptions& options, int depth,
                       size_t prefix_length) {
  std::unique_ptr<LoadSetup> read;
  in_phase("header", path, [&] { read = std::make_unique<LoadSetup>(path, options); });
  const LoadSetup& setup = *read;
  if (depth != 0) check_depth(depth, "the prefix");
  if (prefix_length > static_cast<size_t>(setup.descriptor.max_positions)) {
    throw InvalidInputError("cannot plan for a prefix of " + std::to_string(prefix_length) +
                            " tokens: the model has " +
                            std::to_string(setup.descriptor.max_positions) + " positions");
  }
  const Descriptor& d = setup.descriptor;
  const CacheShape& cache = setup.cache;
  const size_t alignment = setup.backend->alignment();
  MemoryPlan plan;
  for (size_t i = 0; i < kOwnerCount; ++i) plan.owners[owner_name(static_cast<Owner>(i))] = 0;
  const auto add = [&](Owner owner, size_t bytes) { plan.owners[owner_name(owner)] += bytes; };
  add(Owner::kWeights, weights_bytes(setup.file, stores_hidden(cache.mode), *setup.backend));
  const BufferShape shape =
      buffer_shape(d, setup.options, cache.mode, setup.backend->activation_bytes());
  for (const BufferSize& buffer : buffer_sizes(shape)) {
    if (buffer.host && !setup.backend->is_host()) continue;
    add(buffer.owner, accounted_bytes(buffer.bytes, alignment));
  }
  for (const size_t bytes : setup.backend->workspace_bytes(workspace_shape(d, setup.options))) {
    add(Owner::kWorkspace, accounted_bytes(bytes, alignment));
  }
  for (const auto& [owner, bytes] : plan.owners) plan.total += bytes;
  if (setup.backend->is_host()) {
    plan.logit_rows =
        accounted_bytes(static_cast<size_t>(kLogitRows * d.vocab_size) * sizeof(float), alignment);
  }

  const Schedule schedule = make_schedule(d);
  const int64_t planes = schedule.planes(depth > 0 ? depth : d.loops);
  const auto tokens = static_cast<int64_t>(prefix_length);
  plan.cache_token =
      static_cast<size_t>(planes) * (cache_bytes(cache, {1024, 1024 + 64, 0, 1}) / 64);
  if (tokens > 0) {
    plan.prefix_tokens =
        accounted_bytes(cache_bytes(cache, {0, tokens, 0, planes}), alignment) +
        accounted_bytes(
            static_cast<size_t>(schedule.states * tokens * d.hidden_size) * sizeof(float),
            alignment);
  }
  const std::string warning = cache_mode_warning(d, setup.options.cache_mode);
  if (!warning.empty()) plan.warnings.push_back(warning);
  return plan;
}

}  // namespace tinyloop
