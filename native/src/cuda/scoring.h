// The head after its product: logits folded into each row's log-softmax; and the exit gate.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tinyloop::cuda {

// Columns of the vocabulary that one partial covers: fixed, so that a row's bits do not depend on
// how many columns a tile of logits has.
inline constexpr int64_t kHeadColumns = 512;

// One row's part of a log-softmax over kHeadColumns columns.
struct HeadPartial {
  float max = 0.0f;      // over the logits that are numbers; -inf where none is
  float sum = 0.0f;      // of exp(logit - max); NaN where a logit is NaN
  int32_t best_id = -1;  // of max, the lowest; -1 where max is -inf
};

// Device arrays; each may be null.
struct HeadResults {
  float* logprobs = nullptr;
  uint8_t* greedy = nullptr;
  int32_t* best = nullptr;
  float* best_logprobs = nullptr;
  double* log_sums = nullptr;
};

// Folds logits [rows][columns] of ids first, first + 1, ... (row stride in elements; first a
// multiple of kHeadColumns) into partials [rows][partials_stride]. Where a row's target (targets
// may be null) is among them, its logit goes to target_logits[row].
void fold_logits(cudaStream_t stream, const float* logits, int64_t stride, int64_t rows,
                 int64_t first, int64_t columns, const int32_t* targets, float* target_logits,
                 HeadPartial* partials, int64_t partials_stride);

// From the partials of all columns. Sums are in double, over the partials in a fixed order.
void finish_rows(cudaStream_t stream, const HeadPartial* partials, int64_t n_partials, int64_t rows,
                 const int32_t* targets, const float* target_logits, const HeadResults& out);

// out[i] = sigmoid(weight . state row indices[i] + *bias)
void exit_gate(cudaStream_t stream, const float* state, const int32_t* indices, int64_t rows,
               int64_t width, const float* weight, const float* bias, float* out);

}  // namespace tinyloop::cuda
