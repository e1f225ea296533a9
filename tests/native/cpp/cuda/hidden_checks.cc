// A layer's input as it is stored for rebuilding keys and values, and as it is read.
#include "cuda/rows.h"
#include "device_data.h"

namespace tinyloop::cuda {
namespace {

constexpr float kEps = 1e-5f;
constexpr int64_t kPlane = 3, kFirstPlane = 2, kLastPlane = 5;

// Stored inputs of two sequences, the same bytes in both memories: the first from token 3 on (the
// sinks' end is inside), the second from token 20 on.
class Stores {
 public:
  Stores(bool fp32, HiddenFormat format, int64_t width, int64_t rows) : rows_(rows) {
    const int64_t planes = kLastPlane - kFirstPlane, tokens = rows + 2;
    const int64_t whole = width * (fp32 ? 4 : 2);
    const int64_t codes = format == HiddenFormat::kActivations ? whole
                          : format == HiddenFormat::kInt8      ? width
                                                               : (width + 1) / 2;
    const int64_t scales = format == HiddenFormat::kInt8   ? (width + 127) / 128
                           : format == HiddenFormat::kInt4 ? (width + 63) / 64 * 2
                                                           : 0;
    segment_.format = format;
    segment_.first_plane = kFirstPlane;
    segment_.last_plane = kLastPlane;
    segment_.plane_codes = static_cast<size_t>(tokens * codes);
    segment_.plane_scales = static_cast<size_t>(tokens * scales * 2);
    segment_.plane_sinks = static_cast<size_t>(kSinkTokens * whole);
    const auto aligned = [](size_t bytes) { return (bytes + 15) / 16 * 16; };
    scales_at_ = aligned(static_cast<size_t>(planes) * segment_.plane_codes);
    sinks_at_ = scales_at_ + aligned(static_cast<size_t>(planes) * segment_.plane_scales);
    size_ = sinks_at_ + aligned(static_cast<size_t>(planes) * segment_.plane_sinks);
    bytes_.assign(2 * size_, 0xCD);
  }

  Bytes& bytes() { return bytes_; }
  HiddenSegment segment(uint8_t* memory, int which) const {
    HiddenSegment s = segment_;
    s.codes = memory + static_cast<size_t>(which) * size_;
    s.scales = reinterpret_cast<uint16_t*>(s.codes + scales_at_);
    s.sinks = s.codes + sinks_at_;
    s.begin = which == 0 ? 2 : 19;
    s.end = s.begin + rows_ + 2;
    return s;
  }
  // Of two thirds of the rows, then the others. kept: false drops the second.
  std::vector<HiddenRun> runs(uint8_t* memory, bool kept) const {
    const int64_t first = (2 * rows_ + 2) / 3;
    HiddenRun a, b;
    a.rows = first;
    a.token = 3;
    a.to = segment(memory, 0);
    b.row = first;
    b.rows = rows_ - first;
    b.token = 20;
    b.to = segment(memory, 1);
    if (!kept) {
      b.to = HiddenSegment{};
      b.to.format = segment_.format;
    }
    std::vector<HiddenRun> runs{a};
    if (b.rows > 0) runs.push_back(b);
    return runs;
  }
  std::vector<int32_t> run_of_row() const {
    std::vector<int32_t> runs(static_cast<size_t>(rows_), 1);
    std::fill_n(runs.begin(), (2 * rows_ + 2) / 3, 0);
    return runs;
  }

 private:
  int64_t rows_;
  size_t scales_at_ = 0, sinks_at_ = 0, size_ = 0;
  Bytes bytes_;
  HiddenSegment segment_;
};

// States with groups that are hard to code.
std::vector<float> states_to_store(int64_t rows, int64_t width) {
  auto state = noise_floats(70, rows * width);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      float& x = state[static_cast<size_t>(r * width + c)];
      x *= 3.3333f;
      const int64_t kind = (c / 64 + r) % 6;
      if (kind == 1) x = 0.0f;
      if (kind == 2) x = std::ldexp(x, -23);
      if (kind == 3) x = std::fabs(x);
      if (kind == 4 && c % 64 == 5) x = 30000.0f;
      if (kind == 5) x = c % 2 == 0 ? 0.0f : -0.0f;
    }
  }
  return state;
}

const char* name_of(HiddenFormat format) {
  return format == HiddenFormat::kActivations ? " as it is"
         : format == HiddenFormat::kInt8      ? " int8"
                                              : " int4";
}

struct Result {
  Bytes out, back, stores;
};

Result store_on_device(const Bench& bench, bool fp32, const std::vector<float>& state,
                       const NormSpec& norm, int64_t rows, int64_t width, const Matrix& shape,
                       Stores stores, bool kept) {
  const OnDevice<float> state_d(state);
  const OnDevice<uint8_t> out(Matrix(shape).bytes()), back(Matrix(shape).bytes());
  const OnDevice<uint8_t> memory(stores.bytes());
  const OnDevice<HiddenRun> runs(stores.runs(memory.get(), kept));
  const OnDevice<int32_t> of_row(stores.run_of_row());
  norm_store(bench.stream, fp32, state_d.get(), norm, rows, width, {of_row.get(), runs.get(), {}},
             kPlane, shape.at(out), shape.at(back));
  return {out.read(), back.read(), memory.read()};
}

Result store_on_host(const Bench& bench, bool fp32, const std::vector<float>& state, int64_t rows,
                     int64_t width, const Matrix& shape, Stores stores, bool kept) {
  Matrix out(shape), back(shape);
  Backend& cpu = bench.cpu(fp32);
  const auto plan = cpu.plan_chunk({{}, {}, stores.runs(stores.bytes().data(), kept)});
  cpu.norm_store(state.data(), {false, nullptr, 0.0f}, rows, width, *plan, kPlane, out.host(),
                 back.host());
  return {out.bytes(), back.bytes(), stores.bytes()};
}

bool same_results(const Result& a, const Result& b) {
  return same(a.out, b.out) && same(a.back, b.back) && same(a.stores, b.stores);
}

// The norm itself is checked with the other norms: here the CPU is given what it came to.
void check_store(const Bench& bench, bool fp32) {
  All plain, normed, alone, loaded;
  for (const HiddenFormat format :
       {HiddenFormat::kActivations, HiddenFormat::kInt8, HiddenFormat::kInt4}) {
    for (const int64_t width : {3, 64, 130, 577, 2048, 5000}) {
      for (const int64_t rows : {1, 12, 100}) {
        const std::string where = sized(rows, width) + name_of(format);
        const Matrix shape(fp32, rows, width, width % 2 == 0 ? 8 : 3);
        const Stores stores(fp32, format, width, rows);
        const auto state = states_to_store(rows, width);
        const NormSpec absent{false, nullptr, 0.0f};
        const OnDevice<float> weight(noise_floats(71, width));
        const NormSpec norm{true, weight.get(), kEps};
        for (const bool kept : {true, false}) {
          plain.add(
              same_results(
                  store_on_device(bench, fp32, state, absent, rows, width, shape, stores, kept),
                  store_on_host(bench, fp32, state, rows, width, shape, stores, kept)),
              where);
        }
        const Result got =
            store_on_device(bench, fp32, state, norm, rows, width, shape, stores, true);
        std::vector<float> inputs;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < width; ++c) {
            inputs.push_back(static_cast<float>(shape.get(got.out, r, c)));
          }
        }
        normed.add(
            same_results(got, store_on_host(bench, fp32, inputs, rows, width, shape, stores, true)),
            where);

        // The last row by itself, by a run passed by value.
        const int64_t r = rows - 1;
        const OnDevice<float> state_d(state);
        const OnDevice<uint8_t> out(Matrix(shape).bytes()), back(Matrix(shape).bytes());
        const OnDevice<uint8_t> memory(Stores(stores).bytes());
        HiddenRun run = stores.runs(memory.get(), true).back();
        run.token += r - run.row;
        run.row = 0;
        run.rows = 1;
        norm_store(bench.stream, fp32, state_d.get() + r * width, norm, 1, width, single_run(run),
                   kPlane, shape.at(out, r), shape.at(back, r));
        alone.add(same(shape.row_bytes(out.read(), r), shape.row_bytes(got.out, r)) &&
                      same(shape.row_bytes(back.read(), r), shape.row_bytes(got.back, r)),
                  where);

        Bytes kept_bytes = got.stores;
        const OnDevice<uint8_t> stored(kept_bytes);
        Matrix read(shape);
        const OnDevice<uint8_t> read_d(read.bytes());
        const int64_t first = (2 * rows + 2) / 3;
        load_hidden(bench.stream, fp32, stores.segment(stored.get(), 0), kPlane, 3, first, width,
                    shape.at(read_d));
        bench.cpu(fp32).load_hidden(stores.segment(kept_bytes.data(), 0), kPlane, 3, first, width,
                                    read.host());
        const Bytes read_bytes = read_d.read();
        bool as_promised = same(read_bytes, read.bytes());
        for (int64_t i = 0; i < first; ++i) {
          const Bytes& promise = format == HiddenFormat::kActivations ? got.out : got.back;
          as_promised &= same(shape.row_bytes(read_bytes, i), shape.row_bytes(promise, i));
        }
        loaded.add(as_promised, where);
      }
    }
  }
  plain.line(mode(fp32) + "norm_store without norm, bytes");
  normed.line(mode(fp32) + "norm_store, bytes given the norm");
  alone.line(mode(fp32) + "norm_store of a row alone, bits");
  loaded.line(mode(fp32) + "load_hidden, bits, as read_back promised");
}

}  // namespace

void check_hidden(const Bench& bench) {
  for (const bool fp32 : {false, true}) check_store(bench, fp32);
}

}  // namespace tinyloop::cuda
