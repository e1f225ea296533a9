// Which kernel attends, and how many thread blocks share a sequence.
#include <algorithm>
#include <string>

#include "cuda/attention.h"
#include "cuda/attention_kernels.h"
#include "cuda/check.h"
#include "tinyloop/errors.h"

namespace tinyloop::cuda {
namespace {

// Thread blocks of the decode kernel that a multiprocessor runs at once. Which number of blocks
// shares a sequence decides no bits.
constexpr int64_t kBlocksPerProcessor = 3;
// Scratch is not made larger than this for more than one item.
constexpr int64_t kScratchAim = int64_t{64} << 20;
// For the size of the scratch, which is asked for without a device at hand: the largest one.
constexpr int64_t kMostProcessors = 160;

int64_t processors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "find the current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "count the device's multiprocessors");
  return count;
}

int64_t group_of(const HeadShape& shape) { return shape.n_q_heads / shape.n_kv_heads; }

// Blocks that share each item and K/V head, so that together they fill the device.
int64_t splits_for(const HeadShape& shape, int64_t items, int64_t spans, int64_t n_processors) {
  const int64_t heads = std::max<int64_t>(1, items * shape.n_kv_heads);
  return std::clamp<int64_t>(n_processors * kBlocksPerProcessor / heads, 1,
                             std::max<int64_t>(1, spans));
}

void check_shape(const HeadShape& shape) {
  if (padded_head_dim(shape.head_dim) == 0 || shape.head_dim % 2 != 0) {
    throw DeviceError("cannot attend with heads of " + std::to_string(shape.head_dim) +
                      " elements: the device's kernels take even numbers up to 256");
  }
  if (group_of(shape) > kMaxGroupedHeads) {
    throw DeviceError("cannot attend with " + std::to_string(group_of(shape)) +
                      " query heads for each key: the device's kernels take up to " +
                      std::to_string(kMaxGroupedHeads));
  }
}

}  // namespace

int64_t attention_rows(const HeadShape& shape) {
  return std::max<int64_t>(1, kBlockVectors / group_of(shape));
}

size_t attention_scratch_bytes(const HeadShape& shape, int64_t max_decode_items,
                               int64_t max_spans) {
  if (max_decode_items < 1 || max_spans <= 1 || group_of(shape) > kDecodeVectors) return 0;
  const auto bytes = static_cast<int64_t>(partial_bytes(shape)) * shape.n_q_heads * max_spans;
  // Only as many items as leave room on the device are shared at all.
  const int64_t useful = kMostProcessors * kBlocksPerProcessor / (2 * shape.n_kv_heads);
  const int64_t items =
      std::min({max_decode_items, useful, std::max<int64_t>(1, kScratchAim / bytes)});
  return static_cast<size_t>(items * bytes);
}

void attention(cudaStream_t stream, const AttentionPlan& plan, const HeadShape& shape,
               int64_t plane, Rows queries, Rows out, bool fp32, void* scratch,
               size_t scratch_bytes) {
  if (plan.n_items == 0) return;
  check_shape(shape);
  const AttentionCall call{plan, shape, plane, queries, out};
  if (fp32) return attention_fp32(stream, call);
  if (!plan.decode || group_of(shape) > kDecodeVectors) {
    if (!attention_ring(stream, call)) attention_many(stream, call);
    return;
  }
  int64_t splits = splits_for(shape, plan.n_items, plan.max_spans, processors());
  const auto places = static_cast<size_t>(plan.n_items * shape.n_q_heads * plan.max_spans);
  if (places * partial_bytes(shape) > scratch_bytes) splits = 1;
  attention_decode(stream, call, static_cast<int>(splits), scratch);
}

}  // namespace tinyloop::cuda
