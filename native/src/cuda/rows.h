// The operations of backend.h on rows alone, on the device: all but products and attention.
//
// Pointers are to device memory unless said otherwise. Everything goes to `stream`, waits for
// nothing and may be captured in a graph. fp32: activations are float32, else FP16. A row has the
// same bits whatever rows stand beside it, and a fused operation the bits of its parts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend.h"
#include "cuda/weight.h"
#include "kv.h"

namespace tinyloop::cuda {

// ---- norms, gates -------------------------------------------------------------------------------

// state = norm(state)
void norm(cudaStream_t stream, float* state, const NormSpec& norm, int64_t rows, int64_t width);
// out = round(norm(state))
void norm_rows(cudaStream_t stream, bool fp32, const float* state, const NormSpec& norm,
               int64_t rows, int64_t width, Rows out);
// state += norm(branch)
void norm_add(cudaStream_t stream, bool fp32, Rows branch, const NormSpec& norm, int64_t rows,
              int64_t width, float* state);
// norm_add() by `norm`, then norm_rows() of the state by `next`
void norm_add_norm_rows(cudaStream_t stream, bool fp32, Rows branch, const NormSpec& norm,
                        int64_t rows, int64_t width, float* state, const NormSpec& next, Rows out);
// state += other
void add(cudaStream_t stream, float* state, const float* other, int64_t rows, int64_t width);
// out *= sigmoid(gate)
void gate_mul(cudaStream_t stream, bool fp32, Rows gate, int64_t rows, int64_t width, Rows out);
// out = silu(gate) * up; gate_up rows are gate then up, width each
void silu_mul(cudaStream_t stream, bool fp32, Rows gate_up, int64_t rows, int64_t width, Rows out);

// ---- moves --------------------------------------------------------------------------------------

// Ranges must not overlap.
void copy(cudaStream_t stream, void* to, const void* from, size_t bytes);
void fill_zero(cudaStream_t stream, void* to, size_t bytes);
// Every row of the state becomes `row`.
void broadcast_row(cudaStream_t stream, const float* row, int64_t rows, int64_t width,
                   float* state);
// Row r of a matrix becomes what row from[r] was. Scratch of rows * row_bytes, aligned to 16.
void permute(cudaStream_t stream, void* data, int64_t row_bytes, int64_t rows, const int32_t* from,
             void* scratch);
// out[i] = round(state row indices[i])
void gather_rows(cudaStream_t stream, bool fp32, const float* state, const int32_t* indices,
                 int64_t rows, int64_t width, Rows out);
// out = [round(state), round(other)], width each
void concat_rows(cudaStream_t stream, bool fp32, const float* state, const float* other,
                 int64_t rows, int64_t width, Rows out);

// ---- what a state starts from -------------------------------------------------------------------

// state[r] = row ids[r] of the weight, as the products see it, times scale (unchanged by 1)
void embed(cudaStream_t stream, bool fp32, const DeviceWeight& weight, const int32_t* ids,
           int64_t rows, float scale, float* state);
// state = std * a normal cut at three deviations, of (seed, position, channel); the CPU's bits
void init_normal(cudaStream_t stream, float* state, const int32_t* positions, int64_t rows,
                 int64_t width, float std, uint64_t seed);

// ---- heads --------------------------------------------------------------------------------------

// rope[r] = cosines, then sines, of the angles of positions[r]; frequencies [head_dim / 2]
void rope_table(cudaStream_t stream, const int32_t* positions, const float* frequencies,
                int64_t rows, int64_t head_dim, float* rope);

// Which run each row belongs to. Rows of no run are not stored.
template <typename Run>
struct RunTable {
  const int32_t* run_of_row = nullptr;  // -1: none. Null: all rows are of `one`
  const Run* runs = nullptr;
  Run one{};
};
template <typename Run>
RunTable<Run> single_run(const Run& run) {
  return {nullptr, nullptr, run};
}

// Bias, norm and rotation of the heads in place.
void prepare_heads(cudaStream_t stream, bool fp32, Rows qkv, const float* rope, int64_t rows,
                   const HeadShape& shape, const HeadPrep& prep);
// k and v of the rows, which follow shape.n_q_heads heads of q, to where the runs say.
void store_kv(cudaStream_t stream, bool fp32, Rows qkv, const HeadShape& shape, int64_t rows,
              const RunTable<KvRun>& runs, int64_t plane);
// Both. Only q comes back to its place: k and v of `qkv` keep what the product gave.
void prepare_and_store(cudaStream_t stream, bool fp32, Rows qkv, const float* rope, int64_t rows,
                       const HeadShape& shape, const HeadPrep& prep, const RunTable<KvRun>& runs,
                       int64_t plane);

// ---- a layer's input, stored --------------------------------------------------------------------

// out = round(norm(state)); each run's `to` gets its stored form (nothing is kept where to.codes is
// null); read_back = what a later read of that form gives, not written where the format is
// kActivations. Of rows of no run only `out` is written.
void norm_store(cudaStream_t stream, bool fp32, const float* state, const NormSpec& norm,
                int64_t rows, int64_t width, const RunTable<HiddenRun>& runs, int64_t plane,
                Rows out, Rows read_back);
// Tokens [token, token + rows) of a stored plane as activations.
void load_hidden(cudaStream_t stream, bool fp32, const HiddenSegment& from, int64_t plane,
                 int64_t token, int64_t rows, int64_t width, Rows out);

}  // namespace tinyloop::cuda
