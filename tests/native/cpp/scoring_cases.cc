// The head and the exit gate.
#include "checks.h"

namespace tinyloop {
namespace {

constexpr int64_t kWidth = 100, kVocab = 1050, kStateRows = 50;

using Logits = std::vector<Values>;  // of every state row

int32_t row_of(int64_t i) { return static_cast<int32_t>(i * 13 % kStateRows); }
std::vector<int32_t> rows_of(int64_t n) {
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < n; ++i) rows.push_back(row_of(i));
  return rows;
}

Logits logits_of(const Tensor& head) {
  Logits all;
  for (int64_t row = 0; row < kStateRows; ++row) {
    all.emplace_back();
    for (int64_t id = 0; id < kVocab; ++id) {
      double sum = 0.0;
      for (int64_t k = 0; k < kWidth; ++k) sum += noise(30, row * kWidth + k) * head.at(id, k);
      all.back().push_back(sum);
    }
  }
  return all;
}

int32_t best_of(const Values& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Every third row is scored against its best id.
std::vector<int32_t> targets_of(int64_t n, const Logits& logits) {
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t best = best_of(logits[static_cast<size_t>(row_of(i))]);
    targets.push_back(i % 3 == 0 ? best : static_cast<int32_t>(i * 101 % kVocab));
  }
  return targets;
}

double log_sum_of(const Values& logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const double x : logits) sum += std::exp(x - most);
  return most + std::log(sum);
}

Case logits_case(TensorKind kind, int64_t n) {
  const auto head = make_tensor(kind, kVocab, kWidth);
  const auto state = noise_floats(30, kStateRows * kWidth);
  const auto rows = rows_of(n);
  const auto run = [=](Backend& backend, int64_t split) {
    const auto weight = upload(backend, *head, 0, kVocab);
    std::vector<float> out(static_cast<size_t>(n * kVocab));
    std::vector<double> log_sums(static_cast<size_t>(n));
    in_splits(n, split, [&](int64_t at, int64_t count) {
      backend.logits(state.data(), rows.data() + at, count, *weight, out.data() + at * kVocab,
                     log_sums.data() + at);
    });
    Values values(out.begin(), out.end());
    values.insert(values.end(), log_sums.begin(), log_sums.end());
    return values;
  };
  const auto want = [=](bool) {
    const Logits all = logits_of(*head);
    Values out;
    for (const int32_t row : rows) {
      const Values& logits = all[static_cast<size_t>(row)];
      out.insert(out.end(), logits.begin(), logits.end());
    }
    for (const int32_t row : rows) out.push_back(log_sum_of(all[static_cast<size_t>(row)]));
    return out;
  };
  return {"logits of " + std::to_string(n) + " rows", run, want, kFloatTolerance, kFloatTolerance};
}

// Per row: log p(target), greedy, best, log p(best); the first two only with targets.
Case score_case(TensorKind kind, int64_t n, bool with_targets) {
  const auto head = make_tensor(kind, kVocab, kWidth);
  const auto state = noise_floats(30, kStateRows * kWidth);
  const Logits all_logits = logits_of(*head);
  const auto rows = rows_of(n), targets = targets_of(n, all_logits);
  const auto run = [=](Backend& backend, int64_t split) {
    const auto weight = upload(backend, *head, 0, kVocab);
    const auto count = static_cast<size_t>(n);
    std::vector<float> logprobs(count), best_logprobs(count);
    std::vector<uint8_t> greedy(count);
    std::vector<int32_t> best(count);
    in_splits(n, split, [&](int64_t at, int64_t part) {
      HeadScores out{logprobs.data() + at, greedy.data() + at, best.data() + at,
                     best_logprobs.data() + at};
      if (!with_targets) out.logprobs = nullptr;
      backend.score_head(state.data(), rows.data() + at,
                         with_targets ? targets.data() + at : nullptr, part, *weight, out);
    });
    Values all;
    for (size_t i = 0; i < count; ++i) {
      for (const double x : {static_cast<double>(logprobs[i]), static_cast<double>(greedy[i]),
                             static_cast<double>(best[i]), static_cast<double>(best_logprobs[i])}) {
        all.push_back(x);
      }
    }
    return all;
  };
  const auto want = [=](bool) {
    Values all;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Values& logits = all_logits[static_cast<size_t>(rows[i])];
      const int32_t best = best_of(logits);
      const double total = log_sum_of(logits);
      all.push_back(with_targets ? logits[static_cast<size_t>(targets[i])] - total : 0.0);
      all.push_back(with_targets && targets[i] == best ? 1.0 : 0.0);
      all.push_back(best);
      all.push_back(logits[static_cast<size_t>(best)] - total);
    }
    return all;
  };
  return {"score_head of " + std::to_string(n) + " rows" + (with_targets ? "" : ", best alone"),
          run, want, kFloatTolerance, kFloatTolerance};
}

Case exit_gate_case(int64_t n) {
  constexpr float kBias = 0.25f;
  const auto state = noise_floats(30, kStateRows * kWidth), weight = noise_floats(31, kWidth);
  const auto rows = rows_of(n);
  const auto run = [=](Backend& backend, int64_t split) {
    std::vector<float> out(static_cast<size_t>(n));
    in_splits(n, split, [&](int64_t at, int64_t count) {
      backend.exit_gate(state.data(), rows.data() + at, count, kWidth, weight.data(), &kBias,
                        out.data() + at);
    });
    return Values(out.begin(), out.end());
  };
  const auto want = [=](bool) {
    Values out;
    for (const int32_t row : rows) {
      double sum = static_cast<double>(kBias);
      for (int64_t k = 0; k < kWidth; ++k) sum += noise(30, row * kWidth + k) * noise(31, k);
      out.push_back(sigmoid(sum));
    }
    return out;
  };
  return {"exit_gate of " + std::to_string(n) + " rows", run, want, kFloatTolerance,
          kFloatTolerance};
}

}  // namespace

std::vector<Case> scoring_cases() {
  std::vector<Case> cases;
  for (const int64_t n : {1, 7, 400}) {
    cases.push_back(logits_case(TensorKind::kF16, n));
    cases.push_back(score_case(TensorKind::kQ8, n, true));
    cases.push_back(score_case(TensorKind::kF16, n, false));
    cases.push_back(exit_gate_case(n));
  }
  return cases;
}

}  // namespace tinyloop
