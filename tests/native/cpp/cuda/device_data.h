// What the checks of the device's row operations share: data in both memories, comparisons, lines.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../checks.h"
#include "bench.h"
#include "cuda/check.h"

namespace tinyloop::cuda {

using Bytes = std::vector<uint8_t>;

// ---- memory -------------------------------------------------------------------------------------

// Values in device memory, `offset` bytes from an aligned address.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host, size_t offset = 0) : n_(host.size()) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, n_ * sizeof(T) + offset + 1), "allocate test data");
    memory_.reset(memory, [](void* p) { cudaFree(p); });
    data_ = reinterpret_cast<T*>(static_cast<uint8_t*>(memory) + offset);
    check(cudaMemcpy(data_, host.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), "copy");
    // The copy may still be on its way, and other streams do not wait for it.
    check(cudaDeviceSynchronize(), "copy");
  }
  T* get() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> host(n_);
    check(cudaDeviceSynchronize(), "run a kernel");
    check(cudaMemcpy(host.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "copy back");
    return host;
  }

 private:
  size_t n_;
  std::shared_ptr<void> memory_;
  T* data_ = nullptr;
};

// Rows of activations; what lies between them must stay as it is.
class Matrix {
 public:
  Matrix(bool fp32, int64_t rows, int64_t width, int64_t gap)
      : fp32_(fp32),
        rows_(rows),
        width_(width),
        stride_(width + gap),
        bytes_(static_cast<size_t>(rows * stride_ * size()), 0xAB) {}
  Matrix(bool fp32, int64_t rows, int64_t width, int64_t gap, uint64_t stream, double scale = 1.0)
      : Matrix(fp32, rows, width, gap) {
    for (int64_t i = 0; i < rows * width; ++i) {
      set(i / width, i % width, scale * noise(stream, i));
    }
  }

  int64_t size() const { return fp32_ ? 4 : 2; }
  int64_t rows() const { return rows_; }
  int64_t stride() const { return stride_; }
  Bytes& bytes() { return bytes_; }
  Rows host(int64_t row = 0) { return {bytes_.data() + row * stride_ * size(), stride_}; }
  Rows at(const OnDevice<uint8_t>& device, int64_t row = 0) const {
    return {device.get() + row * stride_ * size(), stride_};
  }
  void set(int64_t row, int64_t column, double x) {
    uint8_t* at = bytes_.data() + (row * stride_ + column) * size();
    const auto value = static_cast<float>(x);
    const uint16_t half = half_bits(x);
    std::memcpy(at, fp32_ ? static_cast<const void*>(&value) : &half, static_cast<size_t>(size()));
  }
  // Element (row, column) of these bytes.
  double get(const Bytes& bytes, int64_t row, int64_t column) const {
    return Acts::read(bytes.data() + (row * stride_ + column) * size(), fp32_);
  }
  Bytes row_bytes(const Bytes& bytes, int64_t row) const {
    const auto begin = bytes.begin() + row * stride_ * size();
    return Bytes(begin, begin + width_ * size());
  }

  // Largest difference of two such matrices, in steps of the activations' type at that size, or in
  // parts of `floor` where the values are below it; infinite where a gap differs.
  double steps_between(const Bytes& a, const Bytes& b, double floor) const {
    double worst = 0.0;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < stride_; ++c) {
        const uint8_t* at = a.data() + (r * stride_ + c) * size();
        const bool same =
            std::memcmp(at, b.data() + (at - a.data()), static_cast<size_t>(size())) == 0;
        if (same) continue;
        if (c >= width_) return INFINITY;
        const double x = get(a, r, c), y = get(b, r, c);
        const double magnitude = std::max({std::fabs(x), std::fabs(y), floor});
        const double step = std::ldexp(1.0, std::ilogb(magnitude) - (fp32_ ? 23 : 10));
        const double steps = std::fabs(x - y) / step;
        worst = std::isnan(steps) ? INFINITY : std::max(worst, steps);
      }
    }
    return worst;
  }

 private:
  bool fp32_;
  int64_t rows_, width_, stride_;
  Bytes bytes_;
};

// Largest relative difference, of values at least `floor` large.
inline double relative(const std::vector<float>& a, const std::vector<float>& b, double floor) {
  double worst = a.size() == b.size() ? 0.0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], 4) == 0) continue;
    const auto x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    const double error = std::fabs(x - y) / std::max({std::fabs(x), std::fabs(y), floor});
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

template <typename T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline std::string mode(bool fp32) { return fp32 ? "fp32 " : "fp16 "; }
inline std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2g", x);
  return text;
}
inline std::string sized(int64_t rows, int64_t width) {
  return " of " + std::to_string(rows) + " x " + std::to_string(width);
}

// The largest of many differences, in one line.
class Worst {
 public:
  explicit Worst(double allowed) : allowed_(allowed) {}
  void add(double value, const std::string& where) {
    if (value > worst_ || std::isnan(value)) {
      worst_ = value;
      where_ = where;
    }
  }
  void line(const std::string& text) const {
    report(worst_ <= allowed_, text + ": worst " + number(worst_) + " of " + number(allowed_) +
                                   (where_.empty() ? "" : " at" + where_));
  }

 private:
  double allowed_, worst_ = 0.0;
  std::string where_;
};

// Whether all of many comparisons hold, in one line.
class All {
 public:
  void add(bool good, const std::string& where) {
    ++n_;
    if (!good && wrong_.empty()) wrong_ = where;
  }
  void line(const std::string& text) const {
    report(wrong_.empty() && n_ > 0, text + ": " + std::to_string(n_) + " cases" +
                                         (wrong_.empty() ? "" : ", wrong at" + wrong_));
  }

 private:
  int n_ = 0;
  std::string wrong_;
};

// ---- tolerances ---------------------------------------------------------------------------------

// The sums of a norm are in another order than the CPU's, and silu has another exponential: a few
// units of float32, which may turn a rounding to FP16 the other way.
inline constexpr double kHalfSteps = 2.0;
inline constexpr double kFloatSteps = 32.0;
inline double steps_allowed(bool fp32) { return fp32 ? kFloatSteps : kHalfSteps; }
inline constexpr double kFloatRelative = 4e-6;

}  // namespace tinyloop::cuda
