#include "pass.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "interrupt.h"
#include "rebuild.h"

namespace tinyloop {

namespace {
size_t float_bytes(int64_t values) { return static_cast<size_t>(values) * sizeof(float); }
}  // namespace

Pass::Pass(Engine& engine, std::vector<PassSequence> sequences, int first_loop)
    : engine_(engine),
      d_(engine.descriptor),
      backend_(*engine.backend),
      sequences_(std::move(sequences)),
      shape_{d_.n_q_heads, d_.n_kv_heads, d_.head_dim},
      hidden_(stores_hidden(engine.cache.mode)),
      loop_(first_loop),
      running_(sequences_.size()),
      order_(sequences_.size()),
      first_row_(sequences_.size()) {
  std::iota(order_.begin(), order_.end(), size_t{0});
  place_rows();
  place_befores();
  if (first_loop > 0) {
    load_states();
  } else {
    backend_.embed(*engine_.weights.embed, ids(), rows_, static_cast<float>(d_.embed_scale),
                   state(0, 0));
    enter(Phase::kBefore);
    run(engine_.schedule.before, 0);
  }
  engine_.counters.rows += rows_;
  engine_.counters.passes += 1;
}

void Pass::run_loop() {
  enter(Phase::kLoop);
  run(engine_.schedule.loop, loop_);
  ++loop_;
}

void Pass::finish() {
  running_ = sequences_.size();
  active_rows_ = rows_;
  if (engine_.schedule.after.empty()) return;
  enter(Phase::kAfter);
  run(engine_.schedule.after, 0);
}

void Pass::retire(const std::vector<size_t>& retired) {
  if (retired.empty()) return;
  std::vector<bool> gone(sequences_.size(), false);
  for (const size_t s : retired) gone[s] = true;
  const auto middle = order_.begin() + static_cast<std::ptrdiff_t>(running_);
  const std::vector<int64_t> old_first = first_row_;
  std::stable_partition(order_.begin(), middle, [&](size_t s) { return !gone[s]; });
  running_ -= retired.size();

  std::vector<int32_t> from(static_cast<size_t>(active_rows_));
  int64_t row = 0, still = 0;
  for (size_t i = 0; row < active_rows_; ++i) {
    const size_t s = order_[i];
    first_row_[s] = row;
    for (int64_t r = 0; r < sequences_[s].rows; ++r, ++row) {
      from[static_cast<size_t>(row)] = static_cast<int32_t>(old_first[s] + r);
    }
    if (i < running_) still = row;
  }
  for (int index = 0; index < engine_.schedule.states; ++index) {
    backend_.permute(state(index, 0), d_.hidden_size * 4, active_rows_, from.data());
  }
  std::vector<int32_t> moved(from.size());
  for (size_t r = 0; r < from.size(); ++r) moved[r] = positions()[from[r]];
  std::copy(moved.begin(), moved.end(), positions());
  place_rope();
  active_rows_ = still;
  chunks_.clear();
}

void Pass::save(size_t sequence, StateRows to) const {
  const int64_t values = sequences_[sequence].rows * d_.hidden_size;
  for (int index = 0; index < engine_.schedule.states; ++index) {
    backend_.copy(to + index * values, state(index, first_row_[sequence]), float_bytes(values));
  }
}

void Pass::load_states() {
  for (size_t s = 0; s < sequences_.size(); ++s) {
    const int64_t values = sequences_[s].rows * d_.hidden_size;
    for (int index = 0; index < engine_.schedule.states; ++index) {
      backend_.copy(state(index, first_row_[s]), sequences_[s].resume + index * values,
                    float_bytes(values));
    }
  }
}

float* Pass::state(int index, int64_t row) const {
  const Block& block = index == 0 ? engine_.buffers.main : engine_.buffers.state;
  return block.as<float>() + row * d_.hidden_size;
}

Rows Pass::columns(Rows rows, int64_t first) const {
  return {rows.data + static_cast<size_t>(first) * backend_.activation_bytes(), rows.stride};
}

// ---- what lies where ---------------------------------------------------------------------------

void Pass::place_rows() {
  for (size_t s = 0; s < sequences_.size(); ++s) {
    const PassSequence& sequence = sequences_[s];
    first_row_[s] = rows_;
    std::copy_n(sequence.ids, sequence.rows, ids() + rows_);
    check_copied(rows_, sequence.rows);
    std::iota(positions() + rows_, positions() + rows_ + sequence.rows,
              static_cast<int32_t>(sequence.position));
    rows_ += sequence.rows;
    two_sweeps_ = two_sweeps_ || sequence.open_end > 0;
  }
  active_rows_ = rows_;
  place_rope();
}

void Pass::place_rope() {
  backend_.rope(engine_.weights.inv_freq.data(), d_.head_dim, positions(), active_rows_,
                engine_.buffers.rope.as<float>());
}

// The ids were checked when the call began, but they are the caller's: another thread may have
// changed them since, and what is used from here on is the copy.
void Pass::check_copied(int64_t first, int64_t n) const {
  for (int64_t i = first; i < first + n; ++i) {
    if (ids()[i] < 0 || ids()[i] >= d_.vocab_size) {
      throw InvalidInputError("cannot run a pass: token id " + std::to_string(ids()[i]) +
                              " is outside the vocabulary; it was changed while the call ran");
    }
  }
}

// One list of segments for each distinct `before`; neighbours on one share it.
void Pass::place_befores() {
  int64_t hot_rows = 0;
  for (const PassSequence& sequence : sequences_) {
    const auto [at, is_new] = befores_.try_emplace(sequence.before);
    if (!is_new || sequence.before == nullptr) continue;
    at->second.view = sequence.before;
    at->second.segments = sequence.before->kv;
    if (!sequence.before->hidden.empty()) {
      at->second.hot_row = hot_rows;
      hot_rows += sequence.before->length;
    }
  }
  if (hot_rows == 0) return;
  need_rebuild_rows(engine_, hot_rows);
  for (auto& [view, before] : befores_) {
    if (view == nullptr || view->hidden.empty()) continue;
    const BufferPool& b = engine_.buffers;
    place_rebuild_rope(engine_, view->length,
                       b.rebuild_rope.as<float>() + before.hot_row * d_.head_dim);
    CacheShape hot = engine_.cache;
    hot.mode = CacheMode::kFp16;
    KvSegment all = cache_places(hot, {0, b.rebuild_rows, 0, 1}, b.rebuild.as<uint8_t>()).kv;
    const size_t offset =
        static_cast<size_t>(before.hot_row * d_.kv_width()) * backend_.activation_bytes();
    all.keys += offset;
    all.values += offset;
    all.plane_bytes = 0;
    all.last_plane = INT64_MAX;
    all.end = view->length;
    before.segments.push_back(all);
  }
}

// ---- chunks ------------------------------------------------------------------------------------

void Pass::enter(Phase phase) {
  if (phase == phase_ && !chunks_.empty()) return;
  phase_ = phase;
  cut_chunks();
}

void Pass::cut_chunks() {
  chunks_.clear();
  const int64_t scratch = engine_.buffers.scratch_rows;
  for (int64_t begin = 0; begin < active_rows_; begin += scratch) {
    chunks_.push_back({begin, std::min(active_rows_, begin + scratch), nullptr});
  }
  for (RowChunk& chunk : chunks_) {
    ChunkWork work;
    for (const size_t s : order_) {
      if (first_row_[s] < chunk.end && first_row_[s] + sequences_[s].rows > chunk.begin) {
        add_rows(chunk, s, work);
      }
    }
    chunk.plan = backend_.plan_chunk(std::move(work));
  }
}

// Where a sequence's own tokens lie while they are attended to.
KvSegment Pass::own_segment(size_t s) const {
  const PassSequence& sequence = sequences_[s];
  const CachePlaces* keep = phase_ == Phase::kLoop ? sequence.keep_loops : sequence.keep_once;
  if (keep != nullptr && keep->kv.keys != nullptr) {
    KvSegment own = keep->kv;
    own.end = sequence.position + sequence.rows;
    return own;
  }
  CacheShape hot = engine_.cache;
  if (hidden_) hot.mode = CacheMode::kFp16;
  KvSegment own = cache_places(hot, {0, engine_.options.max_seq_len, 0, 1},
                               engine_.buffers.pass_kv.as<uint8_t>())
                      .kv;
  const size_t element = own.format == KvFormat::kInt8 ? 1 : backend_.activation_bytes();
  const size_t offset = static_cast<size_t>(first_row_[s] * d_.kv_width()) * element;
  own.keys += offset;
  own.values += offset;
  if (own.scales != nullptr) own.scales += first_row_[s] * 2 * d_.n_kv_heads;
  own.plane_bytes = own.plane_scales = 0;
  own.last_plane = INT64_MAX;
  own.begin = sequence.position;
  own.end = sequence.position + sequence.rows;
  return own;
}

HiddenRun Pass::hidden_run(size_t s, int64_t first, int64_t rows, int64_t chunk_begin) const {
  const PassSequence& sequence = sequences_[s];
  const CachePlaces* keep = phase_ == Phase::kLoop ? sequence.keep_loops : sequence.keep_once;
  HiddenRun run{first - chunk_begin, rows, sequence.position + first - first_row_[s], {}};
  if (keep != nullptr && keep->hidden.codes != nullptr) {
    run.to = keep->hidden;
  } else {
    run.to.format = hidden_format(engine_.cache.mode);
  }
  return run;
}

// A sequence's rows of a chunk: where they are stored, and the attention work items they go to, of
// at most the backend's rows each. Neighbours on one `before` share an item only if it has a whole
// tile to share.
void Pass::add_rows(const RowChunk& chunk, size_t s, ChunkWork& work) {
  const PassSequence& sequence = sequences_[s];
  const KvSegment own = own_segment(s);
  const Before& before = befores_.at(sequence.before);
  const int64_t limit = backend_.attention_rows(shape_);
  const int64_t end = std::min(first_row_[s] + sequence.rows, chunk.end);
  int64_t at = std::max(first_row_[s], chunk.begin);
  const int64_t first_position = sequence.position + at - first_row_[s];
  work.kv.push_back({at - chunk.begin, end - at, first_position, own});
  if (hidden_) work.hidden.push_back(hidden_run(s, at, end - at, chunk.begin));
  while (at < end) {
    const bool joins = !work.attention.empty() &&
                       work.attention.back().prefix == &before.segments &&
                       work.attention.back().prefix_length == own.begin && own.begin >= kKeyTile &&
                       work.attention.back().rows < limit;
    if (!joins) work.attention.push_back({&before.segments, own.begin, {}, 0});
    AttentionChunk& item = work.attention.back();
    const int64_t position = sequence.position + at - first_row_[s];
    const bool open = position < sequence.open_end;
    int64_t rows = std::min(end - at, limit - item.rows);
    if (open) rows = std::min(rows, sequence.open_end - position);
    item.pieces.push_back({at - chunk.begin, rows, position, open ? sequence.open_end : 0, own});
    item.rows += rows;
    at += rows;
  }
}

// ---- the walk ----------------------------------------------------------------------------------

void Pass::run(const std::vector<Step>& steps, int64_t loop) {
  if (steps.empty()) return;
  const bool in_loop = phase_ == Phase::kLoop;
  const bool repeated = repeats();
  const StepKey key{phase_, static_cast<int>(loop), active_rows_};
  do {
    if (repeated && !backend_.begin_steps(key, *chunks_.front().plan)) continue;
    for (const Step& step : steps) {
      run_step(step, in_loop ? engine_.schedule.plane(step, loop) : step.plane);
    }
  } while (repeated && !backend_.end_steps());
}

// Whether this is a step that comes again and again: one new row of each sequence, nothing to
// rebuild, and no positions in the initial state.
bool Pass::repeats() const {
  const bool single = std::all_of(sequences_.begin(), sequences_.end(),
                                  [](const PassSequence& s) { return s.rows == 1; });
  const bool cold = std::any_of(befores_.begin(), befores_.end(), [](const auto& entry) {
    return entry.first != nullptr && !entry.first->hidden.empty();
  });
  const bool positioned = phase_ == Phase::kBefore && d_.state_init == StateInit::kNormal;
  return single && !cold && !positioned && chunks_.size() == 1;
}

void Pass::run_step(const Step& step, int64_t plane) {
  float* to = state(step.state, 0);
  const int64_t values = active_rows_ * d_.hidden_size;
  switch (step.kind) {
    case Step::Kind::kLayer:
      return run_layer(step, plane);
    case Step::Kind::kNorm:
      return backend_.norm(to, norm_spec(engine_.weights.final_norm), active_rows_, d_.hidden_size);
    case Step::Kind::kAdapter:
      return backend_.adapter(to, state(step.other, 0), active_rows_, *engine_.weights.adapter);
    case Step::Kind::kAdd:
      return backend_.add(to, state(step.other, 0), active_rows_, d_.hidden_size);
    case Step::Kind::kCopy:
      backend_.copy(to, state(step.other, 0), float_bytes(values));
      return;
    case Step::Kind::kInit:
      if (d_.state_init == StateInit::kZero) {
        backend_.fill_zero(to, float_bytes(values));
      } else {
        backend_.init_normal(to, positions(), active_rows_, d_.hidden_size,
                             static_cast<float>(d_.state_std), engine_.options.state_seed);
      }
      return;
    case Step::Kind::kLowInit:
      return backend_.broadcast(to, engine_.weights.low_init.data(), active_rows_, d_.hidden_size);
  }
}

// A layer runs chunk by chunk: keys of earlier rows are there when a later chunk attends to them.
// Rows that see later ones need all keys first, and their products twice: the scratch holds one
// chunk.
void Pass::run_layer(const Step& step, int64_t plane) {
  poll_interrupt();
  const Layer& layer = engine_.weights.layers[static_cast<size_t>(step.layer)];
  if (hidden_) rebuild(layer, plane);
  const bool twice = two_sweeps_ && chunks_.size() > 1;
  if (twice) {
    for (const RowChunk& chunk : chunks_) project(layer, chunk, step.state, plane, true);
  }
  for (const RowChunk& chunk : chunks_) {
    project(layer, chunk, step.state, plane, !twice);
    attend(layer, chunk, step.state, plane);
    feed_forward(layer, chunk, step.state);
  }
}

// Products of the heads, prepared for attention; keys and values to their places.
void Pass::project(const Layer& layer, const RowChunk& chunk, int index, int64_t plane,
                   bool store) {
  const int64_t rows = chunk.end - chunk.begin;
  const Rows out = scratch1(d_.attn_width());
  if (hidden_) {
    project_hidden(layer, chunk, index, plane, out);
  } else {
    backend_.norm_linear(state(index, chunk.begin), norm_spec(layer.norm_attn_in, d_.norm_in()),
                         rows, *layer.attention.qkv, out);
  }
  backend_.prepare_heads(out, engine_.buffers.rope.as<float>() + chunk.begin * d_.head_dim, rows,
                         shape_, head_prep(engine_, layer, true));
  if (store) backend_.store_kv(out, shape_, *chunk.plan, plane);
}

// The hidden modes: q and the gate read the layer's input, k and v what a reader of the store
// would.
void Pass::project_hidden(const Layer& layer, const RowChunk& chunk, int index, int64_t plane,
                          Rows out) {
  const int64_t rows = chunk.end - chunk.begin;
  const Rows input = norm_rows();
  const Rows back = attn_down(d_.hidden_size);
  backend_.norm_store(state(index, chunk.begin), norm_spec(layer.norm_attn_in, d_.norm_in()), rows,
                      d_.hidden_size, *chunk.plan, plane, input, back);
  const bool exact = hidden_format(engine_.cache.mode) == HiddenFormat::kActivations;
  backend_.linear(input, rows, *layer.attention.q, out);
  backend_.linear(exact ? input : back, rows, *layer.attention.kv, columns(out, d_.q_width()));
  if (layer.attention.gate) {
    backend_.linear(input, rows, *layer.attention.gate, columns(out, d_.qkv_width()));
  }
}

// Keys and values of one plane of all stored tokens that the pass stands on.
void Pass::rebuild(const Layer& layer, int64_t plane) {
  const auto* rope = engine_.buffers.rebuild_rope.as<float>();
  for (const auto& [view, before] : befores_) {
    if (view == nullptr || view->hidden.empty()) continue;
    rebuild_plane(engine_, layer, plane, *view, before.segments.back(), 0,
                  rope + before.hot_row * d_.head_dim);
  }
}

void Pass::attend(const Layer& layer, const RowChunk& chunk, int index, int64_t plane) {
  const int64_t rows = chunk.end - chunk.begin;
  const Rows qkv = scratch1(d_.attn_width());
  const Rows out = attn_down(d_.q_width());
  backend_.attention(*chunk.plan, shape_, plane, qkv, out);
  if (d_.attn_gate) backend_.gate_mul(columns(qkv, d_.qkv_width()), rows, d_.q_width(), out);
  branch(out, rows, *layer.o, layer.norm_attn_out, state(index, chunk.begin));
}

void Pass::feed_forward(const Layer& layer, const RowChunk& chunk, int index) {
  const int64_t rows = chunk.end - chunk.begin;
  const Rows gate_up = scratch1(2 * d_.ffn_size);
  const Rows product = attn_down(d_.ffn_size);
  backend_.norm_linear(state(index, chunk.begin), norm_spec(layer.norm_ffn_in, d_.norm_in()), rows,
                       *layer.gate_up, gate_up);
  backend_.silu_mul(gate_up, rows, d_.ffn_size, product);
  branch(product, rows, *layer.down, layer.norm_ffn_out, state(index, chunk.begin));
}

// The end of a branch: its last product, and how it meets the residual.
void Pass::branch(Rows in, int64_t rows, const Weight& weight, const Vector& norm_out, float* to) {
  switch (d_.norm_placement) {
    case NormPlacement::kPre:
      return backend_.linear_add(in, rows, weight, to);
    case NormPlacement::kSum:
      backend_.linear_add(in, rows, weight, to);
      return backend_.norm(to, norm_spec(norm_out), rows, d_.hidden_size);
    case NormPlacement::kSandwich:
    case NormPlacement::kBranch:
      backend_.linear(in, rows, weight, norm_rows());
      return backend_.norm_add(norm_rows(), norm_spec(norm_out), rows, d_.hidden_size, to);
  }
}

}  // namespace tinyloop
