// What a model is, as data. The forward pass walks this record; no model family has a class.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tinyloop {

enum class NormPlacement {
  kPre,       // x += branch(norm(x))
  kSandwich,  // x += norm_out(branch(norm_in(x)))
};

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
  int64_t n_layers = 0;  // distinct layers; one plane of K/V per (layer, loop)
  int64_t max_positions = 0;
  int64_t loops = 0;  // the depth the model was made for, and the default depth of a request
  double norm_eps = 0.0;
  NormPlacement norm_placement = NormPlacement::kPre;
  bool loop_norm = true;  // the final norm ends every loop; its output is the next loop's residual
  bool exit_gate = false;
  bool tied_head = false;
  int64_t bos_id = -1;  // -1: the model has none
  std::vector<int64_t> eos_ids;
  bool add_bos = false;
  std::string chat_template;

  int64_t q_width() const { return n_q_heads * head_dim; }
  int64_t kv_width() const { return n_kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  // Plane of a (layer, loop): planes of one loop lie together, so a shallower request reads a
  // prefix of a deeper cache.
  int64_t plane(int64_t layer, int64_t loop) const { return loop * n_layers + layer; }
};

}  // namespace tinyloop
