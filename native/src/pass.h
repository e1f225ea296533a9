// One pass: rows of many sequences through the schedule. The caller runs the loops one by one and
// decides between them which sequences are done.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "cache.h"
#include "engine.h"

namespace tinyloop {

// The states of a sequence's rows between two loops: float32 [schedule.states][rows][hidden].
using StateRows = float*;

// A sequence of a pass. What it points to must outlive the pass.
struct PassSequence {
  const int32_t* ids = nullptr;
  int64_t rows = 0;
  int64_t position = 0;  // absolute, of the first row
  int64_t open_end = 0;  // prefix-LM: rows below it see each other both ways; 0: causal
  const CacheView* before = nullptr;  // the tokens before `own`; null: none
  // Where the rows' keys and values (or hidden states) are kept, by plane: those of the layers that
  // run once, and those of the loops. Null: they live in the pass and are gone afterwards. A kept
  // place begins where `before` ends, and may hold earlier rows of the sequence.
  const CachePlaces* keep_once = nullptr;
  const CachePlaces* keep_loops = nullptr;
  const float* resume = nullptr;  // StateRows to go on from, instead of the embedding
};

// Rows lie sequence by sequence; those of sequences still running lie first. Neighbours on one
// `before` share its tiles. The sum of rows is at most max_seq_len. Allocates nothing from the
// account unless stored tokens are more than any pass before rebuilt. The caller holds the
// ForwardGuard.
class Pass {
 public:
  // first_loop: the loop to begin with; above 0 every sequence resumes.
  Pass(Engine& engine, std::vector<PassSequence> sequences, int first_loop = 0);

  // Runs one loop over the running sequences.
  void run_loop();
  // Loops run so far, those before a resume counted.
  int loops() const { return loop_; }
  // Takes sequences out of the running ones; their states stay as they are.
  void retire(const std::vector<size_t>& sequences);
  size_t running() const { return running_; }
  // Runs what follows the loops over all rows. Their states in `main` are then ready for the head.
  void finish();

  // The row, now, of a sequence's first row in `main`.
  int64_t first_row(size_t sequence) const { return first_row_[sequence]; }
  const float* main() const { return engine_.buffers.main.as<float>(); }
  // Copies a sequence's states to [states][rows][hidden].
  void save(size_t sequence, StateRows to) const;

 private:
  struct RowChunk {
    int64_t begin = 0, end = 0;
    std::unique_ptr<ChunkPlan> plan;
  };
  // A distinct `before`, as attention reads it.
  struct Before {
    std::vector<KvSegment> segments;
    const CacheView* view = nullptr;
    int64_t hot_row = 0;  // hidden modes: first row in the rebuild buffer
  };
  using Phase = StepKey::Part;

  int32_t* ids() const { return engine_.buffers.row_ids.as<int32_t>(); }
  int32_t* positions() const { return ids() + engine_.options.max_seq_len; }
  float* state(int index, int64_t row) const;
  Rows norm_rows() const { return {engine_.buffers.norm.as<uint8_t>(), d_.hidden_size}; }
  Rows attn_down(int64_t width) const { return {engine_.buffers.attn_down.as<uint8_t>(), width}; }
  Rows scratch1(int64_t width) const { return {engine_.buffers.scratch1.as<uint8_t>(), width}; }
  Rows columns(Rows rows, int64_t first) const;
  NormSpec norm_spec(const Vector& weight, bool present = true) const {
    return {present, weight.data(), static_cast<float>(d_.norm_eps)};
  }

  void place_rows();
  void place_befores();
  void check_copied(int64_t first, int64_t n) const;
  void enter(Phase phase);
  void cut_chunks();
  KvSegment own_segment(size_t sequence) const;
  HiddenRun hidden_run(size_t sequence, int64_t first, int64_t rows, int64_t chunk_begin) const;
  void add_rows(const RowChunk& chunk, size_t sequence, ChunkWork& work);
  void place_rope();
  void load_states();
  void run(const std::vector<Step>& steps, int64_t loop);
  bool repeats() const;
  void run_step(const Step& step, int64_t plane);
  void run_layer(const Step& step, int64_t plane);
  void rebuild(const Layer& layer, int64_t plane);
  void project(const Layer& layer, const RowChunk& chunk, int index, int64_t plane, bool store);
  void project_hidden(const Layer& layer, const RowChunk& chunk, int index, int64_t plane,
                      Rows out);
  void attend(const Layer& layer, const RowChunk& chunk, int index, int64_t plane);
  void feed_forward(const Layer& layer, const RowChunk& chunk, int index);
  void branch(Rows in, int64_t rows, const Weight& weight, const Vector& norm_out, float* state);

  Engine& engine_;
  const Descriptor& d_;
  Backend& backend_;
  std::vector<PassSequence> sequences_;
  const HeadShape shape_;
  const bool hidden_;
  bool two_sweeps_ = false;
  Phase phase_ = Phase::kBefore;
  int loop_ = 0;
  int64_t rows_ = 0;         // of all sequences
  int64_t active_rows_ = 0;  // of the running ones, or all after finish()
  size_t running_ = 0;
  std::vector<size_t> order_;  // sequences by row; the running ones first
  std::vector<int64_t> first_row_;
  std::map<const CacheView*, Before> befores_;
  std::vector<RowChunk> chunks_;
};

}  // namespace tinyloop
