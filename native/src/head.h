// The head at chosen rows of a pass: log-probabilities, the argmax, the exit gate.
#pragma once

#include <cstdint>

#include "engine.h"
#include "pass.h"

namespace tinyloop {

// Rows of a pass whose next token is asked for. At most max_seq_len of them. The results lie in the
// engine's buffers until the next call.
class HeadRows {
 public:
  explicit HeadRows(Engine& engine) : engine_(engine) {}

  void clear() { n_ = 0; }
  void add(int64_t row, int32_t target);
  int64_t size() const { return n_; }

  // log p of the targets, and whether each is the argmax.
  void score(const Pass& pass);
  // The argmax of every row and its log p.
  void best(const Pass& pass);
  // The exit gate's probability. Throws InvalidInputError if the model has none.
  void gates(const Pass& pass);
  // Allocates the memory of logits(), once.
  void need_logits();
  // float32 logits [size(), vocab], and each row's log of the sum of exponentials; size() at most
  // kLogitRows. After need_logits().
  const float* logits(const Pass& pass, double* log_sums);

  const float* logprobs() const { return scores(0); }
  const float* best_logprobs() const { return scores(1); }
  const float* gate() const { return scores(2); }
  const int32_t* best_ids() const { return reinterpret_cast<const int32_t*>(scores(3)); }
  const uint8_t* greedy() const { return reinterpret_cast<const uint8_t*>(scores(4)); }

 private:
  int64_t capacity() const { return engine_.options.max_seq_len; }
  int32_t* rows() const { return engine_.buffers.row_ids.as<int32_t>() + 2 * capacity(); }
  int32_t* targets() const { return rows() + capacity(); }
  float* scores(int64_t column) const {
    return engine_.buffers.row_scores.as<float>() + column * capacity();
  }

  Engine& engine_;
  int64_t n_ = 0;
};

}  // namespace tinyloop
