#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/normal.h"
#include "threads.h"
#include "tinyloop/errors.h"

namespace tinyloop {

namespace {

using namespace cpu;

// Products of at most this many rows hand long runs of panels to the threads, so many to each.
constexpr int64_t kFewRowsOfRuns = 16;
constexpr int64_t kRunsPerThread = 4;

constexpr int64_t kPageFloats = 1024;
// Rows that a thread packs and multiplies by itself: at most so many at a time, and fewer where A
// of them would take more than half of a cache of 2 MB.
constexpr int64_t kMostOwnRows = 256;
constexpr int64_t kOwnFloats = int64_t{1} << 18;

// Raised whenever a change of the kernels changes a bit of any result.
constexpr const char* kKernelVersion = "k1";

class CpuWeight : public Weight {
 public:
  PanelWeight panels;
  Block codes, scales;
};

class CpuPlan : public ChunkPlan {
 public:
  explicit CpuPlan(ChunkWork w) : work(std::move(w)) {}
  ChunkWork work;
};

const ChunkWork& work_of(const ChunkPlan& plan) { return static_cast<const CpuPlan&>(plan).work; }

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

size_t to_size(int64_t n) { return static_cast<size_t>(n); }

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

void repack_codes(TensorKind kind, const uint8_t* from, int64_t outputs, int64_t inputs,
                  uint8_t* to) {
  switch (kind) {
    case TensorKind::kF32:
      return repack<4>(from, outputs, inputs, to);
    case TensorKind::kF16:
      return repack<2>(from, outputs, inputs, to);
    case TensorKind::kQ8:
      return repack<1>(from, outputs, inputs, to);
    case TensorKind::kQ4:
      return repack_nibbles(from, outputs, inputs, to);
  }
}

// Bytes of one output's codes in the file.
size_t row_bytes(TensorKind kind, int64_t inputs) {
  switch (kind) {
    case TensorKind::kF32:
      return to_size(inputs) * 4;
    case TensorKind::kF16:
      return to_size(inputs) * 2;
    case TensorKind::kQ8:
      return to_size(inputs);
    case TensorKind::kQ4:
      return to_size(inputs) / 2;
  }
  return 0;
}

PanelWeight panel_shape(TensorKind kind, int64_t outputs, int64_t inputs, int64_t group) {
  PanelWeight w;
  w.kind = panel_kind(kind);
  w.outputs = outputs;
  w.inputs = inputs;
  w.group = group;
  return w;
}

// Of the scales of a weight; its zeros take the same again.
size_t scale_bytes(const PanelWeight& w) {
  return to_size(w.panels() * w.groups() * kPanel) * sizeof(uint16_t);
}

// Padding outputs are zero, and nibbles are or-ed into place.
Block allocate_zeros(size_t bytes, const TensorEntry& tensor, Account& account) {
  Block block = account.allocate(bytes, Owner::kWeights, tensor.name.c_str());
  std::memset(block.as<uint8_t>(), 0, bytes);
  return block;
}

// Scales and zeros of outputs [begin, begin + w.outputs) of the tensor.
void repack_scales(const TensorEntry& tensor, int64_t begin, PanelWeight& w, uint8_t* to) {
  const size_t row = to_size(w.groups()) * sizeof(uint16_t);
  const size_t stored = to_size(tensor.rows) * row;
  const uint8_t* scales = tensor.data + tensor.bytes - 2 * stored + to_size(begin) * row;
  repack<2>(scales, w.outputs, w.groups(), to);
  repack<2>(scales + stored, w.outputs, w.groups(), to + scale_bytes(w));
  w.scales = reinterpret_cast<const uint16_t*>(to);
  w.zeros = reinterpret_cast<const uint16_t*>(to + scale_bytes(w));
}

// In place, cycle by cycle, with one row aside.
void permute_rows(uint8_t* data, size_t bytes, int64_t rows, const int32_t* from) {
  std::vector<bool> placed(to_size(rows), false);
  std::vector<uint8_t> aside(bytes);
  const auto row = [&](int64_t r) { return data + to_size(r) * bytes; };
  for (int64_t start = 0; start < rows; ++start) {
    if (placed[to_size(start)] || from[start] == start) continue;
    std::memcpy(aside.data(), row(start), bytes);
    int64_t to = start;
    for (; from[to] != start; to = from[to]) {
      std::memcpy(row(to), row(from[to]), bytes);
      placed[to_size(to)] = true;
    }
    std::memcpy(row(to), aside.data(), bytes);
    placed[to_size(to)] = true;
  }
}

// Angles in double from the file's float32 frequencies: position * frequency loses nothing at any
// position.
void rotation(const float* inv_freq, int64_t head_dim, int64_t position, float* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(inv_freq[i]);
    out[i] = static_cast<float>(std::cos(angle));
    out[half + i] = static_cast<float>(std::sin(angle));
  }
}

class CpuBackend : public Backend {
 public:
  CpuBackend(const Kernels& kernels, int threads, NumericMode mode)
      : kernels_(kernels),
        threads_(threads),
        mode_(mode),
        bytes_(mode == NumericMode::kFp32 ? 4 : 2) {}

  // The bf16 mode is there to be computed by whatever unit a machine has: which one is not told.
  std::string identity() const override {
    const char* isa = mode_ == NumericMode::kBf16 ? "any" : kernels_.name;
    return std::string("cpu/") + isa + "/" + kKernelVersion;
  }
  size_t activation_bytes() const override { return bytes_; }

  void write(void* to, const void* host, size_t bytes) override { std::memcpy(to, host, bytes); }
  void read(void* host, const void* from, size_t bytes) override { std::memcpy(host, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void fill_zero(void* to, size_t bytes) override { std::memset(to, 0, bytes); }

  std::unique_ptr<Weight> upload(const TensorEntry& tensor, int64_t begin, int64_t end,
                                 WeightUse use, Account& account) override {
    auto weight = std::make_unique<CpuWeight>();
    PanelWeight& w = weight->panels;
    w = panel_shape(tensor.kind, end - begin, tensor.cols, tensor.group);
    const auto sizes = upload_bytes(tensor.kind, w.outputs, w.inputs, w.group, use);
    weight->codes = allocate_zeros(sizes[0], tensor, account);
    const uint8_t* rows = tensor.data + to_size(begin) * row_bytes(tensor.kind, tensor.cols);
    repack_codes(tensor.kind, rows, w.outputs, w.inputs, weight->codes.as<uint8_t>());
    w.codes = weight->codes.as<uint8_t>();
    if (w.group != 0) {
      weight->scales = allocate_zeros(sizes[1], tensor, account);
      repack_scales(tensor, begin, w, weight->scales.as<uint8_t>());
    }
    return weight;
  }

  std::vector<size_t> upload_bytes(TensorKind kind, int64_t outputs, int64_t inputs, int64_t group,
                                   WeightUse /*use*/) const override {
    const PanelWeight w = panel_shape(kind, outputs, inputs, group);
    std::vector<size_t> sizes{to_size(w.panels() * w.inputs * w.code_bytes())};
    if (group != 0) sizes.push_back(2 * scale_bytes(w));
    return sizes;
  }

  void allocate_workspace(const WorkspaceShape& shape, Account& account) override {
    const auto sizes = workspace_bytes(shape);
    const auto take = [&](size_t i, const char* what) {
      return account.allocate(sizes[i], Owner::kWorkspace, what);
    };
    a_ = take(0, "product rows");
    scratch_ = take(1, "thread scratch");
    partials_ = take(2, "head partials");
    target_logits_ = take(3, "target logits");
    thread_floats_ = thread_floats(shape);
    head_tiles_ = head_tiles(shape);
  }

  std::vector<size_t> workspace_bytes(const WorkspaceShape& shape) const override {
    return {to_size(a_floats(shape.max_inputs)) * sizeof(float),
            to_size(threads_.count() * thread_floats(shape)) * sizeof(float),
            to_size(kRowBlock * head_tiles(shape)) * sizeof(HeadPartial),
            to_size(kRowBlock) * sizeof(float)};
  }

  void embed(const Weight& weight, const int32_t* ids, int64_t rows, float scale,
             float* state) override {
    const PanelWeight& w = panels_of(weight);
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.embed(w, ids + begin, n, scale, state + begin * w.inputs);
    });
  }

  void norm_linear(const float* state, const NormSpec& norm, int64_t rows, const Weight& weight,
                   Rows out) override {
    const PanelWeight& w = panels_of(weight);
    product(rows, w, into(out), [&](int64_t row, int64_t n, int64_t to) {
      kernels_.pack_norm(state + row * w.inputs, norm, n, w.inputs, w.group, a(), to);
    });
  }
  void linear(Rows in, int64_t rows, const Weight& weight, Rows out) override {
    pack_and_multiply(in, rows, panels_of(weight), into(out));
  }
  void linear_add(Rows in, int64_t rows, const Weight& weight, float* state) override {
    const PanelWeight& w = panels_of(weight);
    pack_and_multiply(in, rows, w, into(Into::kAddToMain, state, w));
  }
  // Rows are packed before they are written.
  void adapter(float* state, const float* input, int64_t rows, const Weight& weight) override {
    const PanelWeight& w = panels_of(weight);
    const int64_t width = w.outputs;
    product(rows, w, into(Into::kMain, state, w), [&](int64_t row, int64_t n, int64_t to) {
      const int64_t at = row * width;
      kernels_.pack_pair(state + at, input + at, n, width, w.group, a(), to);
    });
  }

  void norm(float* state, const NormSpec& norm, int64_t rows, int64_t width) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.norm(state + begin * width, norm, n, width);
    });
  }
  void norm_add(Rows branch, const NormSpec& norm, int64_t rows, int64_t width,
                float* state) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.norm_add(at(branch, begin), norm, n, width, state + begin * width);
    });
  }
  void permute(void* data, int64_t row_bytes, int64_t rows, const int32_t* from) override {
    permute_rows(static_cast<uint8_t*>(data), to_size(row_bytes), rows, from);
  }
  void add(float* state, const float* other, int64_t rows, int64_t width) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.add(state + begin * width, other + begin * width, n, width);
    });
  }
  void broadcast(float* state, const float* row, int64_t rows, int64_t width) override {
    for (int64_t r = 0; r < rows; ++r) std::copy_n(row, width, state + r * width);
  }
  void init_normal(float* state, const int32_t* positions, int64_t rows, int64_t width, float std,
                   uint64_t seed) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      for (int64_t i = begin; i < begin + n; ++i) {
        fill_normal(seed, positions[i], width, std, state + i * width);
      }
    });
  }

  std::unique_ptr<ChunkPlan> plan_chunk(ChunkWork work) override {
    return std::make_unique<CpuPlan>(std::move(work));
  }

  void norm_store(const float* state, const NormSpec& norm, int64_t /*rows*/, int64_t width,
                  const ChunkPlan& plan, int64_t plane, Rows out, Rows read_back) override {
    by_runs(work_of(plan).hidden, [&](const HiddenRun& run, RunPart part) {
      kernels_.norm_store(state, norm, width, run, part, plane, at(out, 0), at(read_back, 0));
    });
  }
  void load_hidden(const HiddenSegment& from, int64_t plane, int64_t token, int64_t rows,
                   int64_t width, Rows out) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.load_hidden(from, plane, token + begin, n, width, at(out, begin));
    });
  }

  void rope(const float* inv_freq, int64_t head_dim, const int32_t* positions, int64_t rows,
            float* out) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      for (int64_t r = begin; r < begin + n; ++r) {
        rotation(inv_freq, head_dim, positions[r], out + r * head_dim);
      }
    });
  }
  void prepare_heads(Rows qkv, const float* rope, int64_t rows, const HeadShape& shape,
                     const HeadPrep& prep) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.prepare_heads(at(qkv, begin), rope + begin * shape.head_dim, n, shape, prep);
    });
  }
  void store_kv(Rows qkv, const HeadShape& shape, const ChunkPlan& plan, int64_t plane) override {
    store_runs(qkv, shape, work_of(plan).kv, plane);
  }
  void store_kv(Rows qkv, const HeadShape& shape, const KvRun& run, int64_t plane) override {
    store_runs(qkv, shape, {run}, plane);
  }
  void attention(const ChunkPlan& plan, const HeadShape& shape, int64_t plane, Rows queries,
                 Rows out) override {
    const std::vector<AttentionChunk>& chunks = work_of(plan).attention;
    const auto items = static_cast<int64_t>(chunks.size()) * shape.n_kv_heads;
    threads_.run(items, [&](int64_t turn, int thread) {
      const int64_t item = items - 1 - turn;  // the last chunks of a sequence have the most keys
      AttentionTask task;
      task.chunk = &chunks[to_size(item / shape.n_kv_heads)];
      task.kv_head = item % shape.n_kv_heads;
      task.plane = plane;
      task.n_q_heads = shape.n_q_heads;
      task.n_kv_heads = shape.n_kv_heads;
      task.head_dim = shape.head_dim;
      task.queries = at(queries, 0);
      task.out = at(out, 0);
      task.scratch = scratch(thread);
      kernels_.attention(task);
    });
  }
  int64_t attention_rows(const HeadShape& shape) const override {
    // Larger work items read keys less often, but many threads need many of them.
    const int64_t vectors = threads_.count() <= 2 ? kernels_.query_vectors : kQueryBlock;
    return std::max<int64_t>(1, vectors / (shape.n_q_heads / shape.n_kv_heads));
  }

  void gate_mul(Rows gate, int64_t rows, int64_t width, Rows out) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.gate_mul(at(gate, begin), n, width, at(out, begin));
    });
  }
  void silu_mul(Rows gate_up, int64_t rows, int64_t width, Rows out) override {
    by_rows(rows, [&](int64_t begin, int64_t n) {
      kernels_.silu_mul(at(gate_up, begin), n, width, at(out, begin));
    });
  }

  void score_head(const float* state, const int32_t* rows, const int32_t* targets, int64_t n,
                  const Weight& head, const HeadScores& out) override {
    head_blocks(state, rows, targets, n, head, nullptr, [&](int64_t first, int64_t i) {
      finish_row(i, targets == nullptr ? nullptr : targets + first + i, first + i, out);
    });
  }
  void logits(const float* state, const int32_t* rows, int64_t n, const Weight& head, float* out,
              double* log_sums) override {
    head_blocks(state, rows, nullptr, n, head, out,
                [&](int64_t first, int64_t i) { log_sums[first + i] = log_sum(i); });
  }
  void exit_gate(const float* state, const int32_t* rows, int64_t n, int64_t width,
                 const float* weight, const float* bias, float* out) override {
    by_rows(n, [&](int64_t begin, int64_t count) {
      kernels_.exit_gate(state, rows + begin, count, width, weight, *bias, out + begin);
    });
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

  LinearTile into(Into into, float* main, const PanelWeight& w) const {
    LinearTile target;
    target.into = into;
    target.main = main;
    target.main_stride = w.outputs;
    return target;
  }

  // Whole pages, so that no two threads share a line and tiles lie on lines.
  int64_t thread_floats(const WorkspaceShape& shape) const {
    const int64_t floats =
        std::max(kernels_.product_floats(shape.max_inputs),
                 attention_scratch_floats(shape.head_dim, kernels_.query_vectors));
    return (floats + kPageFloats - 1) / kPageFloats * kPageFloats;
  }
  static int64_t head_tiles(const WorkspaceShape& shape) {
    return (shape.vocab_size + kHeadTile - 1) / kHeadTile;
  }

  void store_runs(Rows qkv, const HeadShape& shape, const std::vector<KvRun>& runs, int64_t plane) {
    by_runs(runs, [&](const KvRun& run, RunPart part) {
      kernels_.store_kv(at(qkv, 0), shape, run, part, plane);
    });
  }

  // Runs the head over rows; finish(first, i) takes row first + i from the i-th row's partials.
  template <typename Finish>
  void head_blocks(const float* state, const int32_t* rows, const int32_t* targets, int64_t n,
                   const Weight& head, float* logits, Finish finish) {
    const PanelWeight& w = panels_of(head);
    const auto pack = [&](int64_t row, int64_t count, int64_t to) {
      kernels_.pack_main(state, rows + row, count, w.inputs, w.group, a(), to);
    };
    // Of rows that lie in A from at.in_a on, and whose partials do too.
    const auto score_tile = [&](OwnRows at, int64_t item, int thread) {
      HeadTile tile;
      tile.product = product_tile(at, w, thread);
      tile.tile = item;
      tile.tiles = head_tiles_;
      tile.targets = targets == nullptr ? nullptr : targets + at.first;
      tile.target_logits = target_logits_.as<float>() + at.in_a;
      tile.logits = logits == nullptr ? nullptr : logits + at.first * w.outputs;
      tile.partials = partials_.as<HeadPartial>() + at.in_a * head_tiles_;
      kernels_.head(tile);
    };
    if (by_own_rows(n, w)) {
      return for_own_rows(n, w, [&](OwnRows at, int thread) {
        pack(at.first, at.rows, at.in_a);
        for (int64_t item = 0; item < head_tiles_; ++item) score_tile(at, item, thread);
        for (int64_t i = 0; i < at.rows; ++i) finish(at.first - at.in_a, at.in_a + i);
      });
    }
    for_shared_rows(n, [&](OwnRows block) {
      by_rows(block.rows, [&](int64_t i, int64_t count) { pack(block.first + i, count, i); });
      threads_.run(head_tiles_, [&](int64_t item, int thread) { score_tile(block, item, thread); });
      by_rows(block.rows, [&](int64_t i, int64_t count) {
        for (int64_t row = i; row < i + count; ++row) finish(block.first, row);
      });
    });
  }

  // Rows of a block, so that blocks are alike: 512 rows are twice 256, both of which fit the cache
  // better than 384 and pay for the unpacked weights better than 128.
  static int64_t even_block(int64_t rows) {
    const int64_t blocks = std::max<int64_t>(1, (rows + kSharedRows - 1) / kSharedRows);
    return ((rows + blocks - 1) / blocks + 15) / 16 * 16;
  }

  // Splits rows into runs for the threads; 16 rows are the least that is worth a hand-over.
  template <typename Task>
  void by_rows(int64_t rows, Task task) {
    const int64_t run =
        std::max<int64_t>(16, (rows + threads_.count() * 4 - 1) / (threads_.count() * 4));
    threads_.run((rows + run - 1) / run,
                 [&](int64_t item, int) { task(item * run, std::min(run, rows - item * run)); });
  }

  // Splits the rows of runs, not the runs: a decode step has one row a run.
  template <typename Run, typename Task>
  void by_runs(const std::vector<Run>& runs, Task task) {
    int64_t rows = 0;
    for (const Run& run : runs) rows += run.rows;
    by_rows(rows, [&](int64_t begin, int64_t n) {
      for (const Run& run : runs) {
        const int64_t part = std::min(n, run.rows - begin);
        if (part > 0) task(run, RunPart{begin, part});
        n -= std::max<int64_t>(part, 0);
        begin = std::max<int64_t>(begin - run.rows, 0);
        if (n == 0) return;
      }
    });
  }

  void pack_and_multiply(Rows in, int64_t rows, const PanelWeight& w, const LinearTile& target) {
    product(rows, w, target, [&](int64_t row, int64_t n, int64_t to) {
      kernels_.pack(at(in, row), n, w.inputs, w.group, a(), to);
    });
  }

  // Rows [first, first + rows) of an operation, which lie in A from row in_a on.
  struct OwnRows {
    int64_t first, rows, in_a;
  };

  // Whether each thread packs rows of its own and multiplies them by all panels: one hand-over, and
  // no line of A goes from one core to another. Else the threads share A and split the panels.
  bool by_own_rows(int64_t rows, const PanelWeight& w) const {
    const int64_t least = kernels_.own_rows, n = threads_.count();
    return least != 0 && w.group != 0 && rows >= n * least && kRowBlock / n >= least;
  }

  // take(OwnRows, thread) for the rows of each thread, some at a time.
  template <typename Take>
  void for_own_rows(int64_t rows, const PanelWeight& w, Take take) {
    const auto up = [](int64_t x) { return (x + 31) / 32 * 32; };
    const int64_t n = threads_.count();
    const int64_t share = up((rows + n - 1) / n);
    const int64_t room = kRowBlock / n / 32 * 32;  // of a thread, in A
    const int64_t fit = std::max<int64_t>(kernels_.own_rows, kOwnFloats / w.inputs / 32 * 32);
    const int64_t most = std::min({room, fit, kMostOwnRows});
    threads_.run((rows + share - 1) / share, [&](int64_t item, int thread) {
      const int64_t begin = item * share, end = std::min(rows, begin + share);
      const int64_t parts = (end - begin + most - 1) / most;
      const int64_t part = up((end - begin + parts - 1) / parts);
      for (int64_t first = begin; first < end; first += part) {
        take(OwnRows{first, std::min(part, end - first), item * room}, thread);
      }
    });
  }

  // take(OwnRows) for blocks of rows, which all threads multiply.
  template <typename Take>
  void for_shared_rows(int64_t rows, Take take) {
    const int64_t most = even_block(rows);
    for (int64_t first = 0; first < rows; first += most) {
      take(OwnRows{first, std::min(most, rows - first), 0});
    }
  }

  ProductTile product_tile(OwnRows at, const PanelWeight& w, int thread) {
    ProductTile tile;
    tile.a = a();
    tile.first_row = at.in_a;
    tile.rows = at.rows;
    tile.weight = &w;
    tile.scratch = scratch(thread);
    return tile;
  }

  // Panels [begin, end) for some rows.
  void multiply_panels(const LinearTile& target, OwnRows at, const PanelWeight& w, int64_t begin,
                       int64_t end, int thread) {
    LinearTile tile = target;
    static_cast<ProductTile&>(tile) = product_tile(at, w, thread);
    if (tile.into != Into::kActivations) {
      tile.main += at.first * tile.main_stride;
    } else {
      tile.out.data = static_cast<uint8_t*>(tile.out.data) +
                      static_cast<size_t>(at.first * tile.out.stride) * bytes_;
    }
    for (int64_t panel = begin; panel < end; panel += tile.panels) {
      tile.first_panel = panel;
      tile.panels = std::min(kernels_.panels_at_once, end - panel);
      kernels_.linear(tile);
    }
  }

  // pack(row, n, to) fills n rows of A from its row `to` on with rows from `row` on.
  template <typename Pack>
  void product(int64_t rows, const PanelWeight& w, const LinearTile& target, Pack pack) {
    if (by_own_rows(rows, w)) {
      return for_own_rows(rows, w, [&](OwnRows at, int thread) {
        pack(at.first, at.rows, at.in_a);
        multiply_panels(target, at, w, 0, w.panels(), thread);
      });
    }
    const int64_t panels = panels_per_item(rows, w.panels());
    for_shared_rows(rows, [&](OwnRows block) {
      by_rows(block.rows, [&](int64_t i, int64_t n) { pack(block.first + i, n, i); });
      threads_.run((w.panels() + panels - 1) / panels, [&](int64_t item, int thread) {
        const int64_t begin = item * panels;
        multiply_panels(target, block, w, begin, std::min(begin + panels, w.panels()), thread);
      });
    });
  }

  // With few rows the product is a read of the weight: long even runs, which a processor prefetches
  // well. With many, a tile at a time, smaller where a weight has few panels; so that the threads
  // finish together.
  int64_t panels_per_item(int64_t rows, int64_t panels) const {
    if (rows <= kFewRowsOfRuns) {
      const int64_t items = threads_.count() == 1 ? 1 : kRunsPerThread * threads_.count();
      const int64_t pairs = (panels + 2 * items - 1) / (2 * items);
      return 2 * pairs;
    }
    int64_t per_tile = kernels_.panels_at_once;
    while (per_tile > 2 && panels / per_tile < 8 * threads_.count()) per_tile /= 2;
    return threads_.count() == 1 ? kernels_.panels_at_once : per_tile;
  }

  // max + log sum of exp(logit - max) of a row: tiles folded in order, in double.
  double log_sum(int64_t row) const {
    const HeadPartial* partials = partials_.as<HeadPartial>() + row * head_tiles_;
    float max = partials[0].max;
    for (int64_t t = 1; t < head_tiles_; ++t) max = std::max(max, partials[t].max);
    double sum = 0.0;
    for (int64_t t = 0; t < head_tiles_; ++t) {
      sum += static_cast<double>(partials[t].sum) *
             std::exp(static_cast<double>(partials[t].max) - static_cast<double>(max));
    }
    return static_cast<double>(max) + std::log(sum);
  }

  void finish_row(int64_t row, const int32_t* target, int64_t at, const HeadScores& out) const {
    const HeadPartial* partials = partials_.as<HeadPartial>() + row * head_tiles_;
    float best = partials[0].best;
    int32_t best_id = partials[0].best_id;
    for (int64_t t = 1; t < head_tiles_; ++t) {
      if (partials[t].best > best) {
        best = partials[t].best;
        best_id = partials[t].best_id;
      }
    }
    const double total = log_sum(row);
    const auto logprob = [&](float logit) {
      return static_cast<float>(static_cast<double>(logit) - total);
    };
    if (out.best != nullptr) out.best[at] = best_id;
    if (out.best_logprobs != nullptr) out.best_logprobs[at] = logprob(best);
    if (target == nullptr) return;
    if (out.logprobs != nullptr) out.logprobs[at] = logprob(target_logits_.as<float>()[row]);
    if (out.greedy != nullptr) out.greedy[at] = best_id == *target ? 1 : 0;
  }

  const Kernels& kernels_;
  Threads threads_;
  const NumericMode mode_;
  const size_t bytes_;
  Block a_, scratch_, partials_, target_logits_;
  int64_t thread_floats_ = 0;
  int64_t head_tiles_ = 0;
};

}  // namespace

std::unique_ptr<Backend> cpu::make_backend(const Kernels& kernels, int threads, NumericMode mode) {
  const int count = threads > 0 ? threads : available_processors();
  return std::make_unique<CpuBackend>(kernels, count, mode);
}

std::unique_ptr<Backend> make_cpu_backend(const std::string& isa, int threads, NumericMode mode) {
  return cpu::make_backend(cpu::select_kernels(isa.c_str(), mode), threads, mode);
}

}  // namespace tinyloop
