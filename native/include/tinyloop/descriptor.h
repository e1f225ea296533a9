// What a model is, as data. The forward pass walks this record; no model family has a class.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tinyloop {

// Where a layer's norms stand. x is the residual, f a branch (attention or feed-forward).
enum class NormPlacement {
  kPre,       // x += f(norm_in(x))                  Llama
  kSandwich,  // x += norm_out(f(norm_in(x)))        Ouro
  kBranch,    // x += norm_out(f(x))                 OLMo
  kSum,       // x = norm_out(x + f(norm_in(x)))     Huginn
};

// What the loops' state starts from: the prelude's output, zeros, or a truncated normal drawn for
// each token from a generator keyed by (seed, position).
enum class StateInit { kInput, kZero, kNormal };

// How the prelude's output enters every loop: not at all, or state = adapter [state, input].
enum class Inject { kNone, kLinear };

enum class RopeStyle { kHalf, kPair };  // element j turns with j + head_dim / 2, or 2j with 2j + 1
enum class QkNorm {
  kNone,
  kHead,
  kFull
};  // before rotation: none, per head, or over the whole width

// The dims and the schedule of one model, read from a file's header. Counts are in elements,
// token ids or loops; nothing here is in bytes.
struct Descriptor {
  std::string family;  // for people; no arithmetic depends on it
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t ffn_size = 0;
  int64_t n_q_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t n_layers = 0;    // distinct layers, in the order prelude, core, coda (or low, high stack)
  int64_t n_prelude = 0;   // layers that run once, before the loops
  int64_t n_coda = 0;      // layers that run once, after the loops
  int64_t n_low = 0;       // layers of the low stack; 0: one stack
  int64_t low_cycles = 0;  // runs of the low stack in each loop, before one run of the high stack
  int64_t max_positions = 0;
  int64_t loops = 0;  // the depth the model was made for, and the default depth of a request
  double norm_eps = 0.0;
  NormPlacement norm_placement = NormPlacement::kPre;
  bool norm_weight = true;  // false: no norm has a weight
  bool loop_norm = true;  // the final norm ends every loop; its output is the next loop's residual.
                          // With two stacks: it ends every run of a stack
  bool exit_norm = false;  // the final norm also stands between the last loop and the coda
  StateInit state_init = StateInit::kInput;
  double state_std = 0.0;  // kNormal: standard deviation before the cut at three of them
  Inject inject = Inject::kNone;
  double embed_scale = 1.0;
  RopeStyle rope_style = RopeStyle::kHalf;
  QkNorm qk_norm = QkNorm::kNone;
  bool attn_bias = false;  // q, k, v get a bias before norm and rotation
  bool attn_gate =
      false;  // the attention's output is multiplied by sigmoid(gate), a fourth product
  bool prefix_lm = false;  // a prompt is attended in both directions
  bool exit_gate = false;
  bool tied_head = false;
  int64_t bos_id = -1;  // -1: the model has none
  std::vector<int64_t> eos_ids;
  bool add_bos = false;
  std::string chat_template;

  int64_t q_width() const { return n_q_heads * head_dim; }
  int64_t kv_width() const { return n_kv_heads * head_dim; }
  // Rows of the fused attention product: q, k, v, then the gate if there is one.
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  int64_t attn_width() const { return qkv_width() + (attn_gate ? q_width() : 0); }
  int64_t n_core() const { return n_layers - n_prelude - n_coda; }
  bool norm_in() const { return norm_placement != NormPlacement::kBranch; }
  bool norm_out() const { return norm_placement != NormPlacement::kPre; }
};

}  // namespace tinyloop
