// Scores continuations of one context and prints the log-probability of each.
//
//   score MODEL.tloop CONTEXT CONTINUATION...      token ids with commas between: 1,17,4
//
// The context is computed once, as a prefix that all continuations share; a prefix-LM model attends
// to it in both directions, its last id included, so there every item brings it whole.
#include <charconv>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tinyloop/tinyloop.h"

namespace {

using Ids = std::vector<int32_t>;

// Owners that free what they own, whatever is thrown.
struct FreeModel {
  void operator()(tinyloop::Model* model) const { tinyloop::free_model(model); }
};
struct FreePrefix {
  void operator()(tinyloop::PrefixCache* prefix) const { tinyloop::free_prefix(prefix); }
};
using OwnedModel = std::unique_ptr<tinyloop::Model, FreeModel>;
using OwnedPrefix = std::unique_ptr<tinyloop::PrefixCache, FreePrefix>;

Ids parse_ids(const std::string& list) {
  Ids ids;
  const char* const end = list.data() + list.size();
  for (const char* at = list.data();; ++at) {  // ++ over the comma
    const auto [after, error] = std::from_chars(at, end, ids.emplace_back());
    if (error != std::errc() || (after != end && *after != ',')) {
      throw tinyloop::InvalidInputError("cannot read the ids '" + list + "': write them as 1,17,4");
    }
    if (after == end) return ids;
    at = after;
  }
}

OwnedModel load(const std::string& path) {
  tinyloop::LoadOptions options;
  options.max_seq_len = 256;
  OwnedModel model(tinyloop::load_model(path, options));
  // A load answers with nullptr, all other calls throw.
  if (model == nullptr) throw tinyloop::LoadError(tinyloop::last_error());
  return model;
}

// The sum of each continuation's log-probabilities.
std::vector<double> score(tinyloop::Model* model, const Ids& context,
                          const std::vector<Ids>& continuations) {
  const int depth = static_cast<int>(tinyloop::descriptor(model).loops);
  const bool whole = tinyloop::descriptor(model).prefix_lm;
  // The context's last id goes into every item: its row predicts the continuation's first id.
  OwnedPrefix prefix;
  if (context.size() > 1 && !whole) {
    prefix.reset(tinyloop::build_prefix(model, context.data(), context.size() - 1, depth, nullptr));
  }
  std::vector<Ids> items;
  std::vector<tinyloop::ScoreRequest> requests;
  size_t n_scored = 0;
  for (const Ids& continuation : continuations) {
    Ids& ids = items.emplace_back(whole ? context : Ids(1, context.back()));
    ids.insert(ids.end(), continuation.begin(), continuation.end());
    tinyloop::ScoreRequest& request = requests.emplace_back();
    request.ids = ids.data();
    request.n_ids = ids.size();
    request.n_scored = continuation.size();
    request.prefix = prefix.get();
    if (whole) request.prompt_len = static_cast<int64_t>(context.size());
    n_scored += continuation.size();
  }
  std::vector<float> logprobs(n_scored);
  std::vector<uint8_t> greedy(n_scored);
  tinyloop::score(model, requests, depth, logprobs.data(), greedy.data());

  std::vector<double> sums;
  auto next = logprobs.begin();
  for (const Ids& continuation : continuations) {
    const auto end = next + static_cast<std::ptrdiff_t>(continuation.size());
    sums.push_back(std::accumulate(next, end, 0.0));
    next = end;
  }
  return sums;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s MODEL.tloop CONTEXT CONTINUATION...\n", argv[0]);
    return 2;
  }
  try {
    const OwnedModel model = load(argv[1]);
    std::vector<Ids> continuations;
    for (int i = 3; i < argc; ++i) continuations.push_back(parse_ids(argv[i]));
    for (const double sum : score(model.get(), parse_ids(argv[2]), continuations)) {
      std::printf("%.6f\n", sum);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
