// Operations on rows alone: norms, gates, the seeded state, and heads before attention.
#include "checks.h"

namespace tinyloop {
namespace {

std::string sized(const std::string& operation, int64_t rows, int64_t width) {
  return operation + " of " + std::to_string(rows) + " rows, width " + std::to_string(width);
}

Values normed(const Values& x, const std::vector<float>* weight, double eps) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  const double rms = std::sqrt(squares / static_cast<double>(x.size()) + eps);
  Values out;
  for (size_t k = 0; k < x.size(); ++k) {
    out.push_back(x[k] / rms * (weight == nullptr ? 1.0 : static_cast<double>((*weight)[k])));
  }
  return out;
}

constexpr float kEps = 1e-5f;

// state = norm(state), or state += norm(branch).
Case norm_case(bool adds, bool weighted, bool present, int64_t rows, int64_t width) {
  const auto start = noise_floats(10, rows * width), weight = noise_floats(11, width);
  const auto run = [=](Backend& backend, int64_t split) {
    std::vector<float> state = start;
    Acts branch(is_fp32(backend), rows, width, 12);
    const NormSpec norm{present, weighted ? weight.data() : nullptr, kEps};
    in_splits(rows, split, [&](int64_t at, int64_t n) {
      float* to = state.data() + at * width;
      if (adds) {
        backend.norm_add(branch.from(at), norm, n, width, to);
      } else {
        backend.norm(to, norm, n, width);
      }
    });
    return Values(state.begin(), state.end());
  };
  const auto want = [=](bool) {
    Values out;
    for (int64_t r = 0; r < rows; ++r) {
      Values x;
      for (int64_t k = 0; k < width; ++k) x.push_back(noise(adds ? 12 : 10, r * width + k));
      if (present) x = normed(x, weighted ? &weight : nullptr, static_cast<double>(kEps));
      for (int64_t k = 0; k < width; ++k) {
        out.push_back(x[static_cast<size_t>(k)] + (adds ? noise(10, r * width + k) : 0.0));
      }
    }
    return out;
  };
  const std::string kind = std::string(adds ? "norm_add" : "norm") +
                           (weighted ? "" : " without weight") + (present ? "" : ", absent,");
  return {sized(kind, rows, width), run, want, kFloatTolerance, kFloatTolerance};
}

Case add_case(int64_t rows, int64_t width) {
  const auto start = noise_floats(13, rows * width), other = noise_floats(14, rows * width);
  const auto run = [=](Backend& backend, int64_t split) {
    std::vector<float> state = start;
    in_splits(rows, split, [&](int64_t at, int64_t n) {
      backend.add(state.data() + at * width, other.data() + at * width, n, width);
    });
    return Values(state.begin(), state.end());
  };
  const auto want = [=](bool) {
    Values out;
    for (size_t i = 0; i < start.size(); ++i)
      out.push_back(static_cast<double>(start[i]) + static_cast<double>(other[i]));
    return out;
  };
  return {sized("add", rows, width), run, want, kExact, kExact};
}

// ---- the seeded state
// ----------------------------------------------------------------------------

uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

// Phi^-1 by halving, on the C library's own error function.
double inverse_normal(double p) {
  double low = -4.0, high = 4.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2.0;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return low;
}

Case init_normal_case(int64_t rows, int64_t width, uint64_t seed) {
  constexpr float kStd = 0.3f;
  const auto position_of = [](int64_t row) { return static_cast<int32_t>(row * 37 % 5000); };
  const auto run = [=](Backend& backend, int64_t split) {
    std::vector<float> state(static_cast<size_t>(rows * width));
    std::vector<int32_t> positions;
    for (int64_t r = 0; r < rows; ++r) positions.push_back(position_of(r));
    in_splits(rows, split, [&](int64_t at, int64_t n) {
      backend.init_normal(state.data() + at * width, positions.data() + at, n, width, kStd, seed);
    });
    return Values(state.begin(), state.end());
  };
  const auto want = [=](bool) {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
    const double cut = 0.5 * std::erfc(3.0 / std::sqrt(2.0));
    Values out;
    for (int64_t r = 0; r < rows; ++r) {
      const uint64_t row =
          mix(mix(seed + kGolden) + static_cast<uint64_t>(position_of(r)) * kGolden);
      for (int64_t c = 0; c < width; ++c) {
        const uint64_t bits = mix(row + static_cast<uint64_t>(c) * 0xD1B54A32D192ED03);
        const double u = (static_cast<double>(bits >> 40) + 0.5) / (1 << 24);
        out.push_back(inverse_normal(cut + u * (1.0 - 2.0 * cut)) * static_cast<double>(kStd));
      }
    }
    return out;
  };
  constexpr double kAgreement = 1e-6;  // what two implementations of the formula owe each other
  return {sized("init_normal", rows, width), run, want, kAgreement, kAgreement};
}

// ---- gates
// ---------------------------------------------------------------------------------------

Case gate_mul_case(int64_t rows, int64_t width) {
  const auto run = [=](Backend& backend, int64_t split) {
    Acts gate(is_fp32(backend), rows, width, 15), out(is_fp32(backend), rows, width, 16);
    in_splits(rows, split, [&](int64_t at, int64_t n) {
      backend.gate_mul(gate.from(at), n, width, out.from(at));
    });
    return out.all();
  };
  const auto want = [=](bool) {
    Values out;
    for (int64_t i = 0; i < rows * width; ++i) out.push_back(noise(16, i) * sigmoid(noise(15, i)));
    return out;
  };
  return {sized("gate_mul", rows, width), run, want};
}

Case silu_mul_case(int64_t rows, int64_t width) {
  const auto run = [=](Backend& backend, int64_t split) {
    Acts gate_up(is_fp32(backend), rows, 2 * width, 17), out(is_fp32(backend), rows, width);
    in_splits(rows, split, [&](int64_t at, int64_t n) {
      backend.silu_mul(gate_up.from(at), n, width, out.from(at));
    });
    return out.all();
  };
  const auto want = [=](bool) {
    Values out;
    for (int64_t i = 0; i < rows * width; ++i) {
      const int64_t at = i / width * 2 * width + i % width;
      out.push_back(noise(17, at) * sigmoid(noise(17, at)) * noise(17, at + width));
    }
    return out;
  };
  return {sized("silu_mul", rows, width), run, want};
}

// ---- heads
// ---------------------------------------------------------------------------------------

struct Heads {
  HeadShape shape;
  QkNorm norm;
  bool bias, pairs;
  int64_t rows;

  int64_t q() const { return shape.n_q_heads * shape.head_dim; }
  int64_t kv() const { return shape.n_kv_heads * shape.head_dim; }
  int64_t width() const { return q() + 2 * kv(); }
};

// Norm, then rotation, of heads of q or of k.
void prepare(Values& heads, const Heads& h, const std::vector<float>& weight, const float* rope) {
  const auto dim = static_cast<size_t>(h.shape.head_dim), half = dim / 2;
  const size_t group = h.norm == QkNorm::kFull ? heads.size() : dim;
  for (size_t at = 0; h.norm != QkNorm::kNone && at < heads.size(); at += group) {
    const auto begin = heads.begin() + static_cast<int64_t>(at);
    const Values part = normed(Values(begin, begin + static_cast<int64_t>(group)), &weight,
                               static_cast<double>(kEps));
    std::copy(part.begin(), part.end(), begin);
  }
  for (size_t at = 0; at < heads.size(); at += dim) {
    for (size_t j = 0; j < half; ++j) {
      double& x = heads[at + (h.pairs ? 2 * j : j)];
      double& y = heads[at + (h.pairs ? 2 * j + 1 : j + half)];
      const auto c = static_cast<double>(rope[j]), s = static_cast<double>(rope[half + j]);
      const double turned = x * c - y * s;
      y = y * c + x * s;
      x = turned;
    }
  }
}

Case heads_case(const Heads& h) {
  const auto rope = noise_floats(20, h.rows * h.shape.head_dim);
  const auto bias = noise_floats(21, h.width());
  const bool full = h.norm == QkNorm::kFull;
  const auto q_norm = noise_floats(22, full ? h.q() : h.shape.head_dim);
  const auto k_norm = noise_floats(23, full ? h.kv() : h.shape.head_dim);
  const auto run = [=](Backend& backend, int64_t split) {
    Acts qkv(is_fp32(backend), h.rows, h.width(), 24);
    HeadPrep prep;
    prep.bias = h.bias ? bias.data() : nullptr;
    prep.norm = h.norm;
    prep.q_norm = q_norm.data();
    prep.k_norm = k_norm.data();
    prep.eps = kEps;
    prep.adjacent_pairs = h.pairs;
    in_splits(h.rows, split, [&](int64_t at, int64_t n) {
      backend.prepare_heads(qkv.from(at), rope.data() + at * h.shape.head_dim, n, h.shape, prep);
    });
    return qkv.all();
  };
  const auto want = [=](bool) {
    Values out;
    for (int64_t r = 0; r < h.rows; ++r) {
      Values q, k, v;
      for (int64_t c = 0; c < h.width(); ++c) {
        const double x = noise(24, r * h.width() + c) +
                         (h.bias ? static_cast<double>(bias[static_cast<size_t>(c)]) : 0.0);
        (c < h.q() ? q : c < h.q() + h.kv() ? k : v).push_back(x);
      }
      const float* angles = rope.data() + r * h.shape.head_dim;
      prepare(q, h, q_norm, angles);
      prepare(k, h, k_norm, angles);
      for (const Values* part : {&q, &k, &v}) out.insert(out.end(), part->begin(), part->end());
    }
    return out;
  };
  const char* norm = h.norm == QkNorm::kNone ? "" : full ? ", full norm" : ", head norm";
  return {"prepare_heads of " + std::to_string(h.rows) + " rows, " +
              std::to_string(h.shape.n_q_heads) + " and " + std::to_string(h.shape.n_kv_heads) +
              " x " + std::to_string(h.shape.head_dim) + norm + (h.bias ? ", bias" : "") +
              (h.pairs ? ", pairs" : ""),
          run, want};
}

}  // namespace

std::vector<Case> row_cases() {
  std::vector<Case> cases;
  for (const int64_t rows : {1, 7, 400}) {
    for (const int64_t width : {45, 64}) {
      for (const bool adds : {false, true}) {
        cases.push_back(norm_case(adds, true, true, rows, width));
        cases.push_back(norm_case(adds, false, true, rows, width));
        cases.push_back(norm_case(adds, true, false, rows, width));
      }
      cases.push_back(add_case(rows, width));
      cases.push_back(init_normal_case(rows, width, 7));
      cases.push_back(gate_mul_case(rows, width));
      cases.push_back(silu_mul_case(rows, width));
    }
    for (const bool pairs : {false, true}) {
      for (const bool bias : {false, true}) {
        cases.push_back(heads_case({{4, 2, 24}, QkNorm::kNone, bias, pairs, rows}));
        cases.push_back(heads_case({{4, 2, 64}, QkNorm::kHead, bias, pairs, rows}));
        cases.push_back(heads_case({{3, 1, 24}, QkNorm::kFull, bias, pairs, rows}));
        cases.push_back(heads_case({{0, 2, 24}, QkNorm::kFull, bias, pairs, rows}));
      }
    }
  }
  return cases;
}

}  // namespace tinyloop
