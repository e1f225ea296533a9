#include "pass.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <string>

namespace tinyloop {

namespace {

// Cuts the sequences into attention work items of at most `limit` rows. Neighbours on one prefix
// share an item only if the prefix has a whole tile to share.
std::vector<AttentionChunk> cut_chunks(const std::vector<PassSequence>& sequences,
                                       const std::vector<const std::vector<KvSegment>*>& prefixes,
                                       const std::vector<KvSegment>& own, int64_t limit,
                                       int64_t first_row, int64_t end_row) {
  std::vector<AttentionChunk> chunks;
  int64_t row = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const PassSequence& sequence = sequences[s];
    const int64_t prefix_length = sequence.prefix ? sequence.prefix->length() : 0;
    const int64_t sequence_end = std::min(row + sequence.rows, end_row);
    for (int64_t at = std::max(row, first_row); at < sequence_end;) {
      const bool joins = !chunks.empty() && chunks.back().prefix == prefixes[s] &&
                         prefix_length >= kKeyTile && chunks.back().rows < limit;
      if (!joins) chunks.push_back({prefixes[s], prefix_length, {}, 0});
      AttentionChunk& chunk = chunks.back();
      const int64_t rows = std::min(sequence_end - at, limit - chunk.rows);
      chunk.pieces.push_back({at - first_row, rows, prefix_length + at - row, own[s]});
      chunk.rows += rows;
      at += rows;
    }
    row += sequence.rows;
  }
  return chunks;
}

// The walk over the schedule. Row ranges of the scratch are chunks of buffers.scratch_rows.
class Pass {
 public:
  Pass(Engine& engine, const std::vector<PassSequence>& sequences, int depth, PrefixState* keep)
      : engine_(engine),
        d_(engine.descriptor),
        b_(engine.buffers),
        backend_(*engine.backend),
        sequences_(sequences),
        depth_(depth),
        keep_(keep),
        shape_{d_.n_q_heads, d_.n_kv_heads, d_.head_dim},
        eps_(static_cast<float>(d_.norm_eps)) {}

  void run() {
    place_rows();
    place_keys();
    place_prefixes();
    for (int64_t begin = 0; begin < rows_; begin += b_.scratch_rows) {
      const int64_t end = std::min(rows_, begin + b_.scratch_rows);
      chunks_.push_back(
          {begin, end,
           cut_chunks(sequences_, prefixes_, own_, backend_.attention_rows(shape_), begin, end)});
    }
    backend_.embed(*engine_.weights.embed, ids(), rows_, main(0));
    for (int loop = 0; loop < depth_; ++loop) {
      for (int64_t layer = 0; layer < d_.n_layers; ++layer) run_layer(layer, loop);
      backend_.norm(main(0), engine_.weights.final_norm.data(), eps_, rows_, d_.hidden_size);
    }
    engine_.counters.rows += rows_;
    engine_.counters.passes += 1;
  }

 private:
  struct RowChunk {
    int64_t begin, end;
    std::vector<AttentionChunk> attention;
  };

  int32_t* ids() const { return b_.row_ids.as<int32_t>(); }
  float* main(int64_t row) const { return b_.main.as<float>() + row * d_.hidden_size; }
  Rows norm() const { return {b_.norm.as<uint8_t>(), d_.hidden_size}; }
  Rows attn_down(int64_t width) const { return {b_.attn_down.as<uint8_t>(), width}; }
  Rows scratch1(int64_t width) const { return {b_.scratch1.as<uint8_t>(), width}; }

  // Token ids and rotation angles of every row. Angles in double from the file's float32
  // frequencies: position * frequency loses nothing at any position.
  void place_rows() {
    const float* frequency = engine_.weights.inv_freq.data();
    const int64_t half = d_.head_dim / 2;
    float* rope = b_.rope.as<float>();
    for (const PassSequence& sequence : sequences_) {
      const int64_t start = sequence.prefix ? sequence.prefix->length() : 0;
      std::copy_n(sequence.ids, sequence.rows, ids() + rows_);
      check_copied(rows_, sequence.rows);
      for (int64_t i = 0; i < sequence.rows; ++i, ++rows_) {
        for (int64_t j = 0; j < half; ++j) {
          const double angle = static_cast<double>(start + i) * static_cast<double>(frequency[j]);
          rope[rows_ * d_.head_dim + j] = static_cast<float>(std::cos(angle));
          rope[rows_ * d_.head_dim + half + j] = static_cast<float>(std::sin(angle));
        }
      }
    }
  }

  // The ids were checked when the call began, but they are the caller's: another thread may have
  // changed them since, and what is used from here on is the copy.
  void check_copied(int64_t first, int64_t n) const {
    for (int64_t i = first; i < first + n; ++i) {
      if (ids()[i] < 0 || ids()[i] >= d_.vocab_size) {
        throw InvalidInputError("cannot run a pass: token id " + std::to_string(ids()[i]) +
                                " is outside the vocabulary; it was changed while the call ran");
      }
    }
  }

  // One list of segments for each distinct prefix; neighbours on one prefix share it.
  void place_prefixes() {
    std::map<const PrefixState*, const std::vector<KvSegment>*> known;
    for (const PassSequence& sequence : sequences_) {
      const auto [at, is_new] = known.emplace(sequence.prefix, nullptr);
      if (is_new) {
        segments_.push_back(sequence.prefix ? sequence.prefix->segments()
                                            : std::vector<KvSegment>());
        at->second = &segments_.back();
      }
      prefixes_.push_back(at->second);
    }
  }

  // Where each sequence's own keys and values go.
  void place_keys() {
    kv_row_bytes_ = static_cast<size_t>(d_.kv_width()) * backend_.activation_bytes();
    if (keep_ != nullptr) {
      own_.push_back(keep_->own);
      return;
    }
    uint8_t* keys = b_.pass_kv.as<uint8_t>();
    uint8_t* values = keys + static_cast<size_t>(engine_.options.max_seq_len) * kv_row_bytes_;
    int64_t row = 0;
    for (const PassSequence& sequence : sequences_) {
      const size_t offset = static_cast<size_t>(row) * kv_row_bytes_;
      const int64_t start = sequence.prefix ? sequence.prefix->length() : 0;
      own_.push_back({keys + offset, values + offset, 0, start, start + sequence.rows});
      row += sequence.rows;
    }
  }

  // A layer runs chunk by chunk: keys of earlier rows are there when a later chunk attends to them.
  void run_layer(int64_t layer, int loop) {
    const int64_t plane = d_.plane(layer, loop);
    for (const RowChunk& chunk : chunks_) {
      attend(engine_.weights.layers[static_cast<size_t>(layer)], chunk, plane);
      feed_forward(engine_.weights.layers[static_cast<size_t>(layer)], chunk);
    }
  }

  void attend(const Layer& layer, const RowChunk& chunk, int64_t plane) {
    const int64_t rows = chunk.end - chunk.begin;
    const Rows qkv = scratch1(d_.qkv_width());
    const Rows out = attn_down(d_.q_width());
    backend_.norm_linear(main(chunk.begin), layer.norm_attn_in.data(), eps_, rows, *layer.qkv, qkv);
    const int64_t own_plane = keep_ != nullptr ? plane : 0;
    const KvSegment& first = own_.front();  // own tokens of a pass lie one after the other
    const size_t offset = static_cast<size_t>(own_plane) * first.plane_bytes +
                          static_cast<size_t>(chunk.begin) * kv_row_bytes_;
    backend_.rope_store(qkv, b_.rope.as<float>() + chunk.begin * d_.head_dim, rows, shape_,
                        const_cast<uint8_t*>(first.keys) + offset,
                        const_cast<uint8_t*>(first.values) + offset);
    backend_.attention(chunk.attention, shape_, plane, own_plane, qkv, out);
    branch(out, rows, *layer.o, layer.norm_attn_out, main(chunk.begin));
  }

  void feed_forward(const Layer& layer, const RowChunk& chunk) {
    const int64_t rows = chunk.end - chunk.begin;
    const Rows gate_up = scratch1(2 * d_.ffn_size);
    const Rows product = attn_down(d_.ffn_size);
    backend_.norm_linear(main(chunk.begin), layer.norm_ffn_in.data(), eps_, rows, *layer.gate_up,
                         gate_up);
    backend_.silu_mul(gate_up, rows, d_.ffn_size, product);
    branch(product, rows, *layer.down, layer.norm_ffn_out, main(chunk.begin));
  }

  // The end of a branch: its last product, and the add with or without a norm before it.
  void branch(Rows in, int64_t rows, const Weight& weight, const Vector& norm_out,
              float* main_rows) {
    if (d_.norm_placement == NormPlacement::kPre) {
      backend_.linear_add(in, rows, weight, main_rows);
    } else {
      backend_.linear(in, rows, weight, norm());
      backend_.norm_add(norm(), norm_out.data(), eps_, rows, d_.hidden_size, main_rows);
    }
  }

  Engine& engine_;
  const Descriptor& d_;
  const BufferPool& b_;
  Backend& backend_;
  const std::vector<PassSequence>& sequences_;
  const int depth_;
  PrefixState* const keep_;
  const AttentionShape shape_;
  const float eps_;
  size_t kv_row_bytes_ = 0;
  int64_t rows_ = 0;
  std::vector<KvSegment> own_;
  std::list<std::vector<KvSegment>>
      segments_;  // of the distinct prefixes; a list keeps its addresses
  std::vector<const std::vector<KvSegment>*> prefixes_;  // of each sequence
  std::vector<RowChunk> chunks_;
};

}  // namespace

void run_pass(Engine& engine, const std::vector<PassSequence>& sequences, int depth,
              PrefixState* keep) {
  Pass(engine, sequences, depth, keep).run();
}

}  // namespace tinyloop
