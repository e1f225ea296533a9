// One pass: rows of many sequences through the schedule at one depth.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"
#include "prefix.h"

namespace tinyloop {

// A sequence of a pass: its new rows stand on a prefix (null: none).
struct PassSequence {
  const int32_t* ids = nullptr;
  int64_t rows = 0;
  const PrefixState* prefix = nullptr;
};

// Runs the sequences' rows, one after the other in `main`, through `depth` loops and leaves each
// row's state of that depth, after the final norm, in `main`. Sequences on the same prefix should
// be neighbours: they share its tiles.
//   keep  null: the rows' keys and values live in the pass's one plane and are gone afterwards;
//         else: the one sequence's go to this prefix's planes.
// The sum of rows is at most max_seq_len. Allocates nothing that grows with the rows but the lists
// of sequences. The caller holds the ForwardGuard.
void run_pass(Engine& engine, const std::vector<PassSequence>& sequences, int depth,
              PrefixState* keep);

}  // namespace tinyloop
