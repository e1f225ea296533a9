#include "cuda/device_weight.h"

#include <algorithm>
#include <cstring>

#include "tinyloop/errors.h"

namespace tinyloop::cuda {

namespace {

constexpr size_t kAlignment = 256;  // of each array in the staging memory

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
  const auto rows_at_once =
      static_cast<int64_t>((PinnedRing::slot_bytes() - 3 * kAlignment) / row) / kTileOutputs *
      kTileOutputs;
  if (rows_at_once == 0) {
    throw LoadError("cannot load tensor '" + tensor.name + "' on a GPU: " +
                    std::to_string(tensor.cols) + " inputs are more than its upload can take");
  }
  weight->view = weight_shape(shape.kind, shape.outputs, shape.inputs, shape.group, shape.fp32);
  for (int64_t first = 0; first < shape.outputs; first += rows_at_once) {
    const int64_t end = std::min(first + rows_at_once, shape.outputs);
    const StagedRows staged = stage(tensor, begin + first, end - first);
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

// Outputs [first, first + count) of the tensor.
StagedRows Uploader::stage(const TensorEntry& tensor, int64_t first, int64_t count) {
  const size_t codes = to_size(count) * code_bytes(tensor);
  const size_t scales = to_size(count) * scale_bytes(tensor);
  unsigned char* at = ring_.room(aligned(codes) + 2 * aligned(scales));
  const auto put = [&](const uint8_t* from, size_t bytes) {
    std::memcpy(at, from, bytes);
    unsigned char* const here = at;
    at += aligned(bytes);
    return here;
  };
  StagedRows to;
  to.kind = tensor.kind;
  to.rows = put(tensor.data + to_size(first) * code_bytes(tensor), codes);
  if (scales == 0) return to;
  const size_t all = to_size(tensor.rows) * scale_bytes(tensor);
  const uint8_t* from = tensor.data + tensor.bytes - 2 * all + to_size(first) * scale_bytes(tensor);
  to.scales = reinterpret_cast<const uint16_t*>(put(from, scales));
  to.zeros = reinterpret_cast<const uint16_t*>(put(from + all, scales));
  return to;
}

}  // namespace tinyloop::cuda
