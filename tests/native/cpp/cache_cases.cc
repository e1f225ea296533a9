// What is stored for later: keys and values, and the hidden states they can be rebuilt from.
#include "checks.h"
#include "kv_memory.h"

namespace tinyloop {
namespace {

constexpr int64_t kPlane = 3, kFirstPlane = 2, kLastPlane = 5;

// Cuts runs to at most `split` rows.
template <typename Run>
std::vector<Run> cut(const std::vector<Run>& runs, int64_t split) {
  std::vector<Run> out;
  for (const Run& run : runs) {
    in_splits(run.rows, split, [&](int64_t at, int64_t n) {
      out.push_back({run.row + at, n, run.token + at, run.to});
    });
  }
  return out;
}

// ---- keys and values
// -----------------------------------------------------------------------------

// Runs of one token each, as in a decode step, or two long ones.
Case store_kv_case(const HeadShape& shape, KvFormat format, int64_t rows, bool decode) {
  const int64_t q = shape.n_q_heads * shape.head_dim, kv = shape.n_kv_heads * shape.head_dim;
  const int64_t run_rows = decode ? 1 : (rows + 1) / 2;
  const auto token_of = [=](int64_t run) { return 5 + run % 3; };
  const auto memories = [=](bool fp32) {
    std::vector<KvMemory> all;
    for (int64_t at = 0; at < rows; at += run_rows) {
      const int64_t token = token_of(at / run_rows);
      all.emplace_back(fp32, format, shape, 4, token + run_rows, kFirstPlane, kLastPlane);
    }
    return all;
  };
  const auto contents = [=](std::vector<KvMemory>& all) {
    Values out;
    for (int64_t r = 0; r < rows; ++r) {
      const Values raw =
          all[static_cast<size_t>(r / run_rows)].raw(kPlane, token_of(r / run_rows) + r % run_rows);
      out.insert(out.end(), raw.begin(), raw.end());
    }
    return out;
  };
  const auto run = [=](Backend& backend, int64_t split) {
    Acts qkv(is_fp32(backend), rows, q + 2 * kv, 40);
    auto all = memories(is_fp32(backend));
    std::vector<KvRun> runs;
    for (int64_t i = 0; i < static_cast<int64_t>(all.size()); ++i) {
      const int64_t at = i * run_rows;
      runs.push_back(
          {at, std::min(run_rows, rows - at), token_of(i), all[static_cast<size_t>(i)].segment()});
    }
    backend.store_kv(qkv.from(), shape, *backend.plan_chunk({{}, cut(runs, split), {}}), kPlane);
    return contents(all);
  };
  const auto want = [=](bool fp32) {
    auto all = memories(fp32);
    for (int64_t r = 0; r < rows; ++r) {
      for (const int64_t which : {0, 1}) {
        Values heads;
        for (int64_t i = 0; i < kv; ++i)
          heads.push_back(noise(40, r * (q + 2 * kv) + q + which * kv + i));
        all[static_cast<size_t>(r / run_rows)].put(kPlane, token_of(r / run_rows) + r % run_rows,
                                                   which, heads);
      }
    }
    return contents(all);
  };
  return {"store_kv of " + std::to_string(rows) + " rows, " + std::to_string(shape.n_kv_heads) +
              " x " + std::to_string(shape.head_dim) + (format == KvFormat::kInt8 ? ", int8" : "") +
              (decode ? ", decode" : ""),
          run, want, kExact, kExact};
}

// ---- hidden states
// -------------------------------------------------------------------------------

// A row as stored (codes as bytes, then scales) and as it is read.
struct StoredRow {
  Values raw, read;
};

StoredRow int8_row(const Values& x, bool fp32) {
  StoredRow out;
  Values scales;
  for (size_t k = 0; k < x.size(); k += kInt8HiddenGroup) {
    const size_t end = std::min(x.size(), k + kInt8HiddenGroup);
    const Int8Codes group = int8_codes(
        Values(x.begin() + static_cast<int64_t>(k), x.begin() + static_cast<int64_t>(end)));
    scales.push_back(group.scale);
    for (size_t i = 0; i < group.codes.size(); ++i) {
      out.raw.push_back(static_cast<double>(static_cast<uint8_t>(group.codes[i])));
      out.read.push_back(rounded(group.read(i), fp32));
    }
  }
  out.raw.insert(out.raw.end(), scales.begin(), scales.end());
  return out;
}

StoredRow int4_row(const Values& x, bool fp32) {
  StoredRow out;
  Values scales;
  for (size_t k = 0; k < x.size(); k += kInt4HiddenGroup) {
    const size_t end = std::min(x.size(), k + kInt4HiddenGroup);
    const auto first = x.begin() + static_cast<int64_t>(k),
               last = x.begin() + static_cast<int64_t>(end);
    const auto low = static_cast<float>(*std::min_element(first, last));
    const auto high = static_cast<float>(*std::max_element(first, last));
    const auto scale = static_cast<float>(to_half(static_cast<double>((high - low) / 15.0f)));
    const auto least = static_cast<float>(to_half(static_cast<double>(low)));
    for (size_t i = k; i < end; ++i) {
      const float steps = (static_cast<float>(x[i]) - least) / scale;
      const float code = scale == 0.0f ? 0.0f : std::clamp(std::nearbyint(steps), 0.0f, 15.0f);
      const float above = code * scale;
      out.read.push_back(rounded(static_cast<double>(above + least), fp32));
      if (i % 2 == 0) {
        out.raw.push_back(static_cast<double>(code));
      } else {
        out.raw.back() += 16.0 * static_cast<double>(code);
      }
    }
    scales.push_back(static_cast<double>(scale));
    scales.push_back(static_cast<double>(least));
  }
  out.raw.insert(out.raw.end(), scales.begin(), scales.end());
  return out;
}

StoredRow stored_row(HiddenFormat format, int64_t token, const Values& x, bool fp32) {
  if (format == HiddenFormat::kInt8) return int8_row(x, fp32);
  if (format == HiddenFormat::kInt4 && token >= kSinkTokens) return int4_row(x, fp32);
  return {x, x};
}

class HiddenMemory {
 public:
  HiddenMemory(bool fp32, HiddenFormat format, int64_t width, int64_t begin, int64_t end)
      : fp32_(fp32), width_(width), activations_(width * (fp32 ? 4 : 2)) {
    const int64_t planes = kLastPlane - kFirstPlane, tokens = end - begin;
    code_bytes_ = format == HiddenFormat::kActivations ? activations_
                  : format == HiddenFormat::kInt8      ? width
                                                       : (width + 1) / 2;
    row_scales_ = format == HiddenFormat::kInt8   ? (width + 127) / 128
                  : format == HiddenFormat::kInt4 ? (width + 63) / 64 * 2
                                                  : 0;
    codes_.resize(static_cast<size_t>(planes * tokens * code_bytes_));
    scales_.resize(static_cast<size_t>(planes * tokens * row_scales_));
    sinks_.resize(
        static_cast<size_t>(planes * std::max<int64_t>(0, kSinkTokens - begin) * activations_));
    segment_.format = format;
    segment_.plane_codes = static_cast<size_t>(tokens * code_bytes_);
    segment_.plane_scales = static_cast<size_t>(tokens * row_scales_) * 2;
    segment_.plane_sinks = static_cast<size_t>(
        std::max<int64_t>(0, std::min(end, kSinkTokens) - begin) * activations_);
    segment_.first_plane = kFirstPlane;
    segment_.last_plane = kLastPlane;
    segment_.begin = begin;
    segment_.end = end;
  }

  HiddenSegment segment(bool kept = true) {
    HiddenSegment segment = segment_;
    if (!kept) return segment;
    segment.codes = codes_.data();
    segment.scales = scales_.data();
    segment.sinks = sinks_.data();
    return segment;
  }

  Values raw(int64_t token) const {
    const int64_t row = token - segment_.begin;
    const bool sink = segment_.format == HiddenFormat::kInt4 && token < kSinkTokens;
    const auto plane = static_cast<size_t>(kPlane - kFirstPlane);
    Values out;
    if (sink || segment_.format == HiddenFormat::kActivations) {
      const uint8_t* at = sink ? sinks_.data() + plane * segment_.plane_sinks
                               : codes_.data() + plane * segment_.plane_codes;
      for (int64_t i = 0; i < width_; ++i) {
        out.push_back(Acts::read(at + row * activations_ + i * (activations_ / width_), fp32_));
      }
      return out;
    }
    const uint8_t* codes = codes_.data() + plane * segment_.plane_codes + row * code_bytes_;
    for (int64_t i = 0; i < code_bytes_; ++i) out.push_back(codes[i]);
    const uint16_t* scales = scales_.data() + plane * segment_.plane_scales / 2 + row * row_scales_;
    for (int64_t i = 0; i < row_scales_; ++i) {
      out.push_back(Acts::read(reinterpret_cast<const uint8_t*>(scales + i), false));
    }
    return out;
  }

 private:
  bool fp32_;
  int64_t width_, activations_, code_bytes_ = 0, row_scales_ = 0;
  HiddenSegment segment_;
  std::vector<uint8_t> codes_, sinks_;
  std::vector<uint16_t> scales_;
};

// Rows far from zero on either side: the padding of a short group must not count.
double hidden_value(int64_t row, int64_t width, int64_t k) {
  return to_half((row % 2 == 0 ? 1.0 : -1.0) * (2.0 + noise(41, row * width + k)));
}
std::vector<float> hidden_rows(int64_t rows, int64_t width) {
  std::vector<float> state;
  for (int64_t i = 0; i < rows * width; ++i) {
    state.push_back(static_cast<float>(hidden_value(i / width, width, i % width)));
  }
  return state;
}

// Two sequences: tokens from 0 on, kept, and tokens from 6 on, kept or not. Out, what is read back,
// the stored bytes of what is kept, and those loaded again. No norm: its input is exact.
Case hidden_case(HiddenFormat format, int64_t rows, int64_t width, bool keeps_second) {
  const int64_t first_rows = (rows + 1) / 2, second_token = 6;
  const auto state = hidden_rows(rows, width);
  const auto run = [=](Backend& backend, int64_t split) {
    const bool fp32 = is_fp32(backend), coded = format != HiddenFormat::kActivations;
    HiddenMemory first(fp32, format, width, 0, first_rows);
    HiddenMemory second(fp32, format, width, 5, second_token + rows);
    std::vector<HiddenRun> runs{{0, first_rows, 0, first.segment()}};
    if (rows > first_rows)
      runs.push_back({first_rows, rows - first_rows, second_token, second.segment(keeps_second)});
    Acts out(fp32, rows, width), read_back(fp32, rows, width), loaded(fp32, first_rows, width);
    const NormSpec absent{false, nullptr, 0.0f};
    backend.norm_store(state.data(), absent, rows, width,
                       *backend.plan_chunk({{}, {}, cut(runs, split)}), kPlane, out.from(),
                       read_back.from());
    in_splits(first_rows, split, [&](int64_t at, int64_t n) {
      backend.load_hidden(first.segment(), kPlane, at, n, width, loaded.from(at));
    });
    Values all = out.all();
    const auto add = [&](const Values& more) { all.insert(all.end(), more.begin(), more.end()); };
    add(coded ? read_back.all() : out.all());
    add(loaded.all());
    for (int64_t r = 0; r < first_rows; ++r) add(first.raw(r));
    for (int64_t r = first_rows; keeps_second && r < rows; ++r)
      add(second.raw(second_token + r - first_rows));
    return all;
  };
  const auto want = [=](bool fp32) {
    Values out, read, raw, loaded;
    const auto add = [](Values& to, const Values& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    for (int64_t r = 0; r < rows; ++r) {
      const bool is_first = r < first_rows;
      const int64_t token = is_first ? r : second_token + r - first_rows;
      Values x;
      for (int64_t k = 0; k < width; ++k) x.push_back(hidden_value(r, width, k));
      const StoredRow row = stored_row(format, token, x, fp32);
      add(out, x);
      add(read, row.read);
      if (is_first) add(loaded, row.read);
      if (is_first || keeps_second) add(raw, row.raw);
    }
    for (const Values* part : {&read, &loaded, &raw}) add(out, *part);
    return out;
  };
  const char* name = format == HiddenFormat::kInt8   ? "int8"
                     : format == HiddenFormat::kInt4 ? "int4"
                                                     : "as is";
  return {std::string("hidden states ") + name + " of " + std::to_string(rows) + " rows, width " +
              std::to_string(width) + (keeps_second ? "" : ", some kept"),
          run, want, kExact, kExact};
}

// A value that is not finite makes its whole group read as no number: 1 where an element does.
Case spoiled_case(HiddenFormat format, float spoiler) {
  constexpr int64_t kRows = 7, kWidth = 300, kSpoiled = 140;
  const int64_t group = format == HiddenFormat::kInt8 ? kInt8HiddenGroup : kInt4HiddenGroup;
  auto state = hidden_rows(kRows, kWidth);
  for (size_t r = 0; r < kRows; r += 2) state[r * kWidth + kSpoiled] = spoiler;
  const auto run = [=](Backend& backend, int64_t split) {
    const bool fp32 = is_fp32(backend);
    HiddenMemory memory(fp32, format, kWidth, kSinkTokens, kSinkTokens + kRows);
    Acts out(fp32, kRows, kWidth), read_back(fp32, kRows, kWidth);
    const std::vector<HiddenRun> runs{{0, kRows, kSinkTokens, memory.segment()}};
    backend.norm_store(state.data(), {false, nullptr, 0.0f}, kRows, kWidth,
                       *backend.plan_chunk({{}, {}, cut(runs, split)}), kPlane, out.from(),
                       read_back.from());
    Values flags;
    for (const double x : read_back.all()) flags.push_back(std::isnan(x) ? 1.0 : 0.0);
    return flags;
  };
  const auto want = [=](bool) {
    Values flags;
    for (int64_t i = 0; i < kRows * kWidth; ++i) {
      const bool same_group = i % kWidth / group == kSpoiled / group;
      flags.push_back(same_group && i / kWidth % 2 == 0 ? 1.0 : 0.0);
    }
    return flags;
  };
  return {std::string("hidden states ") + (format == HiddenFormat::kInt8 ? "int8" : "int4") +
              " with " + std::to_string(spoiler),
          run, want, kExact, kExact};
}

}  // namespace

std::vector<Case> cache_cases() {
  std::vector<Case> cases;
  for (const int64_t rows : {1, 7, 400}) {
    for (const KvFormat format : {KvFormat::kActivations, KvFormat::kInt8}) {
      cases.push_back(store_kv_case({4, 2, 24}, format, rows, false));
      cases.push_back(store_kv_case({0, 3, 64}, format, rows, true));
    }
    for (const HiddenFormat format :
         {HiddenFormat::kActivations, HiddenFormat::kInt8, HiddenFormat::kInt4}) {
      cases.push_back(hidden_case(format, rows, 300, true));
      cases.push_back(hidden_case(format, rows, 45, false));
    }
  }
  for (const HiddenFormat format : {HiddenFormat::kInt8, HiddenFormat::kInt4}) {
    for (const float spoiler : {NAN, INFINITY, -INFINITY}) {
      cases.push_back(spoiled_case(format, spoiler));
    }
  }
  return cases;
}

}  // namespace tinyloop
