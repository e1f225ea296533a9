#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "counter_random.h"
#include "tinyloop/errors.h"

namespace tinyloop {

namespace {

// A channel that no model's width reaches: the initial states of a model draw from the others.
constexpr uint64_t kSamplingChannel = uint64_t{1} << 63;

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

[[noreturn]] void refuse_logits(size_t count) {
  throw Error("cannot sample: among the " + std::to_string(count) +
              " logits is a NaN or an infinity that leaves no distribution");
}

double penalized(float logit, double penalty) {
  const double value = logit;
  return value > 0.0 ? value / penalty : value * penalty;
}

// Logits after the repetition penalty, one candidate an id.
void fill(SampleScratch& out, std::span<const float> logits, std::span<const int32_t> seen,
          double penalty) {
  out.resize(logits.size());
  for (size_t id = 0; id < logits.size(); ++id) {
    // A NaN has no place in any order; minus infinity does.
    if (std::isnan(logits[id])) refuse_logits(logits.size());
    out[id] = {logits[id], static_cast<int32_t>(id)};
  }
  if (penalty == 1.0) return;
  for (const int32_t id : seen) {
    if (id < 0 || static_cast<size_t>(id) >= logits.size()) {
      throw InvalidInputError("cannot sample: seen id " + std::to_string(id) +
                              " is outside the vocabulary of " + std::to_string(logits.size()));
    }
    // From the logit as given, so that an id that was seen twice is not punished twice.
    out[static_cast<size_t>(id)].value = penalized(logits[static_cast<size_t>(id)], penalty);
  }
}

// The order of every cumulative sum: descending, ties by the lower id.
bool before(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.id < b.id;
}

size_t find_largest(std::span<const Candidate> candidates) {
  size_t best = 0;
  for (size_t i = 1; i < candidates.size(); ++i) {
    if (candidates[i].value > candidates[best].value) best = i;
  }
  return best;
}

// Candidates in descending order, sorted only as far as they are read: nearly all draws end within
// the first few of tens of thousands.
class Descending {
 public:
  explicit Descending(std::span<Candidate> candidates) : all_(candidates) {}

  size_t size() const { return all_.size(); }
  const Candidate& operator[](size_t i) {
    while (i >= sorted_) sort_to(std::max<size_t>(64, 8 * sorted_));
    return all_[i];
  }
  double weight(size_t i) { return std::exp((*this)[i].value); }
  // Only the first n of the order stay.
  void keep(size_t n) {
    sort_to(n);
    all_ = all_.first(std::min(n, all_.size()));
  }

 private:
  void sort_to(size_t n) {
    n = std::min(n, all_.size());
    if (n <= sorted_) return;
    const auto from = all_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    const auto to = all_.begin() + static_cast<std::ptrdiff_t>(n);
    if (to != all_.end()) std::nth_element(from, to, all_.end(), before);
    std::sort(from, to, before);
    sorted_ = n;
  }

  std::span<Candidate> all_;
  size_t sorted_ = 0;
};

// What may be drawn: the first `count` of the order, and the sum of their weights. The largest
// weight is exp(0) = 1, so probabilities relative to it are the weights themselves.
struct Nucleus {
  size_t count;
  double total;
};

Nucleus cut_top_p(Descending& order, Nucleus whole, double top_p) {
  double sum = 0.0;
  for (size_t i = 0; i < whole.count; ++i) {
    sum += order.weight(i);
    if (sum >= top_p * whole.total) return {i + 1, sum};
  }
  return {whole.count, sum};
}

Nucleus cut_min_p(Descending& order, Nucleus whole, double min_p) {
  double sum = 0.0;
  for (size_t i = 0; i < whole.count; ++i) {
    const double weight = order.weight(i);
    if (weight < min_p) return {i, sum};
    sum += weight;
  }
  return {whole.count, sum};
}

int32_t draw(Descending& order, Nucleus nucleus, double uniform) {
  double sum = 0.0;
  size_t last = 0;
  for (size_t i = 0; i < nucleus.count; ++i) {
    const double weight = order.weight(i);
    if (weight <= 0.0) break;  // and so are all that follow
    sum += weight;
    last = i;
    if (sum > uniform * nucleus.total) break;
  }
  // Without a break, the total was rounded above this sum: the draw fell into that gap.
  return order[last].id;
}

double total_weight(std::span<const Candidate> candidates) {
  double total = 0.0;
  for (const Candidate& candidate : candidates) total += std::exp(candidate.value);
  return total;
}

int32_t draw_one(std::span<Candidate> candidates, const SamplingOptions& options, double uniform) {
  Descending order(candidates);
  const bool all = options.top_k == 0 || static_cast<size_t>(options.top_k) >= candidates.size();
  if (!all) {
    order.keep(static_cast<size_t>(options.top_k));
    candidates = candidates.first(static_cast<size_t>(options.top_k));
  }
  // Summed before the order is touched further: by id, or descending after a top-k.
  Nucleus nucleus{order.size(), total_weight(candidates)};
  if (options.top_p < 1.0) nucleus = cut_top_p(order, nucleus, options.top_p);
  if (options.min_p > 0.0) nucleus = cut_min_p(order, nucleus, options.min_p);
  return draw(order, nucleus, uniform);
}

}  // namespace

void check_sampling(const SamplingOptions& options, const std::string& what) {
  const auto require = [&](bool allowed, const char* option, const std::string& value,
                           const char* range) {
    if (allowed) return;
    throw InvalidInputError("cannot sample" + what + " with " + option + "=" + value +
                            ": it must be " + range);
  };
  require(std::isfinite(options.temperature) && options.temperature >= 0.0, "temperature",
          number(options.temperature), "0 (the likeliest id) or a positive number");
  require(options.top_k >= 0, "top_k", std::to_string(options.top_k), "0 (all ids) or positive");
  require(options.top_p > 0.0 && options.top_p <= 1.0, "top_p", number(options.top_p),
          "above 0 and at most 1 (all ids)");
  require(options.min_p >= 0.0 && options.min_p <= 1.0, "min_p", number(options.min_p),
          "within 0 (all ids) and 1");
  require(std::isfinite(options.repetition_penalty) && options.repetition_penalty > 0.0,
          "repetition_penalty", number(options.repetition_penalty),
          "a positive number, 1 for none");
}

int32_t choose_id(std::span<const float> logits, const SamplingOptions& options,
                  std::span<const int32_t> seen, SampleKey key, SampleScratch& scratch) {
  fill(scratch, logits, seen, options.repetition_penalty);
  const size_t best = find_largest(scratch);
  const double largest = scratch[best].value;
  if (!std::isfinite(largest)) refuse_logits(logits.size());
  if (options.temperature == 0.0) return scratch[best].id;
  for (Candidate& candidate : scratch) {
    candidate.value = (candidate.value - largest) / options.temperature;
  }
  const uint64_t bits = counter_bits(counter_row(key.seed, key.position), kSamplingChannel);
  return draw_one(scratch, options, static_cast<double>(bits >> 11) * 0x1p-53);
}

float logprob_of(std::span<const float> logits, int32_t id) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  if (!std::isfinite(sum)) refuse_logits(logits.size());
  return static_cast<float>(logits[static_cast<size_t>(id)] - largest - std::log(sum));
}

Sample sample(std::span<const float> logits, const SamplingOptions& options,
              std::span<const int32_t> seen, SampleKey key, SampleScratch& scratch) {
  const int32_t id = choose_id(logits, options, seen, key, scratch);
  return {id, logprob_of(logits, id)};
}

}  // namespace tinyloop
