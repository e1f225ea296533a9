// Heads before attention, and keys and values as they are stored.
#include "cuda/rows.h"
#include "device_data.h"

namespace tinyloop::cuda {
namespace {

constexpr float kEps = 1e-5f;
constexpr int64_t kPlane = 3, kFirstPlane = 2, kLastPlane = 5;

struct Heads {
  HeadShape shape;
  QkNorm norm;
  bool bias, pairs;

  int64_t q() const { return shape.n_q_heads * shape.head_dim; }
  int64_t kv() const { return shape.n_kv_heads * shape.head_dim; }
  int64_t width() const { return q() + 2 * kv(); }
};

std::string where_of(const Heads& h, int64_t rows) {
  return " " + std::to_string(rows) + " rows of " + std::to_string(h.shape.n_q_heads) + " and " +
         std::to_string(h.shape.n_kv_heads) + " x " + std::to_string(h.shape.head_dim) +
         (h.norm == QkNorm::kNone   ? ""
          : h.norm == QkNorm::kHead ? ", head norm"
                                    : ", full norm") +
         (h.bias ? ", bias" : "") + (h.pairs ? ", pairs" : "");
}

std::vector<Heads> all_heads() {
  std::vector<Heads> all;
  for (const HeadShape& shape : {HeadShape{16, 16, 128},
                                 {9, 3, 64},
                                 {4, 2, 80},
                                 {3, 1, 24},
                                 {2, 2, 6},
                                 {2, 1, 256},
                                 {0, 2, 128},
                                 {5, 1, 2}}) {
    for (const QkNorm norm : {QkNorm::kNone, QkNorm::kHead, QkNorm::kFull}) {
      for (const bool bias : {false, true}) {
        for (const bool pairs : {false, true}) all.push_back({shape, norm, bias, pairs});
      }
    }
  }
  return all;
}

// A preparation with its vectors in both memories.
struct BothPreps {
  std::vector<float> rope, bias, q_norm, k_norm;
  OnDevice<float> rope_d, bias_d, q_norm_d, k_norm_d;
  HeadPrep host, device;

  BothPreps(const Heads& h, int64_t rows)
      : rope(noise_floats(60, rows * h.shape.head_dim)),
        bias(noise_floats(61, h.width())),
        q_norm(noise_floats(62, std::max<int64_t>(1, h.q()))),
        k_norm(noise_floats(63, h.kv())),
        rope_d(rope),
        bias_d(bias),
        q_norm_d(q_norm),
        k_norm_d(k_norm) {
    host.bias = h.bias ? bias.data() : nullptr;
    host.norm = h.norm;
    host.q_norm = q_norm.data();
    host.k_norm = k_norm.data();
    host.eps = kEps;
    host.adjacent_pairs = h.pairs;
    device = host;
    device.bias = h.bias ? bias_d.get() : nullptr;
    device.q_norm = q_norm_d.get();
    device.k_norm = k_norm_d.get();
  }
};

// Keys and values of some sequences, the same bytes in both memories.
class Caches {
 public:
  // Runs of run_rows rows; each has a cache of its own.
  Caches(bool fp32, KvFormat format, const HeadShape& shape, int64_t rows, int64_t run_rows)
      : rows_(rows), run_rows_(run_rows) {
    const int64_t planes = kLastPlane - kFirstPlane, tokens = run_rows + 3;
    const int64_t element = format == KvFormat::kInt8 ? 1 : fp32 ? 4 : 2;
    const int64_t plane = tokens * shape.n_kv_heads * shape.head_dim * element;
    const int64_t plane_scales = tokens * 2 * shape.n_kv_heads;
    n_runs_ = (rows + run_rows - 1) / run_rows;
    heads_ = static_cast<size_t>(planes * plane);
    scales_ = static_cast<size_t>(planes * plane_scales * 2);
    bytes_.assign(static_cast<size_t>(n_runs_) * (2 * heads_ + scales_), 0xCD);
    segment_.format = format;
    segment_.first_plane = kFirstPlane;
    segment_.last_plane = kLastPlane;
    segment_.plane_bytes = static_cast<size_t>(plane);
    segment_.plane_scales = static_cast<size_t>(plane_scales);
    segment_.begin = 4;
    segment_.end = 4 + tokens;
  }

  Bytes& bytes() { return bytes_; }
  std::vector<KvRun> runs(uint8_t* memory) const {
    std::vector<KvRun> runs;
    for (int64_t i = 0; i < n_runs_; ++i) {
      KvRun run;
      run.row = i * run_rows_;
      run.rows = std::min(run_rows_, rows_ - run.row);
      run.token = 5 + i % 2;
      run.to = segment_;
      run.to.keys = memory + static_cast<size_t>(i) * (2 * heads_ + scales_);
      run.to.values = run.to.keys + heads_;
      run.to.scales = reinterpret_cast<uint16_t*>(run.to.values + heads_);
      runs.push_back(run);
    }
    return runs;
  }
  std::vector<int32_t> run_of_row() const {
    std::vector<int32_t> runs;
    for (int64_t r = 0; r < rows_; ++r) runs.push_back(static_cast<int32_t>(r / run_rows_));
    return runs;
  }

 private:
  int64_t rows_, run_rows_, n_runs_;
  size_t heads_, scales_;
  Bytes bytes_;
  KvSegment segment_;
};

void check_prepare(const Bench& bench, bool fp32) {
  // Sums that cancel keep the error of their terms.
  constexpr double kTermFloor = 0.25;
  All exact, alone, odd;
  Worst normed(steps_allowed(fp32));
  for (const Heads& h : all_heads()) {
    for (const int64_t rows : {1, 5, 130}) {
      const std::string where = where_of(h, rows);
      const BothPreps prep(h, rows);
      const int64_t gap = h.shape.head_dim % 16 == 0 ? 8 : 3;
      Matrix qkv(fp32, rows, h.width(), gap, 64);
      const OnDevice<uint8_t> qkv_d(qkv.bytes()), one_d(qkv.bytes());
      const OnDevice<uint8_t> odd_d(qkv.bytes(), 4);
      prepare_heads(bench.stream, fp32, qkv.at(qkv_d), prep.rope_d.get(), rows, h.shape,
                    prep.device);
      bench.cpu(fp32).prepare_heads(qkv.host(), prep.rope.data(), rows, h.shape, prep.host);
      const Bytes got = qkv_d.read();
      if (h.norm == QkNorm::kNone) {
        exact.add(same(got, qkv.bytes()), where);
      } else {
        normed.add(qkv.steps_between(got, qkv.bytes(), kTermFloor), where);
      }
      const int64_t r = rows - 1;
      prepare_heads(bench.stream, fp32, qkv.at(one_d, r), prep.rope_d.get() + r * h.shape.head_dim,
                    1, h.shape, prep.device);
      alone.add(same(qkv.row_bytes(one_d.read(), r), qkv.row_bytes(got, r)), where);
      prepare_heads(bench.stream, fp32, qkv.at(odd_d), prep.rope_d.get(), rows, h.shape,
                    prep.device);
      odd.add(same(odd_d.read(), got), where);
    }
  }
  exact.line(mode(fp32) + "prepare_heads without norm, bits");
  normed.line(mode(fp32) + "prepare_heads with norm, in steps");
  alone.line(mode(fp32) + "prepare_heads of a row alone, bits");
  odd.line(mode(fp32) + "prepare_heads of rows that lie oddly, bits");
}

// Rows with heads that are hard to code: zeros, tiny values, one large one, ties of rounding.
Matrix rows_to_store(bool fp32, const HeadShape& shape, int64_t rows, int64_t gap) {
  const int64_t width = (shape.n_q_heads + 2 * shape.n_kv_heads) * shape.head_dim;
  Matrix qkv(fp32, rows, width, gap, 65, 3.0);
  const int64_t first = shape.n_q_heads * shape.head_dim;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = first; c < width; ++c) {
      if (r % 6 == 1) qkv.set(r, c, 0.0);
      if (r % 6 == 2) qkv.set(r, c, std::ldexp(noise(66, r * width + c), -22));
      if (r % 6 == 3 && c % shape.head_dim == 1) qkv.set(r, c, -60000.0);
      if (r % 6 == 4) qkv.set(r, c, c % shape.head_dim == 0 ? 127.0 : c % 250 - 124.5);
    }
  }
  return qkv;
}

void check_store(const Bench& bench, bool fp32) {
  All stored, single;
  for (const HeadShape& shape :
       {HeadShape{16, 16, 128}, {9, 3, 64}, {4, 2, 80}, {2, 2, 6}, {0, 2, 256}, {5, 1, 2}}) {
    for (const KvFormat format : {KvFormat::kActivations, KvFormat::kInt8}) {
      for (const int64_t rows : {1, 12, 200}) {
        for (const int64_t run_rows : {int64_t{1}, rows}) {
          const std::string where = where_of({shape, QkNorm::kNone, false, false}, rows) +
                                    (format == KvFormat::kInt8 ? ", int8" : "");
          Matrix qkv = rows_to_store(fp32, shape, rows, shape.head_dim % 16 == 0 ? 8 : 3);
          const OnDevice<uint8_t> qkv_d(qkv.bytes());
          Caches caches(fp32, format, shape, rows, run_rows);
          const OnDevice<uint8_t> caches_d(caches.bytes());
          const auto runs = caches.runs(caches_d.get());
          const OnDevice<KvRun> runs_d(runs);
          const OnDevice<int32_t> of_row(caches.run_of_row());
          store_kv(bench.stream, fp32, qkv.at(qkv_d), shape, rows, {of_row.get(), runs_d.get(), {}},
                   kPlane);
          Backend& cpu = bench.cpu(fp32);
          cpu.store_kv(qkv.host(), shape,
                       *cpu.plan_chunk({{}, caches.runs(caches.bytes().data()), {}}), kPlane);
          stored.add(same(caches_d.read(), caches.bytes()), where);
          if (run_rows != rows) continue;
          const OnDevice<uint8_t> again(Bytes(caches.bytes().size(), 0xCD));
          store_kv(bench.stream, fp32, qkv.at(qkv_d), shape, rows,
                   single_run(caches.runs(again.get())[0]), kPlane);
          single.add(same(again.read(), caches.bytes()), where);
        }
      }
    }
  }
  stored.line(mode(fp32) + "store_kv by a table, bytes");
  single.line(mode(fp32) + "store_kv of one run, bytes");
}

// Of few rows and of many; caches that allow no vectors, as well.
struct BothCase {
  int64_t rows;
  KvFormat format;
  size_t cache_offset;
};
const std::vector<BothCase> kBothCases{{33, KvFormat::kActivations, 0},  {33, KvFormat::kInt8, 0},
                                       {9, KvFormat::kActivations, 4},   {9, KvFormat::kInt8, 4},
                                       {140, KvFormat::kActivations, 0}, {140, KvFormat::kInt8, 0}};

void check_both(const Bench& bench, bool fp32) {
  All queries, kept;
  for (const Heads& h : all_heads()) {
    for (const BothCase& c : kBothCases) {
      const int64_t rows = c.rows;
      const KvFormat format = c.format;
      const std::string where = where_of(h, rows) + (format == KvFormat::kInt8 ? ", int8" : "");
      const BothPreps prep(h, rows);
      Matrix qkv(fp32, rows, h.width(), h.shape.head_dim % 16 == 0 ? 8 : 3, 67);
      // Apart they also lie oddly, so that nothing is common to the two but the arithmetic.
      const OnDevice<uint8_t> apart(qkv.bytes(), 4), together(qkv.bytes());
      Caches caches(fp32, format, h.shape, rows, 1);
      const OnDevice<uint8_t> caches_apart(caches.bytes());
      const OnDevice<uint8_t> caches_together(caches.bytes(), c.cache_offset);
      const OnDevice<KvRun> runs_apart(caches.runs(caches_apart.get()));
      const OnDevice<KvRun> runs_together(caches.runs(caches_together.get()));
      auto of_rows = caches.run_of_row();
      of_rows[7] = -1;  // of no run
      const OnDevice<int32_t> of_row(of_rows);
      prepare_heads(bench.stream, fp32, qkv.at(apart), prep.rope_d.get(), rows, h.shape,
                    prep.device);
      store_kv(bench.stream, fp32, qkv.at(apart), h.shape, rows,
               {of_row.get(), runs_apart.get(), {}}, kPlane);
      prepare_and_store(bench.stream, fp32, qkv.at(together), prep.rope_d.get(), rows, h.shape,
                        prep.device, {of_row.get(), runs_together.get(), {}}, kPlane);
      const Bytes a = apart.read(), b = together.read();
      bool same_queries = true;
      for (int64_t r = 0; r < rows; ++r) {
        Bytes x = qkv.row_bytes(a, r), y = qkv.row_bytes(b, r);
        x.resize(static_cast<size_t>(h.q() * qkv.size()));
        y.resize(x.size());
        same_queries &= x == y;
      }
      queries.add(same_queries, where);
      const Bytes stored = caches_apart.read();
      kept.add(same(stored, caches_together.read()) && stored != caches.bytes(), where);
    }
  }
  queries.line(mode(fp32) + "prepare_and_store, bits of q");
  kept.line(mode(fp32) + "prepare_and_store, bytes of the caches");
}

void check_rope(const Bench& bench) {
  Worst worst(0x1p-23);  // one rounding of a double that may differ in its last place
  for (const int64_t head_dim : {2, 80, 128}) {
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < 300; ++i) positions.push_back(static_cast<int32_t>(i * i * 3));
    std::vector<float> frequencies;
    for (int64_t j = 0; j < head_dim / 2; ++j) {
      frequencies.push_back(
          std::pow(1e-4f, static_cast<float>(2 * j) / static_cast<float>(head_dim)));
    }
    std::vector<float> expected;
    for (const int32_t position : positions) {
      for (const bool sines : {false, true}) {
        for (const float frequency : frequencies) {
          const double angle = static_cast<double>(position) * static_cast<double>(frequency);
          expected.push_back(static_cast<float>(sines ? std::sin(angle) : std::cos(angle)));
        }
      }
    }
    const OnDevice<int32_t> positions_d(positions);
    const OnDevice<float> frequencies_d(frequencies);
    const OnDevice<float> rope(std::vector<float>(expected.size()));
    rope_table(bench.stream, positions_d.get(), frequencies_d.get(), 300, head_dim, rope.get());
    worst.add(relative(rope.read(), expected, 1e-6), " head_dim " + std::to_string(head_dim));
  }
  worst.line("rope_table, relative");
}

}  // namespace

void check_heads(const Bench& bench) {
  check_rope(bench);
  for (const bool fp32 : {false, true}) {
    check_prepare(bench, fp32);
    check_store(bench, fp32);
    check_both(bench, fp32);
  }
}

}  // namespace tinyloop::cuda
