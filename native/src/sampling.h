// The next token from a row of logits. Pure: the same logits, options, ids and key give the same
// id, whatever else is in the batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tinyloop/sampling_options.h"

namespace tinyloop {

// Names one draw: the request's seed and the position of the token to come.
struct SampleKey {
  uint64_t seed = 0;
  uint64_t position = 0;
};

struct Sample {
  int32_t id = 0;
  float logprob = 0.0f;  // natural log, under the logits as they were given
};

// One id and its scaled logit (the largest is 0).
struct Candidate {
  double value;
  int32_t id;
};

// Memory that draws share, so that none of them allocates after the first.
using SampleScratch = std::vector<Candidate>;

// Throws InvalidInputError naming the option, its value and what is allowed. what: whose options
// they are where there are several, such as " for request 3".
void check_sampling(const SamplingOptions& options, const std::string& what = "");

// The chosen id. The options must have passed check_sampling().
//   logits  float32 [vocabulary], at least one; minus infinity is an id that cannot come
//   seen    ids of prompt and output so far, in any order, repeats allowed; read only with a
//           repetition penalty
// Throws InvalidInputError for a seen id outside the vocabulary, Error for logits without a
// distribution: a NaN, plus infinity, or nothing but minus infinity.
int32_t choose_id(std::span<const float> logits, const SamplingOptions& options,
                  std::span<const int32_t> seen, SampleKey key, SampleScratch& scratch);

// log softmax(logits)[id], summed in double. Throws Error for logits without a distribution.
float logprob_of(std::span<const float> logits, int32_t id);

// Both of the above.
Sample sample(std::span<const float> logits, const SamplingOptions& options,
              std::span<const int32_t> seen, SampleKey key, SampleScratch& scratch);

}  // namespace tinyloop
