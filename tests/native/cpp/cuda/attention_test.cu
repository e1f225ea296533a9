// Attention on the device against a double loop on the host, against itself bit by bit, and its
// speed. Own main: one line for each check that did not hold and for each speed; the exit status
// says whether all held. Every plan goes through all kernels that can take it.
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -DTINYLOOP_SM90A -I native/src
//     -I native/include tests/native/cpp/cuda/attention_test.cu native/src/cuda/attention*.cu
//     -o attention_test
//   ./attention_test [checks | alone | speed | table] [all: a line for each check]
// alone: the checks for compute-sanitizer; table: the speeds of the kernels side by side.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/attention.h"
#include "cuda/attention_kernels.h"
#include "cuda/check.h"

namespace tinyloop::cuda {
namespace {

// The weights and the result are rounded to FP16 (2^-11 each), and a weight at the edge may round
// the other way than the double's would; values are below 1.
constexpr double kHalfTolerance = 2e-3;
constexpr double kFloatTolerance = 1e-5;
constexpr int64_t kPlane = 3;

// More failures than these are counted only.
constexpr int kFailuresShown = 25;

int failures = 0;
int checks = 0;
int plans_compared = 0;  // by one more kernel
bool all_lines = false;
void report(const std::string& what, bool held, const std::string& found = "") {
  ++checks;
  if (!held) ++failures;
  if (!all_lines && (held || failures > kFailuresShown)) return;
  std::printf("%s  %s%s%s\n", held ? "ok  " : "FAIL", what.c_str(), found.empty() ? "" : ": ",
              found.c_str());
  std::fflush(stdout);
}

// ---- numbers ------------------------------------------------------------------------------------

uint16_t half_bits(float x) {
  const __half h = __float2half(x);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}
float from_bits(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

// One of 2,048 numbers in [-1, 1), all of which FP16 holds.
float noise(uint64_t stream, int64_t index) {
  uint64_t z = (stream << 40) + static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return static_cast<float>(static_cast<int>((z ^ z >> 31) >> 53) - 1024) / 1024.0f;
}

// ---- device memory ------------------------------------------------------------------------------

struct DeviceFree {
  void operator()(void* p) const { cudaFree(p); }
};
using DevicePlace = std::unique_ptr<void, DeviceFree>;

// One block of device memory in which everything lies that a check reads, with NaN between.
class Arena {
 public:
  explicit Arena(size_t bytes) : image_(bytes, 0xFF) {
    void* data = nullptr;
    check(cudaMalloc(&data, bytes), "allocate the arena");
    base_ = static_cast<uint8_t*>(data);
  }
  ~Arena() { cudaFree(base_); }
  Arena(const Arena&) = delete;

  void clear() {
    std::fill(image_.begin(), image_.begin() + static_cast<int64_t>(used_), uint8_t{0xFF});
    used_ = 0;
  }
  // shift: bytes behind a multiple of 256 at which the place begins.
  size_t take(size_t bytes, size_t shift = 0) {
    const size_t at = (used_ + 256 + 255) / 256 * 256 + shift;
    used_ = at + bytes + 256;
    if (used_ > image_.size()) {
      std::printf("FAIL  the arena of %zu bytes is too small\n", image_.size());
      std::exit(2);
    }
    return at;
  }
  uint8_t* host(size_t at) { return image_.data() + at; }
  uint8_t* device(size_t at) { return base_ + at; }
  void upload() {
    check(cudaMemcpy(base_, image_.data(), used_, cudaMemcpyHostToDevice), "upload the arena");
  }
  void download(size_t at, size_t bytes) {
    check(cudaMemcpy(host(at), device(at), bytes, cudaMemcpyDeviceToHost), "download");
  }

 private:
  std::vector<uint8_t> image_;
  uint8_t* base_ = nullptr;
  size_t used_ = 0;
};

Arena& arena() {
  static Arena all(size_t{192} << 20);
  return all;
}

// ---- scenes -------------------------------------------------------------------------------------

struct Mode {
  HeadShape shape;
  KvFormat format = KvFormat::kActivations;
  bool fp32 = false;

  int64_t kv() const { return shape.n_kv_heads * shape.head_dim; }
  int64_t q() const { return shape.n_q_heads * shape.head_dim; }
  bool int8() const { return format == KvFormat::kInt8; }
  size_t element() const { return fp32 ? 4 : 2; }
  size_t kv_element() const { return int8() ? 1 : element(); }
  std::string name() const {
    return std::to_string(shape.n_q_heads) + " on " + std::to_string(shape.n_kv_heads) + " x " +
           std::to_string(shape.head_dim) + (int8() ? " int8" : "") + (fp32 ? " fp32" : "");
  }
};

// Rows at the last `rows` positions of a sequence of `length` tokens; those below `open` see each
// other both ways. The first `shared` tokens are the same for all sequences of one scene.
struct Sequence {
  int64_t length = 0;
  int64_t rows = 0;
  int64_t open = 0;
  uint64_t id = 1;
  bool spoiled = false;  // the last token's key and value are no numbers
};

struct Scene {
  Mode mode;
  int64_t shared = 0;
  std::vector<Sequence> sequences;
};

// How the same scene is given to the kernels.
struct Layout {
  int64_t prefix = 0;             // tokens in segments before the sequences' own
  std::vector<int64_t> cuts;      // borders of those segments
  int64_t item_rows = INT64_MAX;  // at most attention_rows()
  bool join = true;               // sequences share items
  bool decode = false;            // as decode items
  bool decoys = false;            // segments of other planes lie between
  size_t shift = 0;               // of addresses
  int64_t spare_items = 0;        // items without rows at the end
  int64_t spare_spans = 0;
  size_t scratch = SIZE_MAX;  // bytes that the kernels get
  bool graph = false;
  bool alone = false;  // each segment in memory of its own that ends where the segment does
};

uint64_t token_stream(const Scene& s, const Sequence& q, int64_t token) {
  return token < s.shared ? 7 : 100 + q.id;
}

// A token's head as attention reads it.
std::vector<double> token_head(const Scene& s, const Sequence& q, int64_t token, int which,
                               int64_t head, std::vector<int>* codes = nullptr,
                               float* scale = nullptr) {
  const int64_t dim = s.mode.shape.head_dim;
  const uint64_t stream = 2 * token_stream(s, q, token) + static_cast<uint64_t>(which);
  const bool spoiled = q.spoiled && token == q.length - 1;
  std::vector<double> x;
  float largest = 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float value =
        noise(stream, (token * s.mode.shape.n_kv_heads + head) * dim + d) * (which == 0 ? 4 : 1);
    x.push_back(static_cast<double>(spoiled ? NAN : value));
    largest = std::max(largest, std::fabs(value));
  }
  if (!s.mode.int8()) return x;
  const float step = spoiled ? NAN : from_bits(half_bits(largest / 127.0f));
  if (scale != nullptr) *scale = step;
  for (double& value : x) {
    const int code =
        spoiled ? 0
                : std::clamp(static_cast<int>(std::nearbyint(static_cast<float>(value) / step)),
                             -127, 127);
    if (codes != nullptr) codes->push_back(code);
    value = static_cast<double>(static_cast<float>(code)) * static_cast<double>(step);
  }
  return x;
}

float query_element(const Scene& s, const Sequence& q, int64_t position, int64_t i) {
  return noise(3000 + q.id, position * s.mode.q() + i);
}

// Tokens [begin, end) in planes [2, 5) of memory of their own.
KvSegment place_segment(const Scene& s, const Sequence& q, int64_t begin, int64_t end,
                        size_t shift) {
  const Mode& m = s.mode;
  const int64_t tokens = end - begin, planes = 3;
  KvSegment segment;
  segment.format = m.format;
  segment.begin = begin;
  segment.end = end;
  segment.first_plane = kPlane - 1;
  segment.last_plane = kPlane + 2;
  segment.plane_bytes = static_cast<size_t>(tokens * m.kv()) * m.kv_element() + 256;
  segment.plane_scales = static_cast<size_t>(tokens * 2 * m.shape.n_kv_heads) + 128;
  const size_t bytes = segment.plane_bytes * planes;
  const size_t places[2] = {arena().take(bytes, shift), arena().take(bytes, shift)};
  const size_t scales = m.int8() ? arena().take(segment.plane_scales * planes * 2) : 0;
  segment.keys = arena().device(places[0]);
  segment.values = arena().device(places[1]);
  if (m.int8()) segment.scales = reinterpret_cast<uint16_t*>(arena().device(scales));
  for (int64_t t = begin; t < end; ++t) {
    for (int which = 0; which < 2; ++which) {
      for (int64_t h = 0; h < m.shape.n_kv_heads; ++h) {
        std::vector<int> codes;
        float scale = 1.0f;
        const auto x = token_head(s, q, t, which, h, &codes, &scale);
        uint8_t* to =
            arena().host(places[which]) + segment.plane_bytes +
            static_cast<size_t>((t - begin) * m.kv() + h * m.shape.head_dim) * m.kv_element();
        for (size_t d = 0; d < x.size(); ++d) {
          const auto value = static_cast<float>(x[d]);
          const uint16_t bits = half_bits(value);
          if (m.int8()) {
            to[d] = static_cast<uint8_t>(codes[d]);
          } else {
            std::memcpy(to + d * m.element(), m.fp32 ? static_cast<const void*>(&value) : &bits,
                        m.element());
          }
        }
        if (m.int8()) {
          const uint16_t bits = half_bits(scale);
          std::memcpy(
              arena().host(scales) +
                  2 * (segment.plane_scales +
                       static_cast<size_t>(((t - begin) * 2 + which) * m.shape.n_kv_heads + h)),
              &bits, 2);
        }
      }
    }
  }
  return segment;
}

// A segment that must not be read: memory that is NaN throughout, for planes around kPlane.
KvSegment decoy_segment(const Scene& s, int64_t begin, int64_t end, bool before) {
  KvSegment segment;
  segment.format = s.mode.format;
  segment.begin = begin;
  segment.end = end;
  segment.first_plane = before ? 0 : kPlane + 1;
  segment.last_plane = before ? kPlane : kPlane + 9;
  const auto bytes = static_cast<size_t>((end - begin) * s.mode.kv()) * s.mode.kv_element();
  segment.keys = segment.values = arena().device(arena().take(bytes));
  if (s.mode.int8()) {
    segment.scales = reinterpret_cast<uint16_t*>(arena().device(
        arena().take(static_cast<size_t>((end - begin) * 4 * s.mode.shape.n_kv_heads))));
  }
  return segment;
}

struct Plan {
  std::vector<Item> items;
  std::vector<AttentionPiece> pieces;
  std::vector<KvSegment> segments;
  int64_t rows = 0;
  int64_t spans = 0;
};

Plan lay_out(const Scene& s, const Layout& how) {
  Plan plan;
  std::vector<int64_t> borders = {0};
  for (const int64_t cut : how.cuts) {
    if (cut > borders.back() && cut < how.prefix) borders.push_back(cut);
  }
  borders.push_back(how.prefix);
  for (size_t i = 0; i + 1 < borders.size() && how.prefix > 0; ++i) {
    if (how.decoys) {
      plan.segments.push_back(decoy_segment(s, borders[i], borders[i + 1], i % 2 == 0));
    }
    plan.segments.push_back(
        place_segment(s, s.sequences[0], borders[i], borders[i + 1], how.shift));
  }
  const int64_t limit = how.decode ? 1 : std::min(how.item_rows, attention_rows(s.mode.shape));
  for (const Sequence& q : s.sequences) {
    const KvSegment own = place_segment(s, q, how.prefix, q.length, how.shift);
    for (int64_t at = q.length - q.rows; at < q.length;) {
      const bool joins =
          !plan.items.empty() && how.join && !how.decode && plan.items.back().rows < limit;
      if (!joins) {
        Item item;
        item.n_segments = static_cast<int32_t>(plan.segments.size());
        item.first_piece = static_cast<int32_t>(plan.pieces.size());
        item.prefix_length = how.prefix;
        plan.items.push_back(item);
      }
      Item& item = plan.items.back();
      const bool open = at < q.open;
      int64_t n = std::min(q.length - at, limit - item.rows);
      if (open) n = std::min(n, q.open - at);
      plan.pieces.push_back({plan.rows, n, at, open ? q.open : 0, own});
      item.rows += n;
      ++item.n_pieces;
      plan.spans = std::max(plan.spans, (std::max(at + n, q.open) + kSpan - 1) / kSpan);
      plan.rows += n;
      at += n;
    }
  }
  plan.items.resize(plan.items.size() + static_cast<size_t>(how.spare_items));
  plan.spans += how.spare_spans;
  return plan;
}

template <typename T>
const T* place_array(const std::vector<T>& data) {
  const size_t at = arena().take(data.size() * sizeof(T) + 16);
  std::memcpy(arena().host(at), data.data(), data.size() * sizeof(T));
  return reinterpret_cast<const T*>(arena().device(at));
}

void enqueue_in_graph(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t runnable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin a capture");
  enqueue();
  check(cudaStreamEndCapture(stream, &graph), "end a capture");
  check(cudaGraphInstantiate(&runnable, graph, 0), "instantiate a graph");
  check(cudaGraphLaunch(runnable, stream), "launch a graph");
  check(cudaStreamSynchronize(stream), "run a graph");
  cudaGraphExecDestroy(runnable);
  cudaGraphDestroy(graph);
}

// ---- kernels ------------------------------------------------------------------------------------

struct Kernel {
  const char* name;
  // False: it does not take the call; nothing was done.
  bool (*enqueue)(cudaStream_t, const AttentionCall&);
};
bool many(cudaStream_t stream, const AttentionCall& call) {
  attention_many(stream, call);
  return true;
}
bool dealt_ring(cudaStream_t stream, AttentionCall call) {
  call.plan.turns = nullptr;
  return attention_ring(stream, call);
}
const Kernel kManyRows[] = {
    {"many", many},
    {"ring", attention_ring},
    {"ring, dealt",
     [](cudaStream_t stream, const AttentionCall& call) { return dealt_ring(stream, call); }},
};

// All kernels for many rows give the bits at `want`, which are in the arena's image; `out` is room
// for as many.
void compare_kernels(cudaStream_t stream, const AttentionCall& call, size_t want, size_t out,
                     size_t bytes, const std::string& what) {
  for (const Kernel& kernel : kManyRows) {
    check(cudaMemset(arena().device(out), 0xFF, bytes), "clear the rows");
    AttentionCall other = call;
    other.out.data = arena().device(out);
    if (!kernel.enqueue(stream, other)) continue;
    check(cudaStreamSynchronize(stream), "attend by another kernel");
    arena().download(out, bytes);
    ++plans_compared;
    if (std::memcmp(arena().host(want), arena().host(out), bytes) == 0) continue;
    size_t differing = 0;
    for (size_t i = 0; i < bytes; i += 2) {
      differing += std::memcmp(arena().host(want) + i, arena().host(out) + i, 2) != 0;
    }
    report(std::string("the same bits by kernel ") + kernel.name + ", " + what, false,
           std::to_string(differing) + " of " + std::to_string(bytes / 2) + " elements differ");
  }
}

// Segments whose keys, values and scales lie in allocations of their own that hold kPlane alone and
// end with its last byte: a read past the end is one that compute-sanitizer names.
class AloneSegments {
 public:
  explicit AloneSegments(const Mode& m) : mode_(m) {}

  void move(KvSegment& segment) {
    if (kPlane < segment.first_plane || kPlane >= segment.last_plane) return;  // a decoy
    const auto plane = static_cast<size_t>(kPlane - segment.first_plane);
    const auto tokens = static_cast<size_t>(segment.end - segment.begin);
    const size_t bytes = tokens * static_cast<size_t>(mode_.kv()) * mode_.kv_element();
    segment.keys = copy(segment.keys + plane * segment.plane_bytes, bytes);
    segment.values = copy(segment.values + plane * segment.plane_bytes, bytes);
    if (segment.scales != nullptr) {
      const size_t scales = tokens * 2 * static_cast<size_t>(mode_.shape.n_kv_heads);
      segment.scales = reinterpret_cast<uint16_t*>(
          copy(reinterpret_cast<const uint8_t*>(segment.scales + plane * segment.plane_scales),
               scales * sizeof(uint16_t)));
    }
    segment.first_plane = kPlane;
    segment.last_plane = kPlane + 1;
  }

 private:
  // Of what the arena's image has at a device address.
  uint8_t* copy(const uint8_t* from, size_t bytes) {
    const uint8_t* image = arena().host(static_cast<size_t>(from - arena().device(0)));
    const auto [at, is_new] = places_.try_emplace(from);
    if (is_new && bytes > 0) {
      void* p = nullptr;
      check(cudaMalloc(&p, bytes), "allocate a segment");
      at->second.reset(p);
      check(cudaMemcpy(p, image, bytes, cudaMemcpyHostToDevice), "upload a segment");
    }
    return static_cast<uint8_t*>(at->second.get());
  }

  const Mode& mode_;
  std::map<const uint8_t*, DevicePlace> places_;  // pieces of one sequence share a segment
};

// The rows' results as bits. Rows have a stride of their own; what lies between must stay as it is.
std::vector<uint32_t> attend(const Scene& s, const Layout& how) {
  arena().clear();
  const Mode& m = s.mode;
  Plan plan = lay_out(s, how);
  AloneSegments alone(m);
  if (how.alone) {
    for (KvSegment& segment : plan.segments) alone.move(segment);
    for (AttentionPiece& piece : plan.pieces) alone.move(piece.own);
  }
  const int64_t gap = how.shift != 0 ? 3 : 8;
  const int64_t query_stride = m.q() + 2 * m.kv() + gap, out_stride = m.q() + gap;
  const size_t queries =
      arena().take(static_cast<size_t>(plan.rows * query_stride) * m.element(), how.shift);
  const size_t out_bytes = static_cast<size_t>(plan.rows * out_stride) * m.element();
  const size_t out = arena().take(out_bytes, how.shift);
  const size_t other_out = arena().take(out_bytes, how.shift);
  int64_t row = 0;
  for (const Sequence& q : s.sequences) {
    for (int64_t p = q.length - q.rows; p < q.length; ++p, ++row) {
      for (int64_t i = 0; i < m.q(); ++i) {
        const float x = query_element(s, q, p, i);
        const uint16_t bits = half_bits(x);
        std::memcpy(
            arena().host(queries) + static_cast<size_t>(row * query_stride + i) * m.element(),
            m.fp32 ? static_cast<const void*>(&x) : &bits, m.element());
      }
    }
  }
  const size_t turns = arena().take(8);
  std::memset(arena().host(turns), 0, 8);
  AttentionPlan device;
  device.items = place_array(plan.items);
  device.pieces = place_array(plan.pieces);
  device.segments = place_array(plan.segments);
  device.n_items = static_cast<int32_t>(plan.items.size());
  device.max_spans = static_cast<int32_t>(plan.spans);
  device.decode = how.decode;
  device.turns = reinterpret_cast<uint32_t*>(arena().device(turns));
  const size_t scratch_bytes =
      std::min(how.scratch, attention_scratch_bytes(m.shape, device.n_items, device.max_spans));
  const size_t scratch = arena().take(scratch_bytes);
  arena().upload();
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "create a stream");
  const Rows query_rows{arena().device(queries), query_stride};
  const Rows out_rows{arena().device(out), out_stride};
  const auto enqueue = [&] {
    attention(stream, device, m.shape, kPlane, query_rows, out_rows, m.fp32,
              arena().device(scratch), scratch_bytes);
  };
  if (how.graph) {
    enqueue_in_graph(stream, enqueue);
  } else {
    enqueue();
  }
  check(cudaStreamSynchronize(stream), "attend");
  arena().download(out, out_bytes);
  if (!m.fp32) {
    compare_kernels(stream, {device, m.shape, kPlane, query_rows, out_rows}, out, other_out,
                    out_bytes,
                    (how.decode ? "decode, " : "") + std::to_string(plan.items.size()) +
                        " items, prefix of " + std::to_string(how.prefix) + ", " + m.name());
  }
  arena().download(turns, 8);
  uint32_t left[2];
  std::memcpy(left, arena().host(turns), 8);
  if (left[0] != 0 || left[1] != 0) report("the counters are zero afterwards, " + m.name(), false);
  cudaStreamDestroy(stream);
  std::vector<uint32_t> result;
  for (int64_t r = 0; r < plan.rows; ++r) {
    for (int64_t i = 0; i < out_stride; ++i) {
      const uint8_t* at = arena().host(out) + static_cast<size_t>(r * out_stride + i) * m.element();
      uint32_t bits = 0;
      std::memcpy(&bits, at, m.element());
      if (i < m.q()) {
        result.push_back(bits);
      } else if (bits != (m.fp32 ? 0xFFFFFFFFu : 0xFFFFu)) {
        report("nothing is written between rows, " + m.name(), false);
        return result;
      }
    }
  }
  return result;
}

double value_of(const Mode& m, uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return static_cast<double>(m.fp32 ? x : from_bits(static_cast<uint16_t>(bits)));
}

// ---- the double loop ----------------------------------------------------------------------------

// Keys and values of one sequence and head, made once for many rows.
struct HeadTokens {
  std::vector<std::vector<double>> keys, values;
};
HeadTokens head_tokens(const Scene& s, const Sequence& q, int64_t kv_head) {
  HeadTokens all;
  for (int64_t t = 0; t < q.length; ++t) {
    all.keys.push_back(token_head(s, q, t, 0, kv_head));
    all.values.push_back(token_head(s, q, t, 1, kv_head));
  }
  return all;
}

std::vector<double> expected(const Scene& s, const Sequence& q, const HeadTokens& tokens,
                             int64_t position, int64_t head) {
  const int64_t dim = s.mode.shape.head_dim;
  const int64_t seen = std::max(position + 1, position < q.open ? q.open : 0);
  std::vector<double> query, scores, out(static_cast<size_t>(dim), 0.0);
  for (int64_t d = 0; d < dim; ++d) {
    query.push_back(static_cast<double>(query_element(s, q, position, head * dim + d)));
  }
  for (int64_t t = 0; t < seen; ++t) {
    double score = 0.0;
    const auto& key = tokens.keys[static_cast<size_t>(t)];
    for (size_t d = 0; d < query.size(); ++d) score += query[d] * key[d];
    scores.push_back(score / std::sqrt(static_cast<double>(dim)));
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  double total = 0.0;
  for (int64_t t = 0; t < seen; ++t) {
    const double weight = std::exp(scores[static_cast<size_t>(t)] - top);
    total += weight;
    for (size_t d = 0; d < out.size(); ++d) {
      out[d] += weight * tokens.values[static_cast<size_t>(t)][d];
    }
  }
  for (double& x : out) x /= total;
  return out;
}

// Largest difference over some rows and heads of each sequence; the last rows are among them.
double difference(const Scene& s, const std::vector<uint32_t>& bits, int64_t rows_looked_at) {
  const Mode& m = s.mode;
  const int64_t group = m.shape.n_q_heads / m.shape.n_kv_heads, dim = m.shape.head_dim;
  double worst = 0.0;
  int64_t first_row = 0;
  for (const Sequence& q : s.sequences) {
    const int64_t kv_head = m.shape.n_kv_heads - 1;
    const HeadTokens tokens = head_tokens(s, q, kv_head);
    const int64_t step = std::max<int64_t>(1, q.rows / rows_looked_at);
    for (int64_t back = q.spoiled ? 1 : 0; back < q.rows; back += back < 3 ? 1 : step) {
      const int64_t row = q.rows - 1 - back, position = q.length - 1 - back;
      for (const int64_t in_group : {int64_t{0}, group - 1}) {
        const int64_t head = kv_head * group + in_group;
        const auto want = expected(s, q, tokens, position, head);
        for (int64_t d = 0; d < dim; ++d) {
          const auto at = static_cast<size_t>((first_row + row) * m.q() + head * dim + d);
          const double error = std::fabs(value_of(m, bits[at]) - want[static_cast<size_t>(d)]);
          worst = error <= worst ? worst : error;  // a NaN becomes the worst
          if (std::isnan(error)) return NAN;
        }
      }
    }
    first_row += q.rows;
  }
  return worst;
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2e", x);
  return text;
}

// ---- checks -------------------------------------------------------------------------------------

#ifdef TINYLOOP_EMULATED
constexpr bool kSmall = true;
#else
constexpr bool kSmall = false;
#endif

Mode mode(int64_t kv_heads, int64_t group, int64_t dim, KvFormat format, bool fp32 = false) {
  return {{kv_heads * group, kv_heads, dim}, format, fp32};
}
constexpr KvFormat kBoth[] = {KvFormat::kActivations, KvFormat::kInt8};

void near(const std::string& what, const Scene& s, const Layout& how, int64_t rows = 12) {
  const double worst = difference(s, attend(s, how), rows);
  const double tolerance = s.mode.fp32 ? kFloatTolerance : kHalfTolerance;
  report(what + ", " + s.mode.name(), worst <= tolerance, "largest difference " + number(worst));
}

void same(const std::string& what, const Scene& s, const std::vector<uint32_t>& want,
          const std::vector<uint32_t>& found) {
  size_t differing = 0;
  for (size_t i = 0; i < want.size(); ++i) differing += i >= found.size() || want[i] != found[i];
  report(what + ", " + s.mode.name(), want.size() == found.size() && differing == 0,
         differing == 0 ? ""
                        : std::to_string(differing) + " of " + std::to_string(want.size()) +
                              " elements differ");
}
void same(const std::string& what, const Scene& s, const std::vector<uint32_t>& want,
          const Layout& how) {
  same(what, s, want, attend(s, how));
}

std::vector<uint32_t> last_rows(const Scene& s, const std::vector<uint32_t>& all, int64_t n) {
  return {all.end() - n * s.mode.q(), all.end()};
}

// Documents of every length against the double loop, and their last row by the decode kernel.
void check_lengths(const Mode& m) {
  const std::vector<int64_t> lengths =
      kSmall ? std::vector<int64_t>{1, 65, 257}
             : std::vector<int64_t>{1, 63, 64, 65, 255, 256, 257, 1000, 2048};
  double worst = 0.0;
  bool decode_equal = true, alone_equal = true;
  for (const int64_t n : lengths) {
    const Scene document{m, 0, {{n, n, 0, static_cast<uint64_t>(n)}}};
    const Scene row{m, 0, {{n, 1, 0, static_cast<uint64_t>(n)}}};
    const auto bits = attend(document, {});
    const double error = difference(document, bits, 8);
    if (!(error <= worst)) worst = error;
    const auto last = last_rows(document, bits, 1);
    alone_equal &= attend(row, {}) == last;
    Layout decode;
    decode.decode = true;
    decode_equal &= attend(row, decode) == last;
    decode.scratch = 0;
    decode_equal &= attend(row, decode) == last;
    decode.prefix = n / 3;
    decode_equal &= attend(row, decode) == last;
  }
  const double tolerance = m.fp32 ? kFloatTolerance : kHalfTolerance;
  report("documents of all lengths, " + m.name(), worst <= tolerance,
         "largest difference " + number(worst));
  report("the last row alone has the same bits, " + m.name(), alone_equal);
  report("the last row by decode has the same bits, " + m.name(), decode_equal);
}

// One scene in all layouts.
void check_layouts(const Mode& m) {
  Scene s{m, 191, {{300, 109, 0, 1}, {192, 1, 0, 2}, {261, 70, 0, 3}, {224, 33, 0, 4}}};
  const Layout plain;
  const auto bits = attend(s, plain);
  report("several sequences, " + m.name(),
         difference(s, bits, 12) <= (m.fp32 ? kFloatTolerance : kHalfTolerance),
         "largest difference " + number(difference(s, bits, 12)));
  for (const int64_t prefix : {1, 63, 64, 100, 128, 191}) {
    Layout how;
    how.prefix = prefix;
    same("prefix of " + std::to_string(prefix), s, bits, how);
  }
  Layout cut;
  cut.prefix = 190;
  cut.cuts = {3, 64, 133};
  cut.decoys = true;
  same("prefix in segments, others of other planes between", s, bits, cut);
  for (int64_t at = 1; at < 190; ++at) cut.cuts.push_back(at);
  std::sort(cut.cuts.begin(), cut.cuts.end());
  same("prefix in segments of one token", s, bits, cut);
  cut.cuts = {2, 67};
  for (const int64_t rows : {1, 3, 50}) {
    cut.item_rows = rows;
    same("items of " + std::to_string(rows) + " rows", s, bits, cut);
  }
  cut.join = false;
  same("items of one sequence", s, bits, cut);
  cut = {};
  cut.shift = m.fp32 || m.int8() ? 4 : 2;
  cut.prefix = 130;
  same("addresses of little alignment", s, bits, cut);
  cut.shift = 8;
  same("addresses at multiples of 8", s, bits, cut);
  cut = {};
  cut.prefix = 150;
  cut.cuts = {70};
  cut.decode = true;
  cut.decoys = true;
  same("all rows by decode", s, bits, cut);
  cut.scratch = 0;
  same("all rows by decode without scratch", s, bits, cut);
  Scene one = s;
  one.sequences = {s.sequences[2]};
  const auto rows = static_cast<int64_t>(s.sequences[2].rows);
  const std::vector<uint32_t> part(bits.begin() + 110 * m.q(), bits.begin() + (110 + rows) * m.q());
  same("a sequence without its neighbours", one, part, plain);
}

void check_open(const Mode& m) {
  Scene s{m, 100, {{300, 200, 170, 1}, {180, 80, 180, 2}, {260, 160, 161, 3}}};
  const auto bits = attend(s, {});
  const double worst = difference(s, bits, 20);
  report("prompts in both directions, " + m.name(),
         worst <= (m.fp32 ? kFloatTolerance : kHalfTolerance),
         "largest difference " + number(worst));
  Layout how;
  how.prefix = 100;
  how.cuts = {65};
  same("the same behind a prefix", s, bits, how);
  how.item_rows = 7;
  same("the same in items of 7 rows", s, bits, how);
}

// A sequence whose last token holds no numbers: the rows before it know nothing of it.
void check_spoiled(const Mode& m) {
  Scene s{m, 64, {{100, 36, 0, 1}, {135, 71, 0, 2}}};
  const auto clean = attend(s, {});
  for (Sequence& q : s.sequences) q.spoiled = true;
  Layout how;
  how.prefix = 64;
  for (const bool behind_prefix : {false, true}) {
    const auto bits = attend(s, behind_prefix ? how : Layout{});
    bool equal = true, broken = true;
    for (int64_t row = 0; row < 107; ++row) {
      const bool last = row == 35 || row == 106;
      for (int64_t i = 0; i < m.q(); ++i) {
        const auto at = static_cast<size_t>(row * m.q() + i);
        if (last) {
          broken &= std::isnan(value_of(m, bits[at]));
        } else {
          equal &= bits[at] == clean[at];
        }
      }
    }
    report("rows before a token of NaN keep their bits, " + m.name(), equal);
    report("the row of that token is NaN, " + m.name(), broken);
  }
}

// Single rows of many sequences in one item, one of them with a token of NaN.
void check_spoiled_neighbour(const Mode& m) {
  Scene s{m, 64, {}};
  for (uint64_t id = 1; id <= 40; ++id) s.sequences.push_back({65, 1, 0, id});
  const auto clean = attend(s, {});
  s.sequences[17].spoiled = true;
  Layout how;
  how.prefix = 64;
  for (const bool behind_prefix : {false, true}) {
    const auto bits = attend(s, behind_prefix ? how : Layout{});
    bool equal = true;
    for (size_t i = 0; i < bits.size(); ++i) {
      equal &= bits[i] == clean[i] || i / static_cast<size_t>(m.q()) == 17;
    }
    report("a token of NaN is its own sequence's, " + m.name(), equal);
  }
}

void check_chain(const Mode& m) {
  Scene s{m, 1100, {{1150, 40, 0, 1}, {1101, 1, 0, 2}}};
  const auto bits = attend(s, {});
  Layout how;
  how.prefix = 1100;
  how.decoys = true;
  for (int64_t at = 0; at < 1100; at += 1 + at * 7 % 6) how.cuts.push_back(at);
  same("a prefix in " + std::to_string(how.cuts.size()) + " segments", s, bits, how);
  how.decode = true;
  same("the same by decode", s, bits, how);
}

void check_capacities(const Mode& m) {
  Scene s{m, 0, {{300, 1, 0, 1}, {65, 1, 0, 2}, {700, 1, 0, 3}}};
  Layout how;
  how.decode = true;
  const auto bits = attend(s, how);
  how.spare_items = 5;
  how.spare_spans = 40;
  same("decode with room for more", s, bits, how);
  how.graph = true;
  same("decode in a graph with room for more", s, bits, how);
  how.decode = false;
  how.spare_items = 3;
  same("many rows in a graph with room for more", s, bits, how);
}

// Long documents, some behind a shared prefix, in many items and heads, each segment in memory of
// its own: under compute-sanitizer no kernel may read past a segment's end or before its begin.
void check_alone(const Mode& m) {
  const Scene s{m, 192, {{700, 508, 0, 1}, {1024, 832, 0, 2}, {449, 257, 0, 3}, {193, 1, 0, 4}}};
  const auto bits = attend(s, {});
  Layout how;
  how.alone = true;
  same("documents in memory of their own", s, bits, how);
  how.prefix = 192;
  how.cuts = {1, 64, 127};
  same("documents on a prefix in memory of its own", s, bits, how);
  const Scene steps{m, 64, {{64 + 1, 1, 0, 1}, {320, 1, 0, 2}, {384, 1, 0, 3}, {129, 1, 0, 4}}};
  Layout decode;
  decode.decode = true;
  const auto step_bits = attend(steps, decode);
  decode.alone = true;
  same("decode in memory of its own", steps, step_bits, decode);
  decode.prefix = 64;
  same("decode on a prefix in memory of its own", steps, step_bits, decode);
  decode.scratch = 0;
  same("the same by one block for each", steps, step_bits, decode);
}

// By themselves, since compute-sanitizer takes its time.
void run_alone() {
  for (const KvFormat format : kBoth) {
    check_alone(mode(3, 1, 128, format));
    check_alone(mode(2, 2, 96, format));
    check_alone(mode(2, 1, 80, format));
    check_alone(mode(2, 4, 64, format));
  }
}

void run_checks() {
  run_alone();
  for (const int64_t dim : {8, 20, 64, 96, 128, 256}) {
    for (const int64_t group : {1, 4, 16}) {
      for (const KvFormat format : kBoth)
        check_lengths(mode(group == 16 ? 1 : 2, group, dim, format));
    }
  }
  for (const KvFormat format : kBoth) {
    check_layouts(mode(2, 4, 128, format));
    check_layouts(mode(1, 3, 20, format));
    check_layouts(mode(3, 1, 64, format));
    check_layouts(mode(1, 2, 256, format));
    check_layouts(mode(1, 128, 32, format));
    check_open(mode(2, 2, 128, format));
    check_open(mode(1, 1, 96, format));
    check_open(mode(1, 3, 10, format));
    check_spoiled(mode(2, 2, 128, format));
    check_spoiled(mode(1, 1, 64, format));
    check_spoiled(mode(1, 5, 256, format));
    check_spoiled_neighbour(mode(1, 2, 128, format));
    check_spoiled_neighbour(mode(1, 1, 64, format));
    check_spoiled_neighbour(mode(1, 1, 32, format));
    check_chain(mode(1, 2, 64, format));
    check_chain(mode(2, 1, 96, format));
    check_capacities(mode(2, 4, 128, format));
    check_capacities(mode(2, 1, 24, format));
    check_layouts(mode(2, 2, 24, format, true));
    check_layouts(mode(1, 1, 128, format, true));
    check_open(mode(1, 2, 40, format, true));
    check_spoiled(mode(1, 2, 64, format, true));
    near("a long document", {mode(1, 2, 128, format, true), 0, {{2048, 300, 0, 1}}}, {}, 4);
  }
}

// ---- speed --------------------------------------------------------------------------------------

#ifndef TINYLOOP_EMULATED

// Halves between 0.5 and 1 of either sign, or codes of all values: zeros or all the same would take
// less power, and so less time.
__global__ void fill_kernel(uint32_t* words, size_t n, bool codes) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n;
       i += size_t{gridDim.x} * blockDim.x) {
    auto z = static_cast<uint32_t>(i * 0x9E3779B97F4A7C15ull >> 29);
    z = (z ^ z >> 15) * 0x85EBCA6Bu;
    z ^= z >> 13;
    words[i] = codes ? z : (z & 0x83FF83FFu) | 0x38003800u;
  }
}

// What is timed: attention(), or one of its kernels.
using Enqueue = std::function<void(cudaStream_t, const AttentionCall&, void*, size_t)>;
void by_attention(cudaStream_t stream, const AttentionCall& call, void* scratch, size_t bytes) {
  attention(stream, call.plan, call.shape, call.plane, call.queries, call.out, false, scratch,
            bytes);
}
Enqueue by(const Kernel& kernel) {
  return [&kernel](cudaStream_t stream, const AttentionCall& call, void*, size_t) {
    if (!kernel.enqueue(stream, call)) throw std::runtime_error("a kernel took no call");
  };
}

// Memory of one large shape, filled with numbers of no meaning. Moved, not copied: a copy that ends
// would free what the other's segments lie in.
struct Bench {
  HeadShape shape;
  KvFormat format;
  std::vector<Item> items;
  std::vector<AttentionPiece> pieces;
  std::vector<KvSegment> segments;
  int64_t rows = 0;
  int64_t spans = 0;
  bool decode = false;
  std::vector<DevicePlace> held;

  void* allocate(size_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes), "allocate");
    held.emplace_back(p);
    check(cudaMemset(p, 0x2C, bytes), "fill");  // halves of 0.065
    return p;
  }
  uint8_t* noise_of(size_t bytes, bool codes) {
    void* p = allocate(bytes + 4);
    fill_kernel<<<512, 256>>>(static_cast<uint32_t*>(p), bytes / 4, codes);
    check(cudaGetLastError(), "fill");
    return static_cast<uint8_t*>(p);
  }
  KvSegment segment(int64_t begin, int64_t end) {
    const auto elements = static_cast<size_t>((end - begin) * shape.n_kv_heads * shape.head_dim);
    KvSegment s;
    s.format = format;
    s.begin = begin;
    s.end = end;
    const size_t bytes = elements * (format == KvFormat::kInt8 ? 1 : 2);
    s.keys = noise_of(bytes, format == KvFormat::kInt8);
    s.values = noise_of(bytes, format == KvFormat::kInt8);
    s.scales =
        static_cast<uint16_t*>(allocate(static_cast<size_t>((end - begin) * shape.n_kv_heads) * 4));
    return s;
  }
  void add(int64_t prefix, int64_t length, int64_t n, int64_t limit, bool join) {
    const KvSegment own = segment(prefix, length);
    for (int64_t at = length - n; at < length;) {
      if (items.empty() || !join || items.back().rows >= limit) {
        Item item;
        item.n_segments = static_cast<int32_t>(segments.size());
        item.first_piece = static_cast<int32_t>(pieces.size());
        item.prefix_length = prefix;
        items.push_back(item);
      }
      Item& item = items.back();
      const int64_t take = std::min(length - at, limit - item.rows);
      pieces.push_back({rows, take, at, 0, own});
      item.rows += take;
      ++item.n_pieces;
      rows += take;
      at += take;
    }
    spans = std::max(spans, (length + kSpan - 1) / kSpan);
  }
  template <typename T>
  const T* upload(const std::vector<T>& data) {
    void* p = allocate(data.size() * sizeof(T) + 16);
    check(cudaMemcpy(p, data.data(), data.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
    return static_cast<const T*>(p);
  }
  // Seconds of one call, of `calls` in a graph.
  double seconds(int calls, const Enqueue& enqueue = by_attention) {
    AttentionPlan plan;
    plan.items = upload(items);
    plan.pieces = upload(pieces);
    plan.segments = upload(segments);
    plan.n_items = static_cast<int32_t>(items.size());
    plan.max_spans = static_cast<int32_t>(spans);
    plan.decode = decode;
    plan.turns = static_cast<uint32_t*>(allocate(8));
    check(cudaMemset(plan.turns, 0, 8), "clear the counters");
    const int64_t stride = (shape.n_q_heads + 2 * shape.n_kv_heads) * shape.head_dim;
    const Rows queries{noise_of(static_cast<size_t>(rows * stride * 2), false), stride};
    const int64_t out_stride = shape.n_q_heads * shape.head_dim;
    const Rows out{static_cast<uint8_t*>(allocate(static_cast<size_t>(rows * out_stride * 2))),
                   out_stride};
    const size_t bytes = attention_scratch_bytes(shape, static_cast<int64_t>(items.size()), spans);
    void* scratch = allocate(bytes + 16);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t runnable;
    cudaEvent_t begin, end;
    check(cudaDeviceSynchronize(), "fill");
    check(cudaStreamCreate(&stream), "create a stream");
    check(cudaEventCreate(&begin), "create an event");
    check(cudaEventCreate(&end), "create an event");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin a capture");
    for (int i = 0; i < calls; ++i) {
      enqueue(stream, {plan, shape, 0, queries, out}, scratch, bytes);
    }
    check(cudaStreamEndCapture(stream, &graph), "end a capture");
    check(cudaGraphInstantiate(&runnable, graph, 0), "instantiate a graph");
    double best = 1e9;
    for (int repeat = 0; repeat < 4; ++repeat) {
      check(cudaEventRecord(begin, stream), "record");
      check(cudaGraphLaunch(runnable, stream), "launch");
      check(cudaEventRecord(end, stream), "record");
      check(cudaEventSynchronize(end), "run");
      float milliseconds = 0.0f;
      check(cudaEventElapsedTime(&milliseconds, begin, end), "time");
      if (repeat > 0) best = std::min(best, static_cast<double>(milliseconds) * 1e-3 / calls);
    }
    cudaGraphExecDestroy(runnable);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
    return best;
  }
};

const char* format_name(KvFormat format) { return format == KvFormat::kInt8 ? "int8" : "fp16"; }

std::string shape_name(const HeadShape& shape) {
  return std::to_string(shape.n_q_heads) + " on " + std::to_string(shape.n_kv_heads) + " x " +
         std::to_string(shape.head_dim);
}

// A bench and what of it is counted: floating-point operations, or bytes of keys and values.
struct Workload {
  std::string name;
  Bench bench;
  double operations = 0.0, bytes = 0.0;
  int calls = 4;

  void line(const char* kernel, double seconds) const {
    std::printf("%-66s %-12s %9.2f us  %6.0f TFLOP/s  %5.2f TB/s\n", name.c_str(), kernel,
                seconds * 1e6, operations / seconds * 1e-12, bytes / seconds * 1e-12);
    std::fflush(stdout);
  }
};

double key_bytes(const HeadShape& shape, KvFormat format) {
  return static_cast<double>(shape.n_kv_heads) * static_cast<double>(format == KvFormat::kInt8
                                                                         ? 2 * shape.head_dim + 4
                                                                         : 4 * shape.head_dim);
}
double key_operations(const HeadShape& shape) {
  return 4.0 * static_cast<double>(shape.n_q_heads * shape.head_dim);
}

Workload documents(const HeadShape& shape, KvFormat format, int64_t n, int64_t length) {
  Workload w{std::to_string(n) + " documents of " + std::to_string(length) + ", " +
                 shape_name(shape) + " " + format_name(format),
             {shape, format, {}, {}, {}, 0, 0, false, {}}};
  for (int64_t i = 0; i < n; ++i) w.bench.add(0, length, length, attention_rows(shape), false);
  const auto keys = static_cast<double>(length);
  w.operations = static_cast<double>(n) * key_operations(shape) * keys * (keys + 1.0) / 2.0;
  w.bytes = static_cast<double>(n) * keys * key_bytes(shape, format);
  return w;
}

Workload continuations(const HeadShape& shape, KvFormat format, int64_t n, int64_t prefix,
                       int64_t rows) {
  Workload w{std::to_string(n) + " continuations of " + std::to_string(rows) + " on " +
                 std::to_string(prefix) + ", " + shape_name(shape) + " " + format_name(format),
             {shape, format, {}, {}, {}, 0, 0, false, {}}};
  w.bench.segments.push_back(w.bench.segment(0, prefix));
  for (int64_t i = 0; i < n; ++i) {
    w.bench.add(prefix, prefix + rows, rows, attention_rows(shape), true);
  }
  const double keys = static_cast<double>(prefix) + static_cast<double>(rows + 1) / 2.0;
  w.operations = static_cast<double>(n * rows) * key_operations(shape) * keys;
  w.bytes = static_cast<double>(prefix + n * rows) * key_bytes(shape, format);
  return w;
}

Workload decoded(const HeadShape& shape, KvFormat format, int64_t n, int64_t length) {
  Workload w{"decode " + std::to_string(n) + " x " + std::to_string(length) + ", " +
                 shape_name(shape) + " " + format_name(format),
             {shape, format, {}, {}, {}, 0, 0, true, {}}};
  for (int64_t i = 0; i < n; ++i) w.bench.add(0, length, 1, 1, false);
  w.operations = static_cast<double>(n * length) * key_operations(shape);
  w.bytes = static_cast<double>(n * length) * key_bytes(shape, format);
  w.calls = 50;
  return w;
}

void time_attention(Workload& w) { w.line("attention", w.bench.seconds(w.calls)); }
void time_workload(Workload w) { time_attention(w); }
void time_kernels(Workload w) {
  time_attention(w);
  for (const Kernel& kernel : kManyRows) w.line(kernel.name, w.bench.seconds(w.calls, by(kernel)));
}

const HeadShape kMha{16, 16, 128}, kGqa{16, 4, 128}, kNarrow{16, 16, 64}, kWide{8, 8, 256};

// What is attended to most, by all kernels.
void run_table() {
  for (const KvFormat format : kBoth) {
    time_kernels(documents(kMha, format, 16, 2048));
    time_kernels(continuations(kMha, format, 64, 1024, 32));
    for (const int64_t length : {128, 320, 384}) time_workload(decoded(kMha, format, 64, length));
  }
}

void run_speed() {
  for (const KvFormat format : kBoth) {
    for (const HeadShape& shape : {kMha, kGqa, kNarrow, kWide}) {
      time_workload(documents(shape, format, 64, 2048));
    }
    time_workload(documents(kMha, format, 1, 2048));
    time_workload(documents(kMha, format, 4, 2048));
    time_workload(documents(kMha, format, 256, 512));
    time_workload(continuations(kMha, format, 256, 1024, 32));
    time_workload(continuations(kMha, format, 64, 1024, 1));
    time_workload(continuations(kGqa, format, 256, 1024, 32));
    for (const int64_t n : {1, 8, 64}) {
      for (const int64_t length : {128, 384, 512, 4096}) {
        time_workload(decoded(kMha, format, n, length));
      }
    }
    time_workload(decoded(kGqa, format, 64, 1024));
    time_workload(decoded(kGqa, format, 1, 1024));
    time_workload(decoded(kNarrow, format, 64, 1024));
  }
}

#endif

}  // namespace
}  // namespace tinyloop::cuda

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  tinyloop::cuda::all_lines = argc > 2 && std::string(argv[2]) == "all";
  try {
    if (what == "alone") {
      tinyloop::cuda::run_alone();
    } else if (what != "speed" && what != "table") {
      tinyloop::cuda::run_checks();
    }
    std::printf("%d checks, %d plans by one more kernel\n", tinyloop::cuda::checks,
                tinyloop::cuda::plans_compared);
#ifndef TINYLOOP_EMULATED
    if (what == "table") tinyloop::cuda::run_table();
    if (what == "speed" || what.empty()) tinyloop::cuda::run_speed();
#endif
  } catch (const std::exception& e) {
    std::printf("FAIL  %s\n", e.what());
    return 1;
  }
  std::printf("%d failed\n", tinyloop::cuda::failures);
  return tinyloop::cuda::failures == 0 ? 0 : 1;
}
