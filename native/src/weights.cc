#include "weights.h"

#include <set>

#include "tinyloop/errors.h"

namespace tinyloop {

namespace {

using Place = std::function<void(const Placement&)>;

// Says one descriptor's tensors, one after the other.
class Walk {
 public:
  Walk(const Descriptor& descriptor, const Place& place) : d_(descriptor), place_(place) {}

  void matrix(const std::string& name, int64_t rows, int64_t cols, std::unique_ptr<Weight>& to) {
    place_({name, rows, cols, nullptr, {{0, rows, &to}}, use_});
  }
  void vector(const std::string& name, int64_t size, Vector& to) {
    place_({name, size, 0, &to, {}, use_});
  }
  // Everything until the next layer is used once in a pass, but the adapter: once in a loop.
  void outside() { use_ = WeightUse::kOnce; }
  void in_loop() { use_ = WeightUse::kLoop; }
  void layer(int64_t index, bool split_qkv, Layer& layer) {
    const std::string at = "layers." + std::to_string(index) + ".";
    const bool loops = index >= d_.n_prelude && index < d_.n_layers - d_.n_coda;
    use_ = loops ? WeightUse::kLoop : WeightUse::kOnce;
    qkv(at + "qkv", split_qkv, layer.attention);
    if (d_.attn_bias) vector(at + "qkv_bias", d_.qkv_width(), layer.qkv_bias);
    if (d_.qk_norm != QkNorm::kNone) {
      const bool full = d_.qk_norm == QkNorm::kFull;
      vector(at + "q_norm", full ? d_.q_width() : d_.head_dim, layer.q_norm);
      vector(at + "k_norm", full ? d_.kv_width() : d_.head_dim, layer.k_norm);
    }
    matrix(at + "o", d_.hidden_size, d_.q_width(), layer.o);
    matrix(at + "gate_up", 2 * d_.ffn_size, d_.hidden_size, layer.gate_up);
    matrix(at + "down", d_.hidden_size, d_.ffn_size, layer.down);
    if (!d_.norm_weight) return;
    if (d_.norm_in()) {
      vector(at + "norm_attn_in", d_.hidden_size, layer.norm_attn_in);
      vector(at + "norm_ffn_in", d_.hidden_size, layer.norm_ffn_in);
    }
    if (d_.norm_out()) {
      vector(at + "norm_attn_out", d_.hidden_size, layer.norm_attn_out);
      vector(at + "norm_ffn_out", d_.hidden_size, layer.norm_ffn_out);
    }
  }

 private:
  void qkv(const std::string& name, bool split, AttentionWeights& to) {
    Placement placement{name, d_.attn_width(), d_.hidden_size, nullptr, {}, use_};
    if (!split) {
      placement.matrix = {{0, d_.attn_width(), &to.qkv}};
    } else {
      placement.matrix = {{0, d_.q_width(), &to.q}, {d_.q_width(), d_.qkv_width(), &to.kv}};
      if (d_.attn_gate) {
        placement.matrix.push_back({d_.qkv_width(), d_.attn_width(), &to.gate});
      }
    }
    place_(placement);
  }

  const Descriptor& d_;
  const Place& place_;
  WeightUse use_ = WeightUse::kOnce;
};

}  // namespace

void place_weights(const Descriptor& d, bool split_qkv, Weights& weights, const Place& place) {
  Walk walk(d, place);
  if (d.tied_head) walk.in_loop();
  walk.matrix("embed", d.vocab_size, d.hidden_size, weights.embed);
  walk.outside();
  walk.vector("rope.inv_freq", d.head_dim / 2, weights.inv_freq);
  if (d.inject == Inject::kLinear) {
    walk.in_loop();
    walk.matrix("adapter", d.hidden_size, 2 * d.hidden_size, weights.adapter);
    walk.outside();
  }
  if (d.n_low > 0) walk.vector("low_init", d.hidden_size, weights.low_init);
  weights.layers.resize(static_cast<size_t>(d.n_layers));
  for (int64_t i = 0; i < d.n_layers; ++i) {
    walk.layer(i, split_qkv, weights.layers[static_cast<size_t>(i)]);
  }
  walk.outside();
  if (d.norm_weight) walk.vector("final_norm", d.hidden_size, weights.final_norm);
  if (d.exit_gate) {
    walk.vector("exit_gate.weight", d.hidden_size, weights.exit_gate_weight);
    walk.vector("exit_gate.bias", 1, weights.exit_gate_bias);
  }
  walk.in_loop();
  if (!d.tied_head) walk.matrix("head", d.vocab_size, d.hidden_size, weights.head);
}

void load_weights(const ModelFile& file, bool split_qkv, Backend& backend, Account& account,
                  Weights& weights) {
  // Before the layers are made: n_layers may be a lie that the table does not bear out.
  if (static_cast<size_t>(file.descriptor.n_layers) > file.tensors.size()) {
    throw LoadError("cannot read the model file: descriptor.n_layers: " +
                    std::to_string(file.descriptor.n_layers) + " layers, but only " +
                    std::to_string(file.tensors.size()) + " tensors");
  }
  std::set<std::string> used;
  place_weights(file.descriptor, split_qkv, weights, [&](const Placement& p) {
    const TensorEntry& entry = file.require(p.name, p.rows, p.cols);
    check_crc(entry);
    used.insert(p.name);
    if (p.vector != nullptr) {
      p.vector->block = account.allocate(entry.bytes, Owner::kWeights, p.name.c_str());
      backend.write(p.vector->block.as<uint8_t>(), entry.data, entry.bytes);
    }
    for (const Destination& to : p.matrix) {
      *to.weight = backend.upload(entry, to.begin, to.end, p.use, account);
    }
  });
  for (const TensorEntry& entry : file.tensors) {
    if (used.count(entry.name) == 0) {
      throw LoadError("cannot read the model file: tensor '" + entry.name +
                      "': the descriptor has no place for it");
    }
  }
}

size_t weights_bytes(const ModelFile& file, bool split_qkv, const Backend& backend) {
  Weights nowhere;
  size_t total = 0;
  place_weights(file.descriptor, split_qkv, nowhere, [&](const Placement& p) {
    const TensorEntry& entry = file.require(p.name, p.rows, p.cols);
    if (p.vector != nullptr) total += accounted_bytes(entry.bytes, backend.alignment());
    for (const Destination& to : p.matrix) {
      for (const size_t bytes :
           backend.upload_bytes(entry.kind, to.end - to.begin, entry.cols, entry.group, p.use)) {
        total += accounted_bytes(bytes, backend.alignment());
      }
    }
  });
  return total;
}

}  // namespace tinyloop
