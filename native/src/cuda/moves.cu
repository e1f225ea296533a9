#include "cuda/elements.cuh"
#include "cuda/rows.h"

namespace tinyloop::cuda {

namespace {

constexpr int kThreads = 256;

// ---- bytes --------------------------------------------------------------------------------------

// Sixteen bytes a thread; zeros where `from` is null. The last thread takes a shorter rest.
__global__ void __launch_bounds__(kThreads)
    copy_kernel(uint8_t* to, const uint8_t* from, size_t bytes, bool aligned) {
  wait_for_previous();
  let_next_start();
  const size_t at = 16 * (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (aligned && at + 16 <= bytes) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(to + at) =
        from == nullptr ? zero : *reinterpret_cast<const uint4*>(from + at);
    return;
  }
  for (size_t i = at; i < at + 16 && i < bytes; ++i) to[i] = from == nullptr ? 0 : from[i];
}

bool aligned_for(size_t unit, const void* a, const void* b, int64_t row_bytes) {
  const auto all = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                   static_cast<uintptr_t>(row_bytes);
  return all % unit == 0;
}

void launch_copy(cudaStream_t stream, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const Grid grid{dim3(blocks_for(static_cast<int64_t>(bytes), 16 * kThreads)), kThreads, 0};
  launch(stream, grid, copy_kernel, static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from),
         bytes, aligned_for(16, to, from, 0));
}

// ---- rows of bytes ------------------------------------------------------------------------------

struct RowCopy {
  int64_t units = 0;                  // of a row
  int64_t from_stride = 0;            // units; 0: every row is the first
  const int32_t* from_row = nullptr;  // null: row r is of row r
};

// As many threads side by side take a row as it has units, at most a block.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(Unit* to, const Unit* from, RowCopy shape, int64_t rows, int row_threads) {
  wait_for_previous();
  let_next_start();
  const int64_t r =
      static_cast<int64_t>(blockIdx.x) * (kThreads / row_threads) + threadIdx.x / row_threads;
  if (r >= rows) return;
  const int64_t source = shape.from_row == nullptr ? r : shape.from_row[r];
  const Unit* row = from + source * shape.from_stride;
  for (int64_t i = threadIdx.x % row_threads; i < shape.units; i += row_threads) {
    to[r * shape.units + i] = row[i];
  }
}

template <typename Unit>
void copy_rows_of(cudaStream_t stream, void* to, const void* from, int64_t row_bytes, int64_t rows,
                  const int32_t* from_row, bool repeat) {
  const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  int row_threads = 1;
  while (row_threads < kThreads && row_threads < units) row_threads *= 2;
  const Grid grid{dim3(blocks_for(rows, kThreads / row_threads)), kThreads, 0};
  launch(stream, grid, copy_rows_kernel<Unit>, static_cast<Unit*>(to),
         static_cast<const Unit*>(from), RowCopy{units, repeat ? 0 : units, from_row}, rows,
         row_threads);
}

void copy_rows(cudaStream_t stream, void* to, const void* from, int64_t row_bytes, int64_t rows,
               const int32_t* from_row, bool repeat) {
  if (rows == 0 || row_bytes == 0) return;
  if (aligned_for(16, to, from, row_bytes)) {
    copy_rows_of<uint4>(stream, to, from, row_bytes, rows, from_row, repeat);
  } else if (aligned_for(4, to, from, row_bytes)) {
    copy_rows_of<uint32_t>(stream, to, from, row_bytes, rows, from_row, repeat);
  } else {
    copy_rows_of<uint8_t>(stream, to, from, row_bytes, rows, from_row, repeat);
  }
}

// ---- states to activations ----------------------------------------------------------------------

// Block y of a row of `out` is from source y.
struct Sources {
  const float* state[2];
  const int32_t* indices;  // of the rows; null: row r
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    round_rows_kernel(Sources from, int64_t rows, int64_t width, RowsOf<T> out) {
  wait_for_previous();
  let_next_start();
  const int64_t r = warp_row();
  if (r >= rows) return;
  const int64_t source = from.indices == nullptr ? r : from.indices[r];
  const float* row = (blockIdx.y == 0 ? from.state[0] : from.state[1]) + source * width;
  T* to = out.row(r) + blockIdx.y * width;
  const bool loads = loads_by_four(row), stores = loads_by_four(to);
#pragma unroll 8
  for (int64_t k = 4 * lane(); k < width; k += 128) {
    store_some(to, k, width, stores, load_some(row, k, width, loads));
  }
}

void round_rows(cudaStream_t stream, bool fp32, const Sources& from, unsigned sources, int64_t rows,
                int64_t width, Rows out) {
  if (rows == 0) return;
  Grid grid = warp_per_row(rows);
  grid.blocks.y = sources;
  with_element(fp32, [&](auto element) {
    using T = decltype(element);
    launch(stream, grid, round_rows_kernel<T>, from, rows, width, RowsOf<T>(out));
  });
}

}  // namespace

void copy(cudaStream_t stream, void* to, const void* from, size_t bytes) {
  launch_copy(stream, to, from, bytes);
}

void fill_zero(cudaStream_t stream, void* to, size_t bytes) {
  launch_copy(stream, to, nullptr, bytes);
}

void broadcast_row(cudaStream_t stream, const float* row, int64_t rows, int64_t width,
                   float* state) {
  copy_rows(stream, state, row, width * 4, rows, nullptr, true);
}

void permute(cudaStream_t stream, void* data, int64_t row_bytes, int64_t rows, const int32_t* from,
             void* scratch) {
  copy_rows(stream, scratch, data, row_bytes, rows, from, false);
  launch_copy(stream, data, scratch, static_cast<size_t>(row_bytes * rows));
}

void gather_rows(cudaStream_t stream, bool fp32, const float* state, const int32_t* indices,
                 int64_t rows, int64_t width, Rows out) {
  round_rows(stream, fp32, {{state, nullptr}, indices}, 1, rows, width, out);
}

void concat_rows(cudaStream_t stream, bool fp32, const float* state, const float* other,
                 int64_t rows, int64_t width, Rows out) {
  round_rows(stream, fp32, {{state, other}, nullptr}, 2, rows, width, out);
}

}  // namespace tinyloop::cuda
