// The kernels of the CPU backend, compiled once per instruction set from one source (kernels.inc).
//
// Numerics, the same for every instruction set and tile shape, bit for bit: a matrix product sums
// each block of kDepthBlock inputs by one chain of fused multiply-adds in input order, starting
// from zero, and adds the blocks in order. Lane sums fold halves. No result depends on the rows
// beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv.h"

namespace tinyloop::cpu {

inline constexpr int64_t kPanel = 16;        // output columns of a weight panel
inline constexpr int64_t kDepthBlock = 256;  // inputs of one sum block; also the row stride of A
inline constexpr int64_t kRowBlock = 384;  // rows of A at a time: A, B and C of a block fit the L2
inline constexpr int64_t kTilePanels = 4;  // panels of C at a time
inline constexpr int64_t kHeadTile = 512;  // vocabulary columns of one partial log-sum-exp
inline constexpr int64_t kQueryBlock = 128;  // query vectors of one attention work item
inline constexpr int64_t kMaxHeadDim = 256;
static_assert(kQueryBlock >= kMaxGroupedHeads, "a row's heads must fit one work item");

// A weight [outputs, inputs] in panels of 16 outputs: for each panel, for each input, 16 codes side
// by side; scales and zeros [panel][group][16] in FP16. Outputs are padded to a full panel by
// zeros.
struct PanelWeight {
  enum class Kind { kF32, kF16, kQ4, kQ8 };
  Kind kind = Kind::kF32;
  int64_t outputs = 0;
  int64_t inputs = 0;
  int64_t group = 0;
  const uint8_t* codes = nullptr;
  const uint16_t* scales = nullptr;
  const uint16_t* zeros = nullptr;

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t groups() const { return group == 0 ? 0 : (inputs + group - 1) / group; }
  int64_t code_bytes() const {  // of one input of a panel
    switch (kind) {
      case Kind::kF32:
        return 64;
      case Kind::kF16:
        return 32;
      case Kind::kQ8:
        return 16;
      case Kind::kQ4:
        return 8;
    }
    return 0;
  }
};

// Rows of activations are FP16 or FP32 by the numeric mode.
struct Activations {
  void* data = nullptr;
  int64_t stride = 0;  // elements between rows
};

// Where a product goes.
enum class Into { kActivations, kAddToMain };

struct LinearTile {
  const float* a = nullptr;  // blocks [inputs / kDepthBlock][kRowBlock][kDepthBlock]
  int64_t rows = 0;
  const PanelWeight* weight = nullptr;
  int64_t first_panel = 0;
  int64_t panels = 0;  // at most kTilePanels
  float* b = nullptr;  // scratch [kTilePanels][kDepthBlock][kPanel]
  float* c = nullptr;  // scratch [kRowBlock][kTilePanels * kPanel]
  Into into = Into::kActivations;
  Activations out;        // kActivations
  float* main = nullptr;  // kAddToMain: [rows, main_stride]
  int64_t main_stride = 0;
};

// One row's part of a log-softmax over one vocabulary tile.
struct HeadPartial {
  float max = 0.0f;
  float sum = 0.0f;   // of exp(logit - max)
  float best = 0.0f;  // = max; kept apart so that a NaN elsewhere cannot hide it
  int32_t best_id = 0;
};

struct HeadTile {
  const float* a = nullptr;
  int64_t rows = 0;
  const PanelWeight* weight = nullptr;
  int64_t tile = 0;
  int64_t tiles = 0;
  float* b = nullptr;
  float* c = nullptr;
  const int32_t* targets = nullptr;  // [rows]
  float* target_logits = nullptr;    // [rows]; written by the tile that holds the target
  HeadPartial* partials = nullptr;   // [rows][tiles]
};

struct AttentionTask {
  const AttentionChunk* chunk = nullptr;
  int64_t plane = 0;      // of the prefix segments
  int64_t own_plane = 0;  // of the pieces' own segments
  int64_t kv_head = 0;
  int64_t n_q_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
  Activations queries;  // rotated; head h of row r at h * head_dim
  Activations out;
  float* scratch = nullptr;  // attention_scratch_floats()
};

// Floats of scratch that one thread's attention needs.
int64_t attention_scratch_floats(int64_t head_dim);

// One instruction set. Row loops are over [0, rows); parallel splits are the caller's.
struct Kernels {
  const char* name;
  // A block of rows for a product: converted, or normed as rms(main) * weight and rounded to the
  // activations' type, into `a` starting at row `at`. `rows` indexes main when not null.
  void (*pack)(Activations in, int64_t rows, int64_t inputs, float* a, int64_t at);
  void (*pack_main)(const float* main, const int32_t* indices, int64_t rows, int64_t width,
                    float* a, int64_t at);
  void (*pack_norm)(const float* main, const float* weight, float eps, int64_t rows, int64_t width,
                    float* a, int64_t at);
  void (*linear)(const LinearTile& tile);
  void (*head)(const HeadTile& tile);
  void (*attention)(const AttentionTask& task);
  // main = rms(main) * weight
  void (*norm)(float* main, const float* weight, float eps, int64_t rows, int64_t width);
  // main += rms(branch) * weight
  void (*norm_add)(Activations branch, const float* weight, float eps, int64_t rows, int64_t width,
                   float* main);
  // Rotates the heads of q and k in place (half-split pairs; rope rows are cos then sin, head_dim /
  // 2 each) and copies k and v to the plane. qkv rows: q heads, k heads, v heads.
  void (*rope_store)(Activations qkv, const float* rope, int64_t rows, int64_t n_q_heads,
                     int64_t n_kv_heads, int64_t head_dim, void* keys, void* values);
  // out = silu(gate) * up; rows of gate_up are gate then up.
  void (*silu_mul)(Activations gate_up, int64_t rows, int64_t width, Activations out);
  // main = row `id` of the weight
  void (*embed)(const PanelWeight& weight, const int32_t* ids, int64_t rows, float* main);
};

// The kernels of an instruction set for FP16 or FP32 activations. Throws LoadError if this machine
// cannot run it or does not know the name; "" takes the best one here.
const Kernels& select_kernels(const char* name, bool fp32);

}  // namespace tinyloop::cpu
