// The operations of the forward pass. One interface; src/cpu implements it (and defines the
// numerics), src/cuda is to implement the same. Pointers are to the backend's own memory.
//
// Activations are FP16, or FP32 in the test-only numeric mode; `main` is always FP32. Rows are
// tokens. Every operation gives a row the same bits whatever rows stand beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "format.h"
#include "kv.h"
#include "memory.h"

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

struct AttentionShape {
  int64_t n_q_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
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

  virtual std::unique_ptr<Weight> upload(const TensorEntry& tensor, Account& account) = 0;
  virtual void allocate_workspace(const WorkspaceShape& shape, Account& account) = 0;

  // main[r] = row ids[r] of the weight
  virtual void embed(const Weight& weight, const int32_t* ids, int64_t rows, float* main) = 0;
  // out = weight * round(rms(main) * norm)
  virtual void norm_linear(const float* main, const float* norm, float eps, int64_t rows,
                           const Weight& weight, Rows out) = 0;
  // out = weight * in
  virtual void linear(Rows in, int64_t rows, const Weight& weight, Rows out) = 0;
  // main += weight * in
  virtual void linear_add(Rows in, int64_t rows, const Weight& weight, float* main) = 0;
  // main = rms(main) * norm
  virtual void norm(float* main, const float* norm, float eps, int64_t rows, int64_t width) = 0;
  // main += rms(branch) * norm
  virtual void norm_add(Rows branch, const float* norm, float eps, int64_t rows, int64_t width,
                        float* main) = 0;
  // Rotates q and k in place, then copies k and v of the rows to the plane's rows at keys, values.
  // rope: float32 [rows, head_dim], cosines then sines.
  virtual void rope_store(Rows qkv, const float* rope, int64_t rows, const AttentionShape& shape,
                          uint8_t* keys, uint8_t* values) = 0;
  // out = softmax(q k / sqrt(head_dim)) v over [prefix | own tokens up to itself], per head.
  virtual void attention(const std::vector<AttentionChunk>& chunks, const AttentionShape& shape,
                         int64_t plane, int64_t own_plane, Rows queries, Rows out) = 0;
  // out = silu(gate) * up; gate_up rows are gate then up, width each
  virtual void silu_mul(Rows gate_up, int64_t rows, int64_t width, Rows out) = 0;
  // For scored row i: log p(targets[i] | main row rows[i]) and whether targets[i] is the argmax.
  virtual void score_head(const float* main, const int32_t* rows, const int32_t* targets, int64_t n,
                          const Weight& head, float* logprobs, uint8_t* greedy) = 0;

  // Rows of one attention work item, so that a pass can cut its chunks.
  virtual int64_t attention_rows(const AttentionShape& shape) const = 0;
};

// The CPU backend. isa: "" for the best one here. Throws LoadError for one this machine lacks.
std::unique_ptr<Backend> make_cpu_backend(const std::string& isa, int threads, bool fp32);

}  // namespace tinyloop
