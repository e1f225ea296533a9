// The kernels of the CPU backend, compiled once per instruction set from one source (kernels.inc).
//
// Numerics, the same for every instruction set and tile shape, bit for bit: a matrix product sums
// each block of kDepthBlock inputs by one chain of fused multiply-adds in input order, starting
// from zero, and adds the blocks in order. Lane sums fold halves. No result depends on the rows
// beside it.
//
// The bf16 mode has other products and is the same in everything else, FP16 activations included.
// bf16 is the upper half of a float. An activation x is xh + xl, exactly: xh is x cut to bf16, xl
// what that leaves (x has 11 bits, so xl has 3). For every 32 inputs in order, up to the end of
// their group, a sum takes
//     step(c, x, w) = c + (even + odd),
// where even and odd are chains of fused multiply-adds from zero over the 16 even and the 16 odd
// inputs, in float32: what one instruction of the tile unit (TDPBF16PS) computes.
//
// Weights of 4 and 8 bits: a code less 8 or 128 is q, exact in bf16. A group g of 32, 64 or 128
// inputs has
//     s = 0, then for each of its steps s = step(s, xl, q), s = step(s, xh, q);
//     x = the sum of its activations: 16 lane sums over every 16th input in order, folded by
//         halves;
// and the output c, which starts from zero, becomes for each group in order
//     c = fma(s, scale, c), c = fma(x, (8 or 128 - zero) * scale, c).
// Nothing but float32 rounding separates this from (code - zero) * scale times x.
//
// A float weight w is wh + wl and an error of at most 2^-16 of it: wh is w rounded to bf16, ties
// away from zero, wl the rest rounded likewise; a float32 weight below 2^-70 is zero. For each step
//     c = step(c, xl, wh), c = step(c, xh, wh), c = step(c, xh, wl).
// xl * wl, at most 2^-15 of a product, is left out.
//
// Attention multiplies in that way too, a query vector or a softmax weight as an activation and a
// key or value as a float weight. A softmax weight has more than 11 bits: xl is cut to bf16 too,
// which leaves out 2^-16 of it, and one below 2^-70 is zero. A tile of 64 keys is summed from zero,
// then added to what came before it; keys that a vector does not see have weight zero, or are left
// out where a value of the tile is not finite.
//
// None of the numbers of a step is subnormal, so that it does not matter that the unit takes those
// for zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend.h"
#include "kv.h"

namespace tinyloop::cpu {

inline constexpr int64_t kPanel = 16;        // output columns of a weight panel
inline constexpr int64_t kDepthBlock = 256;  // inputs of one sum block; also the row stride of A
inline constexpr int64_t kRowBlock = 512;    // rows that A has room for
// Rows that the threads multiply together, at most: A, B and C of them fit the L2.
inline constexpr int64_t kSharedRows = 384;
inline constexpr int64_t kTilePanels = 4;    // panels of C at a time
inline constexpr int64_t kHeadTile = 512;    // vocabulary columns of one partial log-sum-exp
inline constexpr int64_t kQueryBlock = 128;  // query vectors of an attention work item, as a rule
inline constexpr int64_t kMaxHeadDim = 256;
// Groups of coded weights have 32, 64 or 128 inputs, so that a sum block holds whole ones.
inline constexpr int64_t kBlockGroups = kDepthBlock / 32;
// Scratch of a product beside its C: the panels of a sum block, or what tiles.inc needs.
inline constexpr int64_t kProductScratch = kTilePanels * kDepthBlock * kPanel + 2048;
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
enum class Into { kActivations, kAddToMain, kMain };

// Some panels of C for some rows of A.
struct ProductTile {
  const float* a = nullptr;  // blocks [inputs / kDepthBlock][kRowBlock][kDepthBlock], group sums
  int64_t first_row = 0;     // of A; a multiple of 32
  int64_t rows = 0;
  const PanelWeight* weight = nullptr;
  int64_t first_panel = 0;
  int64_t panels = 0;        // at most Kernels::panels_at_once
  float* scratch = nullptr;  // [Kernels::product_floats()]
};

struct LinearTile : ProductTile {
  Into into = Into::kActivations;
  Activations out;        // kActivations; that of the tile's first row
  float* main = nullptr;  // kAddToMain, kMain: [rows, main_stride], likewise
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
  ProductTile product;  // of all columns; a tile takes its panels
  int64_t tile = 0;
  int64_t tiles = 0;
  const int32_t* targets = nullptr;  // [rows], or null
  float* target_logits = nullptr;    // [rows]; written by the tile that holds the target
  float* logits = nullptr;           // [rows][outputs], or null
  HeadPartial* partials = nullptr;   // [rows][tiles]
};

struct AttentionTask {
  const AttentionChunk* chunk = nullptr;
  int64_t plane = 0;
  int64_t kv_head = 0;
  int64_t n_q_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
  Activations queries;  // ready for the product; head h of row r at h * head_dim
  Activations out;
  float* scratch = nullptr;  // attention_scratch_floats()
};

// Floats of scratch that one thread's attention needs for work items of so many query vectors.
int64_t attention_scratch_floats(int64_t head_dim, int64_t query_vectors);

// Rows [first, first + rows) of a run: a thread's part of it.
struct RunPart {
  int64_t first = 0;
  int64_t rows = 0;
};

// Floats of A: the rows, and behind them the sums of their groups, which the bf16 mode reads.
constexpr int64_t a_floats(int64_t inputs) {
  return (inputs + kDepthBlock - 1) / kDepthBlock * kRowBlock * (kDepthBlock + kBlockGroups);
}

// One instruction set. Row loops are over [0, rows); parallel splits are the caller's. What an
// operation computes is said in backend.h.
struct Kernels {
  const char* name;
  int64_t panels_at_once;  // that a product takes
  // Rows from which on a thread packs them by itself, in a part of A, and multiplies them by all
  // panels of a coded weight; 0: never.
  int64_t own_rows;
  int64_t query_vectors;  // of one attention work item, at most; a multiple of 32
  // Scratch that products of at most so many inputs need, in floats.
  int64_t (*product_floats)(int64_t inputs);
  // A block of rows for a product into `a`, starting at its row `at`: converted; rows `indices` of
  // a state; a state's norm; two states side by side. States are rounded to the activations' type.
  // group: that of the weight, 0 if it has none.
  void (*pack)(Activations in, int64_t rows, int64_t inputs, int64_t group, float* a, int64_t at);
  void (*pack_main)(const float* main, const int32_t* indices, int64_t rows, int64_t width,
                    int64_t group, float* a, int64_t at);
  void (*pack_norm)(const float* main, const NormSpec& norm, int64_t rows, int64_t width,
                    int64_t group, float* a, int64_t at);
  void (*pack_pair)(const float* main, const float* other, int64_t rows, int64_t width,
                    int64_t group, float* a, int64_t at);
  void (*linear)(const LinearTile& tile);
  void (*head)(const HeadTile& tile);
  void (*attention)(const AttentionTask& task);
  void (*norm)(float* main, const NormSpec& norm, int64_t rows, int64_t width);
  void (*norm_add)(Activations branch, const NormSpec& norm, int64_t rows, int64_t width,
                   float* main);
  void (*add)(float* main, const float* other, int64_t rows, int64_t width);
  void (*prepare_heads)(Activations qkv, const float* rope, int64_t rows, const HeadShape& shape,
                        const HeadPrep& prep);
  void (*store_kv)(Activations qkv, const HeadShape& shape, const KvRun& run, RunPart part,
                   int64_t plane);
  void (*norm_store)(const float* main, const NormSpec& norm, int64_t width, const HiddenRun& run,
                     RunPart part, int64_t plane, Activations out, Activations read_back);
  void (*load_hidden)(const HiddenSegment& from, int64_t plane, int64_t token, int64_t rows,
                      int64_t width, Activations out);
  void (*gate_mul)(Activations gate, int64_t rows, int64_t width, Activations out);
  void (*silu_mul)(Activations gate_up, int64_t rows, int64_t width, Activations out);
  void (*embed)(const PanelWeight& weight, const int32_t* ids, int64_t rows, float scale,
                float* main);
  void (*exit_gate)(const float* main, const int32_t* indices, int64_t rows, int64_t width,
                    const float* weight, float bias, float* out);
};

// The kernels of an instruction set for a numeric mode. "amx" has the bf16 mode alone, which the
// others compute with the same bits in about five times the time of the fp16 mode. Throws LoadError
// if this machine cannot run it or does not know the name; "" takes the best one here.
const Kernels& select_kernels(const char* name, NumericMode mode);

// The backend over kernels of the mode. threads: 0 for as many as the process may run on.
std::unique_ptr<Backend> make_backend(const Kernels& kernels, int threads, NumericMode mode);

}  // namespace tinyloop::cpu
