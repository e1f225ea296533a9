// The products of the CUDA backend against a double loop on the host, and against each other bit by
// bit; then their speeds. Its own main: a line per check that failed, tables behind them, exit
// status 1 if one did, 3 if a step on the device has not come back in time: its line says which.
//
// From the repository's root, by bash, with a folder OUT, on a machine with an sm_90a device; the
// files are compiled side by side:
//   C='nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -DTINYLOOP_SM90A -I native/src'
//   C="$C -I native/include"
//   P=native/src/cuda; T=tests/native/cpp/cuda/linear_test.cu
//   ls $P/{weight,linear,linear_fp32,warpgroup_plan,products_q4,products_q8,products_f16}.cu
//   $P/{cublas_lt,row_map}.cc $T
//     | xargs -P 8 -I F sh -c "$C -c F -o OUT/\$(basename F).o"
//   nvcc OUT/*.o -ldl -o OUT/linear_test && OUT/linear_test [FOLDER with the nvidia wheels]
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/check.h"
#include "cuda/cublas_lt.h"
#include "cuda/linear.h"
#include "cuda/weight.h"

using namespace tinyloop;
using namespace tinyloop::cuda;

namespace {

int failures = 0, checks = 0;

// A kernel that waits for what never comes would wait for ever: where a step takes longer than
// this, the program says which one and ends.
constexpr std::chrono::seconds kLongestStep{5};

class Watchdog {
 public:
  Watchdog() {
    std::thread([this] { watch(); }).detach();
  }
  void begin(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    what_ = what;
    until_ = Clock::now() + kLongestStep;
    changed_.notify_one();
  }
  void end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    until_ = Clock::time_point::max();
  }

 private:
  using Clock = std::chrono::steady_clock;
  [[noreturn]] void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (until_ == Clock::time_point::max()) {
        changed_.wait(lock);
        continue;
      }
      if (Clock::now() >= until_) {
        std::printf("STOPPED, it has not come back within %d s: %s\n",
                    static_cast<int>(kLongestStep.count()), what_.c_str());
        std::fflush(stdout);
        _exit(3);  // nothing that waits for the device would come back
      }
      const Clock::time_point until = until_;
      changed_.wait_until(lock, until);
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string what_;
  Clock::time_point until_ = Clock::time_point::max();
};
// Never destroyed: its thread lives as long as the program.
Watchdog& watchdog() {
  static auto* const dog = new Watchdog;
  return *dog;
}

// A step and all that it starts on the device.
template <typename Step>
void watched(const std::string& what, Step step) {
  watchdog().begin(what);
  step();
  check(cudaDeviceSynchronize(), "finish the kernels");
  watchdog().end();
}

// Runs a section and says how long it took.
template <typename Section>
void timed(const std::string& name, Section section) {
  const auto begin = std::chrono::steady_clock::now();
  section();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  std::printf("[%5.1f s] %s\n", taken.count(), name.c_str());
}

void expect(bool right, const std::string& what) {
  if (!right) ++failures;
  if (!right) std::printf("FAILED  %s\n", what.c_str());
}
void report(bool right, const std::string& what) {
  ++checks;
  expect(right, what);
}

// ---- device memory ----------------------------------------------------------------------------

template <typename T>
class Device {
 public:
  explicit Device(size_t count) : count_(count) {
    check(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)), "allocate");
  }
  explicit Device(const std::vector<T>& values) : Device(values.size()) {
    check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "copy to the device");
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  T* get() const { return data_; }
  size_t bytes() const { return count_ * sizeof(T); }
  void poison() { check(cudaMemset(data_, 0xFF, bytes()), "poison"); }  // NaN in FP16 and FP32
  std::vector<T> read() const {
    check(cudaDeviceSynchronize(), "finish the kernels");
    std::vector<T> values(count_);
    check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), "copy to the host");
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

struct Difference {
  unsigned long long count = 0;
  unsigned int ulps = 0;
};

__device__ int ordered(uint32_t bits, bool half) {
  const uint32_t sign = half ? 0x8000u : 0x80000000u;
  const int magnitude = static_cast<int>(bits & (sign - 1));
  return bits & sign ? -magnitude : magnitude;
}

// Elements [rows][columns] of two matrices; elements are 2 or 4 bytes.
template <typename T>
__global__ void compare_kernel(const T* a, int64_t a_stride, const T* b, int64_t b_stride,
                               int64_t rows, int64_t columns, Difference* difference) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * columns;
       i += step) {
    const uint32_t x = a[i / columns * a_stride + i % columns];
    const uint32_t y = b[i / columns * b_stride + i % columns];
    if (x == y) continue;
    atomicAdd(&difference->count, 1ull);
    const long long far = static_cast<long long>(ordered(x, sizeof(T) == 2)) -
                          static_cast<long long>(ordered(y, sizeof(T) == 2));
    atomicMax(&difference->ulps, static_cast<unsigned>(min(far < 0 ? -far : far, 0x7FFFFFFFll)));
  }
}

template <typename T>
Difference compare(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t rows,
                   int64_t columns) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  static Device<Difference> result(1);
  check(cudaMemset(result.get(), 0, sizeof(Difference)), "clear");
  compare_kernel<<<512, 256>>>(reinterpret_cast<const Bits*>(a), a_stride,
                               reinterpret_cast<const Bits*>(b), b_stride, rows, columns,
                               result.get());
  return result.read()[0];
}

std::string words(const Difference& d, int64_t of) {
  if (d.count == 0) return "same bits";
  return std::to_string(d.count) + " of " + std::to_string(of) + " differ, at most " +
         std::to_string(d.ulps) + " ulp";
}

// ---- weights ----------------------------------------------------------------------------------

struct Format {
  const char* name;
  TensorKind kind;
  int64_t group;
};
constexpr Format kFormats[] = {
    {"F32", TensorKind::kF32, 0},      {"F16", TensorKind::kF16, 0},
    {"Q4 g32", TensorKind::kQ4, 32},   {"Q4 g64", TensorKind::kQ4, 64},
    {"Q4 g128", TensorKind::kQ4, 128}, {"Q8 g32", TensorKind::kQ8, 32},
    {"Q8 g64", TensorKind::kQ8, 64},   {"Q8 g128", TensorKind::kQ8, 128}};

struct HostWeight {
  int64_t outputs, inputs, group;
  std::vector<uint8_t> rows;
  std::vector<uint16_t> scales, zeros;
  std::vector<double> values;  // what the file means
};

uint16_t half_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
float half_value(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

HostWeight make_weight(const Format& format, int64_t outputs, int64_t inputs, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  HostWeight w{outputs, inputs, format.group, {}, {}, {}, {}};
  const auto count = static_cast<size_t>(outputs * inputs);
  w.values.resize(count);
  if (format.group == 0) {
    const bool halves = format.kind == TensorKind::kF16;
    w.rows.resize(count * (halves ? 2 : 4));
    for (size_t i = 0; i < count; ++i) {
      const float x = normal(random);
      const uint16_t bits = half_bits(x);
      if (halves) std::memcpy(&w.rows[i * 2], &bits, 2);
      if (!halves) std::memcpy(&w.rows[i * 4], &x, 4);
      w.values[i] = halves ? half_value(bits) : x;
    }
    return w;
  }
  const int64_t groups = (inputs + format.group - 1) / format.group;
  const bool nibbles = format.kind == TensorKind::kQ4;
  const float top = nibbles ? 15.0f : 255.0f;
  for (int64_t i = 0; i < outputs * groups; ++i) {
    w.scales.push_back(half_bits((0.2f + uniform(random)) * 0.2f / top));
    // Mostly inside the codes and no whole number, now and then far outside.
    const float place = uniform(random);
    const float zero = place < 0.05f   ? -3.7f * top
                       : place < 0.1f  ? 150.3f * top
                       : place < 0.15f ? 0.0f
                                       : uniform(random) * top;
    w.zeros.push_back(half_bits(zero));
  }
  w.rows.resize(nibbles ? count / 2 : count);
  for (int64_t n = 0; n < outputs; ++n) {
    for (int64_t k = 0; k < inputs; ++k) {
      const auto at = static_cast<size_t>(n * inputs + k);
      const auto code = static_cast<uint8_t>(random() % (nibbles ? 16 : 256));
      if (nibbles) w.rows[at / 2] |= static_cast<uint8_t>(code << (k % 2 * 4));
      if (!nibbles) w.rows[at] = code;
      const auto g = static_cast<size_t>(n * groups + k / format.group);
      w.values[at] = (static_cast<double>(code) - half_value(w.zeros[g])) *
                     static_cast<double>(half_value(w.scales[g]));
    }
  }
  return w;
}

struct LoadedWeight {
  Device<uint8_t> memory;
  DeviceWeight weight;
};

std::unique_ptr<LoadedWeight> load(const Format& format, const HostWeight& w, bool fp32) {
  auto loaded = std::unique_ptr<LoadedWeight>(new LoadedWeight{
      Device<uint8_t>(weight_bytes(format.kind, w.outputs, w.inputs, w.group, fp32)),
      weight_shape(format.kind, w.outputs, w.inputs, w.group, fp32)});
  loaded->memory.poison();
  const Device<uint8_t> rows(w.rows);
  const Device<uint16_t> scales(w.scales), zeros(w.zeros);
  StagedRows staged;
  staged.kind = format.kind;
  staged.rows = rows.get();
  staged.scales = scales.get();
  staged.zeros = zeros.get();
  // In two pieces where there are two.
  const int64_t cut = w.outputs > 16 ? 16 : w.outputs;
  repack(nullptr, staged, loaded->weight, 0, cut, loaded->memory.get());
  if (cut < w.outputs) {
    const int64_t groups = w.group == 0 ? 0 : (w.inputs + w.group - 1) / w.group;
    staged.rows += w.rows.size() / static_cast<size_t>(w.outputs) * static_cast<size_t>(cut);
    staged.scales += cut * groups;
    staged.zeros += cut * groups;
    repack(nullptr, staged, loaded->weight, cut, w.outputs, loaded->memory.get());
  }
  check(cudaDeviceSynchronize(), "repack a weight");
  loaded->weight.data = loaded->memory.get();
  return loaded;
}

// ---- one shape --------------------------------------------------------------------------------

struct Shape {
  int64_t outputs, inputs;
};

constexpr int64_t kRowCounts[] = {1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 129, 300};
constexpr int64_t kMostRows = 300;
constexpr int64_t kReferenceRows = 40;  // which the host multiplies, too: its time is the longest
constexpr TileShape kTileShapes[] = {TileShape::k128x128, TileShape::k128x64, TileShape::k64x32,
                                     TileShape::k64x16, TileShape::k32x16};
constexpr const char* kTileNames[] = {"128x128", "128x64", "64x32", "64x16", "32x16"};

double frobenius(const std::vector<double>& wanted, const std::vector<double>& found) {
  double miss = 0.0, norm = 0.0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    miss += (wanted[i] - found[i]) * (wanted[i] - found[i]);
    norm += wanted[i] * wanted[i];
  }
  const double relative = std::sqrt(miss / norm);
  return relative == relative ? relative : 1e9;
}

// rows x outputs of sum over k, in double.
std::vector<double> product(const HostWeight& w, const std::vector<double>& x, int64_t rows) {
  std::vector<double> out;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < w.outputs; ++n) {
      double sum = 0.0;
      for (int64_t k = 0; k < w.inputs; ++k) {
        sum += w.values[static_cast<size_t>(n * w.inputs + k)] *
               x[static_cast<size_t>(r * w.inputs + k)];
      }
      out.push_back(sum);
    }
  }
  return out;
}

template <typename T>
std::vector<double> doubles(const std::vector<T>& values) {
  std::vector<double> out;
  for (const T v : values) out.push_back(static_cast<double>(static_cast<float>(v)));
  return out;
}

// Rows of normal values, the last ones of large range, stride elements apart.
std::vector<__half> make_rows(int64_t rows, int64_t inputs, int64_t stride, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<__half> values(static_cast<size_t>(rows * stride), __float2half(NAN));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < inputs; ++k) {
      const float scale = r % 5 == 4 ? std::exp2(normal(random)) : 1.0f;
      values[static_cast<size_t>(r * stride + k)] = __float2half(normal(random) * scale);
    }
  }
  return values;
}

LinearCall rows_call(const DeviceWeight& weight, const void* x, int64_t stride, int64_t rows,
                     OutputKind kind, void* out, int64_t out_stride) {
  LinearCall call;
  call.input.rows = x;
  call.input.stride = stride;
  call.rows = rows;
  call.weight = weight;
  call.output = {kind, out, out_stride};
  return call;
}

using Path = void (*)(cudaStream_t, const LinearCall&, const LinearContext&);

std::string words(const char* path, const LinearCall& call, const LinearContext& context) {
  constexpr const char* kInputs[] = {"rows", "state", "gate and up", "pair"};
  const DeviceWeight& w = call.weight;
  const char* kind = w.kind == TensorKind::kQ4    ? "Q4"
                     : w.kind == TensorKind::kQ8  ? "Q8"
                     : w.kind == TensorKind::kF16 ? "F16"
                                                  : "F32";
  char line[256];
  std::snprintf(line, sizeof line, "%s, %s g%ld %ldx%ld, %ld rows of %s, stride %ld, %d parts",
                path, kind, static_cast<long>(w.group), static_cast<long>(w.outputs),
                static_cast<long>(w.inputs), static_cast<long>(call.rows),
                kInputs[static_cast<int>(call.input.kind)], static_cast<long>(call.input.stride),
                context.parts);
  return line;
}

void run_watched(const char* name, Path path, const LinearCall& call,
                 const LinearContext& context) {
  watched(words(name, call, context), [&] { path(nullptr, call, context); });
}

// Every path at every number of rows against each row alone.
void check_paths(const std::string& name, const LoadedWeight& loaded, const HostWeight& host,
                 const LinearContext& context, int64_t padding) {
  const int64_t n = host.outputs, k = host.inputs, stride = k + padding;
  const std::vector<__half> rows = make_rows(kMostRows, k, stride, 3);
  const Device<__half> x(rows);
  Device<float> alone(static_cast<size_t>(kMostRows * n)), out(static_cast<size_t>(kMostRows * n));
  const auto call = [&](int64_t count, int64_t first, Device<float>& to) {
    return rows_call(loaded.weight, x.get() + first * stride, stride, count, OutputKind::kFloat,
                     to.get() + first * n, n);
  };
  alone.poison();
  watched(words("narrow", call(1, 0, alone), context) + ", one by one", [&] {
    for (int64_t r = 0; r < kMostRows; ++r) linear_narrow(nullptr, call(1, r, alone), context);
  });

  std::vector<double> packed;
  for (int64_t r = 0; r < kReferenceRows; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      packed.push_back(__half2float(rows[static_cast<size_t>(r * stride + c)]));
    }
  }
  std::vector<double> found = doubles(alone.read());
  found.resize(static_cast<size_t>(kReferenceRows * n));
  const double error = frobenius(product(host, packed, kReferenceRows), found);
  bool same = true;
  const auto against = [&](int64_t count, const std::string& path) {
    const Difference d = compare(out.get(), n, alone.get(), n, count, n);
    same = same && d.count == 0;
    expect(d.count == 0,
           name + ", " + std::to_string(count) + " rows, " + path + ": " + words(d, count * n));
  };
  for (const int64_t count : kRowCounts) {
    const LinearCall now = call(count, 0, out);
    const auto try_path = [&](const char* path_name, Path path) {
      out.poison();
      run_watched(path_name, path, now, context);
      against(count, path_name);
    };
    if (takes_warpgroups(now, context)) try_path("warpgroups", linear_warpgroups);
    if (takes_fed(now, context)) try_path("fed", linear_fed);
    if (takes_direct(now, context)) try_path("direct", linear_direct);
    try_path("linear", linear);
    if (count <= 16) try_path("narrow", linear_narrow);  // blocks of 8 rows side by side
    for (size_t s = 0; s < std::size(kTileShapes); ++s) {
      if (context.parts > 1 && s == 0) continue;
      const std::string path = std::string("tiles ") + kTileNames[s];
      out.poison();
      watched(words(path.c_str(), now, context),
              [&] { linear_tiled(nullptr, now, context, kTileShapes[s]); });
      against(count, path);
    }
  }
  char line[64];
  std::snprintf(line, sizeof line, ": relative error %.1e, bits %s", error,
                same ? "the same" : "differ");
  report(error < 1e-3 && same, name + line);
}

// Rounded and added results from the accumulated ones.
void check_outputs(const std::string& name, const LoadedWeight& loaded, const HostWeight& host,
                   const LinearContext& context) {
  const int64_t n = host.outputs, k = host.inputs, most = 129, stride = n + 8;
  const Device<__half> x(make_rows(most, k, k, 4));
  Device<float> sums(static_cast<size_t>(most * n));
  linear(nullptr, rows_call(loaded.weight, x.get(), k, most, OutputKind::kFloat, sums.get(), n),
         context);
  const std::vector<float> wanted = sums.read();
  const auto right = [&](const char* path_name, Path path, int64_t rows) {
    Device<__half> halves(static_cast<size_t>(rows * stride));
    halves.poison();
    run_watched(
        path_name, path,
        rows_call(loaded.weight, x.get(), k, rows, OutputKind::kActivations, halves.get(), stride),
        context);
    const std::vector<__half> rounded = halves.read();
    std::vector<float> state(static_cast<size_t>(rows * n));
    for (size_t i = 0; i < state.size(); ++i) state[i] = static_cast<float>(i % 97) * 0.37f - 9.0f;
    Device<float> added(state);
    run_watched(path_name, path,
                rows_call(loaded.weight, x.get(), k, rows, OutputKind::kAdd, added.get(), n),
                context);
    const std::vector<float> sum = added.read();
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < stride; ++c) {
        const uint16_t bits = __half_as_ushort(rounded[static_cast<size_t>(r * stride + c)]);
        if (c >= n && bits == 0xFFFF) continue;  // untouched
        if (c >= n) return false;
        const auto at = static_cast<size_t>(r * n + c);
        if (bits != half_bits(wanted[at]) || sum[at] != state[at] + wanted[at]) return false;
      }
    }
    return true;
  };
  for (const int64_t rows : {1, 8, 9, 40, 129}) {
    const std::string what = name + ", " + std::to_string(rows) + " rows: rounded and added, ";
    const LinearCall call =
        rows_call(loaded.weight, x.get(), k, rows, OutputKind::kFloat, nullptr, n);
    const auto try_path = [&](const char* path_name, Path path) {
      report(right(path_name, path, rows), what + path_name);
    };
    try_path("linear", linear);
    if (takes_warpgroups(call, context)) try_path("warpgroups", linear_warpgroups);
    if (takes_fed(call, context)) try_path("fed", linear_fed);
    if (takes_direct(call, context)) try_path("direct", linear_direct);
  }
}

// Every kind of input: formed inside the product or before it, and what it should be.
void check_inputs(const std::string& name, const LoadedWeight& loaded, const HostWeight& host,
                  LinearContext context) {
  const int64_t n = host.outputs, k = host.inputs, most = 33;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  const auto floats = [&](int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = normal(random) * 3.0f;
    return values;
  };
  const std::vector<float> state = floats(most * k), weight = floats(k), pair = floats(most * k);
  const int64_t gate_stride = 2 * k + 8;
  const std::vector<__half> gates = make_rows(most, 2 * k, gate_stride, 5);
  std::vector<int32_t> index;
  for (int64_t r = 0; r < most; ++r) index.push_back(static_cast<int32_t>((r * 7 + 3) % most));
  const Device<float> d_state(state), d_weight(weight), d_pair(pair);
  const Device<__half> d_gates(gates);
  const Device<int32_t> d_index(index);

  const auto value = [&](InputKind kind, bool normed, bool weighted, bool indexed, int64_t r,
                         int64_t c) {
    const auto at = static_cast<size_t>(r * k + c);
    if (kind == InputKind::kGateUp) {
      const double gate = __half2float(gates[static_cast<size_t>(r * gate_stride + c)]);
      const double up = __half2float(gates[static_cast<size_t>(r * gate_stride + k + c)]);
      return gate / (1.0 + std::exp(-gate)) * up;
    }
    if (kind == InputKind::kPair) {
      const int64_t half = k / 2;
      return static_cast<double>(c < half ? state[static_cast<size_t>(r * half + c)]
                                          : pair[static_cast<size_t>(r * half + c - half)]);
    }
    const int64_t row = indexed ? index[static_cast<size_t>(r)] : r;
    double squares = 0.0;
    for (int64_t i = 0; normed && i < k; ++i) {
      const double x = state[static_cast<size_t>(row * k + i)];
      squares += x * x;
    }
    const double x = state[static_cast<size_t>(row * k + c)];
    const double scale = normed ? 1.0 / std::sqrt(squares / static_cast<double>(k) + 1e-5) : 1.0;
    (void)at;
    return x * scale *
           (normed && weighted ? static_cast<double>(weight[static_cast<size_t>(c)]) : 1.0);
  };

  struct Case {
    const char* name;
    InputKind kind;
    bool normed, weighted, indexed;
  };
  constexpr Case kCases[] = {{"norm", InputKind::kState, true, true, false},
                             {"norm without weight", InputKind::kState, true, false, false},
                             {"no norm, by index", InputKind::kState, false, false, true},
                             {"silu", InputKind::kGateUp, false, false, false},
                             {"pair", InputKind::kPair, false, false, false}};
  for (const Case& c : kCases) {
    LinearInput input;
    input.kind = c.kind;
    input.rows = d_gates.get();
    input.stride = gate_stride;
    input.state = d_state.get();
    input.other = d_pair.get();
    input.index = c.indexed ? d_index.get() : nullptr;
    input.norm = {c.normed, c.weighted ? d_weight.get() : nullptr, 1e-5f};
    const int64_t stride = (k + 7) / 8 * 8;
    Device<__half> formed(static_cast<size_t>(most * stride));
    formed.poison();
    form_rows(nullptr, input, 0, most, k, formed.get(), stride, false);
    std::vector<double> wanted, found;
    const std::vector<__half> rows = formed.read();
    for (int64_t r = 0; r < most; ++r) {
      for (int64_t i = 0; i < k; ++i) {
        wanted.push_back(value(c.kind, c.normed, c.weighted, c.indexed, r, i));
        found.push_back(__half2float(rows[static_cast<size_t>(r * stride + i)]));
      }
    }
    const double error = frobenius(wanted, found);
    bool right = error < 5e-4;  // one rounding to FP16 is 2e-4
    Device<float> out(static_cast<size_t>(most * n)), base(static_cast<size_t>(most * n));
    linear(nullptr,
           rows_call(loaded.weight, formed.get(), stride, most, OutputKind::kFloat, base.get(), n),
           context);
    std::string miss;
    const auto against = [&](int64_t count, const char* path) {
      const Difference d = compare(out.get(), n, base.get(), n, count, n);
      right = right && d.count == 0;
      if (d.count == 0) return;
      miss +=
          std::string(" ") + path + ", " + std::to_string(count) + " rows " + words(d, count * n);
    };
    // Little scratch: the rows beyond its block follow in another.
    const LinearContext whole = context;
    LinearContext blocks = context;
    blocks.weight_scratch_bytes = 0;
    blocks.scratch_bytes = static_cast<size_t>(10 * stride) * sizeof(__half);
    for (const LinearContext& with : {whole, blocks}) {
      for (const int64_t count : {1, 2, 3, 5, 8, 9, 33}) {
        LinearCall call =
            rows_call(loaded.weight, nullptr, 0, count, OutputKind::kFloat, out.get(), n);
        call.input = input;
        const auto try_path = [&](const char* path_name, Path path) {
          out.poison();
          run_watched(path_name, path, call, with);
          against(count, path_name);
        };
        try_path("linear", linear);
        if (takes_fed(call, with)) try_path("fed", linear_fed);
        if (takes_direct(call, with)) try_path("direct", linear_direct);
      }
    }
    char line[64];
    std::snprintf(line, sizeof line, ": %s, error %.1e", c.name, error);
    report(right, name + line + miss);
  }
}

// The weight's FP16 rows.
void check_dequantized(const std::string& name, const LoadedWeight& loaded,
                       const HostWeight& host) {
  const int64_t n = host.outputs, k = host.inputs, stride = (k + 7) / 8 * 8;
  Device<__half> rows(static_cast<size_t>(n * stride));
  rows.poison();
  dequantize(nullptr, loaded.weight, 0, n, reinterpret_cast<uint16_t*>(rows.get()), stride);
  const std::vector<__half> found = rows.read();
  double worst = 0.0;
  bool zeros = true;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < stride; ++j) {
      const float w = __half2float(found[static_cast<size_t>(i * stride + j)]);
      if (j >= k) {
        zeros = zeros && w == 0.0f;
        continue;
      }
      const double wanted = host.values[static_cast<size_t>(i * k + j)];
      // Half a step of FP16 is 2^-11; below its normal range the step is 2^-24.
      const double miss = std::fabs(w - wanted) / std::max(std::fabs(wanted), 1e-4);
      worst = std::max(worst, miss == miss ? miss : 1e9);
    }
  }
  char line[64];
  std::snprintf(line, sizeof line, ": FP16 rows, worst relative error %.1e", worst);
  report(worst < 1.5e-3 && zeros, name + line);
}

void check_fp32(const std::string& name, const Format& format, const HostWeight& host,
                LinearContext context) {
  context.fp32 = true;
  const auto loaded = load(format, host, true);
  const int64_t n = host.outputs, k = host.inputs, most = 33;
  std::vector<float> x;
  for (const __half v : make_rows(most, k, k, 6)) x.push_back(__half2float(v) * 1.0001f);
  const Device<float> d_x(x);
  Device<float> out(static_cast<size_t>(most * n)), alone(static_cast<size_t>(most * n));
  linear(nullptr,
         rows_call(loaded->weight, d_x.get(), k, most, OutputKind::kActivations, out.get(), n),
         context);
  for (int64_t r = 0; r < most; ++r) {
    linear(nullptr,
           rows_call(loaded->weight, d_x.get() + r * k, k, 1, OutputKind::kActivations,
                     alone.get() + r * n, n),
           context);
  }
  const double error = frobenius(product(host, doubles(x), most), doubles(out.read()));
  const Difference d = compare(out.get(), n, alone.get(), n, most, n);
  char line[64];
  std::snprintf(line, sizeof line, ": FP32 mode, error %.1e", error);
  report(error < 1e-5 && d.count == 0, name + line);
}

void check_shapes(const Format& format, const LinearContext& context) {
  for (const Shape& shape :
       {Shape{16, 40}, Shape{48, 72}, Shape{96, 100}, Shape{40, 96}, Shape{72, 48}, Shape{80, 576},
        Shape{200, 384}, Shape{256, 1416}, Shape{48, 5280}}) {
    const HostWeight host = make_weight(format, shape.outputs, shape.inputs, 1);
    const auto loaded = load(format, host, false);
    const std::string name = std::string(format.name) + " " + std::to_string(shape.outputs) + "x" +
                             std::to_string(shape.inputs);
    check_dequantized(name, *loaded, host);
    check_paths(name, *loaded, host, context, 0);
    if (shape.inputs == 384) {
      check_paths(name + ", rows apart", *loaded, host, context, 24);
      check_paths(name + ", rows unaligned", *loaded, host, context, 3);
      check_outputs(name, *loaded, host, context);
    }
    if (shape.inputs == 384 || shape.inputs == 100) {
      check_inputs(name, *loaded, host, context);
      check_fp32(name, format, host, context);
    }
    if (shape.inputs >= 384 && shape.inputs < 5280) {
      LinearContext four = context;
      four.parts = 4;
      check_paths(name + ", 4 parts", *loaded, host, four, 0);
      if (shape.inputs == 384) {
        check_outputs(name + ", 4 parts", *loaded, host, four);
        check_inputs(name + ", 4 parts", *loaded, host, four);
      }
    }
  }
}

// ---- the models' shapes -----------------------------------------------------------------------

struct Named {
  const char* name;
  int64_t outputs, inputs;
};
constexpr Named kModel[] = {{"qkv     6144x2048", 6144, 2048},
                            {"o       2048x2048", 2048, 2048},
                            {"gate_up 11264x2048", 11264, 2048},
                            {"down    2048x5632", 2048, 5632},
                            {"head    49152x2048", 49152, 2048}};

__device__ uint32_t hash(uint64_t i) {
  i = (i ^ i >> 33) * 0xff51afd7ed558ccdull;
  i = (i ^ i >> 33) * 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(i ^ i >> 33);
}
// About normal: a sum of four uniform values.
__device__ float normal_of(uint64_t i) {
  float sum = 0.0f;
  for (int j = 0; j < 4; ++j) sum += static_cast<float>(hash(i * 4 + j) >> 8) * 0x1p-24f - 0.5f;
  return sum * 1.732f;
}
__global__ void fill_bytes(uint32_t* to, int64_t count, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step)
    to[i] = hash(static_cast<uint64_t>(i) + seed);
}
__global__ void fill_halves(__half* to, int64_t count, float mean, float scale, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step)
    to[i] = __float2half(mean + scale * normal_of(static_cast<uint64_t>(i) + seed));
}

__global__ void fill_floats(float* to, int64_t count, float mean, float scale, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step)
    to[i] = mean + scale * normal_of(static_cast<uint64_t>(i) + seed);
}

void fill(Device<__half>& to, float mean, float scale, uint64_t seed) {
  fill_halves<<<1024, 256>>>(to.get(), static_cast<int64_t>(to.bytes() / 2), mean, scale, seed);
}

// `copies` weights of a shape, one behind the other.
struct BigWeights {
  Device<uint8_t> memory;
  size_t bytes;
  DeviceWeight first;
  DeviceWeight at(size_t i) const {
    DeviceWeight w = first;
    w.data += i * bytes;
    return w;
  }
};

std::unique_ptr<BigWeights> make_big(const Format& format, int64_t outputs, int64_t inputs,
                                     size_t copies) {
  const size_t bytes = weight_bytes(format.kind, outputs, inputs, format.group, false);
  auto big = std::unique_ptr<BigWeights>(
      new BigWeights{Device<uint8_t>(bytes * copies), bytes,
                     weight_shape(format.kind, outputs, inputs, format.group, false)});
  big->first.data = big->memory.get();
  const auto count = static_cast<size_t>(outputs * inputs);
  StagedRows staged;
  staged.kind = format.kind;
  if (format.group == 0) {
    Device<__half> rows(count);
    fill(rows, 0.0f, 0.03f, 1);
    staged.rows = reinterpret_cast<const uint8_t*>(rows.get());
    repack(nullptr, staged, big->first, 0, outputs, big->memory.get());
    check(cudaDeviceSynchronize(), "repack");
  } else {
    const bool nibbles = format.kind == TensorKind::kQ4;
    const size_t code_bytes = nibbles ? count / 2 : count;
    Device<uint8_t> codes(code_bytes);
    fill_bytes<<<1024, 256>>>(reinterpret_cast<uint32_t*>(codes.get()),
                              static_cast<int64_t>(code_bytes / 4), 2);
    const size_t groups = count / static_cast<size_t>(format.group);
    Device<__half> scales(groups), zeros(groups);
    fill(scales, nibbles ? 0.008f : 0.0005f, nibbles ? 0.001f : 0.00006f, 3);
    fill(zeros, nibbles ? 7.5f : 127.5f, nibbles ? 0.5f : 8.0f, 4);
    staged.rows = codes.get();
    staged.scales = reinterpret_cast<const uint16_t*>(scales.get());
    staged.zeros = reinterpret_cast<const uint16_t*>(zeros.get());
    repack(nullptr, staged, big->first, 0, outputs, big->memory.get());
    check(cudaDeviceSynchronize(), "repack");
  }
  for (size_t i = 1; i < copies; ++i) {
    check(cudaMemcpy(big->memory.get() + i * bytes, big->memory.get(), bytes,
                     cudaMemcpyDeviceToDevice),
          "copy a weight");
  }
  check(cudaDeviceSynchronize(), "copy the weights");
  return big;
}

// Every path against cuBLASLt's 2,048 rows at once.
template <typename T>
void experiment(const Named& shape, const DeviceWeight& w, const LinearContext& context,
                const Device<__half>& x, OutputKind kind, const char* kind_name) {
  const int64_t n = shape.outputs, k = shape.inputs, most = 2048;
  Device<T> all(static_cast<size_t>(most * n)), out(static_cast<size_t>(most * n));
  const auto call = [&](int64_t rows, int64_t first, const Device<T>& to) {
    return rows_call(w, x.get() + first * k, k, rows, kind, to.get() + first * n, n);
  };
  const auto start = [&](Device<T>& to) {
    if (kind == OutputKind::kAdd) {
      check(cudaMemset(to.get(), 0x3D, to.bytes()), "set a state");
    } else {
      to.poison();
    }
  };
  start(all);
  linear_wide(nullptr, call(most, 0, all), context);
  const auto note = [&](const char* path, int64_t rows, int64_t first) {
    const Difference d = compare(out.get() + first * n, n, all.get() + first * n, n, rows, n);
    report(d.count == 0, std::string(shape.name) + ", " + kind_name + ", " + path + ", " +
                             std::to_string(rows) + " rows from " + std::to_string(first) + ": " +
                             words(d, rows * n));
  };
  for (const int64_t rows :
       {1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 129, 256, 300, 1000, 2047}) {
    start(out);
    run_watched("cuBLASLt", linear_wide, call(rows, 0, out), context);
    note("cuBLASLt", rows, 0);
    start(out);
    run_watched("linear", linear, call(rows, 0, out), context);
    note("linear", rows, 0);
    start(out);
    run_watched("warpgroups", linear_warpgroups, call(rows, 0, out), context);
    note("warpgroups", rows, 0);
    start(out);
    run_watched("fed", linear_fed, call(rows, 0, out), context);
    note("fed", rows, 0);
    start(out);
    run_watched("direct", linear_direct, call(rows, 0, out), context);
    note("direct", rows, 0);
  }
  start(out);
  linear_wide(nullptr, call(300, 129, out), context);
  note("cuBLASLt", 300, 129);
  start(out);
  linear_tiled(nullptr, call(most, 0, out), context);
  note("tiles", most, 0);
  start(out);
  for (int64_t r = 0; r < 16; ++r) linear_narrow(nullptr, call(1, r, out), context);
  note("narrow one by one", 16, 0);
  start(out);
  for (int64_t r = 0; r < 16; ++r) linear_fed(nullptr, call(1, r, out), context);
  note("fed one by one", 16, 0);
}

void experiments(LinearContext context) {
  if (context.cublas_lt == nullptr) return;
  for (const Named& shape : kModel) {
    const auto big = make_big({"Q4 g128", TensorKind::kQ4, 128}, shape.outputs, shape.inputs, 1);
    DeviceWeight w = big->first;
    Device<uint16_t> cache(static_cast<size_t>(shape.outputs * shape.inputs));
    dequantize(nullptr, w, 0, shape.outputs, cache.get(), shape.inputs);
    w.cache = cache.get();
    w.cache_stride = shape.inputs;
    Device<__half> x(static_cast<size_t>(2048 * shape.inputs));
    fill(x, 0.0f, 1.0f, 9);
    experiment<__half>(shape, w, context, x, OutputKind::kActivations, "FP16 out");
    experiment<float>(shape, w, context, x, OutputKind::kFloat, "FP32 out");
    if (shape.outputs == 2048) {
      experiment<float>(shape, w, context, x, OutputKind::kAdd, "added to FP32");
    }
    // The same through tiles of dequantized outputs.
    if (shape.outputs == 49152) {
      DeviceWeight uncached = w;
      uncached.cache = nullptr;
      Device<float> a(static_cast<size_t>(300 * shape.outputs)), b(a.bytes() / 4);
      linear_wide(
          nullptr,
          rows_call(w, x.get(), shape.inputs, 300, OutputKind::kFloat, a.get(), shape.outputs),
          context);
      linear_wide(nullptr,
                  rows_call(uncached, x.get(), shape.inputs, 300, OutputKind::kFloat, b.get(),
                            shape.outputs),
                  context);
      const Difference d =
          compare(a.get(), shape.outputs, b.get(), shape.outputs, 300, shape.outputs);
      report(d.count == 0,
             "head in tiles of outputs against whole: " + words(d, 300 * shape.outputs));
    }
  }
}

// ---- speeds -----------------------------------------------------------------------------------

// Median microseconds of a graph's replay.
double replay(const std::function<void(cudaStream_t)>& work) {
  static cudaStream_t stream = [] {
    cudaStream_t s;
    check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "create a stream");
    return s;
  }();
  work(stream);  // whatever is loaded or chosen at first use
  check(cudaStreamSynchronize(stream), "warm up");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
  work(stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate a graph");
  cudaEvent_t before, after;
  check(cudaEventCreate(&before), "create an event");
  check(cudaEventCreate(&after), "create an event");
  std::vector<float> times;
  for (int i = 0; i < 6; ++i) {
    check(cudaEventRecord(before, stream), "record");
    check(cudaGraphLaunch(exec, stream), "replay");
    check(cudaEventRecord(after, stream), "record");
    check(cudaStreamSynchronize(stream), "replay");
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, before, after), "time");
    if (i >= 1) times.push_back(ms * 1000.0f);
  }
  std::sort(times.begin(), times.end());
  cudaEventDestroy(before);
  cudaEventDestroy(after);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return times[times.size() / 2];
}

constexpr int kNodes = 200;

struct SpeedBuffers {
  Device<__half> x, gates;
  Device<float> state, norm, out;
  explicit SpeedBuffers(const Named& shape)
      : x(static_cast<size_t>(128 * shape.inputs)),
        gates(static_cast<size_t>(256 * shape.inputs)),
        state(static_cast<size_t>(128 * shape.inputs)),
        norm(static_cast<size_t>(shape.inputs)),
        out(static_cast<size_t>(128 * shape.outputs)) {
    fill(x, 0.0f, 1.0f, 5);
    fill(gates, 0.0f, 1.0f, 6);
    fill_floats<<<1024, 256>>>(state.get(), 128 * shape.inputs, 0.0f, 2.0f, 7);
    fill_floats<<<1024, 256>>>(norm.get(), shape.inputs, 1.0f, 0.2f, 8);
    check(cudaMemset(out.get(), 0, out.bytes()), "clear");
  }
  LinearCall call(const Named& shape, const DeviceWeight& w, int64_t rows, InputKind kind) const {
    LinearCall call = rows_call(w, x.get(), shape.inputs, rows, OutputKind::kActivations, out.get(),
                                shape.outputs);
    call.input.kind = kind;
    call.input.state = state.get();
    call.input.norm = {true, norm.get(), 1e-5f};
    if (kind == InputKind::kGateUp) {
      call.input.rows = gates.get();
      call.input.stride = 2 * shape.inputs;
    }
    return call;
  }
};

size_t copies_of(size_t bytes) {
  return std::min<size_t>(kNodes, std::max<size_t>(2, (size_t{600} << 20) / bytes + 1));
}

// ---- our own kernels against each other on the models' shapes ----------------------------------

struct NamedPath {
  const char* name;
  Path run;
  bool (*takes)(const LinearCall& call, const LinearContext& context);
};
constexpr NamedPath kPaths[] = {
    {"narrow", linear_narrow, takes_narrow},
    {"tiled",
     [](cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
       linear_tiled(stream, call, context);
     },
     [](const LinearCall& call, const LinearContext&) {
       return call.input.kind == InputKind::kRows;
     }},
    {"warpgroups", linear_warpgroups, takes_warpgroups},
    {"fed", linear_fed, takes_fed},
    {"direct", linear_direct, takes_direct}};
constexpr InputKind kFormedKinds[] = {InputKind::kRows, InputKind::kState, InputKind::kGateUp};

// Every path at every number of rows against tiles of 128 rows, or up to 8 rows of a formed input
// against the narrow kernel.
void check_models(LinearContext context, int parts) {
  context.parts = parts;
  constexpr int64_t kMost = 128;
  for (const Format& format : {kFormats[4], kFormats[2], kFormats[7], kFormats[1]}) {
    for (const Named& shape : kModel) {
      const auto big = make_big(format, shape.outputs, shape.inputs, 1);
      const SpeedBuffers buffers(shape);
      const int64_t n = shape.outputs;
      Device<float> base(static_cast<size_t>(kMost * n)), out(static_cast<size_t>(kMost * n));
      const auto call = [&](int64_t rows, InputKind kind, Device<float>& to) {
        LinearCall call = buffers.call(shape, big->first, rows, kind);
        call.output = {OutputKind::kFloat, to.get(), n};
        return call;
      };
      std::string miss;
      for (const InputKind kind : kFormedKinds) {
        base.poison();
        if (kind == InputKind::kRows) {
          linear_tiled(nullptr, call(kMost, kind, base), context, TileShape::k128x64);
        } else {
          linear_narrow(nullptr, call(8, kind, base), context);
        }
        for (const int64_t rows : {1, 2, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128}) {
          if (kind != InputKind::kRows && rows > 8) break;
          for (const NamedPath& path : kPaths) {
            if (!path.takes(call(rows, kind, out), context)) continue;
            const std::string what = std::string(path.name) + " of kind " +
                                     std::to_string(static_cast<int>(kind)) + ", " +
                                     std::to_string(rows) + " rows";
            out.poison();
            run_watched(path.name, path.run, call(rows, kind, out), context);
            const Difference d = compare(out.get(), n, base.get(), n, rows, n);
            if (d.count != 0) miss += "; " + what + ": " + words(d, rows * n);
          }
        }
      }
      report(miss.empty(), std::string(format.name) + " " + shape.name + ", " +
                               std::to_string(parts) + " parts" + miss);
    }
  }
}

// Rows formed by a kernel of their own, then fed.
void linear_formed_and_fed(cudaStream_t stream, const LinearCall& call,
                           const LinearContext& context) {
  LinearCall formed = call;
  formed.input = LinearInput{};
  formed.input.stride = call.weight.inputs;
  formed.input.rows = static_cast<uint8_t*>(context.scratch) + context.weight_scratch_bytes;
  form_rows(stream, call.input, 0, call.rows, call.weight.inputs,
            const_cast<void*>(formed.input.rows), formed.input.stride, false);
  linear_fed(stream, formed, context);
}

struct TimedPath {
  NamedPath path;
  int parts;
};
constexpr TimedPath kTimedPaths[] = {{kPaths[0], 1},
                                     {kPaths[1], 1},
                                     {kPaths[2], 1},
                                     {kPaths[3], 1},
                                     {kPaths[4], 1},
                                     {{"formed+fed", linear_formed_and_fed,
                                       [](const LinearCall& call, const LinearContext& context) {
                                         return call.input.kind != InputKind::kRows &&
                                                takes_fed(call, context);
                                       }},
                                      1},
                                     {{"narrow /4", linear_narrow, takes_narrow}, 4},
                                     {{"fed /4", linear_fed, takes_fed}, 4},
                                     {{"direct /4", linear_direct, takes_direct}, 4}};

void path_speeds(LinearContext context) {
  context.cublas_lt = nullptr;
  std::printf(
      "\nmicroseconds a node, %d nodes in a graph, weights from memory; in brackets at 4,300 "
      "GB/s\n",
      kNodes);
  for (const Format& format : {kFormats[4], kFormats[7], kFormats[1]}) {
    for (size_t s = 0; s < 4; ++s) {
      const Named& shape = kModel[s];
      const size_t bytes =
          weight_bytes(format.kind, shape.outputs, shape.inputs, format.group, false);
      const size_t copies = copies_of(bytes);
      const auto big = make_big(format, shape.outputs, shape.inputs, copies);
      const SpeedBuffers buffers(shape);
      std::printf("%-7s %.8s (%4.1f)\n", format.name, shape.name,
                  static_cast<double>(bytes) / 4300.0 * 1e-3);
      for (const TimedPath& timed : kTimedPaths) {
        const NamedPath& path = timed.path;
        context.parts = timed.parts;
        std::printf("  %-10s", path.name);
        const auto time = [&](const char* name, int64_t rows, InputKind kind) {
          if (timed.parts > 1 && rows > 8) return;
          if (!path.takes(buffers.call(shape, big->first, rows, kind), context)) return;
          if (path.run == kPaths[1].run && rows < 64) return;  // never the faster one
          double taken = 0.0;
          watched(
              "speed: " + words(path.name, buffers.call(shape, big->first, rows, kind), context),
              [&] {
                taken = replay([&](cudaStream_t stream) {
                  for (size_t i = 0; i < kNodes; ++i) {
                    path.run(stream, buffers.call(shape, big->at(i % copies), rows, kind), context);
                  }
                });
              });
          std::printf("  %s%ld:%6.2f", name, static_cast<long>(rows), taken / kNodes);
        };
        for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128}) {
          if (s == 0 || format.kind == TensorKind::kQ4 || rows == 1 || rows == 8 || rows == 64) {
            time("", rows, InputKind::kRows);
          }
        }
        for (const int64_t rows : {1, 2, 8}) time("norm ", rows, InputKind::kState);
        for (const int64_t rows : {1, 2, 8}) time("silu ", rows, InputKind::kGateUp);
        std::printf("\n");
      }
    }
  }
}

// qkv, o, gate_up and down, one after the other, as a layer has them.
void layer_speeds(LinearContext context, const char* name, int parts, Path path) {
  context.cublas_lt = nullptr;
  context.parts = parts;
  for (const Format& format : {kFormats[4], kFormats[7], kFormats[1]}) {
    std::vector<std::unique_ptr<BigWeights>> weights;
    std::vector<std::unique_ptr<SpeedBuffers>> buffers;
    constexpr size_t kLayers = 12;
    for (size_t i = 0; i < 4; ++i) {
      weights.push_back(make_big(format, kModel[i].outputs, kModel[i].inputs, kLayers));
      buffers.push_back(std::make_unique<SpeedBuffers>(kModel[i]));
    }
    std::printf("%-7s qkv o gate_up down, a layer, %s:", format.name, name);
    for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128}) {
      if (rows > 8 && (parts > 1 || path == linear_narrow)) break;
      const auto layers = [&](cudaStream_t stream) {
        constexpr InputKind kKinds[] = {InputKind::kState, InputKind::kRows, InputKind::kState,
                                        InputKind::kGateUp};
        for (size_t i = 0; i < kLayers * 4; ++i) {
          const InputKind kind = rows > 8 ? InputKind::kRows : kKinds[i % 4];
          path(stream, buffers[i % 4]->call(kModel[i % 4], weights[i % 4]->at(i / 4), rows, kind),
               context);
        }
      };
      watched(
          std::string("speed of a layer, ") + name + ", " + std::to_string(rows) + " rows",
          [&] { std::printf(" %ld:%6.1f", static_cast<long>(rows), replay(layers) / kLayers); });
    }
    std::printf("\n");
  }
}

// What the switch between our own kernels and cuBLASLt goes by.
void switch_speeds(const LinearContext& context) {
  std::printf("\nmicroseconds: warpgroups / cuBLASLt with a cache / without\n");
  for (const Named& shape : kModel) {
    const auto big = make_big(kFormats[4], shape.outputs, shape.inputs, 1);
    Device<uint16_t> cache(static_cast<size_t>(shape.outputs * shape.inputs));
    dequantize(nullptr, big->first, 0, shape.outputs, cache.get(), shape.inputs);
    check(cudaDeviceSynchronize(), "dequantize");
    DeviceWeight cached = big->first;
    cached.cache = cache.get();
    cached.cache_stride = shape.inputs;
    constexpr int64_t kMost = 2048;
    Device<__half> x(static_cast<size_t>(kMost * shape.inputs));
    fill(x, 0.0f, 1.0f, 5);
    Device<__half> out(static_cast<size_t>(kMost * shape.outputs));
    const auto time = [&](const DeviceWeight& weight, int64_t rows, auto run) {
      return replay([&](cudaStream_t stream) {
               for (int i = 0; i < 4; ++i) {
                 run(stream,
                     rows_call(weight, x.get(), shape.inputs, rows, OutputKind::kActivations,
                               out.get(), shape.outputs),
                     context);
               }
             }) /
             4;
    };
    std::printf("%-8.8s", shape.name);
    for (const int64_t rows : {64, 128, 192, 256, 512, 2048}) {
      std::printf(" %ld:%.1f", static_cast<long>(rows), time(big->first, rows, linear_warpgroups));
      if (context.cublas_lt != nullptr) {
        std::printf("/%.1f/%.1f", time(cached, rows, linear_wide),
                    time(big->first, rows, linear_wide));
      }
    }
    std::printf("\n");
  }
}

int run(const std::string& packages) {
  LinearContext context = linear_context(false);
  report(context.warpgroups, "the build and the device have products by warpgroups");
  const size_t scratch_bytes = linear_scratch_bytes(512, 5632, false, true);
  Device<uint8_t> scratch(scratch_bytes);
  context.scratch = scratch.get();
  context.scratch_bytes = scratch_bytes;
  context.weight_scratch_bytes = kWeightScratch;
  std::string why_not;
  const auto lt = CublasLt::open(packages, why_not);
  if (lt == nullptr) {
    std::printf("%s\n", why_not.c_str());
  } else {
    std::printf("cuBLASLt %zu\n", lt->version());
  }
  for (const Format& format : kFormats) {
    timed(std::string(format.name) + ", small shapes", [&] { check_shapes(format, context); });
  }
  std::printf("%d checks of small shapes, %d failures\n", checks, failures);
  for (const int parts : {1, 4}) {
    timed("models' shapes, " + std::to_string(parts) + " parts",
          [&] { check_models(context, parts); });
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  timed("speeds of products", [&] { path_speeds(context); });
  timed("speeds of layers", [&] {
    layer_speeds(context, "linear", 1, linear);
    layer_speeds(context, "linear, 4 parts", 4, linear);
    layer_speeds(context, "narrow", 1, linear_narrow);
    layer_speeds(context, "narrow, 4 parts", 4, linear_narrow);
  });
  context.cublas_lt = lt.get();
  timed("against cuBLASLt", [&] { experiments(context); });
  std::printf("%d checks, %d failures\n", checks, failures);
  timed("speeds beside cuBLASLt", [&] { switch_speeds(context); });
  check(cudaDeviceSynchronize(), "finish");
  std::printf("\n%s\n", failures == 0 ? "all checks passed" : "CHECKS FAILED");
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& e) {
    std::printf("STOPPED: %s\n", e.what());
    return 2;
  }
}
