#include "head.h"

namespace tinyloop {

void HeadRows::add(int64_t row, int32_t target) {
  rows()[n_] = static_cast<int32_t>(row);
  targets()[n_] = target;
  ++n_;
}

void HeadRows::score(const Pass& pass) {
  HeadScores out;
  out.logprobs = scores(0);
  out.greedy = reinterpret_cast<uint8_t*>(scores(4));
  engine_.backend->score_head(pass.main(), rows(), targets(), n_, engine_.weights.output_head(),
                              out);
  engine_.counters.head_rows += n_;
}

void HeadRows::best(const Pass& pass) {
  HeadScores out;
  out.best = reinterpret_cast<int32_t*>(scores(3));
  out.best_logprobs = scores(1);
  engine_.backend->score_head(pass.main(), rows(), nullptr, n_, engine_.weights.output_head(), out);
  engine_.counters.head_rows += n_;
}

void HeadRows::gates(const Pass& pass) {
  const Weights& w = engine_.weights;
  if (!engine_.descriptor.exit_gate) {
    throw InvalidInputError("cannot read the exit gate: the model has none");
  }
  engine_.backend->exit_gate(pass.main(), rows(), n_, engine_.descriptor.hidden_size,
                             w.exit_gate_weight.data(), w.exit_gate_bias.data(), scores(2));
}

void HeadRows::need_logits() {
  Block& block = engine_.buffers.logit_rows;
  if (block) return;
  block = engine_.host_account->allocate(
      static_cast<size_t>(kLogitRows * engine_.descriptor.vocab_size) * sizeof(float),
      Owner::kLogitRow, "logit rows");
}

const float* HeadRows::logits(const Pass& pass, double* log_sums) {
  Block& block = engine_.buffers.logit_rows;
  engine_.backend->logits(pass.main(), rows(), n_, engine_.weights.output_head(), block.as<float>(),
                          log_sums);
  engine_.counters.head_rows += n_;
  return block.as<float>();
}

}  // namespace tinyloop
