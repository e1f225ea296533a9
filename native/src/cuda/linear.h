// Every matrix product of the backend: out = weight * input, for any number of rows.
//
// Numerics: an output is the sum of kParts chains over equal runs of slabs, added in order (one
// chain when parts is 1), each chain a tensor-core accumulation over its inputs in ascending steps
// of 16 with an FP32 accumulator that starts from zero.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend.h"
#include "cuda/weight.h"

namespace tinyloop::cuda {

class CublasLt;

enum class InputKind : uint8_t {
  kRows,    // activations as they are
  kState,   // round(norm(state))
  kGateUp,  // round(silu(gate) * up); rows are gate then up
  kPair,    // round(state), then round(other), half of the inputs each
};

// Activations are FP16, or FP32 in the FP32 mode; strides are in elements.
struct LinearInput {
  InputKind kind = InputKind::kRows;
  const void* rows = nullptr;  // kRows, kGateUp
  int64_t stride = 0;
  const float* state = nullptr;    // kState, kPair
  const float* other = nullptr;    // kPair
  const int32_t* index = nullptr;  // kState: row r is state row index[r]; null: r
  NormSpec norm{};                 // kState
};

enum class OutputKind : uint8_t {
  kActivations,  // rounded
  kFloat,        // as accumulated
  kAdd,          // float: what is there, plus the sum
};

struct LinearOutput {
  OutputKind kind = OutputKind::kActivations;
  void* data = nullptr;
  int64_t stride = 0;
};

struct LinearCall {
  LinearInput input;
  int64_t rows = 0;
  DeviceWeight weight;
  LinearOutput output;  // may be the kPair input's state, no other input
};

// What a device and its backend bring to every product.
struct LinearContext {
  bool fp32 = false;
  int parts = 1;  // chains per output: part of the numerics
  int multiprocessors = 0;
  size_t shared_limit = 0;        // bytes of shared memory that a block may ask for
  bool warpgroups = false;        // the device is one of sm_90a
  CublasLt* cublas_lt = nullptr;  // null: our own kernels at any number of rows
  void* scratch = nullptr;        // linear_scratch_bytes(), aligned to 256
  size_t scratch_bytes = 0;
  size_t weight_scratch_bytes = 0;  // of them, for weights as FP16 rows: 0 or kWeightScratch
};

// Reads the current device's properties.
LinearContext linear_context(bool fp32);

// Scratch for weights that have no FP16 cache: tiles of outputs go through it.
inline constexpr size_t kWeightScratch = size_t{64} << 20;

// Scratch for products of up to max_inputs inputs whose input is formed for max_rows rows at once
// (more rows go in blocks), with or without kWeightScratch in front.
size_t linear_scratch_bytes(int64_t max_rows, int64_t max_inputs, bool fp32, bool weight_scratch);

void linear(cudaStream_t stream, const LinearCall& call, const LinearContext& context);

// ---- the parts, for tests and measurements ----------------------------------------------------

// Whether the fused kernel of up to 8 rows takes this call.
bool takes_narrow(const LinearCall& call, const LinearContext& context);
void linear_narrow(cudaStream_t stream, const LinearCall& call, const LinearContext& context);

// Whether the kernel of warpgroups that dequantize takes this call: any number of rows of
// activations; parts must be 1.
bool takes_warpgroups(const LinearCall& call, const LinearContext& context);
void linear_warpgroups(cudaStream_t stream, const LinearCall& call, const LinearContext& context);

// Whether the kernel of chains that are fed takes this call, on a device of sm_90a: up to 8 rows of
// any input but a pair, or any number of rows of activations in aligned places.
bool takes_fed(const LinearCall& call, const LinearContext& context);
void linear_fed(cudaStream_t stream, const LinearCall& call, const LinearContext& context);

// The same by chains that dequantize themselves; FP16 weights, by linear_fed().
bool takes_direct(const LinearCall& call, const LinearContext& context);
void linear_direct(cudaStream_t stream, const LinearCall& call, const LinearContext& context);

// Our own kernel for any number of rows and any device; the input must be kRows.
enum class TileShape : int { kChoose = -1, k128x128, k128x64, k64x32, k64x16, k32x16 };
void linear_tiled(cudaStream_t stream, const LinearCall& call, const LinearContext& context,
                  TileShape shape = TileShape::kChoose);

// Whether cuBLASLt takes this call; the input must be kRows. The weight comes from its cache, or
// through the weight scratch. What cuBLASLt refuses when it is called, our own kernels do.
bool takes_wide(const LinearCall& call, const LinearContext& context);
void linear_wide(cudaStream_t stream, const LinearCall& call, const LinearContext& context);

// The input as rows of activations.
void form_rows(cudaStream_t stream, const LinearInput& input, int64_t first, int64_t rows,
               int64_t inputs, void* out, int64_t stride, bool fp32);

}  // namespace tinyloop::cuda
