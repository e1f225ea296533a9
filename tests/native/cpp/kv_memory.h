// Keys and values of one token range in memory, written and read by the formulas of the file
// formats and not by the backend.
#pragma once

#include "checks.h"

namespace tinyloop {

struct Int8Codes {
  double scale = 0.0;
  std::vector<int8_t> codes;
  double read(size_t i) const { return static_cast<float>(codes[i]) * static_cast<float>(scale); }
};

inline Int8Codes int8_codes(const Values& x) {
  float largest = 0.0f;
  bool finite = true;
  for (const double value : x) {
    largest = std::max(largest, std::fabs(static_cast<float>(value)));
    finite &= std::isfinite(value);
  }
  Int8Codes out;
  out.scale = finite ? to_half(static_cast<double>(largest / 127.0f)) : NAN;
  for (const double value : x) {
    const float code = std::nearbyint(static_cast<float>(value) / static_cast<float>(out.scale));
    out.codes.push_back(
        out.scale == 0.0 || !finite ? 0 : static_cast<int8_t>(std::clamp(code, -127.0f, 127.0f)));
  }
  return out;
}

class KvMemory {
 public:
  // one_plane: the same memory serves all planes in turn.
  KvMemory(bool fp32, KvFormat format, const HeadShape& shape, int64_t begin, int64_t end,
           int64_t first_plane, int64_t last_plane, bool one_plane = false)
      : fp32_(fp32), heads_(shape.n_kv_heads), head_dim_(shape.head_dim), tokens_(end - begin) {
    const int64_t planes = one_plane ? 1 : last_plane - first_plane;
    segment_.format = format;
    segment_.begin = begin;
    segment_.end = end;
    segment_.first_plane = first_plane;
    segment_.last_plane = last_plane;
    segment_.plane_bytes =
        one_plane ? 0 : static_cast<size_t>(tokens_ * heads_ * head_dim_ * element_bytes());
    segment_.plane_scales = one_plane ? 0 : static_cast<size_t>(tokens_ * 2 * heads_);
    keys_.resize(static_cast<size_t>(planes * tokens_ * heads_ * head_dim_ * element_bytes()));
    values_.resize(keys_.size());
    scales_.resize(static_cast<size_t>(planes * tokens_ * 2 * heads_));
  }

  KvSegment segment() {
    KvSegment segment = segment_;
    segment.keys = keys_.data();
    segment.values = values_.data();
    segment.scales = segment.format == KvFormat::kInt8 ? scales_.data() : nullptr;
    return segment;
  }

  // heads: the keys (which 0) or values (which 1) of a token.
  void put(int64_t plane, int64_t token, int64_t which, const Values& heads) {
    for (int64_t h = 0; h < heads_; ++h) {
      const auto begin = heads.begin() + h * head_dim_;
      put_head(plane, token, which, h, Values(begin, begin + head_dim_));
    }
  }

  // As the backend wrote it: elements or codes, and the scales.
  Values raw(int64_t plane, int64_t token) {
    Values out;
    for (const int64_t which : {0, 1}) {
      for (int64_t i = 0; i < heads_ * head_dim_; ++i) {
        const uint8_t* at = element(plane, token, which, i);
        out.push_back(int8() ? static_cast<double>(static_cast<int8_t>(*at))
                             : Acts::read(at, fp32_));
      }
      for (int64_t h = 0; int8() && h < heads_; ++h) out.push_back(*scale(plane, token, which, h));
    }
    return out;
  }

 private:
  bool int8() const { return segment_.format == KvFormat::kInt8; }
  int64_t element_bytes() const { return int8() ? 1 : fp32_ ? 4 : 2; }
  uint8_t* element(int64_t plane, int64_t token, int64_t which, int64_t i) {
    const int64_t row = (token - segment_.begin) * heads_ * head_dim_ + i;
    auto& memory = which == 0 ? keys_ : values_;
    return memory.data() +
           static_cast<size_t>(plane - segment_.first_plane) * segment_.plane_bytes +
           row * element_bytes();
  }
  uint16_t* scale(int64_t plane, int64_t token, int64_t which, int64_t head) {
    return scales_.data() +
           static_cast<size_t>(plane - segment_.first_plane) * segment_.plane_scales +
           ((token - segment_.begin) * 2 + which) * heads_ + head;
  }
  void put_head(int64_t plane, int64_t token, int64_t which, int64_t head, const Values& x) {
    const Int8Codes coded = int8_codes(x);
    if (int8()) *scale(plane, token, which, head) = half_bits(coded.scale);
    for (int64_t i = 0; i < head_dim_; ++i) {
      uint8_t* at = element(plane, token, which, head * head_dim_ + i);
      const auto index = static_cast<size_t>(i);
      const auto full = static_cast<float>(x[index]);
      const uint16_t half = half_bits(x[index]);
      if (int8()) {
        *at = static_cast<uint8_t>(coded.codes[index]);
      } else {
        std::memcpy(at, fp32_ ? static_cast<const void*>(&full) : &half,
                    static_cast<size_t>(element_bytes()));
      }
    }
  }

  bool fp32_;
  int64_t heads_, head_dim_, tokens_;
  KvSegment segment_;
  std::vector<uint8_t> keys_, values_;
  std::vector<uint16_t> scales_;
};

}  // namespace tinyloop
