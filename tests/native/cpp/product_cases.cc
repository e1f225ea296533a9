// Products of rows and weights.
#include "checks.h"

namespace tinyloop {
namespace {

struct Shape {
  TensorKind kind;
  int64_t rows, inputs, outputs;
  int64_t group = 32;  // of coded weights
};
// Uploaded outputs start at this one of the tensor.
constexpr int64_t kBegin = 5;

std::string name_of(const char* operation, const Shape& s) {
  return std::string(operation) + " kind " + std::to_string(static_cast<int>(s.kind)) + ", " +
         std::to_string(s.rows) + " rows, " + std::to_string(s.inputs) + " to " +
         std::to_string(s.outputs) +
         (s.group == 32 ? "" : ", groups of " + std::to_string(s.group));
}
std::shared_ptr<Tensor> tensor_of(const Shape& s) {
  return make_tensor(s.kind, s.outputs + kBegin + 2, s.inputs, s.group);
}
std::unique_ptr<Weight> weight_of(Backend& backend, const Shape& s, const Tensor& t) {
  return upload(backend, t, kBegin, kBegin + s.outputs);
}

// row(r) gives the inputs of row r, as activations.
template <typename Row>
Values multiply(const Shape& s, const Tensor& t, Row row) {
  Values out;
  for (int64_t r = 0; r < s.rows; ++r) {
    const Values x = row(r);
    for (int64_t n = 0; n < s.outputs; ++n) {
      double sum = 0.0;
      for (int64_t k = 0; k < s.inputs; ++k) sum += x[static_cast<size_t>(k)] * t.at(kBegin + n, k);
      out.push_back(sum);
    }
  }
  return out;
}

Values noise_row(uint64_t stream, int64_t row, int64_t width) {
  Values x;
  for (int64_t k = 0; k < width; ++k) x.push_back(noise(stream, row * width + k));
  return x;
}

Case embed_case(const Shape& s, float scale) {
  const auto t = tensor_of(s);
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < s.rows; ++r) ids.push_back(static_cast<int32_t>(r * 7 % s.outputs));
  const auto run = [=](Backend& backend, int64_t split) {
    const auto weight = weight_of(backend, s, *t);
    std::vector<float> state(static_cast<size_t>(s.rows * s.inputs));
    in_splits(s.rows, split, [&](int64_t at, int64_t n) {
      backend.embed(*weight, ids.data() + at, n, scale, state.data() + at * s.inputs);
    });
    return Values(state.begin(), state.end());
  };
  const auto want = [=](bool) {
    Values out;
    for (const int32_t id : ids) {
      for (int64_t k = 0; k < s.inputs; ++k)
        out.push_back(static_cast<float>(t->at(kBegin + id, k)) * scale);
    }
    return out;
  };
  return {name_of("embed", s), run, want, kExact, kExact};
}

enum class Weighting { kWeight, kNoWeight, kAbsent };

Case norm_linear_case(const Shape& s, Weighting weighting) {
  const auto t = tensor_of(s);
  const auto state = noise_floats(1, s.rows * s.inputs);
  const auto weights = noise_floats(2, s.inputs);
  const NormSpec norm{weighting != Weighting::kAbsent, nullptr, 1e-5f};
  const auto run = [=](Backend& backend, int64_t split) {
    const auto weight = weight_of(backend, s, *t);
    NormSpec spec = norm;
    if (weighting == Weighting::kWeight) spec.weight = weights.data();
    Acts out(is_fp32(backend), s.rows, s.outputs);
    in_splits(s.rows, split, [&](int64_t at, int64_t n) {
      backend.norm_linear(state.data() + at * s.inputs, spec, n, *weight, out.from(at));
    });
    return out.all();
  };
  const auto want = [=](bool fp32) {
    return multiply(s, *t, [&](int64_t r) {
      Values x = noise_row(1, r, s.inputs);
      double squares = 0.0;
      for (const double value : x) squares += value * value;
      const double rms =
          norm.present ? std::sqrt(squares / static_cast<double>(s.inputs) + 1e-5) : 1.0;
      for (size_t k = 0; k < x.size(); ++k) {
        const double weight =
            weighting == Weighting::kWeight ? static_cast<double>(weights[k]) : 1.0;
        x[k] = rounded(x[k] / rms * weight, fp32);
      }
      return x;
    });
  };
  return {name_of("norm_linear", s), run, want};
}

Case linear_case(const Shape& s) {
  const auto t = tensor_of(s);
  const auto run = [=](Backend& backend, int64_t split) {
    const auto weight = weight_of(backend, s, *t);
    Acts in(is_fp32(backend), s.rows, s.inputs, 3), out(is_fp32(backend), s.rows, s.outputs);
    in_splits(s.rows, split, [&](int64_t at, int64_t n) {
      backend.linear(in.from(at), n, *weight, out.from(at));
    });
    return out.all();
  };
  const auto want = [=](bool) {
    return multiply(s, *t, [&](int64_t r) { return noise_row(3, r, s.inputs); });
  };
  return {name_of("linear", s), run, want};
}

// Rows alone and among so many that the backend multiplies them in another way: the run that is
// whole, which the others are compared with, has the many.
Case few_rows_case(const Shape& s) {
  constexpr int64_t kMany = 40;
  const auto t = tensor_of(s);
  const auto run = [=](Backend& backend, int64_t split) {
    const auto weight = weight_of(backend, s, *t);
    const int64_t rows = split == kWhole ? kMany : s.rows;
    Acts in(is_fp32(backend), rows, s.inputs, 3), out(is_fp32(backend), rows, s.outputs);
    backend.linear(in.from(0), rows, *weight, out.from(0));
    Values values = out.all();
    values.resize(static_cast<size_t>(s.rows * s.outputs));
    return values;
  };
  const auto want = [=](bool) {
    return multiply(s, *t, [&](int64_t r) { return noise_row(3, r, s.inputs); });
  };
  return {name_of("few rows of linear", s), run, want};
}

Case linear_add_case(const Shape& s) {
  const auto t = tensor_of(s);
  const auto start = noise_floats(4, s.rows * s.outputs);
  const auto run = [=](Backend& backend, int64_t split) {
    const auto weight = weight_of(backend, s, *t);
    Acts in(is_fp32(backend), s.rows, s.inputs, 3);
    std::vector<float> state = start;
    in_splits(s.rows, split, [&](int64_t at, int64_t n) {
      backend.linear_add(in.from(at), n, *weight, state.data() + at * s.outputs);
    });
    return Values(state.begin(), state.end());
  };
  const auto want = [=](bool) {
    Values out = multiply(s, *t, [&](int64_t r) { return noise_row(3, r, s.inputs); });
    for (size_t i = 0; i < out.size(); ++i) out[i] += static_cast<double>(start[i]);
    return out;
  };
  return {name_of("linear_add", s), run, want, kFloatTolerance, kFloatTolerance};
}

Case adapter_case(const Shape& s) {
  const auto t = tensor_of(s);
  const int64_t width = s.outputs;
  const auto start = noise_floats(5, s.rows * width), input = noise_floats(6, s.rows * width);
  const auto run = [=](Backend& backend, int64_t split) {
    const auto weight = weight_of(backend, s, *t);
    std::vector<float> state = start;
    in_splits(s.rows, split, [&](int64_t at, int64_t n) {
      backend.adapter(state.data() + at * width, input.data() + at * width, n, *weight);
    });
    return Values(state.begin(), state.end());
  };
  const auto want = [=](bool) {
    return multiply(s, *t, [&](int64_t r) {
      Values x = noise_row(5, r, width);
      const Values second = noise_row(6, r, width);
      x.insert(x.end(), second.begin(), second.end());
      return x;
    });
  };
  return {name_of("adapter", s), run, want, kFloatTolerance, kFloatTolerance};
}

}  // namespace

std::vector<Case> product_cases() {
  using Kind = TensorKind;
  std::vector<Case> cases;
  for (const Kind kind : {Kind::kF32, Kind::kF16, Kind::kQ4, Kind::kQ8}) {
    cases.push_back(embed_case({kind, 7, 100, 40}, 1.0f));
    cases.push_back(embed_case({kind, 400, 300, 77}, 3.7f));
    cases.push_back(linear_case({kind, 7, 600, 77}));
    for (int64_t rows = 1; rows <= 16; ++rows) {
      cases.push_back(few_rows_case({kind, rows, 300, 16 * (rows % 7) + rows}));
    }
    cases.push_back(few_rows_case({kind, 1, 34, 5}));
    cases.push_back(few_rows_case({kind, 2, 518, 200}));
  }
  for (const int64_t group : {32, 64, 128}) {  // short last groups, and an input without a second
    cases.push_back(linear_case({Kind::kQ4, 33, 576, 90, group}));
    cases.push_back(linear_case({Kind::kQ4, 90, 1000, 40, group}));
    cases.push_back(linear_case({Kind::kQ8, 50, 301, 77, group}));
    cases.push_back(few_rows_case({Kind::kQ4, 3, 200, 130, group}));
  }
  for (const int64_t rows : {1, 7, 400}) {
    cases.push_back(norm_linear_case({Kind::kF16, rows, 100, 40}, Weighting::kWeight));
    cases.push_back(norm_linear_case({Kind::kQ4, rows, 600, 77}, Weighting::kNoWeight));
    cases.push_back(norm_linear_case({Kind::kQ8, rows, 64, 77}, Weighting::kAbsent));
    cases.push_back(linear_case({Kind::kF32, rows, 250, 130}));
    cases.push_back(linear_add_case({Kind::kF16, rows, 600, 77}));
    cases.push_back(adapter_case({Kind::kF16, rows, 80, 40}));
    cases.push_back(adapter_case({Kind::kQ4, rows, 600, 300}));
    cases.push_back(adapter_case({Kind::kF32, rows, 2 * 45, 45}));
  }
  return cases;
}

}  // namespace tinyloop
