// The operations of one layer and of the head by themselves, at SmolLM2-135M's shape: milliseconds
// for `rows` rows, the median of some runs, as one line of JSON for each instruction set and thread
// count.
//
//     operations [rows=512] [isa[:mode[:group]]]...
//
// isa "" is the best one here; mode fp16 or bf16; groups of 32, 64 or 128 (64) share a scale.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "../native/cpp/checks.h"
#include "tinyloop/errors.h"

namespace tinyloop {
namespace {

constexpr int64_t kWidth = 576, kFfn = 1536, kVocab = 49152, kLayers = 30;
constexpr HeadShape kHeads{9, 3, 64};
constexpr int64_t kKv = 3 * 64, kQkv = kWidth + 2 * kKv;
constexpr int kRuns = 7;

template <typename Call>
double milliseconds(Call call) {
  std::vector<double> times;
  call();
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    times.push_back(time.count());
  }
  std::sort(times.begin(), times.end());
  return times[kRuns / 2];
}

class Layer {
 public:
  Layer(Backend& backend, int64_t rows, int64_t group)
      : backend_(backend),
        rows_(rows),
        group_(group),
        state_(noise_floats(1, rows * kWidth)),
        qkv_(false, rows, kQkv, 2),
        mixed_(false, rows, kWidth, 3),
        gate_up_(false, rows, 2 * kFfn, 4),
        inner_(false, rows, kFfn, 5),
        rope_(static_cast<size_t>(rows * 64), 0.5f),
        keys_(static_cast<size_t>(2 * rows * kKv)),
        values_(static_cast<size_t>(2 * rows * kKv)) {
    qkv_weight_ = weight(kQkv, kWidth);
    o_ = weight(kWidth, kWidth);
    up_ = weight(2 * kFfn, kWidth);
    down_ = weight(kWidth, kFfn);
    head_ = weight(kVocab, kWidth);
    own_.keys = keys_.data();
    own_.values = values_.data();
    own_.end = rows;
    ChunkWork work;
    for (int64_t row = 0; row < rows; row += backend.attention_rows(kHeads)) {
      const int64_t n = std::min(backend.attention_rows(kHeads), rows - row);
      work.attention.push_back({&none_, 0, {{row, n, row, 0, own_}}, n});
    }
    plan_ = backend.plan_chunk(std::move(work));
    for (int64_t row = 0; row < rows; ++row) {
      indices_.push_back(static_cast<int32_t>(row));
    }
  }

  // name: milliseconds of one call, and how many calls a pass has.
  void measure(const char* label) {
    const NormSpec norm{true, state_.data(), 1e-5f};
    double total = 0.0;
    std::printf("{\"case\": \"%s\", \"rows\": %ld, \"ms\": {", label, static_cast<long>(rows_));
    const auto say = [&](const char* name, int64_t calls, auto call) {
      const double ms = milliseconds(call);
      total += ms * static_cast<double>(calls);
      std::printf("\"%s\": %.3f, ", name, ms);
    };
    say("qkv", kLayers,
        [&] { backend_.norm_linear(state_.data(), norm, rows_, *qkv_weight_, qkv_.from()); });
    say("rotate", kLayers,
        [&] { backend_.prepare_heads(qkv_.from(), rope_.data(), rows_, kHeads, {}); });
    say("store", kLayers,
        [&] { backend_.store_kv(qkv_.from(), kHeads, KvRun{0, rows_, 0, own_}, 0); });
    say("attention", kLayers,
        [&] { backend_.attention(*plan_, kHeads, 0, qkv_.from(), mixed_.from()); });
    std::vector<float> sum = state_;
    say("o", kLayers, [&] { backend_.linear_add(mixed_.from(), rows_, *o_, sum.data()); });
    say("gate_up", kLayers,
        [&] { backend_.norm_linear(state_.data(), norm, rows_, *up_, gate_up_.from()); });
    say("silu", kLayers, [&] { backend_.silu_mul(gate_up_.from(), rows_, kFfn, inner_.from()); });
    say("down", kLayers, [&] { backend_.linear_add(inner_.from(), rows_, *down_, sum.data()); });
    std::vector<float> logprobs(static_cast<size_t>(rows_));
    HeadScores out;
    out.logprobs = logprobs.data();
    say("head", 1, [&] {
      backend_.score_head(state_.data(), indices_.data(), indices_.data(), rows_, *head_, out);
    });
    std::printf("\"pass\": %.1f}, \"tokens_per_s\": %.0f}\n", total,
                static_cast<double>(rows_) / total * 1e3);
    std::fflush(stdout);
  }

 private:
  std::unique_ptr<Weight> weight(int64_t outputs, int64_t inputs) {
    return upload(backend_, *make_tensor(TensorKind::kQ4, outputs, inputs, group_), 0, outputs);
  }

  Backend& backend_;
  int64_t rows_, group_;
  std::vector<float> state_;
  Acts qkv_, mixed_, gate_up_, inner_;
  std::vector<float> rope_;
  std::vector<uint8_t> keys_, values_;
  std::unique_ptr<Weight> qkv_weight_, o_, up_, down_, head_;
  KvSegment own_;
  std::vector<KvSegment> none_;
  std::unique_ptr<ChunkPlan> plan_;
  std::vector<int32_t> indices_;
};

void measure(const std::string& choice, int threads, int64_t rows) {
  std::istringstream parts(choice);
  std::string isa, mode, group;
  std::getline(parts, isa, ':');
  std::getline(parts, mode, ':');
  std::getline(parts, group);
  const bool split = mode == "bf16";
  const std::string label = choice + " x" + std::to_string(threads);
  try {
    const auto backend =
        make_cpu_backend(isa, threads, split ? NumericMode::kBf16 : NumericMode::kFp16);
    const auto account = std::make_shared<Account>(0);
    backend->allocate_workspace({kFfn, 2 * kFfn, kVocab, kWidth, 9, 3, 64, rows, rows}, *account);
    Layer(*backend, rows, group.empty() ? 64 : std::stoll(group)).measure(label.c_str());
  } catch (const LoadError& error) {
    std::printf("{\"case\": \"%s\", \"unavailable\": \"%s\"}\n", label.c_str(), error.what());
  }
}

}  // namespace
}  // namespace tinyloop

int main(int argc, char** argv) {
  const int64_t rows = argc > 1 ? std::atoll(argv[1]) : 512;
  std::vector<std::string> choices(argv + std::min(argc, 2), argv + argc);
  if (choices.empty()) choices = {":fp16", ":bf16"};
  for (const std::string& choice : choices) {
    for (const int threads : {1, 2}) tinyloop::measure(choice, threads, rows);
  }
  return 0;
}
