// The weights of a model: where each tensor of the file goes, for every family.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "cache.h"
#include "format.h"
#include "memory.h"

namespace tinyloop {

// A vector of the model (a norm's weight), float32; null when the model has none.
struct Vector {
  Block block;
  const float* data() const { return block.as<float>(); }
};

// The fused product of q, k, v (and gate), or in a mode that stores hidden states its parts: q and
// the gate read the layer's input, k and v what is read back from the store.
struct AttentionWeights {
  std::unique_ptr<Weight> qkv;
  std::unique_ptr<Weight> q, kv, gate;
};

struct Layer {
  AttentionWeights attention;
  std::unique_ptr<Weight> o, gate_up, down;
  Vector qkv_bias, q_norm, k_norm;
  Vector norm_attn_in, norm_attn_out, norm_ffn_in, norm_ffn_out;
};

struct Weights {
  std::unique_ptr<Weight> embed, head;  // head is null when tied
  std::unique_ptr<Weight> adapter;
  std::vector<Layer> layers;
  Vector final_norm, inv_freq, low_init, exit_gate_weight, exit_gate_bias;
  const Weight& output_head() const { return head ? *head : *embed; }
};

// One tensor of a model: its name, its dims (cols 0: a vector), and where it goes. A matrix may go
// to several weights, each of a range of its rows.
struct Destination {
  int64_t begin = 0;
  int64_t end = 0;
  std::unique_ptr<Weight>* weight = nullptr;
};
struct Placement {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  Vector* vector = nullptr;
  std::vector<Destination> matrix;
  WeightUse use = WeightUse::kOnce;
};

// Calls `place` for every tensor that a model of this descriptor has, in file order. Resizes
// `weights.layers`.
void place_weights(const Descriptor& descriptor, bool split_qkv, Weights& weights,
                   const std::function<void(const Placement&)>& place);

// Uploads all tensors of a file. Throws LoadError naming a tensor that is missing, unknown or
// damaged.
void load_weights(const ModelFile& file, bool split_qkv, Backend& backend, Account& account,
                  Weights& weights);

// The exact bytes that load_weights() will take from the account.
size_t weights_bytes(const ModelFile& file, bool split_qkv, const Backend& backend);

}  // namespace tinyloop
