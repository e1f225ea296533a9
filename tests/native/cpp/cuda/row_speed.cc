// How fast: in GB/s at many rows, and in microseconds a launch at one row, 50 of them in a graph.
#include "cuda/rows.h"
#include "device_data.h"

namespace tinyloop::cuda {
namespace {

constexpr int64_t kRows = 8192, kWidth = 2048, kFfn = 5632;
constexpr HeadShape kShape{16, 16, 128};
constexpr int64_t kQkv = 3 * kWidth;
constexpr int kInGraph = 50;

double milliseconds(cudaStream_t stream, const std::function<void()>& work, int times) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "create an event");
  check(cudaEventCreate(&end), "create an event");
  double best = INFINITY;
  for (int i = 0; i < times; ++i) {
    check(cudaEventRecord(begin, stream), "record");
    work();
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "run");
    float took = 0.0f;
    check(cudaEventElapsedTime(&took, begin, end), "time");
    best = std::min(best, static_cast<double>(took));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best;
}

struct Measured {
  std::string name;
  double bytes_a_row;
  std::function<void(int64_t rows)> launch;
};

void line(cudaStream_t stream, const Measured& m) {
  m.launch(kRows);
  const double many = milliseconds(stream, [&] { m.launch(kRows); }, 10);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kInGraph; ++i) m.launch(1);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&run, graph, 0), "instantiate a graph");
  const auto replay = [&] { check(cudaGraphLaunch(run, stream), "launch a graph"); };
  replay();
  const double one = milliseconds(stream, replay, 20) / kInGraph;
  cudaGraphExecDestroy(run);
  cudaGraphDestroy(graph);
  const double rate = m.bytes_a_row * static_cast<double>(kRows) / many / 1e6;
  std::printf(
      "speed  %-22s %7.1f us, %6.0f GB/s (%3.0f %% of 4200) at %d rows; %5.2f us at one row\n",
      m.name.c_str(), many * 1e3, rate, rate / 42.0, static_cast<int>(kRows), one * 1e3);
}

}  // namespace

void measure(const Bench& bench) {
  const cudaStream_t s = bench.stream;
  const OnDevice<float> state(std::vector<float>(kRows * kWidth, 0.5f));
  const OnDevice<float> weight(std::vector<float>(kWidth, 0.75f));
  const OnDevice<uint8_t> wide(Bytes(static_cast<size_t>(kRows * 2 * kFfn * 2), 0x31));
  const OnDevice<uint8_t> narrow(Bytes(static_cast<size_t>(kRows * kFfn * 2), 0x31));
  const OnDevice<float> rope(std::vector<float>(kRows * kShape.head_dim, 0.5f));
  const OnDevice<uint8_t> cache(Bytes(static_cast<size_t>(kRows * kWidth * 2 * 2 + kRows * 64)));
  const OnDevice<uint8_t> codes(Bytes(static_cast<size_t>(kRows * kWidth + kRows * 64)));
  const OnDevice<int32_t> of_row(std::vector<int32_t>(kRows, 0));
  const NormSpec norm{true, weight.get(), 1e-5f};
  const Rows rows_in{narrow.get(), kWidth}, rows_out{wide.get(), kWidth};
  const Rows qkv{wide.get(), kQkv}, gate_up{wide.get(), 2 * kFfn}, product{narrow.get(), kFfn};

  KvRun run;
  run.rows = kRows;
  run.to.keys = cache.get();
  run.to.values = cache.get() + kRows * kWidth * 2;
  run.to.scales = reinterpret_cast<uint16_t*>(run.to.values + kRows * kWidth * 2);
  const OnDevice<KvRun> kv16(std::vector<KvRun>{run});
  run.to.format = KvFormat::kInt8;
  const OnDevice<KvRun> kv8(std::vector<KvRun>{run});
  HiddenRun kept;
  kept.rows = kRows;
  kept.token = kSinkTokens;
  kept.to.begin = kSinkTokens;
  kept.to.codes = codes.get();
  kept.to.scales = reinterpret_cast<uint16_t*>(cache.get());
  kept.to.format = HiddenFormat::kInt8;
  const OnDevice<HiddenRun> h8(std::vector<HiddenRun>{kept});
  kept.to.format = HiddenFormat::kInt4;
  const OnDevice<HiddenRun> h4(std::vector<HiddenRun>{kept});
  const HiddenSegment stored4 = kept.to;
  const RunTable<KvRun> t16{of_row.get(), kv16.get(), {}}, t8{of_row.get(), kv8.get(), {}};
  const RunTable<HiddenRun> th8{of_row.get(), h8.get(), {}}, th4{of_row.get(), h4.get(), {}};
  HeadPrep plain, head_norm;
  head_norm.norm = QkNorm::kHead;
  head_norm.q_norm = head_norm.k_norm = weight.get();
  head_norm.eps = 1e-5f;
  HeadPrep full_norm = head_norm;
  full_norm.norm = QkNorm::kFull;

  const std::vector<Measured> all{
      {"norm_rows", kWidth * 6.0,
       [&](int64_t n) { norm_rows(s, false, state.get(), norm, n, kWidth, rows_out); }},
      {"norm", kWidth * 8.0, [&](int64_t n) { cuda::norm(s, state.get(), norm, n, kWidth); }},
      {"norm_add", kWidth * 10.0,
       [&](int64_t n) { norm_add(s, false, rows_in, norm, n, kWidth, state.get()); }},
      {"norm_add_norm_rows", kWidth * 12.0,
       [&](int64_t n) {
         norm_add_norm_rows(s, false, rows_in, norm, n, kWidth, state.get(), norm, rows_out);
       }},
      {"silu_mul", kFfn * 6.0, [&](int64_t n) { silu_mul(s, false, gate_up, n, kFfn, product); }},
      {"gate_mul", kWidth * 6.0,
       [&](int64_t n) { gate_mul(s, false, rows_out, n, kWidth, rows_in); }},
      {"add", kWidth * 12.0, [&](int64_t n) { add(s, state.get(), state.get(), n, kWidth); }},
      {"prepare_heads", kWidth * 8.0 + 512,
       [&](int64_t n) { prepare_heads(s, false, qkv, rope.get(), n, kShape, plain); }},
      {"prepare_heads, norm", kWidth * 8.0 + 512,
       [&](int64_t n) { prepare_heads(s, false, qkv, rope.get(), n, kShape, head_norm); }},
      {"store_kv fp16", kWidth * 8.0,
       [&](int64_t n) { store_kv(s, false, qkv, kShape, n, t16, 0); }},
      {"store_kv int8", kWidth * 6.0,
       [&](int64_t n) { store_kv(s, false, qkv, kShape, n, t8, 0); }},
      {"both, fp16, no norm", kWidth * 12.0 + 512,
       [&](int64_t n) { prepare_and_store(s, false, qkv, rope.get(), n, kShape, plain, t16, 0); }},
      {"both, fp16", kWidth * 12.0 + 512,
       [&](int64_t n) {
         prepare_and_store(s, false, qkv, rope.get(), n, kShape, head_norm, t16, 0);
       }},
      {"both, int8", kWidth * 10.0 + 512,
       [&](int64_t n) {
         prepare_and_store(s, false, qkv, rope.get(), n, kShape, head_norm, t8, 0);
       }},
      {"both, full norm", kWidth * 12.0 + 512,
       [&](int64_t n) {
         prepare_and_store(s, false, qkv, rope.get(), n, kShape, full_norm, t16, 0);
       }},
      {"norm_store int8", kWidth * 9.0,
       [&](int64_t n) {
         norm_store(s, false, state.get(), norm, n, kWidth, th8, 0, rows_in, rows_out);
       }},
      {"norm_store int4", kWidth * 8.5,
       [&](int64_t n) {
         norm_store(s, false, state.get(), norm, n, kWidth, th4, 0, rows_in, rows_out);
       }},
      {"load_hidden int4", kWidth * 2.5,
       [&](int64_t n) { load_hidden(s, false, stored4, 0, kSinkTokens, n, kWidth, rows_out); }},
  };
  for (const Measured& m : all) line(s, m);
}

}  // namespace tinyloop::cuda
