#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/kernels.h"
#include "threads.h"
#include "tinyloop/errors.h"

namespace tinyloop {

namespace {

using namespace cpu;

// Raised whenever a change of the kernels changes a bit of any result.
constexpr const char* kKernelVersion = "k1";

class CpuWeight : public Weight {
 public:
  PanelWeight panels;
  Block codes, scales;
};

const PanelWeight& panels_of(const Weight& weight) {
  return static_cast<const CpuWeight&>(weight).panels;
}

PanelWeight::Kind panel_kind(TensorKind kind) {
  switch (kind) {
    case TensorKind::kF32:
      return PanelWeight::Kind::kF32;
    case TensorKind::kF16:
      return PanelWeight::Kind::kF16;
    case TensorKind::kQ4:
      return PanelWeight::Kind::kQ4;
    case TensorKind::kQ8:
      return PanelWeight::Kind::kQ8;
  }
  return PanelWeight::Kind::kF32;
}

// File rows [outputs][inputs] of elements of kBytes to panels [panel][input][16].
template <size_t kBytes>
void repack(const uint8_t* from, int64_t outputs, int64_t inputs, uint8_t* to) {
  for (int64_t n = 0; n < outputs; ++n) {
    uint8_t* panel = to + (n / kPanel) * inputs * kPanel * kBytes + (n % kPanel) * kBytes;
    for (int64_t k = 0; k < inputs; ++k) {
      std::memcpy(panel + k * kPanel * kBytes, from + (n * inputs + k) * kBytes, kBytes);
    }
  }
}

// Nibble rows to panels of 8 bytes an input: outputs 0..7 in the low nibbles, 8..15 in the high.
void repack_nibbles(const uint8_t* from, int64_t outputs, int64_t inputs, uint8_t* to) {
  for (int64_t n = 0; n < outputs; ++n) {
    uint8_t* panel = to + (n / kPanel) * inputs * (kPanel / 2) + n % (kPanel / 2);
    const int shift = n % kPanel < kPanel / 2 ? 0 : 4;
    const uint8_t* row = from + n * inputs / 2;
    for (int64_t k = 0; k < inputs; ++k) {
      const int code = (row[k / 2] >> (k % 2 * 4)) & 15;
      panel[k * (kPanel / 2)] |= static_cast<uint8_t>(code << shift);
    }
  }
}

void repack_codes(const TensorEntry& tensor, uint8_t* to) {
  switch (tensor.kind) {
    case TensorKind::kF32:
      return repack<4>(tensor.data, tensor.rows, tensor.cols, to);
    case TensorKind::kF16:
      return repack<2>(tensor.data, tensor.rows, tensor.cols, to);
    case TensorKind::kQ8:
      return repack<1>(tensor.data, tensor.rows, tensor.cols, to);
    case TensorKind::kQ4:
      return repack_nibbles(tensor.data, tensor.rows, tensor.cols, to);
  }
}

class CpuBackend : public Backend {
 public:
  CpuBackend(const Kernels& kernels, int threads, bool fp32)
      : kernels_(kernels), threads_(threads), bytes_(fp32 ? 4 : 2) {}

  std::string identity() const override {
    return std::string("cpu/") + kernels_.name + "/" + kKernelVersion;
  }
  size_t activation_bytes() const override { return bytes_; }

  std::unique_ptr<Weight> upload(const TensorEntry& tensor, Account& account) override {
    auto weight = std::make_unique<CpuWeight>();
    PanelWeight& w = weight->panels;
    w.kind = panel_kind(tensor.kind);
    w.outputs = tensor.rows;
    w.inputs = tensor.cols;
    w.group = tensor.group;
    const auto code_bytes = static_cast<size_t>(w.panels() * w.inputs * w.code_bytes());
    weight->codes = account.allocate(code_bytes, Owner::kWeights, tensor.name.c_str());
    std::memset(weight->codes.as<uint8_t>(), 0,
                code_bytes);  // padding outputs, and nibbles are or-ed
    repack_codes(tensor, weight->codes.as<uint8_t>());
    w.codes = weight->codes.as<uint8_t>();
    if (w.group != 0) upload_scales(tensor, account, *weight);
    return weight;
  }

  void allocate_workspace(const WorkspaceShape& shape, Account& account) override {
    const int64_t depth_blocks = (shape.max_inputs + kDepthBlock - 1) / kDepthBlock;
    const auto take = [&](int64_t floats, const char* what) {
      return account.allocate(static_cast<size_t>(floats) * sizeof(float), Owner::kWorkspace, what);
    };
    a_ = take(depth_blocks * kRowBlock * kDepthBlock, "product rows");
    const int64_t product = kTilePanels * kDepthBlock * kPanel + kRowBlock * kTilePanels * kPanel;
    thread_floats_ = std::max(product, attention_scratch_floats(shape.head_dim));
    scratch_ = take(threads_.count() * thread_floats_, "thread scratch");
    head_tiles_ = (shape.vocab_size + kHeadTile - 1) / kHeadTile;
    partials_ = account.allocate(static_cast<size_t>(kRowBlock * head_tiles_) * sizeof(HeadPartial),
                                 Owner::kWorkspace, "head partials");
    target_logits_ = take(kRowBlock, "target logits");
  }

  void embed(const Weight& weight, const int32_t* ids, int64_t rows, float* main) override {
    const PanelWeight& w = panels_of(weight);
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.embed(w, ids + begin, n, main + begin * w.inputs);
    });
  }

  void norm_linear(const float* main, const float* norm, float eps, int64_t rows,
                   const Weight& weight, Rows out) override {
    const PanelWeight& w = panels_of(weight);
    product(rows, w, into(out), [&](int64_t first, int64_t begin, int64_t n) {
      kernels_.pack_norm(main + (first + begin) * w.inputs, norm, eps, n, w.inputs, a(), begin);
    });
  }
  void linear(Rows in, int64_t rows, const Weight& weight, Rows out) override {
    pack_and_multiply(in, rows, panels_of(weight), into(out));
  }
  void linear_add(Rows in, int64_t rows, const Weight& weight, float* main) override {
    LinearTile target;
    target.into = Into::kAddToMain;
    target.main = main;
    target.main_stride = panels_of(weight).outputs;
    pack_and_multiply(in, rows, panels_of(weight), target);
  }

  void norm(float* main, const float* norm, float eps, int64_t rows, int64_t width) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.norm(main + begin * width, norm, eps, n, width);
    });
  }
  void norm_add(Rows branch, const float* norm, float eps, int64_t rows, int64_t width,
                float* main) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.norm_add(at(branch, begin), norm, eps, n, width, main + begin * width);
    });
  }
  void rope_store(Rows qkv, const float* rope, int64_t rows, const AttentionShape& shape,
                  uint8_t* keys, uint8_t* values) override {
    const size_t row_bytes = static_cast<size_t>(shape.n_kv_heads * shape.head_dim) * bytes_;
    by_rows(rows, [&](int64_t begin, int64_t n) {
      const size_t offset = static_cast<size_t>(begin) * row_bytes;
      kernels_.rope_store(at(qkv, begin), rope + begin * shape.head_dim, n, shape.n_q_heads,
                          shape.n_kv_heads, shape.head_dim, keys + offset, values + offset);
    });
  }
  void silu_mul(Rows gate_up, int64_t rows, int64_t width, Rows out) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.silu_mul(at(gate_up, begin), n, width, at(out, begin));
    });
  }

  void attention(const std::vector<AttentionChunk>& chunks, const AttentionShape& shape,
                 int64_t plane, int64_t own_plane, Rows queries, Rows out) override {
    const auto n_chunks = static_cast<int64_t>(chunks.size());
    threads_.run(n_chunks * shape.n_kv_heads, [&](int64_t item, int thread) {
      AttentionTask task;
      task.chunk = &chunks[static_cast<size_t>(item / shape.n_kv_heads)];
      task.kv_head = item % shape.n_kv_heads;
      task.plane = plane;
      task.own_plane = own_plane;
      task.n_q_heads = shape.n_q_heads;
      task.n_kv_heads = shape.n_kv_heads;
      task.head_dim = shape.head_dim;
      task.queries = at(queries, 0);
      task.out = at(out, 0);
      task.scratch = scratch(thread);
      kernels_.attention(task);
    });
  }

  int64_t attention_rows(const AttentionShape& shape) const override {
    return std::max<int64_t>(1, kQueryBlock / (shape.n_q_heads / shape.n_kv_heads));
  }

  void score_head(const float* main, const int32_t* rows, const int32_t* targets, int64_t n,
                  const Weight& head, float* logprobs, uint8_t* greedy) override {
    const PanelWeight& w = panels_of(head);
    for (int64_t first = 0; first < n; first += kRowBlock) {
      const int64_t block = std::min(kRowBlock, n - first);
      by_rows(block, [&](int64_t begin, int64_t count) {
        kernels_.pack_main(main, rows + first + begin, count, w.inputs, a(), begin);
      });
      threads_.run(head_tiles_, [&](int64_t item, int thread) {
        HeadTile tile;
        tile.a = a();
        tile.rows = block;
        tile.weight = &w;
        tile.tile = item;
        tile.tiles = head_tiles_;
        tile.b = scratch(thread);
        tile.c = tile.b + kTilePanels * kDepthBlock * kPanel;
        tile.targets = targets + first;
        tile.target_logits = target_logits_.as<float>();
        tile.partials = partials_.as<HeadPartial>();
        kernels_.head(tile);
      });
      for (int64_t i = 0; i < block; ++i)
        finish_row(i, targets[first + i], logprobs + first + i, greedy + first + i);
    }
  }

 private:
  float* a() { return a_.as<float>(); }
  float* scratch(int thread) { return scratch_.as<float>() + thread * thread_floats_; }
  Activations at(Rows rows, int64_t row) const {
    return {rows.data + static_cast<size_t>(row * rows.stride) * bytes_, rows.stride};
  }
  LinearTile into(Rows out) const {
    LinearTile target;
    target.out = at(out, 0);
    return target;
  }

  void upload_scales(const TensorEntry& tensor, Account& account, CpuWeight& weight) {
    PanelWeight& w = weight.panels;
    const int64_t values = w.panels() * w.groups() * kPanel;
    weight.scales = account.allocate(static_cast<size_t>(2 * values) * sizeof(uint16_t),
                                     Owner::kWeights, tensor.name.c_str());
    auto* scales = weight.scales.as<uint16_t>();
    std::memset(scales, 0, static_cast<size_t>(2 * values) * sizeof(uint16_t));
    const size_t each = static_cast<size_t>(tensor.rows * tensor.groups()) * sizeof(uint16_t);
    const uint8_t* stored = tensor.data + tensor.bytes - 2 * each;
    repack<2>(stored, tensor.rows, tensor.groups(), reinterpret_cast<uint8_t*>(scales));
    repack<2>(stored + each, tensor.rows, tensor.groups(),
              reinterpret_cast<uint8_t*>(scales + values));
    w.scales = scales;
    w.zeros = scales + values;
  }

  // Splits rows into runs for the threads; 16 rows are the least that is worth a hand-over.
  template <typename Task>
  void by_rows(int64_t rows, Task task) {
    const int64_t run =
        std::max<int64_t>(16, (rows + threads_.count() * 4 - 1) / (threads_.count() * 4));
    threads_.run((rows + run - 1) / run,
                 [&](int64_t item, int) { task(item * run, std::min(run, rows - item * run)); });
  }

  void pack_and_multiply(Rows in, int64_t rows, const PanelWeight& w, const LinearTile& target) {
    product(rows, w, target, [&](int64_t first, int64_t begin, int64_t n) {
      kernels_.pack(at(in, first + begin), n, w.inputs, a(), begin);
    });
  }

  // Multiplies blocks of rows. pack(first, begin, n) fills rows [begin, begin + n) of A from rows
  // first + begin on.
  template <typename Pack>
  void product(int64_t rows, const PanelWeight& w, const LinearTile& target, Pack pack) {
    const int64_t panels = panels_per_tile(w.panels());
    const int64_t tiles = (w.panels() + panels - 1) / panels;
    for (int64_t first = 0; first < rows; first += kRowBlock) {
      const int64_t block = std::min(kRowBlock, rows - first);
      by_rows(block, [&](int64_t begin, int64_t n) { pack(first, begin, n); });
      threads_.run(tiles, [&](int64_t item, int thread) {
        LinearTile tile = target;
        tile.a = a();
        tile.rows = block;
        tile.weight = &w;
        tile.first_panel = item * panels;
        tile.panels = std::min(panels, w.panels() - tile.first_panel);
        tile.b = scratch(thread);
        tile.c = tile.b + kTilePanels * kDepthBlock * kPanel;
        if (tile.into == Into::kAddToMain) {
          tile.main += first * tile.main_stride;
        } else {
          tile.out = {static_cast<uint8_t*>(tile.out.data) +
                          static_cast<size_t>(first * tile.out.stride) * bytes_,
                      tile.out.stride};
        }
        kernels_.linear(tile);
      });
    }
  }

  // Smaller tiles where a weight has few panels, so that the threads finish together.
  int64_t panels_per_tile(int64_t panels) const {
    int64_t per_tile = kTilePanels;
    while (per_tile > 2 && panels / per_tile < 8 * threads_.count()) per_tile /= 2;
    return threads_.count() == 1 ? kTilePanels : per_tile;
  }

  // log p = logit - (max + log sum); tiles are folded in order, in double.
  void finish_row(int64_t row, int32_t target, float* logprob, uint8_t* greedy) {
    const HeadPartial* partials = partials_.as<HeadPartial>() + row * head_tiles_;
    float max = partials[0].max;
    float best = partials[0].best;
    int32_t best_id = partials[0].best_id;
    for (int64_t t = 1; t < head_tiles_; ++t) {
      max = std::max(max, partials[t].max);
      if (partials[t].best > best) {
        best = partials[t].best;
        best_id = partials[t].best_id;
      }
    }
    double sum = 0.0;
    for (int64_t t = 0; t < head_tiles_; ++t) {
      sum += static_cast<double>(partials[t].sum) *
             std::exp(static_cast<double>(partials[t].max) - static_cast<double>(max));
    }
    const double logit = target_logits_.as<float>()[row];
    *logprob = static_cast<float>(logit - (static_cast<double>(max) + std::log(sum)));
    *greedy = best_id == target ? 1 : 0;
  }

  const Kernels& kernels_;
  Threads threads_;
  const size_t bytes_;
  Block a_, scratch_, partials_, target_logits_;
  int64_t thread_floats_ = 0;
  int64_t head_tiles_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const std::string& isa, int threads, bool fp32) {
  const int count = threads > 0 ? threads : available_processors();
  return std::make_unique<CpuBackend>(cpu::select_kernels(isa.c_str(), fp32), count, fp32);
}

}  // namespace tinyloop
