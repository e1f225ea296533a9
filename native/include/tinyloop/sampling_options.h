// How the next token is drawn from a model's logits.
#pragma once

#include <cstdint>

namespace tinyloop {

// What shapes the distribution, in the order in which it is applied.
struct SamplingOptions {
  double repetition_penalty = 1.0;  // positive logits of seen ids are divided by it, negative ones
                                    // multiplied; 1: none
  double temperature = 0.0;  // divides the logits; 0: the largest logit, the lower id on ties
  int64_t top_k = 0;         // this many ids, the lower id on ties; 0: all
  double top_p = 1.0;        // the fewest ids whose probabilities reach this sum; 1: all
  double min_p = 0.0;        // ids below this share of the largest probability go; 0: none
};

}  // namespace tinyloop
