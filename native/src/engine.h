// The engine behind a Model: weights, buffers and the one-forward-at-a-time rule.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "memory.h"
#include "tinyloop/tinyloop.h"

namespace tinyloop {

// A vector of the model (a norm's weight), float32.
struct Vector {
  Block block;
  const float* data() const { return block.as<float>(); }
};

struct Layer {
  std::unique_ptr<Weight> qkv, o, gate_up, down;
  Vector norm_attn_in, norm_attn_out, norm_ffn_in, norm_ffn_out;  // *_out: sandwich norms only
};

struct Weights {
  std::unique_ptr<Weight> embed, head;  // head is null when tied
  std::vector<Layer> layers;
  Vector final_norm, inv_freq, exit_gate_weight, exit_gate_bias;
  const Weight& output_head() const { return head ? *head : *embed; }
};

// Reusable activations, allocated once at load. `main` is FP32 and always max_seq_len rows; the
// scratch has prefill_chunk rows when that is set. Row widths are in elements.
struct BufferPool {
  Block main;       // float32 [max_seq_len, hidden]
  Block norm;       // [scratch rows, hidden]
  Block scratch1;   // [scratch rows, max(q + 2 kv, 2 ffn)]
  Block attn_down;  // [scratch rows, max(q, ffn)]
  Block pass_kv;  // keys then values of one plane, [max_seq_len, kv] each: a scored sequence's own
                  // tokens are in the pass whole, so no other plane of theirs is ever read again
  Block rope;     // float32 [max_seq_len, head_dim]
  Block row_ids;  // int32 [3, max_seq_len]: token ids, scored rows, the scored rows' targets
  Block row_scores;  // float32 [max_seq_len], then uint8 [max_seq_len]: what the head gives
  int64_t scratch_rows = 0;
  int64_t scratch1_width = 0;
  int64_t attn_down_width = 0;
};

// Totals since load, for tests and reports.
struct Counters {
  std::atomic<int64_t> rows{0}, head_rows{0}, passes{0};
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // All phases of a load, or LoadError / OutOfMemoryError with everything released.
  static std::shared_ptr<Engine> load(const std::string& path, const LoadOptions& options);

  std::string numerics_id() const;
  // Throws ClosedHandleError after close(), ConcurrentUseError in a forked child.
  void require_usable() const;
  void close() { closed_ = true; }
  bool closed() const { return closed_; }

  Descriptor descriptor;
  std::map<std::string, std::string> metadata;
  LoadOptions options;  // resolved: no empty strings
  std::shared_ptr<Account> account;
  std::unique_ptr<Backend> backend;
  Weights weights;
  BufferPool buffers;
  Counters counters;
  std::atomic_flag in_use = ATOMIC_FLAG_INIT;

 private:
  void load_weights(const struct ModelFile& file);
  void allocate_buffers();
  std::atomic<bool> closed_{false};
  pid_t owner_process_ = 0;
};

// Held for the length of a forward. Throws ConcurrentUseError if another holds it.
class ForwardGuard {
 public:
  explicit ForwardGuard(Engine& engine);
  ~ForwardGuard() { engine_.in_use.clear(std::memory_order_release); }
  ForwardGuard(const ForwardGuard&) = delete;
  ForwardGuard& operator=(const ForwardGuard&) = delete;

 private:
  Engine& engine_;
};

}  // namespace tinyloop
