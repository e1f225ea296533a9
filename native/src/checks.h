// What callers may ask for: every check of ids, depths, rows and prefixes, in one place.
#pragma once

#include <cstdint>
#include <string>

#include "engine.h"
#include "prefix.h"

namespace tinyloop {

// Loops that a request may ask for.
inline constexpr int kMaxDepth = 4096;

// Each throws the error that the public header names, with `what` as the thing that cannot run.
void check_ids(const Engine& engine, const int32_t* ids, size_t n, const std::string& what);
void check_depth(int depth, const std::string& what);
// New rows against the row budget, and the last position against the model's.
void check_rows(const Engine& engine, size_t rows, int64_t position, const std::string& what);
// A prefix that can serve `depth` loops: deep enough, and exactly so where a coda follows the
// loops.
void check_prefix(const Engine& engine, const PrefixState& prefix, int depth,
                  const std::string& what);
// The scored ids of an item: at least one, and none that nothing predicts.
void check_scored(size_t n_ids, size_t n_scored, const std::string& what);
// prompt_len of an item: only for prefix-LM models, at most all ids but the last, not on
// a prefix.
void check_prompt(const Engine& engine, size_t n_ids, int64_t prompt_len, bool has_prefix,
                  const std::string& what);

}  // namespace tinyloop
