// ResumeHandle: scored ids that can go deeper later, at the price of the missing loops alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "prefix.h"

namespace tinyloop {

// The scored ids of one item and what is needed to go on. A foreign forward cannot touch it: its
// states are its own.
struct ResumeState {
  std::shared_ptr<PrefixState> rows;    // the item's rows: states, and planes if they are kept
  std::shared_ptr<PrefixState> prefix;  // what they stand on, or null
  std::shared_ptr<CacheBlock> reserve;  // planes up to max_depth, or null
  std::vector<int32_t> ids;             // all of the item's, the last one included
  size_t n_scored = 0;
  int max_depth = 0;
  std::vector<float> logprobs;  // [n_scored], at the present depth
  std::vector<uint8_t> greedy;

  int depth() const { return rows->depth; }
  // Bytes that it holds alone, planes not yet used included.
  size_t bytes() const;
  // The rows as a prefix. Throws MismatchError if no cache was kept.
  std::shared_ptr<PrefixState> as_prefix() const;
  // Throws ClosedHandleError after the model was closed; `what` is the handle as the caller knows
  // it.
  void require_open(const std::string& what = "the resume handle") const;
};

// Scores items at `depth` and keeps what upgrades up to max_depth need: the states, and with
// keep_cache also room for the planes of max_depth. All or nothing. The prefixes must serve `depth`
// now and each later depth then.
struct StartItem {
  const int32_t* ids = nullptr;
  size_t n_ids = 0;
  size_t n_scored = 0;
  std::shared_ptr<PrefixState> prefix;
  int64_t prompt_len = 0;
};
std::vector<std::shared_ptr<ResumeState>> start(const std::shared_ptr<Engine>& engine,
                                                const std::vector<StartItem>& items, int depth,
                                                int max_depth, bool keep_cache);

// Takes handles to `depth` in packed passes: all or nothing. prefixes: null, or for each handle the
// prefix to stand on from now on (the same tokens, deep enough), null for the one it has.
// compute_upgrade() changes no handle: that is what the call of its result does, which throws
// nothing. So a caller whose handles are read by other threads can choose the lock to do it under.
// Until the result is gone the model is in use.
std::function<void()> compute_upgrade(
    const std::shared_ptr<Engine>& engine, const std::vector<std::shared_ptr<ResumeState>>& handles,
    int depth, const std::vector<std::shared_ptr<PrefixState>>* prefixes = nullptr);
void upgrade(const std::shared_ptr<Engine>& engine,
             const std::vector<std::shared_ptr<ResumeState>>& handles, int depth,
             const std::vector<std::shared_ptr<PrefixState>>* prefixes = nullptr);

}  // namespace tinyloop
