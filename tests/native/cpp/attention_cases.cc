// Attention over prefixes and own tokens, in all storage formats.
#include "checks.h"
#include "kv_memory.h"

namespace tinyloop {
namespace {

constexpr int64_t kPlane = 3;

// Sequences of `rows` new tokens behind one shared prefix. The first `prompt` new tokens of each
// are attended in both directions. spoiled: the last token of each holds no numbers, and its own
// row is left out of what is compared.
struct Scene {
  HeadShape shape;
  KvFormat format = KvFormat::kActivations;
  int64_t prefix = 0;
  std::vector<int64_t> rows;
  int64_t prompt = 0;
  bool spoiled = false;

  int64_t kv() const { return shape.n_kv_heads * shape.head_dim; }
  int64_t q() const { return shape.n_q_heads * shape.head_dim; }
  int64_t total() const {
    int64_t sum = 0;
    for (const int64_t n : rows) sum += n;
    return sum;
  }
};

// Keys (which 0) or values (which 1) of a token as they are stored, before any quantizing.
Values stored(const Scene& s, int64_t sequence, int64_t token, int64_t which) {
  const int64_t end = s.prefix + s.rows[static_cast<size_t>(sequence)];
  const bool spoiled = s.spoiled && token == end - 1;
  const auto stream = static_cast<uint64_t>(50 + 2 * (token < s.prefix ? 0 : 1 + sequence) + which);
  Values x;
  for (int64_t i = 0; i < s.kv(); ++i) {
    x.push_back(spoiled ? static_cast<double>(NAN)
                        : noise(stream, token * s.kv() + i) * (which == 0 ? 4.0 : 1.0));
  }
  return x;
}

// All memory of a scene whose prefix is held up to `border`; the rest of it is every sequence's
// own.
class SceneMemory {
 public:
  SceneMemory(const Scene& s, bool fp32, int64_t border) : border_(border) {
    const int64_t middle = border * 3 / 5;
    // The first planes of the first part lie elsewhere than the deeper ones; nothing is to read
    // them, and they would overwrite what stands before them.
    prefix_.emplace_back(fp32, s.format, s.shape, 0, middle, kPlane, kPlane + 2);
    prefix_.emplace_back(fp32, s.format, s.shape, 0, middle, 0, kPlane);
    prefix_.emplace_back(fp32, s.format, s.shape, middle, border, 0, kPlane + 2);
    const Values wrong(static_cast<size_t>(s.kv()), 100.0);
    for (int64_t token = 0; token < border; ++token) {
      for (const int64_t which : {0, 1}) {
        prefix_[token < middle ? 0 : 2].put(kPlane, token, which, stored(s, 0, token, which));
        if (token < middle) prefix_[1].put(kPlane - 1, token, which, wrong);
      }
    }
    for (KvMemory& memory : prefix_) segments_.push_back(memory.segment());
    for (size_t i = 0; i < s.rows.size(); ++i) {
      const auto sequence = static_cast<int64_t>(i);
      const int64_t end = s.prefix + s.rows[i];
      own_.emplace_back(fp32, s.format, s.shape, border, end, i % 2 == 0 ? 0 : 2, kPlane + 2,
                        i % 2 == 0);
      for (int64_t token = border; token < end; ++token) {
        for (const int64_t which : {0, 1})
          own_.back().put(kPlane, token, which, stored(s, sequence, token, which));
      }
    }
  }

  // Work items of at most `limit` rows. No piece crosses the end of a prompt.
  std::vector<AttentionChunk> chunks(const Scene& s, int64_t limit) {
    std::vector<AttentionChunk> all;
    int64_t row = 0;
    for (size_t i = 0; i < s.rows.size(); ++i) {
      for (int64_t at = 0; at < s.rows[i];) {
        if (all.empty() || all.back().rows == limit) all.push_back({&segments_, border_, {}, 0});
        AttentionChunk& chunk = all.back();
        const int64_t stop = at < s.prompt ? s.prompt : s.rows[i];
        const int64_t n = std::min({limit - chunk.rows, stop - at, s.rows[i] - at});
        const int64_t open_end = at < s.prompt ? s.prefix + std::min(s.prompt, s.rows[i]) : 0;
        chunk.pieces.push_back({row, n, s.prefix + at, open_end, own_[i].segment()});
        chunk.rows += n;
        at += n;
        row += n;
      }
    }
    return all;
  }

 private:
  int64_t border_;
  std::vector<KvMemory> prefix_, own_;
  std::vector<KvSegment> segments_;
};

// One row, one head: softmax(q k / sqrt(head_dim)) v over the first `n` keys.
void attend(const Values& q, const std::vector<Values>& keys, const std::vector<Values>& values,
            int64_t kv_head, int64_t n, Values& out) {
  const auto dim = q.size(), first = static_cast<size_t>(kv_head) * dim;
  Values scores, sum(dim, 0.0);
  for (size_t t = 0; t < static_cast<size_t>(n); ++t) {
    double score = 0.0;
    for (size_t d = 0; d < dim; ++d) score += q[d] * keys[t][first + d];
    scores.push_back(score / std::sqrt(static_cast<double>(dim)));
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  double total = 0.0;
  for (size_t t = 0; t < scores.size(); ++t) {
    const double weight = std::exp(scores[t] - top);
    total += weight;
    for (size_t d = 0; d < dim; ++d) sum[d] += weight * values[t][first + d];
  }
  for (const double x : sum) out.push_back(x / total);
}

// As attention is to read them.
Values read(const Scene& s, int64_t sequence, int64_t token, int64_t which) {
  Values x = stored(s, sequence, token, which);
  if (s.format != KvFormat::kInt8) return x;
  Values out;
  for (int64_t h = 0; h < s.shape.n_kv_heads; ++h) {
    const auto begin = x.begin() + h * s.shape.head_dim;
    const Int8Codes codes = int8_codes(Values(begin, begin + s.shape.head_dim));
    for (size_t i = 0; i < codes.codes.size(); ++i) out.push_back(codes.read(i));
  }
  return out;
}

Values expected(const Scene& s) {
  Values out;
  int64_t row = 0;
  for (size_t i = 0; i < s.rows.size(); ++i) {
    const auto sequence = static_cast<int64_t>(i);
    std::vector<Values> keys, values;
    for (int64_t token = 0; token < s.prefix + s.rows[i]; ++token) {
      keys.push_back(read(s, sequence, token, 0));
      values.push_back(read(s, sequence, token, 1));
    }
    for (int64_t r = 0; r < s.rows[i]; ++r, ++row) {
      if (s.spoiled && r == s.rows[i] - 1) continue;
      const int64_t open = r < s.prompt ? std::min(s.prompt, s.rows[i]) : 0;
      const int64_t visible = s.prefix + std::max(r + 1, open);
      for (int64_t h = 0; h < s.shape.n_q_heads; ++h) {
        Values q;
        for (int64_t d = 0; d < s.shape.head_dim; ++d) {
          q.push_back(noise(49, row * s.q() + h * s.shape.head_dim + d));
        }
        attend(q, keys, values, h / (s.shape.n_q_heads / s.shape.n_kv_heads), visible, out);
      }
    }
  }
  return out;
}

// Split calls have small work items, and hold half of the prefix as each sequence's own tokens.
Case attention_case(const char* name, const Scene& s) {
  const auto run = [=](Backend& backend, int64_t split) {
    const bool fp32 = is_fp32(backend);
    SceneMemory memory(s, fp32, split == kWhole ? s.prefix : s.prefix / 2);
    Acts queries(fp32, s.total(), s.q(), 49), out(fp32, s.total(), s.q());
    const auto chunks = memory.chunks(s, std::min(split, backend.attention_rows(s.shape)));
    backend.attention(*backend.plan_chunk({chunks, {}, {}}), s.shape, kPlane, queries.from(),
                      out.from());
    Values all;
    int64_t row = 0;
    for (const int64_t n : s.rows) {
      for (int64_t r = 0; r < n; ++r, ++row) {
        if (s.spoiled && r == n - 1) continue;
        for (int64_t c = 0; c < s.q(); ++c) all.push_back(out.get(row, c));
      }
    }
    return all;
  };
  const auto want = [=](bool) { return expected(s); };
  return {"attention, " + std::string(name) + (s.format == KvFormat::kInt8 ? ", int8" : "") +
              (s.spoiled ? ", spoiled ends" : "") + ", " + std::to_string(s.shape.n_q_heads) +
              " on " + std::to_string(s.shape.n_kv_heads) + " x " +
              std::to_string(s.shape.head_dim),
          run, want};
}

}  // namespace

std::vector<Case> attention_cases() {
  std::vector<Case> cases;
  for (const KvFormat format : {KvFormat::kActivations, KvFormat::kInt8}) {
    for (const HeadShape& shape : {HeadShape{4, 2, 24}, HeadShape{3, 3, 64}, HeadShape{6, 1, 40}}) {
      cases.push_back(attention_case("one long sequence", {shape, format, 0, {400}}));
      cases.push_back(attention_case("decode", {shape, format, 200, {1, 1, 1}}));
      cases.push_back(attention_case("shared prefix", {shape, format, 150, {7, 1, 70}}));
      cases.push_back(
          attention_case("prompt in both directions", {shape, format, 0, {140, 60, 130}, 100}));
      cases.push_back(attention_case("shared prefix", {shape, format, 90, {7, 70}, 0, true}));
      cases.push_back(
          attention_case("prompt in both directions", {shape, format, 0, {140, 101}, 100, true}));
    }
  }
  return cases;
}

}  // namespace tinyloop
