#include <algorithm>

#include "cuda/cublas_lt.h"
#include "cuda/input_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear.h"
#include "cuda/linear_fp32.h"
#include "cuda/products.h"
#include "cuda/row_map.h"

namespace tinyloop::cuda {

namespace {

// Whether the build holds code of sm_90a, which Hopper's matrix instructions need.
#ifdef TINYLOOP_SM90A
constexpr bool kHasWarpgroups = true;
#else
constexpr bool kHasWarpgroups = false;
#endif

// From so many results (rows x outputs) on cuBLASLt is faster than our own kernels on an H200,
// above kLeastWideRows rows: with an FP16 copy of the weight, and when the weight must be unpacked
// first. No bit depends on it.
constexpr int64_t kWideResults = 800'000;
constexpr int64_t kWideResultsUnpacked = 1'300'000;
constexpr int64_t kLeastWideRows = 65;

// From so many rows to so many, rows are formed by a kernel of their own and multiplied by chains
// that are fed: faster than the narrow kernel on fewer rows and than warpgroups on more, on an
// H200. No bit depends on it.
constexpr int64_t kLeastFedRows = 2;
constexpr int64_t kMostFedRows = 8;

// Fragments through shared memory cost its bandwidth: with so many chains to a multiprocessor, as
// outputs of several parts have, those that dequantize themselves are faster, on an H200. No bit
// depends on it.
constexpr int64_t kDirectChains = 2;

// The warps of a block of form_rows; rows are shared by several where there are few.
constexpr int kFormWarps = 4;
constexpr int64_t kSharedRows = 64;

template <typename T>
__global__ void __launch_bounds__(kFormWarps * 32)
    form_rows_kernel(const __grid_constant__ LinearInput input, int64_t first, int64_t rows,
                     int shares, int64_t inputs, T* out, int64_t stride, int64_t padded) {
  let_next_start();
  wait_for_previous();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kFormWarps + threadIdx.x / 32;
  const int64_t r = i / shares;
  if (r >= rows) return;
  form_row<T>(input, first + r, inputs, static_cast<int>(i % shares), shares, out + r * stride,
              padded);
}

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Warps of form_rows to a row: each has all loads of its share under way at once.
int form_shares(const LinearInput& input, int64_t rows, int64_t inputs) {
  if (rows > kSharedRows) return 1;
  if (input.kind == InputKind::kState) return kNormShares;
  return static_cast<int>(round_up(inputs, 512) / 512);
}

size_t element_bytes(bool fp32) { return fp32 ? sizeof(float) : sizeof(__half); }

const KindKernels& kernels_of(TensorKind kind) {
  switch (kind) {
    case TensorKind::kQ4:
      return kQ4Kernels;
    case TensorKind::kQ8:
      return kQ8Kernels;
    case TensorKind::kF16:
      return kF16Kernels;
    case TensorKind::kF32:
      break;
  }
  throw DeviceError("cannot multiply FP16 activations by a weight of the FP32 mode");
}

// Rows [first, first + rows) of a call whose input is kRows.
LinearCall rows_of(const LinearCall& call, int64_t first, int64_t rows, bool fp32) {
  LinearCall part = call;
  part.rows = rows;
  part.input.rows = static_cast<const uint8_t*>(call.input.rows) +
                    static_cast<size_t>(first * call.input.stride) * element_bytes(fp32);
  const bool halves = call.output.kind == OutputKind::kActivations && !fp32;
  part.output.data = static_cast<uint8_t*>(call.output.data) +
                     static_cast<size_t>(first * call.output.stride) * element_bytes(!halves);
  return part;
}

// By chains, fed or not.
void multiply_few(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  const bool direct = context.parts > 1 && weight_tiles(call.weight.outputs) * context.parts >=
                                               kDirectChains * context.multiprocessors;
  if (direct && takes_direct(call, context)) return linear_direct(stream, call, context);
  linear_fed(stream, call, context);
}

// By our own kernels; the input is kRows.
void multiply_ourselves(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  if (call.rows <= kMostFedRows && takes_fed(call, context)) {
    return multiply_few(stream, call, context);
  }
  if (takes_narrow(call, context)) return linear_narrow(stream, call, context);
  if (takes_warpgroups(call, context)) return linear_warpgroups(stream, call, context);
  linear_tiled(stream, call, context);
}

void multiply_rows(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  if (context.fp32) return linear_fp32(stream, call);
  const int64_t least = call.weight.cache != nullptr ? kWideResults : kWideResultsUnpacked;
  const bool wide = call.rows >= kLeastWideRows && call.rows * call.weight.outputs >= least;
  if (wide && takes_wide(call, context)) {
    return linear_wide(stream, call, context);
  }
  multiply_ourselves(stream, call, context);
}

// Outputs [begin, end) of a call; begin is a multiple of 16.
LinearCall outputs_of(const LinearCall& call, int64_t begin, int64_t end) {
  LinearCall part = call;
  DeviceWeight& w = part.weight;
  w.outputs = end - begin;
  w.data +=
      begin / kTileOutputs * weight_slabs(w.inputs) * slab_bytes(w.kind, static_cast<int>(w.group));
  if (w.cache != nullptr) w.cache += begin * w.cache_stride;
  const size_t element = element_bytes(call.output.kind != OutputKind::kActivations);
  part.output.data = static_cast<uint8_t*>(call.output.data) + static_cast<size_t>(begin) * element;
  return part;
}

// The largest tile that still gives every multiprocessor a block; the smallest if none does.
TileShape choose_shape(const LinearCall& call, const LinearContext& context) {
  struct Shape {
    TileShape shape;
    int64_t outputs, rows;
  };
  constexpr Shape kShapes[] = {{TileShape::k128x128, 128, 128},
                               {TileShape::k128x64, 128, 64},
                               {TileShape::k64x32, 64, 32},
                               {TileShape::k64x16, 64, 16},
                               {TileShape::k32x16, 32, 16}};
  const KindKernels& kernels = kernels_of(call.weight.kind);
  for (const Shape& s : kShapes) {
    if (s.shape == TileShape::k128x128 && context.parts > 1) continue;
    const int64_t blocks = round_up(call.weight.outputs, s.outputs) / s.outputs *
                           (round_up(call.rows, s.rows) / s.rows);
    if (blocks < context.multiprocessors * 9 / 10) continue;
    if (kernels.tiled_shared(call, s.shape) <= context.shared_limit) return s.shape;
  }
  return TileShape::k32x16;
}

}  // namespace

LinearContext linear_context(bool fp32) {
  LinearContext context;
  context.fp32 = fp32;
  int device = 0, shared = 0;
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaDeviceGetAttribute(&context.multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "ask for the device's multiprocessors");
  check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "ask for the shared memory of a block");
  context.shared_limit = static_cast<size_t>(shared);
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "ask for the device's generation");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "ask for the device's generation");
  context.warpgroups = kHasWarpgroups && major == 9 && minor == 0;
  return context;
}

size_t linear_scratch_bytes(int64_t max_rows, int64_t max_inputs, bool fp32, bool weight_scratch) {
  return (weight_scratch ? kWeightScratch : 0) +
         static_cast<size_t>(max_rows * round_up(max_inputs, 8)) * element_bytes(fp32);
}

void form_rows(cudaStream_t stream, const LinearInput& input, int64_t first, int64_t rows,
               int64_t inputs, void* out, int64_t stride, bool fp32) {
  Grid grid;
  const int shares = form_shares(input, rows, inputs);
  grid.blocks = dim3(static_cast<unsigned>(round_up(rows * shares, kFormWarps) / kFormWarps));
  grid.threads = kFormWarps * 32;
  const int64_t padded = std::min(round_up(inputs, 8), stride);
  if (fp32) {
    return launch(stream, grid, form_rows_kernel<float>, input, first, rows, shares, inputs,
                  static_cast<float*>(out), stride, padded);
  }
  launch(stream, grid, form_rows_kernel<__half>, input, first, rows, shares, inputs,
         static_cast<__half*>(out), stride, padded);
}

bool takes_narrow(const LinearCall& call, const LinearContext& context) {
  if (context.fp32 || call.rows > 8) return false;
  // Its output may stand where other blocks still read.
  if (call.input.kind == InputKind::kPair) return false;
  const size_t shared = kernels_of(call.weight.kind).narrow_shared(call, context);
  return shared <= context.shared_limit;
}

void linear_narrow(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  kernels_of(call.weight.kind).narrow(stream, call, context);
}

bool takes_warpgroups(const LinearCall& call, const LinearContext& context) {
  if (!context.warpgroups || context.fp32 || context.parts != 1) return false;
  if (call.input.kind != InputKind::kRows) return false;
  if (!can_map_rows(call.input.rows, call.input.stride)) return false;
  const WarpgroupPlan plan = kernels_of(call.weight.kind).warpgroup_plan(call, context);
  return plan.shared_bytes <= context.shared_limit;
}

void linear_warpgroups(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  kernels_of(call.weight.kind).warpgroup(stream, call, context);
}

namespace {
bool takes_chains(const LinearCall& call, const LinearContext& context, bool direct) {
  if (!context.warpgroups || context.fp32 || context.parts > most_chains(1)) return false;
  if (call.rows > kFormedRows && (context.parts > most_chains(4) || !copies_rows(call)))
    return false;
  // Its output may stand where other blocks still read.
  if (call.input.kind == InputKind::kPair) return false;
  const FedPlan plan = kernels_of(call.weight.kind).fed_plan(call, context, direct);
  return plan.shared_bytes <= context.shared_limit;
}
}  // namespace

bool takes_fed(const LinearCall& call, const LinearContext& context) {
  return takes_chains(call, context, false);
}
bool takes_direct(const LinearCall& call, const LinearContext& context) {
  return takes_chains(call, context, true);
}

void linear_fed(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  kernels_of(call.weight.kind).fed(stream, call, context, false);
}
void linear_direct(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  kernels_of(call.weight.kind).fed(stream, call, context, true);
}

void linear_tiled(cudaStream_t stream, const LinearCall& call, const LinearContext& context,
                  TileShape shape) {
  if (shape == TileShape::kChoose) shape = choose_shape(call, context);
  kernels_of(call.weight.kind).tiled(stream, call, context, shape);
}

bool takes_wide(const LinearCall& call, const LinearContext& context) {
  if (context.fp32 || context.cublas_lt == nullptr || context.parts != 1) return false;
  const DeviceWeight& w = call.weight;
  const bool has_rows =
      w.cache != nullptr || static_cast<size_t>(round_up(w.inputs, 8) * 128) * sizeof(__half) <=
                                context.weight_scratch_bytes;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return has_rows && w.inputs % 8 == 0 && w.outputs % 8 == 0 && call.input.stride % 8 == 0 &&
         call.output.stride % 8 == 0 && aligned(call.input.rows) && aligned(call.output.data);
}

void linear_wide(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  const DeviceWeight& w = call.weight;
  LtProduct product;
  product.inputs = w.inputs;
  product.rows = call.rows;
  product.in = call.input.rows;
  product.in_stride = call.input.stride;
  product.weight_stride = w.cache != nullptr ? w.cache_stride : w.inputs;
  const int64_t fit = w.cache != nullptr
                          ? w.outputs
                          : static_cast<int64_t>(context.weight_scratch_bytes / sizeof(__half)) /
                                w.inputs / 128 * 128;
  for (int64_t begin = 0; begin < w.outputs; begin += fit) {
    const int64_t end = std::min(begin + fit, w.outputs);
    product.outputs = end - begin;
    if (w.cache != nullptr) {
      product.weight = w.cache;
    } else {
      dequantize(stream, w, begin, end, static_cast<uint16_t*>(context.scratch), w.inputs);
      product.weight = context.scratch;
    }
    const LinearCall part = outputs_of(call, begin, end);
    product.output = part.output;
    if (!context.cublas_lt->multiply(stream, product)) multiply_ourselves(stream, part, context);
  }
}

void linear(cudaStream_t stream, const LinearCall& call, const LinearContext& context) {
  if (call.rows == 0) return;
  const bool fed =
      call.rows >= kLeastFedRows && call.rows <= kMostFedRows && takes_fed(call, context);
  if (!fed && takes_narrow(call, context)) return linear_narrow(stream, call, context);
  if (call.input.kind == InputKind::kRows) return multiply_rows(stream, call, context);

  const int64_t inputs = call.weight.inputs;
  LinearCall formed = call;
  formed.input = LinearInput{};
  formed.input.stride = round_up(inputs, 8);
  void* space = static_cast<uint8_t*>(context.scratch) + context.weight_scratch_bytes;
  const auto block = static_cast<int64_t>(
      (context.scratch_bytes - context.weight_scratch_bytes) /
      (static_cast<size_t>(formed.input.stride) * element_bytes(context.fp32)));
  if (block == 0) throw DeviceError("cannot form a product's input: the scratch holds no row");
  for (int64_t first = 0; first < call.rows; first += block) {
    const int64_t rows = std::min(block, call.rows - first);
    form_rows(stream, call.input, first, rows, inputs, space, formed.input.stride, context.fp32);
    LinearCall part = rows_of(formed, first, rows, context.fp32);
    part.input.rows = space;
    multiply_rows(stream, part, context);
  }
}

}  // namespace tinyloop::cuda
