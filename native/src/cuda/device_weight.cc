#include "cuda/device_weight.h"

#include <algorithm>

#include "cuda/check.h"

namespace tinyloop::cuda {

namespace {

// Enough for one copy to hide the next one's start, and little beside any model's weights.
constexpr size_t kStagingBytes = size_t{16} << 20;
constexpr size_t kAlignment = 256;

size_t to_size(int64_t n) { return static_cast<size_t>(n); }
size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// FP16 rows as the library wants them: multiples of 16 bytes, zeros behind the inputs.
int64_t cache_stride(int64_t inputs) { return (inputs + 7) / 8 * 8; }

// Bytes of one output in the file: codes, then one FP16 scale a group, and as many zeros.
size_t code_bytes(const TensorEntry& tensor) {
  switch (tensor.kind) {
    case TensorKind::kF32:
      return to_size(tensor.cols) * 4;
    case TensorKind::kF16:
      return to_size(tensor.cols) * 2;
    case TensorKind::kQ8:
      return to_size(tensor.cols);
    case TensorKind::kQ4:
      return to_size(tensor.cols) / 2;
  }
  return 0;
}
size_t scale_bytes(const TensorEntry& tensor) {
  return tensor.group == 0 ? 0 : to_size(tensor.groups()) * sizeof(uint16_t);
}

}  // namespace

DeviceWeight slice(const DeviceWeight& weight, int64_t begin, int64_t end) {
  DeviceWeight part = weight;
  part.outputs = end - begin;
  part.data += begin / kTileOutputs * weight_slabs(weight.inputs) *
               slab_bytes(weight.kind, static_cast<int>(weight.group));
  if (part.cache != nullptr) part.cache += begin * weight.cache_stride;
  return part;
}

std::vector<size_t> weight_allocations(const WeightShape& s) {
  std::vector<size_t> sizes{weight_bytes(s.kind, s.outputs, s.inputs, s.group, s.fp32)};
  if (s.cached) sizes.push_back(to_size(s.outputs * cache_stride(s.inputs)) * sizeof(uint16_t));
  return sizes;
}

std::unique_ptr<Weight> Uploader::upload(const TensorEntry& tensor, int64_t begin,
                                         const WeightShape& shape, Account& account) {
  const auto sizes = weight_allocations(shape);
  auto weight = std::make_unique<CudaWeight>();
  weight->data = account.allocate(sizes[0], Owner::kWeights, tensor.name.c_str());
  if (shape.cached) {
    weight->cache = account.allocate(sizes[1], Owner::kWeights, tensor.name.c_str());
  }
  const size_t row = code_bytes(tensor) + 2 * scale_bytes(tensor);
  const size_t tile = row * kTileOutputs + 3 * kAlignment;
  const size_t wanted = std::max(tile, kStagingBytes);
  if (staging_.bytes() < wanted) {
    finish();
    staging_ = account.allocate(wanted, Owner::kWorkspace, "weights on their way");
  }
  const auto rows_at_once =
      static_cast<int64_t>((staging_.bytes() - 3 * kAlignment) / row) / kTileOutputs * kTileOutputs;
  weight->view = weight_shape(shape.kind, shape.outputs, shape.inputs, shape.group, shape.fp32);
  for (int64_t first = 0; first < shape.outputs; first += rows_at_once) {
    const int64_t end = std::min(first + rows_at_once, shape.outputs);
    StagedRows staged;
    stage(tensor, begin + first, end - first, staged);
    repack(stream_, staged, weight->view, first, end, weight->data.as<uint8_t>());
  }
  weight->view.data = weight->data.as<uint8_t>();
  if (shape.cached) {
    const int64_t stride = cache_stride(shape.inputs);
    dequantize(stream_, weight->view, 0, shape.outputs, weight->cache.as<uint16_t>(), stride);
    weight->view.cache = weight->cache.as<uint16_t>();
    weight->view.cache_stride = stride;
  }
  return weight;
}

// Outputs [first, first + count) of the tensor into the staging block, in stream order: what was
// staged before has been read by then.
void Uploader::stage(const TensorEntry& tensor, int64_t first, int64_t count, StagedRows& to) {
  auto* at = staging_.as<uint8_t>();
  const auto put = [&](const uint8_t* from, size_t bytes) {
    ring_.write(at, from, bytes);
    uint8_t* const here = at;
    at += aligned(bytes);
    return here;
  };
  const size_t codes = code_bytes(tensor), scales = scale_bytes(tensor);
  to.kind = tensor.kind;
  to.rows = put(tensor.data + to_size(first) * codes, to_size(count) * codes);
  if (scales == 0) return;
  const size_t all = to_size(tensor.rows) * scales;
  const uint8_t* from = tensor.data + tensor.bytes - 2 * all + to_size(first) * scales;
  to.scales = reinterpret_cast<const uint16_t*>(put(from, to_size(count) * scales));
  to.zeros = reinterpret_cast<const uint16_t*>(put(from + all, to_size(count) * scales));
}

void Uploader::finish() {
  if (!staging_) return;
  check(cudaStreamSynchronize(stream_), "load weights");
  staging_.reset();
}

}  // namespace tinyloop::cuda
