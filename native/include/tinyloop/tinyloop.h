// TinyLoop: the C++ contract. A Model hosts one looped language model; handles own cache state.
//
// Memory: everything a model or its handles hold goes through one accounting allocator, and
// vram_usage_bytes() is its exact sum. Threads: a Model runs one forward at a time; a second
// concurrent call throws ConcurrentUseError at once and changes nothing. Ownership: a handle keeps
// the memory of its model alive; after free_model() the handle's calls throw ClosedHandleError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tinyloop/descriptor.h"
#include "tinyloop/errors.h"
#include "tinyloop/sampling_options.h"

namespace tinyloop {

struct Model;         // opaque
struct PrefixCache;   // opaque: the prefilled state of a token prefix at one depth
struct ResumeHandle;  // opaque: scored ids that can go deeper later
struct PrefixPool;    // opaque: prefixes of one model under a byte budget

// Arithmetic of products, scratch and K/V. kFp16 is what the memory contract describes. kBf16 holds
// the same in memory and multiplies in the tile unit (AMX) of processors that have one, with bits
// of its own that every machine gives; without the unit it has a fifth of the speed of kFp16. kFp32
// exists to prove the logic in tests: it keeps activations and K/V in float32.
enum class NumericMode { kFp16, kFp32, kBf16 };

// Options of a load. Empty strings mean "the environment switch, else the default".
struct LoadOptions {
  int max_seq_len = 2048;  // rows of one pass, 1..the model's positions
  int prefill_chunk = 0;   // scratch rows, 1..max_seq_len; 0: max_seq_len
  std::string device;      // TINYLOOP_DEVICE; "cpu" | "cuda" | "cuda:N"
  std::string cache_mode;  // TINYLOOP_KV; "fp16" | "int8" | "h_fp16" | "h_int8" | "h_int4"
  std::string fp16_cache;  // TINYLOOP_FP16_CACHE; "off" | "loop" | "all" | "auto"; off on the CPU
  // TINYLOOP_DETERMINISTIC; "1" | "0". With "0", of a GPU alone, decode steps of few sequences add
  // their sums in several parts: faster, and a token's bits then depend on how many decode beside
  // it.
  std::string deterministic;
  size_t budget_bytes = 0;  // hard limit of the accounting allocator; 0: none
  int threads = 0;          // compute threads; 0: as many as the process may run on
  std::string cpu_isa;  // TINYLOOP_CPU_ISA; "amx" (of kBf16) | "avx512" | "avx2" | "portable"; the
                        // best here
  NumericMode numeric_mode = NumericMode::kFp16;
  std::string state_init;  // "zero" | "normal" for models whose loops start so; "": the model's own
  uint64_t state_seed = 0;  // of "normal"
  // A folder of installed Python packages, where the wheel of cuBLASLt may be; beside it the file
  // named by TINYLOOP_CUBLASLT and the loader's path are looked at. Without the library our own
  // kernels do its work.
  std::string packages;
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

// A cache mode that loses memory on this model, in words with the numbers; "" if it saves.
std::string cache_mode_warning(const Model* model);

// What a load with these options would hold, from the file's header alone, and what handles cost.
// Equal to the loaded model to the byte. depth 0: the model's own. Throws LoadError for a file or
// options that do not load, InvalidInputError for a depth or length that the model cannot have.
struct MemoryPlan {
  // Bytes right after the load, as memory_report() gives them.
  std::map<std::string, size_t> owners;
  size_t total = 0;
  size_t logit_rows = 0;  // on top, from the first sampled generation on
  size_t prefix_tokens =
      0;                   // bytes of one prefix of the length and depth asked for, states included
  size_t cache_token = 0;  // bytes of one more token of it, planes alone, rounding aside
  std::vector<std::string> warnings;  // with numbers: a mode that loses memory
};
MemoryPlan plan_memory(const std::string& path, const LoadOptions& options, int depth,
                       size_t prefix_length);

// One item of a score call: `ids` follow the ids of `prefix` (nullptr: none). The last n_scored ids
// are scored; 1 <= n_scored <= n_ids - 1. The rows computed are ids[0 .. n_ids - 2].
struct ScoreRequest {
  const int32_t* ids = nullptr;
  size_t n_ids = 0;
  size_t n_scored = 0;
  const PrefixCache* prefix = nullptr;
  int depth = 0;           // loops; 0: that of the call
  int64_t prompt_len = 0;  // prefix-LM models: the first ids that see each other both ways
};

// Natural-log probabilities of the scored ids of all requests, one request after the other.
//   depth     loops to run, 1..4096; a prefix must be at least as deep, and exactly so where layers
//             follow the loops
//   logprobs  float32 [sum of n_scored]
//   greedy    uint8 [sum of n_scored], 1 where the id is the argmax (the lowest id on ties)
// A result depends on its own ids and depth only: not on batch mates, order, chunking or prefixes.
// Throws InvalidInputError, RowBudgetError (a request with more than max_seq_len rows),
// MismatchError, ClosedHandleError, ConcurrentUseError, OutOfMemoryError.
void score(Model* model, const std::vector<ScoreRequest>& requests, int depth, float* logprobs,
           uint8_t* greedy);

// The same with early exit and what each depth gives. S = sum of n_scored.
struct ScoreExtras {
  // A request ends after the first loop, min_depth at least, at which the cumulative exit
  // probability (1 - product of 1 - gate) of every row that predicts a scored id is this or more.
  // 1 or more: never. It must be above 0, and below 1 the model must have an exit gate. No request
  // may be less deep than min_depth.
  double exit_threshold = std::numeric_limits<double>::infinity();
  int min_depth = 1;
  // Results, each null or allocated by the caller. Rows beyond a request's own depth are NaN.
  int32_t* depths = nullptr;  // [requests]: loops that each ran
  float* by_depth = nullptr;  // [greatest depth, S]: log-probabilities after each loop; where
                              // layers follow the loops, only for requests without a prefix
  float* gates = nullptr;     // [greatest depth, S]: the exit gate at the predicting row
};
void score(Model* model, const std::vector<ScoreRequest>& requests, int depth, float* logprobs,
           uint8_t* greedy, const ScoreExtras& extras);

// Prefills `ids` after `parent` (nullptr: from position 0) at `depth` and returns a handle that any
// number of requests may share. A parent's memory is shared, not copied; depth must equal the
// parent's. upgradable: keep the FP32 states that upgrade_prefix() goes on from. A prefix of a
// prefix-LM model is one whole prompt. Throws as score() does.
PrefixCache* build_prefix(Model* model, const int32_t* ids, size_t n_ids, int depth,
                          const PrefixCache* parent, bool upgradable = true);

// The same prefix at a greater depth, at the price of the missing loops. It shares the planes of
// the old handle, which stays usable. parent: the old parent's tokens at that depth, nullptr: the
// old parent itself, which must be deep enough.
PrefixCache* upgrade_prefix(const PrefixCache* prefix, int depth, const PrefixCache* parent);

// Frees a handle (nullptr is allowed). Memory goes when no child and no running call needs it.
void free_prefix(PrefixCache* prefix);

// Tokens of a prefix, parents included; its own bytes, parents excluded.
size_t prefix_length(const PrefixCache* prefix);
size_t prefix_bytes(const PrefixCache* prefix);
int prefix_depth(const PrefixCache* prefix);

// Scores requests at `depth` and keeps what upgrades up to max_depth need: FP32 states, and with
// keep_cache a cache with room for the planes of max_depth, so that the rows can serve as a prefix.
// One handle a request, in order; all or nothing. Throws as score() does.
std::vector<ResumeHandle*> start_resume(Model* model, const std::vector<ScoreRequest>& requests,
                                        int depth, int max_depth, bool keep_cache);

// Takes handles to `depth` in packed passes: exactly (bitwise) what a full run at that depth gives.
// All or nothing. prefixes: empty, or for each handle the deeper handle of its prefix (the same
// ids; nullptr: the one it has).
void upgrade_resume(Model* model, const std::vector<ResumeHandle*>& handles, int depth,
                    const std::vector<const PrefixCache*>& prefixes = {});

void free_resume(ResumeHandle* handle);
int resume_depth(const ResumeHandle* handle);
size_t resume_bytes(const ResumeHandle* handle);
// Of the scored ids at the present depth.
const std::vector<float>& resume_logprobs(const ResumeHandle* handle);
const std::vector<uint8_t>& resume_greedy(const ResumeHandle* handle);
// The handle's rows (all ids but the last) as a prefix at its present depth; shares their memory.
// Throws MismatchError if no cache was kept.
PrefixCache* resume_prefix(const ResumeHandle* handle);

// What happens when a new prefix does not fit: the least recently used ones go, or it is refused
// with OutOfMemoryError. Nothing is evicted for a prefix that is refused.
enum class EvictPolicy { kLru, kNever };

// One line of the eviction report; asked: by pool_evict(), else to make room.
struct Eviction {
  int64_t key = 0;
  size_t bytes = 0;
  bool asked = false;
};

// Prefixes of one model, at most budget_bytes of them (0: no limit), parents not counted for their
// children. A parent outlives its children; a pinned prefix is not evicted; a use of a prefix is a
// use of its ancestors. Calls on one pool must not run at the same time.
PrefixPool* make_pool(Model* model, size_t budget_bytes, EvictPolicy policy = EvictPolicy::kLru);
// Frees the pool and gives up its prefixes (nullptr is allowed).
void free_pool(PrefixPool* pool);
// Builds a prefix after a held one (parent 0: from position 0), with room made before anything is
// computed. Keys are positive and never used twice. Where an equal prefix is held already (the same
// ids from position 0 on, depth and upgradability), nothing is computed or evicted: the result is
// its key, and a use of it; its pins and its parent stay. Throws as build_prefix() does.
int64_t pool_create(PrefixPool* pool, const int32_t* ids, size_t n_ids, int depth,
                    int64_t parent = 0, bool upgradable = true);
// Holds a prefix that was built elsewhere, unless an equal one is held: then the result is the key
// of that one. The caller keeps its handle.
int64_t pool_put(PrefixPool* pool, const PrefixCache* prefix);
// A handle of a held prefix, to be freed by the caller; it outlives an eviction.
PrefixCache* pool_get(PrefixPool* pool, int64_t key);
// The key of the longest held prefix of `ids` that serves `depth`; 0 if there is none. Not a use.
int64_t pool_find(const PrefixPool* pool, const int32_t* ids, size_t n_ids, int depth);
// Pins are counted.
void pool_pin(PrefixPool* pool, int64_t key);
void pool_unpin(PrefixPool* pool, int64_t key);
// Throws InvalidInputError while the prefix is pinned or has held children.
void pool_evict(PrefixPool* pool, int64_t key);
// Every eviction since the last call, in order.
std::vector<Eviction> pool_evictions(PrefixPool* pool);
size_t pool_bytes(const PrefixPool* pool);

// One request of a generate call: `ids` follow those of `prefix`. In a prefix-LM model without a
// prefix they are one prompt whose ids see each other both ways.
struct GenerateRequest {
  const int32_t* ids = nullptr;
  size_t n_ids = 0;  // at least 1
  const PrefixCache* prefix = nullptr;
  int depth = 0;  // 0: the model's own
  int max_new_tokens = 0;
  std::vector<int32_t> stop_ids;  // one of them ends the completion, and is its last id
  SamplingOptions sampling;       // temperature 0: greedy
  uint64_t seed = 0;
  // A decoded token ends its loops by the rule of ScoreExtras; readers of its deeper planes get its
  // last ones, so the result is approximate. 1 or more: never.
  double exit_threshold = std::numeric_limits<double>::infinity();
  int min_depth = 1;
};

enum class Finish { kStop, kLength };

struct Completion {
  std::vector<int32_t> ids;     // generated, a stop id included
  std::vector<float> logprobs;  // natural log, under the model's own distribution
  std::vector<int32_t> depths;  // loops that the row which predicted each id ran
  Finish finish = Finish::kLength;
};

// Called for each id as it comes, in the calling thread, while the model is in use. What it throws
// ends the call.
using OnToken = std::function<void(size_t request, int32_t id, float logprob)>;

// Completions of all requests, in one continuous batch of at most max_batch sequences (0: 64). A
// completion depends on its own request only. When memory runs short, the youngest sequence is put
// back and computed again, to the same numbers. Throws as score() does; OutOfMemoryError only when
// one sequence alone does not fit.
std::vector<Completion> generate(Model* model, const std::vector<GenerateRequest>& requests,
                                 int max_batch = 0, const OnToken& on_token = {});

}  // namespace tinyloop
