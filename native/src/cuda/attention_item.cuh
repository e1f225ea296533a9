// The rows of one work item: their pieces, the tiles that they see, and where the rows lie.
#pragma once

#include "cuda/attention_tiles.cuh"

namespace tinyloop::cuda {

// A piece, small enough that a block keeps all of its item's.
struct OwnKeys {
  const uint8_t* keys;
  const uint8_t* values;
  const __half* scales;
  int row;            // the pass's
  int position;       // of the first row; where all rows see the same keys, `end`
  int end;            // of the keys that the last row sees
  uint8_t first_row;  // the item's
  uint8_t rows;
  bool aligned;
};

// What all threads of a block know; it lies in shared memory to keep registers free.
struct Work {
  HeadPlace place;
  Prefix prefix;
  int shared;  // end of the tiles that the whole item sees
  int rows, pieces, group;
  float c;  // score_factor()
};

struct ItemShared {
  OwnKeys pieces[kBlockVectors];
  int rows[kBlockVectors];  // the pass's row of each row of the item
  int warp_rows[kBlockVectors / 32];
  Work work;
};

__device__ __forceinline__ Work work_of(const AttentionPlan& plan, const Item& item,
                                        const HeadPlace& place, int group) {
  Work work;
  work.place = place;
  work.prefix = {plan.segments + item.first_segment, item.n_segments,
                 static_cast<int>(item.prefix_length)};
  work.shared = work.prefix.end / kTile * kTile;
  work.rows = static_cast<int>(item.rows);
  work.pieces = item.n_pieces;
  work.group = group;
  work.c = score_factor(place.head_dim);
  return work;
}

// The item's pieces, and where its rows are. By at least kBlockVectors threads, which `sync` joins.
template <typename Sync>
__device__ __forceinline__ void take_pieces(ItemShared& item, const AttentionPiece* pieces,
                                            Sync sync) {
  const Work& work = item.work;
  const int i = threadIdx.x, lane = i % 32, warp = i / 32;
  int rows = i < work.pieces ? static_cast<int>(pieces[i].rows) : 0;
  int end = rows;  // in the item, of the piece's rows
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFFu, end, step);
    if (lane >= step) end += before;
  }
  if (i < kBlockVectors && lane == 31) item.warp_rows[warp] = end;
  sync();
  for (int w = 0; w < warp && w < kBlockVectors / 32; ++w) end += item.warp_rows[w];
  if (i < work.pieces) {
    const AttentionPiece& piece = pieces[i];
    const Source own = source_of(piece.own, work.place);
    const bool open = piece.open_end != 0;
    OwnKeys& to = item.pieces[i];
    to.keys = own.keys;
    to.values = own.values;
    to.scales = own.scales;
    to.aligned = own.aligned;
    to.row = static_cast<int>(piece.row);
    to.end = static_cast<int>(open ? piece.open_end : piece.position + piece.rows);
    to.position = open ? to.end : static_cast<int>(piece.position);
    to.first_row = static_cast<uint8_t>(end - rows);
    to.rows = static_cast<uint8_t>(rows);
  }
  sync();
  if (i >= work.rows || i >= kBlockVectors) return;
  int low = 0, high = work.pieces - 1;  // the last piece that begins at row i or before
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (item.pieces[middle].first_row <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  item.rows[i] = item.pieces[low].row + i - item.pieces[low].first_row;
}

// The element where the head of a query vector begins in rows of stride `stride`; -1: no vector.
__device__ __forceinline__ int64_t vector_offset(const ItemShared& item, int vector,
                                                 int64_t stride) {
  const Work& work = item.work;
  const int row = vector / work.group;
  if (row >= work.rows) return -1;
  const int head = work.place.kv_head * work.group + vector % work.group;
  return item.rows[row] * stride + static_cast<int64_t>(head) * work.place.head_dim;
}

// ---- tiles one after the other ------------------------------------------------------------------

// A tile that is folded next: of piece `piece`, or with -1 of the whole item.
struct Step {
  int piece;
  int tile;
  int limit;  // end of the keys
};

__device__ __forceinline__ Step piece_step(const ItemShared& item, int piece, int tile) {
  const int limit = piece < 0 ? tile + kTile : min(tile + kTile, item.pieces[piece].end);
  return {piece, tile, limit};
}
__device__ __forceinline__ Step first_step(const ItemShared& item) {
  return item.work.shared > 0 ? piece_step(item, -1, 0) : piece_step(item, 0, 0);
}
// False: that was the last one.
__device__ __forceinline__ bool advance(const ItemShared& item, Step& step) {
  const int end = step.piece < 0 ? item.work.shared : item.pieces[step.piece].end;
  if (step.tile + kTile < end) {
    step = piece_step(item, step.piece, step.tile + kTile);
    return true;
  }
  if (step.piece + 1 == item.work.pieces) return false;
  step = piece_step(item, step.piece + 1, item.work.shared);
  return true;
}

__device__ __forceinline__ Source own_source(const ItemShared& item, const Step& step) {
  Source own;
  if (step.piece < 0) return own;
  const OwnKeys& piece = item.pieces[step.piece];
  own.keys = piece.keys;
  own.values = piece.values;
  own.scales = piece.scales;
  own.begin = item.work.prefix.end;
  own.end = piece.end;
  own.aligned = piece.aligned;
  return own;
}

// How many keys of a tile a row of a piece sees: below 1 none, above kTile all.
__device__ __forceinline__ int keys_seen(const OwnKeys& piece, int item_row, int tile) {
  return min(piece.position + item_row - piece.first_row + 1, piece.end) - tile;
}
// Whether some row of the step's piece sees a part of the tile only.
__device__ __forceinline__ bool cuts_rows(const ItemShared& item, const Step& step) {
  if (step.piece < 0) return false;
  const OwnKeys& piece = item.pieces[step.piece];
  return keys_seen(piece, piece.first_row, step.tile) < step.limit - step.tile;
}

// What some rows see of a step's tile.
enum class View { kNone, kSome, kAll };

// ---- what the many-row kernels are called with --------------------------------------------------

struct ManyArguments {
  AttentionPlan plan;
  int64_t plane;
  const __half* queries;
  __half* out;
  int64_t query_stride, out_stride;
  int group, n_kv_heads, head_dim;
  bool aligned_queries, aligned_out;
};

inline bool aligned_rows(const Rows& rows, int64_t head_dim) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % 8 == 0 &&
         head_dim % 8 == 0;
}

inline ManyArguments many_arguments(const AttentionCall& call) {
  const HeadShape& shape = call.shape;
  ManyArguments a;
  a.plan = call.plan;
  a.plane = call.plane;
  a.queries = reinterpret_cast<const __half*>(call.queries.data);
  a.out = reinterpret_cast<__half*>(call.out.data);
  a.query_stride = call.queries.stride;
  a.out_stride = call.out.stride;
  a.group = static_cast<int>(shape.n_q_heads / shape.n_kv_heads);
  a.n_kv_heads = static_cast<int>(shape.n_kv_heads);
  a.head_dim = static_cast<int>(shape.head_dim);
  a.aligned_queries = aligned_rows(call.queries, shape.head_dim);
  a.aligned_out = aligned_rows(call.out, shape.head_dim);
  return a;
}

}  // namespace tinyloop::cuda
