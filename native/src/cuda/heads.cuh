// Heads of q, k and v in registers: a group of lanes takes a head, eight pairs that turn together
// to each lane.
#pragma once

#include "cuda/elements.cuh"
#include "cuda/quantize.cuh"
#include "cuda/rows.h"

namespace tinyloop::cuda {

// ---- one lane's part of a head ------------------------------------------------------------------

// Elements x[i] and y[i] of a head turn together.
struct Pairs {
  Eight x, y;
};

// Which pairs of a head a lane has, whatever the head is made of.
struct LanePairs {
  int half;       // pairs of the head
  int first;      // the lane's first pair; half or more: it has none
  bool adjacent;  // pair j is elements 2j and 2j + 1, not j and j + half

  __device__ __forceinline__ int count() const { return half - first; }
  // Whether whole vectors may be loaded at every lane's place.
  template <typename T>
  __device__ __forceinline__ bool whole(const T* head) const {
    return half % 8 == 0 && is_aligned(head);
  }
};

// The lane's sixteen elements as pairs, from two runs in memory order.
__device__ __forceinline__ Pairs pairs_of(const Eight& low, const Eight& high, bool adjacent) {
  if (!adjacent) return {low, high};
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs.x.at[i] = low.at[2 * i];
    pairs.y.at[i] = low.at[2 * i + 1];
    pairs.x.at[i + 4] = high.at[2 * i];
    pairs.y.at[i + 4] = high.at[2 * i + 1];
  }
  return pairs;
}

// The reverse.
__device__ __forceinline__ void runs_of(const Pairs& pairs, bool adjacent, Eight& low,
                                        Eight& high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    low.at[2 * i] = adjacent ? pairs.x.at[i] : pairs.x.at[2 * i];
    low.at[2 * i + 1] = adjacent ? pairs.y.at[i] : pairs.x.at[2 * i + 1];
    high.at[2 * i] = adjacent ? pairs.x.at[i + 4] : pairs.y.at[2 * i];
    high.at[2 * i + 1] = adjacent ? pairs.y.at[i + 4] : pairs.y.at[2 * i + 1];
  }
}

// Where the runs begin, and how many elements each has.
__device__ __forceinline__ int first_run(const LanePairs& at) {
  return (at.adjacent ? 2 : 1) * at.first;
}
__device__ __forceinline__ int second_run(const LanePairs& at) {
  return at.adjacent ? 2 * at.first + 8 : at.half + at.first;
}

// kWhole: every lane has eight pairs or none, and whole vectors may be loaded.
template <bool kWhole, typename T>
__device__ __forceinline__ Pairs load_pairs(const T* head, const LanePairs& at) {
  const int n = at.count();
  if constexpr (kWhole) {
    if (n <= 0) return {};
    return pairs_of(load_whole(head + first_run(at)), load_whole(head + second_run(at)),
                    at.adjacent);
  } else {
    const bool whole = at.whole(head);
    return pairs_of(load_eight(head + first_run(at), at.adjacent ? 2 * n : n, whole),
                    load_eight(head + second_run(at), at.adjacent ? 2 * n - 8 : n, whole),
                    at.adjacent);
  }
}

template <typename T>
__device__ __forceinline__ void store_pairs(T* head, const LanePairs& at, const Pairs& pairs) {
  Eight low, high;
  runs_of(pairs, at.adjacent, low, high);
  const bool whole = at.whole(head);
  const int n = at.count();
  store_eight(head + first_run(at), at.adjacent ? 2 * n : n, whole, low);
  store_eight(head + second_run(at), at.adjacent ? 2 * n - 8 : n, whole, high);
}

__device__ __forceinline__ void store_codes(int8_t* codes, int n, bool whole, const Eight& x,
                                            float scale) {
  int code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) code[i] = int8_code(x.at[i], scale);
  if (whole && n >= 8) {
    *reinterpret_cast<uint2*>(codes) = make_uint2(pack_codes(code[0], code[1], code[2], code[3]),
                                                  pack_codes(code[4], code[5], code[6], code[7]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < n) codes[i] = static_cast<int8_t>(code[i]);
  }
}

__device__ __forceinline__ void store_coded_pairs(int8_t* head, const LanePairs& at,
                                                  const Pairs& pairs, float scale) {
  Eight low, high;
  runs_of(pairs, at.adjacent, low, high);
  const bool whole = at.half % 8 == 0 && reinterpret_cast<uintptr_t>(head) % 8 == 0;
  const int n = at.count();
  store_codes(head + first_run(at), at.adjacent ? 2 * n : n, whole, low, scale);
  store_codes(head + second_run(at), at.adjacent ? 2 * n - 8 : n, whole, high, scale);
}

// f(x) of every element.
template <typename Function>
__device__ __forceinline__ void each_pair(Pairs& pairs, Function f) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pairs.x.at[i] = f(pairs.x.at[i]);
    pairs.y.at[i] = f(pairs.y.at[i]);
  }
}

// f(x, other) likewise.
template <typename Function>
__device__ __forceinline__ void each_pair(Pairs& pairs, const Pairs& others, Function f) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pairs.x.at[i] = f(pairs.x.at[i], others.x.at[i]);
    pairs.y.at[i] = f(pairs.y.at[i], others.y.at[i]);
  }
}

// ---- bias, norm, rotation -----------------------------------------------------------------------

__device__ __forceinline__ float sum_of_group(float sum, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, distance));
  }
  return sum;
}

// 1 / rms of a head, whose lanes each have a part.
__device__ __forceinline__ float inverse_rms_of_head(const Pairs& pairs, int head_dim, float eps,
                                                     int lanes) {
  float x = 0.0f, y = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x = __fmaf_rn(pairs.x.at[i], pairs.x.at[i], x);
    y = __fmaf_rn(pairs.y.at[i], pairs.y.at[i], y);
  }
  return inverse_rms_of_sum(sum_of_group(__fadd_rn(x, y), lanes), head_dim, eps);
}

// 1 / rms of all heads of q, or of k, with their bias. Called by a whole warp.
template <typename T>
__device__ __forceinline__ float inverse_rms_biased(const T* heads, const float* bias,
                                                    int64_t width, float eps) {
  if (bias == nullptr) return inverse_rms(heads, width, eps);
  const bool by_four = loads_by_four(heads), bias_by_four = loads_by_four(bias);
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int64_t k = 4 * lane(); k < width; k += 128) {
    const float4 x = load_some(heads, k, width, by_four);
    const float4 b = load_some(bias, k, width, bias_by_four);
    add_squares(sums, make_float4(__fadd_rn(x.x, b.x), __fadd_rn(x.y, b.y), __fadd_rn(x.z, b.z),
                                  __fadd_rn(x.w, b.w)));
  }
  return inverse_rms_of_sums(sums, width, eps);
}

// The cosines and sines of a row for the lane's pairs of any head.
template <bool kWhole>
__device__ __forceinline__ Pairs load_turn(const float* rope, const LanePairs& at) {
  return load_pairs<kWhole>(rope, LanePairs{at.half, at.first, false});
}

__device__ __forceinline__ void rotate(Pairs& pairs, const Pairs& turn) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = pairs.x.at[i], y = pairs.y.at[i], c = turn.x.at[i], s = turn.y.at[i];
    pairs.x.at[i] = __fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s));
    pairs.y.at[i] = __fadd_rn(__fmul_rn(y, c), __fmul_rn(x, s));
  }
}

// ---- heads of rows ------------------------------------------------------------------------------

struct Heads {
  int rows, n_q, n_kv, head_dim;
  int lanes;  // that take a head: a power of two
  const float* rope;
  HeadPrep prep;
  RunTable<KvRun> runs;
  int64_t plane;
};

// A head of a row: those of q, then of k, then of v.
struct HeadIndex {
  int row, head;
  bool is_q, is_v;
  int within;  // of q, of k or of v
};
__device__ __forceinline__ HeadIndex head_index(const Heads& h, int row, int head) {
  const bool is_q = head < h.n_q, is_v = head >= h.n_q + h.n_kv;
  const int within = head - (is_q ? 0 : is_v ? h.n_q + h.n_kv : h.n_q);
  return {row, head, is_q, is_v, within};
}

// In float32. turn(): load_turn() of the row. full: of kFull, 1 / rms of all heads of q and of k.
template <bool kWhole, typename Turn>
__device__ __forceinline__ void prepare(Pairs& pairs, const Heads& h, const HeadIndex& at,
                                        const LanePairs& lane_pairs, const Turn& turn,
                                        const float* full) {
  const HeadPrep& prep = h.prep;
  const auto plus = [](float a, float b) { return __fadd_rn(a, b); };
  const auto times = [](float a, float b) { return __fmul_rn(a, b); };
  if (prep.bias != nullptr) {
    each_pair(pairs, load_pairs<kWhole>(prep.bias + at.head * h.head_dim, lane_pairs), plus);
  }
  float inverse = 1.0f;
  // All lanes of the warp, whatever their heads: they sum together.
  if (prep.norm == QkNorm::kHead) {
    inverse = inverse_rms_of_head(pairs, h.head_dim, prep.eps, h.lanes);
  } else if (prep.norm == QkNorm::kFull) {
    inverse = full[at.is_q ? 0 : 1];
  }
  if (at.is_v) return;
  if (prep.norm != QkNorm::kNone) {
    each_pair(pairs, [&](float x) { return __fmul_rn(x, inverse); });
    const float* weight = at.is_q ? prep.q_norm : prep.k_norm;
    if (weight != nullptr) {
      if (prep.norm == QkNorm::kFull) weight += at.within * h.head_dim;
      each_pair(pairs, load_pairs<kWhole>(weight, lane_pairs), times);
    }
  }
  rotate(pairs, turn());
}

// Where a token's keys and values begin.
struct KvRow {
  uint8_t *keys, *values;  // elements or codes; null: it is not stored
  uint16_t* scales;        // of a row: keys then values
  bool int8;
};
template <typename T>
__device__ __forceinline__ KvRow kv_row(const Heads& h, int row) {
  const int32_t index = h.runs.run_of_row == nullptr ? 0 : h.runs.run_of_row[row];
  if (index < 0) return {nullptr, nullptr, nullptr, false};
  const KvRun& run = h.runs.run_of_row == nullptr ? h.runs.one : h.runs.runs[index];
  const KvSegment& to = run.to;
  const auto plane = static_cast<size_t>(h.plane - to.first_plane);
  const int64_t token = run.token + (row - run.row) - to.begin;
  const bool int8 = to.format == KvFormat::kInt8;
  const int64_t bytes = int8 ? 1 : static_cast<int64_t>(sizeof(T));
  const int64_t begin =
      static_cast<int64_t>(plane * to.plane_bytes) + token * h.n_kv * h.head_dim * bytes;
  uint16_t* scales = int8 ? to.scales + plane * to.plane_scales + token * 2 * h.n_kv : nullptr;
  return {to.keys + begin, to.values + begin, scales, int8};
}

// Where those of k, or those of v, begin.
struct KvPlace {
  uint8_t* heads;
  uint16_t* scales;
  bool int8;
};
__device__ __forceinline__ KvPlace place_of(const KvRow& to, const HeadIndex& at) {
  return {at.is_v ? to.values : to.keys, to.scales, to.int8};
}

// Called by a whole warp; `stores` says whether this lane's head is stored.
template <typename T>
__device__ __forceinline__ void store_head(Pairs& pairs, const Heads& h, const HeadIndex& at,
                                           const LanePairs& lane_pairs, const KvPlace& place,
                                           bool stores) {
  each_pair(pairs, [](float x) { return to_float(rounded<T>(x)); });
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    largest = max(largest, max(magnitude(pairs.x.at[i]), magnitude(pairs.y.at[i])));
  }
  largest = largest_of_lanes(largest, h.lanes);
  if (!stores) return;
  const int64_t first = static_cast<int64_t>(at.within) * h.head_dim;
  if (!place.int8) {
    return store_pairs(reinterpret_cast<T*>(place.heads) + first, lane_pairs, pairs);
  }
  const __half scale = int8_scale(largest);
  store_coded_pairs(reinterpret_cast<int8_t*>(place.heads) + first, lane_pairs, pairs,
                    __half2float(scale));
  if (lane_pairs.first == 0) {
    place.scales[at.is_v ? h.n_kv + at.within : at.within] = __half_as_ushort(scale);
  }
}

// What happens to the heads.
enum class HeadWork { kPrepare, kStore, kBoth };

}  // namespace tinyloop::cuda
