// The operations of the forward pass. One interface; src/cpu implements it (and defines the
// numerics), src/cuda the same on a GPU. Activations, states, weights, caches and their places are
// in the backend's own memory; what a call names "host" (ids, positions, rows, scores) is in the
// process's, is read before the call returns, and is written when it returns. Operations take
// effect in the order of the calls, and may still run when a call without host results returns.
//
// Activations are FP16, or FP32 in the test-only numeric mode fp32; states (`main` and its like)
// are always FP32. Rows are tokens. Every operation gives a row the same bits whatever rows stand
// beside it, and however many.
#pragma once

#include <compare>
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

struct HeadScores {                // host; each may be null
  float* logprobs = nullptr;       // log p(target)
  uint8_t* greedy = nullptr;       // whether the target is the argmax (the lowest id on ties)
  int32_t* best = nullptr;         // the argmax; -1 where no logit is a number
  float* best_logprobs = nullptr;  // its log p
};

// Sizes that decide the backend's workspace.
struct WorkspaceShape {
  int64_t max_inputs = 0;   // of any product
  int64_t max_outputs = 0;  // of any product but the head's
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t n_q_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rows = 0;          // of a pass
  int64_t scratch_rows = 0;  // of a chunk
};

// How often a weight is used: once in a pass, or in every loop or for every scored row. What the
// FP16 cache of a backend goes by.
enum class WeightUse { kOnce, kLoop };

// Rows of a pass that go through a layer together: what they attend to and where they are kept.
struct ChunkWork {
  std::vector<AttentionChunk> attention;
  std::vector<KvRun> kv;
  std::vector<HiddenRun> hidden;
};

// The same in the form that the backend reads. It must not outlive what `work` points to.
class ChunkPlan {
 public:
  virtual ~ChunkPlan() = default;
};

// Names a run of operations that is the same each time but for what memory and plans hold.
struct StepKey {
  enum class Part { kBefore, kLoop, kAfter };
  Part part = Part::kLoop;
  int loop = 0;
  int64_t rows = 0;
  auto operator<=>(const StepKey&) const = default;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // "cpu/avx2/k1": what decides bits besides the model and the modes.
  virtual std::string identity() const = 0;
  virtual size_t activation_bytes() const = 0;

  // Opens the device. Before it only identity(), activation_bytes() and the sizes may be asked for.
  // Throws LoadError.
  virtual void start() {}
  // Called in the thread that is about to call operations, before the first and after the last.
  virtual void enter() {}
  virtual void leave() noexcept {}
  // Where its blocks come from, and what their sizes are rounded up to.
  virtual std::shared_ptr<MemorySource> memory() const { return host_memory(); }
  virtual size_t alignment() const { return kHostAlignment; }
  // How often the calling thread has waited for the device, since the start.
  virtual int64_t waits() const { return 0; }
  // Whether its memory is the process's own: then host arrays count as its memory too.
  virtual bool is_host() const { return true; }

  // Host to the backend, back, and within. Ranges do not overlap.
  virtual void write(void* to, const void* host, size_t bytes) = 0;
  virtual void read(void* host, const void* from, size_t bytes) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  virtual void fill_zero(void* to, size_t bytes) = 0;

  // Outputs [begin, end) of a tensor as a weight of its own.
  virtual std::unique_ptr<Weight> upload(const TensorEntry& tensor, int64_t begin, int64_t end,
                                         WeightUse use, Account& account) = 0;
  // What upload() would allocate, in the order in which it does, before rounding.
  virtual std::vector<size_t> upload_bytes(TensorKind kind, int64_t outputs, int64_t inputs,
                                           int64_t group, WeightUse use) const = 0;
  virtual void allocate_workspace(const WorkspaceShape& shape, Account& account) = 0;
  virtual std::vector<size_t> workspace_bytes(const WorkspaceShape& shape) const = 0;

  // state[r] = row ids[r] of the weight, times scale (exactly unchanged when scale is 1); ids: host
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
  // Row r of a matrix becomes what row from[r] was, for r in [0, rows); `from` is a permutation,
  // host. At most max(rows of a pass) rows of hidden_size floats.
  virtual void permute(void* data, int64_t row_bytes, int64_t rows, const int32_t* from) = 0;
  // state += other
  virtual void add(float* state, const float* other, int64_t rows, int64_t width) = 0;
  // state[r] = row, for every r
  virtual void broadcast(float* state, const float* row, int64_t rows, int64_t width) = 0;
  // state = embed_std * a normal cut at three deviations, of (seed, position, channel); positions:
  // host
  virtual void init_normal(float* state, const int32_t* positions, int64_t rows, int64_t width,
                           float std, uint64_t seed) = 0;

  // The plans of a pass live together; the next pass begins when all of them are gone.
  virtual std::unique_ptr<ChunkPlan> plan_chunk(ChunkWork work) = 0;

  // out = round(norm(state)); each hidden run's `to` gets its stored form (nothing is kept where
  // to.codes is null); read_back = what a later read of that form gives, also where nothing is
  // kept. read_back is not written when the format is kActivations: there it equals out. Runs cover
  // the rows in order.
  virtual void norm_store(const float* state, const NormSpec& norm, int64_t rows, int64_t width,
                          const ChunkPlan& plan, int64_t plane, Rows out, Rows read_back) = 0;
  // Tokens [token, token + rows) of a stored plane as activations.
  virtual void load_hidden(const HiddenSegment& from, int64_t plane, int64_t token, int64_t rows,
                           int64_t width, Rows out) = 0;

  // Of each row its position's rotation: float32 [rows, head_dim], cosines then sines, of the
  // angles position * inv_freq[i], which are taken in double. positions: host; inv_freq: float32
  // [head_dim / 2].
  virtual void rope(const float* inv_freq, int64_t head_dim, const int32_t* positions, int64_t rows,
                    float* out) = 0;
  // Bias, norm and rotation of the heads in place. rows hold q, k, v heads (q absent when n_q_heads
  // is 0). rope: float32 [rows, head_dim], cosines then sines.
  virtual void prepare_heads(Rows qkv, const float* rope, int64_t rows, const HeadShape& shape,
                             const HeadPrep& prep) = 0;
  // k and v of the rows (which follow shape.n_q_heads heads of q) to where the plan's runs say, or
  // one run.
  virtual void store_kv(Rows qkv, const HeadShape& shape, const ChunkPlan& plan, int64_t plane) = 0;
  virtual void store_kv(Rows qkv, const HeadShape& shape, const KvRun& run, int64_t plane) = 0;
  // out = softmax(q k / sqrt(head_dim)) v over what each row may see, per head.
  virtual void attention(const ChunkPlan& plan, const HeadShape& shape, int64_t plane, Rows queries,
                         Rows out) = 0;
  // out *= sigmoid(gate)
  virtual void gate_mul(Rows gate, int64_t rows, int64_t width, Rows out) = 0;
  // out = silu(gate) * up; gate_up rows are gate then up, width each
  virtual void silu_mul(Rows gate_up, int64_t rows, int64_t width, Rows out) = 0;

  // For i in [0, n): the head at state row rows[i]. targets may be null when only best is asked.
  // Both host.
  virtual void score_head(const float* state, const int32_t* rows, const int32_t* targets,
                          int64_t n, const Weight& head, const HeadScores& out) = 0;
  // float32 logits [n, vocab] of state rows rows[i], and the log of each row's sum of exponentials:
  // logit - log_sum, rounded to float32, is what score_head() gives. rows, out, log_sums: host.
  virtual void logits(const float* state, const int32_t* rows, int64_t n, const Weight& head,
                      float* out, double* log_sums) = 0;
  // out[i] = sigmoid(weight . state row rows[i] + *bias), float32 throughout; rows, out: host
  virtual void exit_gate(const float* state, const int32_t* rows, int64_t n, int64_t width,
                         const float* weight, const float* bias, float* out) = 0;

  // A decode step brackets the layers of a part of the schedule with these. `plan` is the only
  // chunk. Where begin_steps() returns false the backend runs what it recorded under the same key,
  // and the caller leaves the operations out. Between the two calls no host array is used.
  virtual bool begin_steps(const StepKey& /*key*/, const ChunkPlan& /*plan*/) { return true; }
  // False: what was recorded could not be run. The caller does the same once more, and
  // begin_steps() then records nothing.
  virtual bool end_steps() { return true; }

  // Rows of one attention work item, so that a pass can cut its chunks.
  virtual int64_t attention_rows(const HeadShape& shape) const = 0;
};

struct CudaOptions {
  int device = 0;
  bool fp32 = false;
  std::string fp16_cache = "off";  // "off" | "loop" | "all": which weights are kept in FP16 too
  std::string packages;            // where the wheel of cuBLASLt may be
  bool fast = false;  // decode steps of few rows in another numeric class, with shorter chains
};
// The CUDA backend; no device is touched before start(). Throws LoadError where the build has none.
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);

// Whether the build has a CUDA backend, and the devices that it could use now: none without a
// driver. Asks the driver on each call; makes no context.
bool has_cuda_backend();
struct CudaDevice {
  int index = 0;
  std::string name;
  int capability = 0;  // 90 for 9.0
  size_t total_bytes = 0;
};
std::vector<CudaDevice> cuda_devices();

// The CPU backend. isa: "" for the best one here. Throws LoadError for one this machine lacks.
std::unique_ptr<Backend> make_cpu_backend(const std::string& isa, int threads, NumericMode mode);

}  // namespace tinyloop
