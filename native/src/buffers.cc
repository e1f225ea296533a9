#include "buffers.h"

#include <algorithm>

namespace tinyloop {

namespace {

int64_t scratch1_width(const Descriptor& d) { return std::max(d.attn_width(), 2 * d.ffn_size); }
int64_t attn_down_width(const Descriptor& d) {
  return std::max({d.q_width(), d.ffn_size, d.hidden_size});
}
constexpr int64_t kRowIds = 4 * sizeof(int32_t);
constexpr int64_t kRowScores = 3 * sizeof(float) + sizeof(int32_t) + 1;

// The shape that keys and values have while they are attended to.
CacheShape hot(CacheShape shape) {
  if (stores_hidden(shape.mode)) shape.mode = CacheMode::kFp16;
  return shape;
}

struct Entry {
  BufferSize size;
  Block BufferPool::* to;
};

size_t times(int64_t a, int64_t b, int64_t c = 1) { return static_cast<size_t>(a * b * c); }

std::vector<Entry> rebuild_entries(const BufferShape& s, int64_t rows) {
  return {{{Owner::kRebuild, "rebuilt keys and values", cache_bytes(hot(s.cache), {0, rows, 0, 1})},
           &BufferPool::rebuild},
          {{Owner::kRebuild, "rotations of rebuilt keys", times(rows, s.descriptor->head_dim, 4)},
           &BufferPool::rebuild_rope}};
}

std::vector<Entry> entries(const BufferShape& s) {
  const Descriptor& d = *s.descriptor;
  const int64_t element = s.cache.activation_bytes;
  std::vector<Entry> list = {
      {{Owner::kMain, "main", times(s.rows, d.hidden_size, 4)}, &BufferPool::main},
      {{Owner::kScratch, "norm", times(s.scratch_rows, d.hidden_size, element)}, &BufferPool::norm},
      {{Owner::kScratch, "scratch1", times(s.scratch_rows, scratch1_width(d), element)},
       &BufferPool::scratch1},
      {{Owner::kScratch, "attn_down", times(s.scratch_rows, attn_down_width(d), element)},
       &BufferPool::attn_down},
      {{Owner::kRequest, "keys and values of a pass", cache_bytes(hot(s.cache), {0, s.rows, 0, 1})},
       &BufferPool::pass_kv},
      {{Owner::kTables, "rope", times(s.rows, d.head_dim, 4)}, &BufferPool::rope},
      {{Owner::kTables, "row ids", times(s.rows, kRowIds), true}, &BufferPool::row_ids},
      {{Owner::kTables, "row scores", times(s.rows, kRowScores), true}, &BufferPool::row_scores},
  };
  if (s.states > 1) {
    list.push_back(
        {{Owner::kMain, "second state", times(s.rows, d.hidden_size, 4)}, &BufferPool::state});
  }
  if (stores_hidden(s.cache.mode)) {
    for (const Entry& entry : rebuild_entries(s, s.rows)) list.push_back(entry);
  }
  return list;
}

}  // namespace

BufferShape buffer_shape(const Descriptor& d, const LoadOptions& o, CacheMode mode,
                         size_t activation_bytes) {
  const int64_t rows = o.max_seq_len;
  return {&d, make_schedule(d).states, cache_shape(d, mode, activation_bytes), rows,
          o.prefill_chunk > 0 ? o.prefill_chunk : rows};
}

std::vector<BufferSize> buffer_sizes(const BufferShape& shape) {
  std::vector<BufferSize> sizes;
  for (const Entry& entry : entries(shape)) sizes.push_back(entry.size);
  return sizes;
}

BufferPool allocate_buffers(const BufferShape& shape, Account& account, Account& host) {
  BufferPool pool;
  pool.scratch_rows = shape.scratch_rows;
  pool.scratch1_width = scratch1_width(*shape.descriptor);
  pool.attn_down_width = attn_down_width(*shape.descriptor);
  for (const Entry& entry : entries(shape)) {
    Account& from = entry.size.host ? host : account;
    pool.*entry.to = from.allocate(entry.size.bytes, entry.size.owner, entry.size.name);
  }
  if (pool.rebuild) pool.rebuild_rows = shape.rows;
  return pool;
}

void allocate_rebuild(const BufferShape& shape, int64_t rows, Account& account, BufferPool& pool) {
  std::vector<Block> blocks;
  for (const Entry& entry : rebuild_entries(shape, rows)) {
    blocks.push_back(account.allocate(entry.size.bytes, entry.size.owner, entry.size.name));
  }
  pool.rebuild = std::move(blocks[0]);
  pool.rebuild_rope = std::move(blocks[1]);
  pool.rebuild_rows = rows;
}

WorkspaceShape workspace_shape(const Descriptor& d, const LoadOptions& o) {
  WorkspaceShape shape;
  shape.max_inputs = std::max({d.hidden_size, d.q_width(), d.ffn_size});
  if (d.inject == Inject::kLinear) shape.max_inputs = std::max(shape.max_inputs, 2 * d.hidden_size);
  shape.max_outputs = std::max({d.attn_width(), 2 * d.ffn_size, d.hidden_size});
  shape.vocab_size = d.vocab_size;
  shape.hidden_size = d.hidden_size;
  shape.n_q_heads = d.n_q_heads;
  shape.n_kv_heads = d.n_kv_heads;
  shape.rows = o.max_seq_len;
  shape.scratch_rows = o.prefill_chunk > 0 ? o.prefill_chunk : o.max_seq_len;
  shape.head_dim = d.head_dim;
  return shape;
}

}  // namespace tinyloop
