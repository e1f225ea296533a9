// TinyLoop: the C++ contract. A Model hosts one looped language model; handles own cache state.
//
// Memory: everything a model or its handles hold goes through one accounting allocator, and
// vram_usage_bytes() is its exact sum. Threads: a Model runs one forward at a time; a second
// concurrent call throws ConcurrentUseError at once and changes nothing. Ownership: a handle keeps
// the memory of its model alive; after free_model() the handle's calls throw ClosedHandleError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tinyloop/descriptor.h"
#include "tinyloop/errors.h"

namespace tinyloop {

struct Model;        // opaque
struct PrefixCache;  // opaque: the prefilled state of a token prefix at one depth

// Arithmetic of scratch and K/V. kFp32 exists to prove the logic in tests: it keeps activations and
// K/V in float32, where kFp16 is what the memory contract describes.
enum class NumericMode { kFp16, kFp32 };

// Options of a load. Empty strings mean "the environment switch, else the default".
struct LoadOptions {
  int max_seq_len = 2048;   // rows of one pass, 1..the model's positions
  int prefill_chunk = 0;    // scratch rows, 1..max_seq_len; 0: max_seq_len
  std::string device;       // TINYLOOP_DEVICE; "cpu"
  std::string cache_mode;   // TINYLOOP_KV; "fp16"
  std::string fp16_cache;   // TINYLOOP_FP16_CACHE; "off" | "auto" (resolves to off on the CPU)
  size_t budget_bytes = 0;  // hard limit of the accounting allocator; 0: none
  int threads = 0;          // compute threads; 0: as many as the process may run on
  std::string cpu_isa;  // TINYLOOP_CPU_ISA; "avx512" | "avx2" | "portable"; default: the best here
  NumericMode numeric_mode = NumericMode::kFp16;
};

// Loads a model: header, quantized weights, FP16 caches, BufferPool, reconstruction scratch, in
// that order and all or nothing. Returns nullptr on any failure, having released everything;
// last_error() then names the phase, what was asked for and what was found.
Model* load_model(const std::string& path, int max_seq_len = 2048, int prefill_chunk = 0);
Model* load_model(const std::string& path, const LoadOptions& options);

// Frees a model (nullptr is allowed). Live handles keep their memory until they are freed too.
void free_model(Model* model);

// Bytes that the model and all its live handles hold, exactly; without the process's own code.
size_t vram_usage_bytes(Model* model);

// Why the last load_model() of this thread returned nullptr; "" after a success.
const std::string& last_error();

// The record of the loaded file.
const Descriptor& descriptor(const Model* model);

// Names everything that decides a result's bits on this machine: backend, instruction set, kernel
// version, numeric mode, storage mode. Two models with equal ids and digests give equal bits.
std::string numerics_id(const Model* model);

// Live bytes by owner; the values sum to vram_usage_bytes().
std::map<std::string, size_t> memory_report(const Model* model);

// One item of a score call: `ids` follow the ids of `prefix` (nullptr: none). The last n_scored ids
// are scored; 1 <= n_scored <= n_ids - 1. The rows computed are ids[0 .. n_ids - 2].
struct ScoreRequest {
  const int32_t* ids = nullptr;
  size_t n_ids = 0;
  size_t n_scored = 0;
  const PrefixCache* prefix = nullptr;
};

// Natural-log probabilities of the scored ids of all requests, one request after the other.
//   depth     loops to run, >= 1; a prefix must be at least as deep
//   logprobs  float32 [sum of n_scored]
//   greedy    uint8 [sum of n_scored], 1 where the id is the argmax (the lowest id on ties)
// A result depends on its own ids and depth only: not on batch mates, order, chunking or prefixes.
// Throws InvalidInputError, RowBudgetError (a request with more than max_seq_len rows),
// MismatchError, ClosedHandleError, ConcurrentUseError, OutOfMemoryError.
void score(Model* model, const std::vector<ScoreRequest>& requests, int depth, float* logprobs,
           uint8_t* greedy);

// Prefills `ids` after `parent` (nullptr: from position 0) at `depth` and returns a handle that any
// number of requests may share. A parent's memory is shared, not copied; depth must equal the
// parent's. Throws as score() does.
PrefixCache* build_prefix(Model* model, const int32_t* ids, size_t n_ids, int depth,
                          const PrefixCache* parent);

// Frees a handle (nullptr is allowed). Memory goes when no child and no running call needs it.
void free_prefix(PrefixCache* prefix);

// Tokens of a prefix, parents included; its own bytes, parents excluded.
size_t prefix_length(const PrefixCache* prefix);
size_t prefix_bytes(const PrefixCache* prefix);

}  // namespace tinyloop
