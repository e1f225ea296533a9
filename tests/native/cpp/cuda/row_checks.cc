// Norms, gates, sums, the seeded state and the embedding.
#include "cuda/rows.h"
#include "device_data.h"

namespace tinyloop::cuda {
namespace {

constexpr float kEps = 1e-5f;
constexpr double kFloor = 1e-3;            // below it differences count in absolute terms
constexpr int64_t kMostElements = 650000;  // the program is to end soon
const std::vector<int64_t> kRowCounts{1, 7, 300};
const std::vector<int64_t> kWidths{3, 45, 64, 576, 1030, 2048, 3000, 8195};

// A norm with its weight in both memories.
struct BothNorms {
  std::vector<float> weight;
  OnDevice<float> on_device;
  NormSpec host, device;

  BothNorms(int64_t width, bool present, bool weighted, uint64_t stream)
      : weight(noise_floats(stream, width)), on_device(weight) {
    host = {present, weighted ? weight.data() : nullptr, kEps};
    device = {present, weighted ? on_device.get() : nullptr, kEps};
  }
};

struct Kind {
  bool present, weighted;
};
const std::vector<Kind> kKinds{{true, true}, {true, false}, {false, true}};

// round(norm(state)) by the CPU.
void cpu_norm_rows(Backend& cpu, const std::vector<float>& state, const NormSpec& norm,
                   int64_t rows, int64_t width, Rows out) {
  const auto plan = cpu.plan_chunk({{}, {}, {{0, rows, 0, {}}}});
  cpu.norm_store(state.data(), norm, rows, width, *plan, 0, out, {});
}

void check_norms(const Bench& bench, bool fp32) {
  Worst states(kFloatRelative), rows_out(steps_allowed(fp32)), sums(kFloatRelative);
  All fused, alone;
  for (const int64_t rows : kRowCounts) {
    for (const int64_t width : kWidths) {
      if (rows * width > kMostElements) continue;
      for (const Kind kind : kKinds) {
        const std::string where = sized(rows, width);
        const BothNorms norm(width, kind.present, kind.weighted, 31);
        const BothNorms next(width, true, true, 32);
        const auto start = noise_floats(33, rows * width);
        const int64_t gap = width % 2 == 0 ? 8 : 3;
        Matrix branch(fp32, rows, width, gap, 34, 3.0), out(fp32, rows, width, gap);
        const OnDevice<uint8_t> branch_d(branch.bytes());

        std::vector<float> state = start;
        bench.cpu(fp32).norm(state.data(), norm.host, rows, width);
        OnDevice<float> state_d(start);
        cuda::norm(bench.stream, state_d.get(), norm.device, rows, width);
        states.add(relative(state_d.read(), state, kFloor), where);

        cpu_norm_rows(bench.cpu(fp32), start, norm.host, rows, width, out.host());
        const OnDevice<float> start_d(start);
        const Matrix blank(fp32, rows, width, gap);
        OnDevice<uint8_t> out_d(Matrix(blank).bytes());
        norm_rows(bench.stream, fp32, start_d.get(), norm.device, rows, width, out.at(out_d));
        const Bytes out_bytes = out_d.read();
        rows_out.add(out.steps_between(out_bytes, out.bytes(), kFloor), where);
        const int64_t r = rows / 2;
        norm_rows(bench.stream, fp32, start_d.get() + r * width, norm.device, 1, width,
                  out.at(out_d, r));
        alone.add(same(out_d.read(), out_bytes), where);

        state = start;
        bench.cpu(fp32).norm_add(branch.host(), norm.host, rows, width, state.data());
        OnDevice<float> sum_d(start);
        norm_add(bench.stream, fp32, branch.at(branch_d), norm.device, rows, width, sum_d.get());
        const auto sum = sum_d.read();
        sums.add(relative(sum, state, 1.0), where);  // a sum may cancel

        norm_rows(bench.stream, fp32, sum_d.get(), next.device, rows, width, out.at(out_d));
        OnDevice<float> both_d(start);
        OnDevice<uint8_t> both_out(Matrix(blank).bytes());
        norm_add_norm_rows(bench.stream, fp32, branch.at(branch_d), norm.device, rows, width,
                           both_d.get(), next.device, out.at(both_out));
        const auto both = both_d.read();
        const Bytes both_bytes = both_out.read();
        fused.add(same(both, sum) && same(both_bytes, out_d.read()), where);
        OnDevice<float> one_d(
            std::vector<float>(start.begin() + r * width, start.begin() + (r + 1) * width));
        norm_add_norm_rows(bench.stream, fp32, branch.at(branch_d, r), norm.device, 1, width,
                           one_d.get(), next.device, out.at(both_out, r));
        const auto one = one_d.read();
        alone.add(
            std::memcmp(one.data(), both.data() + r * width, static_cast<size_t>(width) * 4) == 0 &&
                same(both_out.read(), both_bytes),
            where);
      }
    }
  }
  states.line(mode(fp32) + "norm of a state, relative");
  rows_out.line(mode(fp32) + "norm_rows, in steps");
  sums.line(mode(fp32) + "norm_add, relative");
  fused.line(mode(fp32) + "norm_add and norm_rows in one launch, bits");
  alone.line(mode(fp32) + "norms of a row alone, bits");
}

// At many rows other kernels have the same bits as at one; which, depends on the width and on how
// the rows lie.
void check_many_norms(const Bench& bench, bool fp32) {
  All sums, both;
  const int64_t rows = 300;  // more than norms_few() takes
  for (const int64_t width : {2, 126, 512, 576, 1030, 2048, 2050, 4096, 4098, 45}) {
    for (const int64_t gap : {0, 8, 3}) {
      for (const Kind kind : kKinds) {
        const std::string where = sized(rows, width) + ", gap " + std::to_string(gap);
        const BothNorms norm(width, kind.present, kind.weighted, 40);
        const BothNorms next(width, true, kind.weighted, 41);
        const auto start = noise_floats(42, rows * width);
        Matrix branch(fp32, rows, width, gap, 43, 3.0);
        const Matrix blank(fp32, rows, width, gap);
        const OnDevice<uint8_t> branch_d(branch.bytes());
        const OnDevice<float> added(start), sum(start), one_by_one(start);
        OnDevice<uint8_t> out(Matrix(blank).bytes()), out_one(Matrix(blank).bytes());
        norm_add(bench.stream, fp32, branch.at(branch_d), norm.device, rows, width, added.get());
        norm_add_norm_rows(bench.stream, fp32, branch.at(branch_d), norm.device, rows, width,
                           sum.get(), next.device, blank.at(out));
        for (int64_t r = 0; r < rows; ++r) {
          norm_add_norm_rows(bench.stream, fp32, branch.at(branch_d, r), norm.device, 1, width,
                             one_by_one.get() + r * width, next.device, blank.at(out_one, r));
        }
        const auto alone = one_by_one.read();
        sums.add(same(added.read(), alone) && same(sum.read(), alone) && !same(alone, start),
                 where);
        both.add(same(out.read(), out_one.read()) && !same(out.read(), Matrix(blank).bytes()),
                 where);
      }
    }
  }
  sums.line(mode(fp32) + "sums of many rows, each alone, bits");
  both.line(mode(fp32) + "norms after them, bits and gaps");
}

// Vectors of every width, and rows that allow none, have the same bits.
void check_gate_paths(const Bench& bench, bool fp32) {
  All alone, apart;
  for (const int64_t width : {8, 120, 1032, 5632}) {
    for (const int64_t rows : {1, 16, 17, 70}) {
      for (const double scale : {1.0, 60.0}) {
        const std::string where = sized(rows, width);
        Matrix gate_up(fp32, rows, 2 * width, 8, 44, scale);
        const Matrix blank(fp32, rows, width, 8);
        const OnDevice<uint8_t> in(gate_up.bytes()), in_apart(gate_up.bytes(), 4);
        const OnDevice<uint8_t> many(Matrix(blank).bytes()), one(Matrix(blank).bytes());
        const OnDevice<uint8_t> odd(Matrix(blank).bytes());
        silu_mul(bench.stream, fp32, gate_up.at(in), rows, width, blank.at(many));
        for (int64_t r = 0; r < rows; ++r) {
          silu_mul(bench.stream, fp32, gate_up.at(in, r), 1, width, blank.at(one, r));
        }
        silu_mul(bench.stream, fp32, gate_up.at(in_apart), rows, width, blank.at(odd));
        const Bytes got = many.read();
        alone.add(same(got, one.read()) && !same(got, Matrix(blank).bytes()), where);
        apart.add(same(got, odd.read()), where);
      }
    }
  }
  alone.line(mode(fp32) + "silu_mul of a row alone, bits");
  apart.line(mode(fp32) + "silu_mul of rows that lie oddly, bits");
}

void check_gates(const Bench& bench, bool fp32) {
  Worst silu(steps_allowed(fp32)), gated(steps_allowed(fp32));
  for (const int64_t rows : kRowCounts) {
    for (const int64_t width : kWidths) {
      if (rows * width > kMostElements) continue;
      for (const double scale : {1.0, 60.0}) {
        const std::string where = sized(rows, width);
        const int64_t gap = width % 2 == 0 ? 16 : 5;
        Matrix gate_up(fp32, rows, 2 * width, gap, 35, scale), out(fp32, rows, width, gap);
        const OnDevice<uint8_t> gate_up_d(gate_up.bytes()), out_d(out.bytes());
        silu_mul(bench.stream, fp32, gate_up.at(gate_up_d), rows, width, out.at(out_d));
        bench.cpu(fp32).silu_mul(gate_up.host(), rows, width, out.host());
        silu.add(out.steps_between(out_d.read(), out.bytes(), kFloor), where);

        Matrix x(fp32, rows, width, gap, 36);
        const OnDevice<uint8_t> x_d(x.bytes());
        gate_mul(bench.stream, fp32, gate_up.at(gate_up_d), rows, width, x.at(x_d));
        bench.cpu(fp32).gate_mul(gate_up.host(), rows, width, x.host());
        gated.add(x.steps_between(x_d.read(), x.bytes(), kFloor), where);
      }
    }
  }
  silu.line(mode(fp32) + "silu_mul, in steps");
  gated.line(mode(fp32) + "gate_mul, in steps");
}

void check_states(const Bench& bench) {
  All added, normals;
  for (const int64_t rows : kRowCounts) {
    for (const int64_t width : kWidths) {
      if (rows * width > kMostElements) continue;
      auto state = noise_floats(37, rows * width);
      const auto other = noise_floats(38, rows * width);
      const OnDevice<float> state_d(state), other_d(other);
      add(bench.stream, state_d.get(), other_d.get(), rows, width);
      bench.half->add(state.data(), other.data(), rows, width);
      added.add(same(state_d.read(), state), sized(rows, width));

      std::vector<int32_t> positions;
      for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(r * 37 % 5000));
      const OnDevice<int32_t> positions_d(positions);
      for (const uint64_t seed : {uint64_t{7}, uint64_t{0xFEDCBA9876543210}}) {
        init_normal(bench.stream, state_d.get(), positions_d.get(), rows, width, 0.3f, seed);
        bench.half->init_normal(state.data(), positions.data(), rows, width, 0.3f, seed);
        normals.add(same(state_d.read(), state), sized(rows, width));
      }
    }
  }
  added.line("add, bits");
  normals.line("init_normal, bits");
}

// The file's bytes as a weight on the device.
struct Uploaded {
  OnDevice<uint8_t> staged, memory;
  DeviceWeight weight;

  Uploaded(const Tensor& t, bool fp32, cudaStream_t stream)
      : staged(t.bytes),
        memory(Bytes(weight_bytes(t.entry.kind, t.entry.rows, t.entry.cols, t.entry.group, fp32))),
        weight(weight_shape(t.entry.kind, t.entry.rows, t.entry.cols, t.entry.group, fp32)) {
    StagedRows from;
    from.kind = t.entry.kind;
    from.rows = staged.get();
    if (t.entry.group != 0) {
      const auto constants = static_cast<size_t>(t.entry.rows * t.entry.groups());
      from.zeros = reinterpret_cast<const uint16_t*>(staged.get() + t.bytes.size()) - constants;
      from.scales = from.zeros - constants;
    }
    repack(stream, from, weight, 0, t.entry.rows, memory.get());
    weight.data = memory.get();
  }
};

void check_embed(const Bench& bench, bool fp32) {
  // FP16 holds a dequantized weight to 2^-11, and what is left of a zero likewise.
  constexpr double kWeightRelative = 0x1p-9, kWeightFloor = 0.05;
  Worst worst(fp32 ? 0.0 : kWeightRelative);
  const int64_t vocabulary = 200, rows = 90;
  for (const TensorKind kind :
       {TensorKind::kF32, TensorKind::kF16, TensorKind::kQ4, TensorKind::kQ8}) {
    for (const int64_t width : {96, 576, 1088}) {
      const auto tensor = make_tensor(kind, vocabulary, width);
      const Uploaded on_device(*tensor, fp32, bench.stream);
      Backend& cpu = bench.cpu(fp32);
      const auto account = std::make_shared<Account>(0);
      const auto on_host = cpu.upload(tensor->entry, 0, vocabulary, WeightUse::kOnce, *account);
      std::vector<int32_t> ids;
      for (int64_t r = 0; r < rows; ++r) ids.push_back(static_cast<int32_t>(r * 97 % vocabulary));
      const OnDevice<int32_t> ids_d(ids);
      for (const float scale : {1.0f, 24.5f}) {
        std::vector<float> state(static_cast<size_t>(rows * width));
        const OnDevice<float> state_d(state);
        embed(bench.stream, fp32, on_device.weight, ids_d.get(), rows, scale, state_d.get());
        cpu.embed(*on_host, ids.data(), rows, scale, state.data());
        worst.add(relative(state_d.read(), state, kWeightFloor * static_cast<double>(scale)),
                  sized(rows, width) + " kind " + std::to_string(static_cast<int>(kind)));
      }
    }
  }
  worst.line(mode(fp32) + "embed, relative");
}

}  // namespace

void check_rows(const Bench& bench) {
  for (const bool fp32 : {false, true}) {
    check_norms(bench, fp32);
    check_many_norms(bench, fp32);
    check_gates(bench, fp32);
    check_gate_paths(bench, fp32);
    check_embed(bench, fp32);
  }
  check_states(bench);
}

}  // namespace tinyloop::cuda
