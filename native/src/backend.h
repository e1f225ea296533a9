// The operations of the forward pass. One interface; src/cpu implements it (and defines the
// numerics), src/cuda is to implement the same. Pointers are to the backend's own memory.
//
// Activations are FP16, or FP32 in the test-only numeric mode fp32; states (`main` and its like)
// are always FP32. Rows are tokens. Every operation gives a row the same bits whatever rows stand
// beside it, and however many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "format.h"
#include "kv.h"
#include "memory.h"
#include "tinyloop/descriptor.h"
#include "tinyloop/tinyloop.h"

namespace tinyloop {

// An uploaded weight [outputs, inputs]; its layout belongs to the backend.
class Weight {
 public:
  virtual ~Weight() = default;
};

// Rows of activations: element c of row r is at data + (r * stride + c) * activation_bytes().
struct Rows {
  uint8_t* data = nullptr;
  int64_t stride = 0;
};

// A norm over the last axis: rms(x) * weight; weight null: rms(x); not present: x itself.
struct NormSpec {
  bool present = true;
  const float* weight = nullptr;
  float eps = 0.0f;
};

// What happens to the heads of q and k between their product and the attention, in this order: bias
// (also to v), norm, rotation; in float32, rounded once.
struct HeadShape {
  int64_t n_q_heads = 0;  // 0: the rows hold k and v only
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
};
struct HeadPrep {
  const float* bias = nullptr;  // float32 [q + 2 kv] of the rows' own layout, or null
  QkNorm norm = QkNorm::kNone;
  const float* q_norm = nullptr;  // float32 [head_dim] or [whole width]
  const float* k_norm = nullptr;
  float eps = 0.0f;
  bool adjacent_pairs = false;
};

struct HeadScores {                // each may be null
  float* logprobs = nullptr;       // log p(target)
  uint8_t* greedy = nullptr;       // whether the target is the argmax (the lowest id on ties)
  int32_t* best = nullptr;         // the argmax; -1 where no logit is a number
  float* best_logprobs = nullptr;  // its log p
};

// Sizes that decide the backend's workspace.
struct WorkspaceShape {
  int64_t max_inputs = 0;  // of any product
  int64_t vocab_size = 0;
  int64_t head_dim = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // "cpu/avx2/k1": what decides bits besides the model and the modes.
  virtual std::string identity() const = 0;
  virtual size_t activation_bytes() const = 0;

  // Outputs [begin, end) of a tensor as a weight of its own.
  virtual std::unique_ptr<Weight> upload(const TensorEntry& tensor, int64_t begin, int64_t end,
                                         Account& account) = 0;
  // What upload() would allocate, in the order in which it does, before rounding.
  virtual std::vector<size_t> upload_bytes(TensorKind kind, int64_t outputs, int64_t inputs,
                                           int64_t group) const = 0;
  virtual void allocate_workspace(const WorkspaceShape& shape, Account& account) = 0;
  virtual std::vector<size_t> workspace_bytes(const WorkspaceShape& shape) const = 0;

  // state[r] = row ids[r] of the weight, times scale (exactly unchanged when scale is 1)
  virtual void embed(const Weight& weight, const int32_t* ids, int64_t rows, float scale,
                     float* state) = 0;
  // out = weight * round(norm(state))
  virtual void norm_linear(const float* state, const NormSpec& norm, int64_t rows,
                           const Weight& weight, Rows out) = 0;
  // out = weight * in
  virtual void linear(Rows in, int64_t rows, const Weight& weight, Rows out) = 0;
  // state += weight * in
  virtual void linear_add(Rows in, int64_t rows, const Weight& weight, float* state) = 0;
  // state = weight * [round(state), round(input)]; weight has 2 width inputs and width outputs
  virtual void adapter(float* state, const float* input, int64_t rows, const Weight& weight) = 0;
  // state = norm(state); nothing where the norm is not present
  virtual void norm(float* state, const NormSpec& norm, int64_t rows, int64_t width) = 0;
  // state += norm(branch)
  virtual void norm_add(Rows branch, const NormSpec& norm, int64_t rows, int64_t width,
                        float* state) = 0;
  // Row r of a matrix becomes what row from[r] was, for r in [0, rows); `from` is a permutation.
  virtual void permute(void* data, int64_t row_bytes, int64_t rows, const int32_t* from) = 0;
  // state += other
  virtual void add(float* state, const float* other, int64_t rows, int64_t width) = 0;
  // state = embed_std * a normal cut at three deviations, of (seed, position, channel)
  virtual void init_normal(float* state, const int32_t* positions, int64_t rows, int64_t width,
                           float std, uint64_t seed) = 0;

  // out = round(norm(state)); each run's `to` gets its stored form (nothing is kept where to.codes
  // is null); read_back = what a later read of that form gives, also where nothing is kept.
  // read_back is not written when the format is kActivations: there it equals out. Runs cover the
  // rows in order.
  virtual void norm_store(const float* state, const NormSpec& norm, int64_t rows, int64_t width,
                          const std::vector<HiddenRun>& runs, int64_t plane, Rows out,
                          Rows read_back) = 0;
  // Tokens [token, token + rows) of a stored plane as activations.
  virtual void load_hidden(const HiddenSegment& from, int64_t plane, int64_t token, int64_t rows,
                           int64_t width, Rows out) = 0;

  // Bias, norm and rotation of the heads in place. rows hold q, k, v heads (q absent when n_q_heads
  // is 0). rope: float32 [rows, head_dim], cosines then sines.
  virtual void prepare_heads(Rows qkv, const float* rope, int64_t rows, const HeadShape& shape,
                             const HeadPrep& prep) = 0;
  // k and v of the rows (which follow shape.n_q_heads heads of q) to where the runs say.
  virtual void store_kv(Rows qkv, const HeadShape& shape, const std::vector<KvRun>& runs,
                        int64_t plane) = 0;
  // out = softmax(q k / sqrt(head_dim)) v over what each row may see, per head.
  virtual void attention(const std::vector<AttentionChunk>& chunks, const HeadShape& shape,
                         int64_t plane, Rows queries, Rows out) = 0;
  // out *= sigmoid(gate)
  virtual void gate_mul(Rows gate, int64_t rows, int64_t width, Rows out) = 0;
  // out = silu(gate) * up; gate_up rows are gate then up, width each
  virtual void silu_mul(Rows gate_up, int64_t rows, int64_t width, Rows out) = 0;

  // For i in [0, n): the head at state row rows[i]. targets may be null when only best is asked.
  virtual void score_head(const float* state, const int32_t* rows, const int32_t* targets,
                          int64_t n, const Weight& head, const HeadScores& out) = 0;
  // float32 logits [n, vocab] of state rows rows[i], and the log of each row's sum of exponentials:
  // logit - log_sum, rounded to float32, is what score_head() gives.
  virtual void logits(const float* state, const int32_t* rows, int64_t n, const Weight& head,
                      float* out, double* log_sums) = 0;
  // out[i] = sigmoid(weight . state row rows[i] + bias), float32 throughout
  virtual void exit_gate(const float* state, const int32_t* rows, int64_t n, int64_t width,
                         const float* weight, float bias, float* out) = 0;

  // Rows of one attention work item, so that a pass can cut its chunks.
  virtual int64_t attention_rows(const HeadShape& shape) const = 0;
};

// The CPU backend. isa: "" for the best one here. Throws LoadError for one this machine lacks.
std::unique_ptr<Backend> make_cpu_backend(const std::string& isa, int threads, NumericMode mode);

}  // namespace tinyloop
