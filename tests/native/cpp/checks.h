// What the test program's cases share: data that all numeric modes hold exactly, and a case.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"

namespace tinyloop {

using Values = std::vector<double>;

// The FP16 path rounds a result once (2^-11 of it), and may round an input of a sum the other way
// than double precision does; FP32 sums of up to 600 terms of size 1 lose about 1e-6 each way.
inline constexpr double kHalfTolerance = 2e-3;
inline constexpr double kFloatTolerance = 2e-5;
// Where a result is not rounded: sums of up to 600 products of size 1, whose weights are off by up
// to 2^-16 of themselves and which leave out as much again in the bf16 mode.
inline constexpr double kSplitTolerance = 2e-4;
inline constexpr double kExact = 0.0;

// ---- data
// ----------------------------------------------------------------------------------------

inline double to_half(double x) {
  return static_cast<double>(static_cast<_Float16>(static_cast<float>(x)));
}
inline uint16_t half_bits(double x) {
  const auto half = static_cast<_Float16>(static_cast<float>(x));
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

// A number in [-1, 1) that FP16 holds, so that both modes see the same inputs.
inline double noise(uint64_t stream, int64_t index) {
  uint64_t z = (stream << 40) + static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return to_half(static_cast<double>((z ^ z >> 31) >> 40) / (1 << 23) - 1.0);
}
inline std::vector<float> noise_floats(uint64_t stream, int64_t n) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = static_cast<float>(noise(stream, i));
  return x;
}

inline double rounded(double x, bool fp32) { return fp32 ? static_cast<float>(x) : to_half(x); }
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Rows of activations with a stride of their own.
class Acts {
 public:
  Acts(bool fp32, int64_t rows, int64_t width)
      : fp32_(fp32),
        n_(rows),
        width_(width),
        stride_(width + 3),
        bytes_(static_cast<size_t>(rows * stride_ * size())) {}
  Acts(bool fp32, int64_t rows, int64_t width, uint64_t stream) : Acts(fp32, rows, width) {
    for (int64_t i = 0; i < rows * width; ++i) set(i / width, i % width, noise(stream, i));
  }

  int64_t size() const { return fp32_ ? 4 : 2; }
  Rows from(int64_t row = 0) { return {bytes_.data() + row * stride_ * size(), stride_}; }
  uint8_t* at(int64_t row, int64_t column) {
    return bytes_.data() + (row * stride_ + column) * size();
  }
  void set(int64_t row, int64_t column, double x) {
    const auto value = static_cast<float>(x);
    const uint16_t half = half_bits(x);
    std::memcpy(at(row, column), fp32_ ? static_cast<const void*>(&value) : &half,
                static_cast<size_t>(size()));
  }
  double get(int64_t row, int64_t column) { return read(at(row, column), fp32_); }
  static double read(const uint8_t* at, bool fp32) {
    if (fp32) {
      float value;
      std::memcpy(&value, at, 4);
      return static_cast<double>(value);
    }
    _Float16 value;
    std::memcpy(&value, at, 2);
    return static_cast<double>(value);
  }
  Values all() {
    Values out;
    for (int64_t r = 0; r < n_; ++r) {
      for (int64_t c = 0; c < width_; ++c) out.push_back(get(r, c));
    }
    return out;
  }

 private:
  bool fp32_;
  int64_t n_, width_, stride_;
  std::vector<uint8_t> bytes_;
};

// A tensor of a model file, and what it stands for.
struct Tensor {
  TensorEntry entry;
  std::vector<uint8_t> bytes;
  Values values;

  double at(int64_t row, int64_t column) const {
    return values[static_cast<size_t>(row * entry.cols + column)];
  }
};

template <typename T>
inline void append(std::vector<uint8_t>& bytes, T value) {
  const auto* raw = reinterpret_cast<const uint8_t*>(&value);
  bytes.insert(bytes.end(), raw, raw + sizeof(T));
}

inline void add_codes(Tensor& t, double top) {
  const int64_t groups = t.entry.groups();
  const auto scale = [&](int64_t i) { return to_half(0.02 + 0.01 * noise(91, i)); };
  const auto zero = [&](int64_t i) { return to_half(top / 2 + noise(92, i)); };
  for (int64_t i = 0; i < t.entry.rows * t.entry.cols; ++i) {
    const auto code = static_cast<int>((noise(93, i) + 1.0) / 2.0 * top);
    const int64_t group = i / t.entry.cols * groups + i % t.entry.cols / t.entry.group;
    const auto above = static_cast<float>(code - zero(group));
    t.values.push_back(above * static_cast<float>(scale(group)));
    if (top > 15.0 || i % 2 == 0) {
      t.bytes.push_back(static_cast<uint8_t>(code));
    } else {
      t.bytes.back() |= static_cast<uint8_t>(code << 4);
    }
  }
  for (int64_t i = 0; i < t.entry.rows * groups; ++i) append(t.bytes, half_bits(scale(i)));
  for (int64_t i = 0; i < t.entry.rows * groups; ++i) append(t.bytes, half_bits(zero(i)));
}

inline std::shared_ptr<Tensor> make_tensor(TensorKind kind, int64_t rows, int64_t cols,
                                           int64_t group = 32) {
  auto t = std::make_shared<Tensor>();
  const bool coded = kind == TensorKind::kQ4 || kind == TensorKind::kQ8;
  t->entry = {"weight", kind, rows, cols, coded ? group : 0};
  if (coded) {
    add_codes(*t, kind == TensorKind::kQ4 ? 15.0 : 255.0);
  } else {
    for (int64_t i = 0; i < rows * cols; ++i) {
      t->values.push_back(noise(90, i) / 8.0);
      if (kind == TensorKind::kF32) append(t->bytes, static_cast<float>(t->values.back()));
      if (kind == TensorKind::kF16) append(t->bytes, half_bits(t->values.back()));
    }
  }
  if (kind == TensorKind::kF16) {
    for (double& value : t->values) value = to_half(value);
  }
  t->entry.data = t->bytes.data();
  t->entry.bytes = t->bytes.size();
  return t;
}

// ---- checks
// --------------------------------------------------------------------------------------

// One operation on fixed data. run() does it in calls of at most `split` rows.
struct Case {
  std::string name;
  std::function<Values(Backend&, int64_t split)> run;
  std::function<Values(bool fp32)> want;
  double half_tolerance = kHalfTolerance;
  double float_tolerance = kFloatTolerance;
};

inline constexpr int64_t kWhole = INT64_MAX;

inline bool is_fp32(const Backend& backend) { return backend.activation_bytes() == 4; }

template <typename Call>
inline void in_splits(int64_t rows, int64_t split, Call call) {
  for (int64_t at = 0; at < rows; at += std::min(split, rows)) call(at, std::min(split, rows - at));
}

inline std::unique_ptr<Weight> upload(Backend& backend, const Tensor& t, int64_t begin,
                                      int64_t end) {
  return backend.upload(t.entry, begin, end, WeightUse::kOnce, *std::make_shared<Account>(0));
}

// The largest difference, relative above 1.
inline double error_of(const Values& got, const Values& want) {
  if (got.size() != want.size()) return INFINITY;
  double worst = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    const double error = std::fabs(got[i] - want[i]) / std::max(1.0, std::fabs(want[i]));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

// Each list in a file of its own.
std::vector<Case> product_cases();
std::vector<Case> row_cases();
std::vector<Case> cache_cases();
std::vector<Case> attention_cases();
std::vector<Case> scoring_cases();

}  // namespace tinyloop
