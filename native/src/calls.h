// The calls behind the public functions, on the engine's own shared pointers. The C++ face and the
// Python binding are both thin layers over these.
#pragma once

#include <memory>
#include <vector>

#include "engine.h"
#include "prefix.h"
#include "tinyloop/tinyloop.h"

namespace tinyloop {

// One item of a score call; see ScoreRequest.
struct ScoreItem {
  const int32_t* ids = nullptr;
  size_t n_ids = 0;
  size_t n_scored = 0;
  const PrefixState* prefix = nullptr;
};

// See tinyloop.h.
void score(Engine& engine, const std::vector<ScoreItem>& items, int depth, float* logprobs,
           uint8_t* greedy);

// See build_prefix() of tinyloop.h.
std::shared_ptr<PrefixState> prefill(const std::shared_ptr<Engine>& engine, const int32_t* ids,
                                     size_t n_ids, int depth, std::shared_ptr<PrefixState> parent);

}  // namespace tinyloop
