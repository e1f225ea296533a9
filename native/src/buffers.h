// BufferPool: the working memory that a model owns for life, and its sizes before anything is
// allocated.
#pragma once

#include <cstdint>
#include <vector>

#include "backend.h"
#include "cache.h"
#include "memory.h"
#include "schedule.h"
#include "tinyloop/tinyloop.h"

namespace tinyloop {

// Everything that decides the sizes of the buffers.
struct BufferShape {
  const Descriptor* descriptor = nullptr;
  int states = 1;
  CacheShape cache;
  int64_t rows = 0;          // max_seq_len
  int64_t scratch_rows = 0;  // prefill_chunk, or all rows
};
BufferShape buffer_shape(const Descriptor& descriptor, const LoadOptions& options, CacheMode mode,
                         size_t activation_bytes);

// One buffer of the pool.
struct BufferSize {
  Owner owner = Owner::kScratch;
  const char* name = "";
  size_t bytes = 0;
  bool host = false;  // read and written by the engine itself, not by the backend
};

// Reusable activations, allocated once at load. States are FP32 and always max_seq_len rows; the
// scratch has prefill_chunk rows when that is set. Row widths are in elements.
struct BufferPool {
  Block main;       // state 0: float32 [rows, hidden]
  Block state;      // state 1: float32 [rows, hidden], where the schedule has one
  Block norm;       // [scratch rows, hidden]
  Block scratch1;   // [scratch rows, max(q + 2 kv + gate, 2 ffn)]
  Block attn_down;  // [scratch rows, max(q, ffn, hidden)]
  Block pass_kv;  // one plane of all rows as the cache mode attends to it: a sequence's own tokens
                  // are in the pass whole, so no other plane of theirs is ever read again
  Block rope;     // float32 [rows, head_dim]
  Block row_ids;  // host: int32 [4, rows]: token ids, positions, head rows, targets
  Block row_scores;  // host, [rows] each: float32 log p, best log p, gate; int32 best; uint8 greedy
  Block rebuild;     // hidden modes: one plane of keys and values of stored tokens
  Block rebuild_rope;  // hidden modes: float32 [rebuild rows, head_dim]
  int64_t rebuild_rows = 0;
  int64_t scratch_rows = 0;
  int64_t scratch1_width = 0;
  int64_t attn_down_width = 0;
  Block logit_rows;  // host: float32 [kLogitRows, vocab], from the first sampled generation on
};

// Rows of logits that sampling takes at a time.
inline constexpr int64_t kLogitRows = 16;

// The buffers of a load, in the order of their allocation.
std::vector<BufferSize> buffer_sizes(const BufferShape& shape);
// `host` may be the same account.
BufferPool allocate_buffers(const BufferShape& shape, Account& account, Account& host);

// What the hidden modes rebuild into, for `rows` stored tokens. Also called when a longer prefix
// comes.
void allocate_rebuild(const BufferShape& shape, int64_t rows, Account& account, BufferPool& pool);

// The sizes that the backend's workspace depends on.
WorkspaceShape workspace_shape(const Descriptor& descriptor, const LoadOptions& options);

}  // namespace tinyloop
