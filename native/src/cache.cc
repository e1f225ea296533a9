#include "cache.h"

#include <algorithm>
#include <array>
#include <limits>

#include "tinyloop/errors.h"

namespace tinyloop {

namespace {

constexpr std::array<const char*, 5> kModeNames = {"fp16", "int8", "h_fp16", "h_int8", "h_int4"};

int64_t groups(int64_t width, int64_t group) { return (width + group - 1) / group; }

// Positions of a range that a kInt4 store keeps as activations.
int64_t sinks(const CacheRange& range) {
  return std::max<int64_t>(0, std::min(range.end, kSinkTokens) - range.begin);
}

// Bytes of one plane, part by part. A part starts where the one before it ends in all planes.
struct PlaneParts {
  size_t codes = 0;   // keys, then values, each; or hidden codes
  size_t values = 0;  // keys' and values' second half; 0 for hidden states
  size_t scales = 0;
  size_t sinks = 0;

  size_t total() const { return codes + values + scales + sinks; }
};

// Float32 activations follow scales in one block.
size_t aligned(size_t bytes) { return (bytes + 3) / 4 * 4; }

PlaneParts plane_parts(const CacheShape& s, const CacheRange& range) {
  const auto tokens = static_cast<size_t>(range.tokens());
  const auto bytes = [&](int64_t each) { return tokens * static_cast<size_t>(each); };
  PlaneParts p;
  if (!stores_hidden(s.mode)) {
    const bool codes = kv_format(s.mode) == KvFormat::kInt8;
    p.codes = p.values = aligned(bytes(s.kv_width() * (codes ? 1 : s.activation_bytes)));
    p.scales = codes ? aligned(bytes(2 * s.n_kv_heads * 2)) : 0;
    return p;
  }
  switch (hidden_format(s.mode)) {
    case HiddenFormat::kActivations:
      p.codes = bytes(s.hidden_size * s.activation_bytes);
      break;
    case HiddenFormat::kInt8:
      p.codes = aligned(bytes(s.hidden_size));
      p.scales = aligned(bytes(groups(s.hidden_size, kInt8HiddenGroup) * 2));
      break;
    case HiddenFormat::kInt4:
      p.codes = aligned(bytes((s.hidden_size + 1) / 2));
      p.scales = aligned(bytes(groups(s.hidden_size, kInt4HiddenGroup) * 2 * 2));
      p.sinks = static_cast<size_t>(sinks(range) * s.hidden_size * s.activation_bytes);
      break;
  }
  return p;
}

}  // namespace

CacheMode cache_mode(const std::string& name) {
  for (size_t i = 0; i < kModeNames.size(); ++i) {
    if (name == kModeNames[i]) return static_cast<CacheMode>(i);
  }
  throw LoadError("cannot load with cache_mode='" + name +
                  "': this build knows fp16, int8, h_fp16, h_int8, h_int4");
}

bool stores_hidden(CacheMode mode) { return mode != CacheMode::kFp16 && mode != CacheMode::kInt8; }

KvFormat kv_format(CacheMode mode) {
  return mode == CacheMode::kInt8 ? KvFormat::kInt8 : KvFormat::kActivations;
}

HiddenFormat hidden_format(CacheMode mode) {
  if (mode == CacheMode::kHInt8) return HiddenFormat::kInt8;
  return mode == CacheMode::kHInt4 ? HiddenFormat::kInt4 : HiddenFormat::kActivations;
}

CacheShape cache_shape(const Descriptor& d, CacheMode mode, size_t activation_bytes) {
  return {mode, d.hidden_size, d.n_kv_heads, d.head_dim, static_cast<int64_t>(activation_bytes)};
}

size_t cache_bytes(const CacheShape& shape, const CacheRange& range) {
  size_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(plane_parts(shape, range).total(),
                                               static_cast<size_t>(range.planes()), &bytes);
  return overflow ? std::numeric_limits<size_t>::max() / 4 : bytes;
}

CachePlaces cache_places(const CacheShape& shape, const CacheRange& range, uint8_t* memory) {
  const PlaneParts part = plane_parts(shape, range);
  const auto planes = static_cast<size_t>(range.planes());
  CachePlaces places;
  if (!stores_hidden(shape.mode)) {
    KvSegment& kv = places.kv;
    kv = {memory,           memory + planes * part.codes,
          nullptr,          part.codes,
          part.scales / 2,  range.first_plane,
          range.last_plane, range.begin,
          range.end,        kv_format(shape.mode)};
    if (part.scales != 0) {
      kv.scales = reinterpret_cast<uint16_t*>(memory + planes * (part.codes + part.values));
    }
    return places;
  }
  HiddenSegment& h = places.hidden;
  h.codes = memory;
  h.scales = part.scales == 0 ? nullptr : reinterpret_cast<uint16_t*>(memory + planes * part.codes);
  h.sinks = part.sinks == 0 ? nullptr : memory + planes * (part.codes + part.scales);
  h.plane_codes = part.codes;
  h.plane_scales = part.scales;
  h.plane_sinks = part.sinks;
  h.first_plane = range.first_plane;
  h.last_plane = range.last_plane;
  h.begin = range.begin;
  h.end = range.end;
  h.format = hidden_format(shape.mode);
  return places;
}

CachePlaces clip_planes(CachePlaces places, int64_t first_plane, int64_t last_plane) {
  KvSegment& kv = places.kv;
  if (kv.keys != nullptr) {
    const int64_t first = std::max(first_plane, kv.first_plane);
    const auto skipped = static_cast<size_t>(first - kv.first_plane);
    kv.keys += skipped * kv.plane_bytes;
    kv.values += skipped * kv.plane_bytes;
    if (kv.scales != nullptr) kv.scales += skipped * kv.plane_scales;
    kv.first_plane = first;
    kv.last_plane = std::min(last_plane, kv.last_plane);
  }
  HiddenSegment& h = places.hidden;
  if (h.codes != nullptr) {
    const int64_t first = std::max(first_plane, h.first_plane);
    const auto skipped = static_cast<size_t>(first - h.first_plane);
    h.codes += skipped * h.plane_codes;
    if (h.scales != nullptr) h.scales += skipped * h.plane_scales / sizeof(uint16_t);
    if (h.sinks != nullptr) h.sinks += skipped * h.plane_sinks;
    h.first_plane = first;
    h.last_plane = std::min(last_plane, h.last_plane);
  }
  return places;
}

std::shared_ptr<CacheBlock> make_cache_block(Account& account, const CacheShape& shape,
                                             const CacheRange& range, Owner owner,
                                             const char* what) {
  auto block = std::make_shared<CacheBlock>();
  block->memory = account.allocate(cache_bytes(shape, range), owner, what);
  block->places = cache_places(shape, range, block->memory.as<uint8_t>());
  return block;
}

void CacheView::append(const CachePlaces& places) {
  if (places.kv.keys != nullptr) kv.push_back(places.kv);
  if (places.hidden.codes != nullptr) hidden.push_back(places.hidden);
}

}  // namespace tinyloop
