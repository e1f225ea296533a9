#include "checks.h"

namespace tinyloop {

void check_ids(const Engine& engine, const int32_t* ids, size_t n, const std::string& what) {
  const int64_t vocab = engine.descriptor.vocab_size;
  for (size_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      throw InvalidInputError("cannot run " + what + ": token id " + std::to_string(ids[i]) +
                              " at index " + std::to_string(i) + " is outside the vocabulary 0.." +
                              std::to_string(vocab - 1));
    }
  }
}

void check_depth(int depth, const std::string& what) {
  if (depth < 1 || depth > kMaxDepth) {
    throw InvalidInputError("cannot run " + what + " at depth " + std::to_string(depth) +
                            ": it must be 1.." + std::to_string(kMaxDepth));
  }
}

void check_rows(const Engine& engine, size_t rows, int64_t position, const std::string& what) {
  const auto limit = static_cast<size_t>(engine.options.max_seq_len);
  if (rows > limit) {
    throw RowBudgetError("cannot run " + what + ": it has " + std::to_string(rows) +
                         " new rows, a pass has " + std::to_string(limit) +
                         "; load with a larger max_seq_len or build a prefix first");
  }
  if (position + static_cast<int64_t>(rows) > engine.descriptor.max_positions) {
    throw InvalidInputError("cannot run " + what + ": it ends at position " +
                            std::to_string(position + static_cast<int64_t>(rows)) +
                            ", the model has " + std::to_string(engine.descriptor.max_positions));
  }
}

void check_prefix(const Engine& engine, const PrefixState& prefix, int depth,
                  const std::string& what) {
  if (prefix.engine.get() != &engine) {
    throw MismatchError("cannot run " + what + ": its prefix belongs to another model");
  }
  if (!prefix.has_planes()) {
    throw MismatchError("cannot run " + what +
                        " on a resume handle that kept no cache: start it with keep_cache");
  }
  if (prefix.depth < depth) {
    throw MismatchError("cannot run " + what + " at depth " + std::to_string(depth) +
                        ": its prefix was built at depth " + std::to_string(prefix.depth) +
                        "; upgrade the prefix first");
  }
  if (engine.schedule.has_coda() && prefix.depth != depth) {
    throw MismatchError("cannot run " + what + " at depth " + std::to_string(depth) +
                        ": its prefix was built at depth " + std::to_string(prefix.depth) +
                        ", and the layers after the loops belong to that depth alone");
  }
}

void check_scored(size_t n_ids, size_t n_scored, const std::string& what) {
  if (n_ids < 2 || n_scored < 1 || n_scored > n_ids - 1) {
    throw InvalidInputError("cannot run " + what + ": it scores " + std::to_string(n_scored) +
                            " of " + std::to_string(n_ids) +
                            " ids; at least 1 and at most all but the first can be scored");
  }
}

void check_prompt(const Engine& engine, size_t n_ids, int64_t prompt_len, bool has_prefix,
                  const std::string& what) {
  if (prompt_len == 0) return;
  const auto refuse = [&](const std::string& why) {
    throw InvalidInputError("cannot run " + what +
                            " with prompt_len=" + std::to_string(prompt_len) + ": " + why);
  };
  if (!engine.descriptor.prefix_lm) {
    refuse("the model is causal, prompt_len is for prefix-LM models");
  }
  if (prompt_len < 0 || prompt_len >= static_cast<int64_t>(n_ids)) {
    refuse("it must be 0.." + std::to_string(n_ids - 1) + ", the last id follows the prompt");
  }
  if (has_prefix) refuse("its prefix is the whole prompt already");
}

}  // namespace tinyloop
