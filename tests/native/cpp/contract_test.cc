// The contract with C++ callers, as a caller sees it: only public headers.
//
//   contract_test SCRATCH_FOLDER MODEL.tloop...      models of at least 2,048 positions
//
// Prints every broken promise with its line, model and setup; exits with 1 if there was one.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "tinyloop/tinyloop.h"

namespace {

using namespace tinyloop;

// ---- the three entry points, exactly ----

template <typename T>
concept Complete = requires { sizeof(T); };
static_assert(!Complete<Model> && !Complete<PrefixCache>, "handles are opaque");

using LoadModel = Model* (*)(const std::string&, int, int);
constexpr LoadModel kLoadModel = &load_model;
static_assert(std::is_same_v<decltype(load_model(std::declval<const std::string&>())), Model*>);
static_assert(std::is_same_v<decltype(load_model(std::declval<const std::string&>(), 1)), Model*>);
static_assert(std::is_same_v<decltype(&free_model), void (*)(Model*)>);
static_assert(std::is_same_v<decltype(&vram_usage_bytes), size_t (*)(Model*)>);

// ---- setups and checks ----

struct Setup {
  const char* cache_mode;
  const char* cpu_isa;  // "": the best of this machine
  NumericMode numeric_mode;
};
// Each cache mode once, then the other arithmetic and the other kernels.
constexpr Setup kSetups[] = {
    {"fp16", "", NumericMode::kFp16},         {"fp16", "", NumericMode::kFp32},
    {"fp16", "portable", NumericMode::kFp16}, {"int8", "", NumericMode::kFp16},
    {"h_fp16", "", NumericMode::kFp16},       {"h_int8", "", NumericMode::kFp16},
    {"h_int4", "", NumericMode::kFp16},       {"fp16", "", NumericMode::kBf16},
};

const char* name_of(NumericMode mode) {
  return mode == NumericMode::kFp16 ? "fp16" : mode == NumericMode::kBf16 ? "bf16" : "fp32";
}

std::string where;  // model and setup of the checks that run
int broken = 0;

void expect(bool kept, const char* promise, int line) {
  if (kept) return;
  ++broken;
  std::fprintf(stderr, "contract_test.cc:%d: broken: %s [%s]\n", line, promise, where.c_str());
}
#define EXPECT(...) expect((__VA_ARGS__), #__VA_ARGS__, __LINE__)

// Whether the call throws an E whose message has `named`.
template <typename E, typename Call>
bool throws(Call call, const std::string& named = "") {
  try {
    call();
  } catch (const E& error) {
    if (std::string(error.what()).find(named) != std::string::npos) return true;
    std::fprintf(stderr, "the error '%s' does not name '%s'\n", error.what(), named.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "another error than expected: %s\n", error.what());
  }
  return false;
}

bool last_error_has(const std::string& text) {
  if (last_error().find(text) != std::string::npos) return true;
  std::fprintf(stderr, "last_error() is '%s', without '%s'\n", last_error().c_str(), text.c_str());
  return false;
}

constexpr int kRows = 64;

LoadOptions options_of(const Setup& setup) {
  LoadOptions options;
  options.max_seq_len = kRows;
  options.threads = 1;
  options.cache_mode = setup.cache_mode;
  options.cpu_isa = setup.cpu_isa;
  options.numeric_mode = setup.numeric_mode;
  return options;
}

std::vector<int32_t> some_ids(const Model* model, int n) {
  const auto vocab = static_cast<int>(descriptor(model).vocab_size);
  std::vector<int32_t> ids;
  for (int i = 0; i < n; ++i) ids.push_back((7 * i + i * i) % vocab);
  return ids;
}

int depth_of(const Model* model) { return static_cast<int>(descriptor(model).loops); }

// Log-probabilities of the last n_scored ids.
std::vector<float> score_one(Model* model, const std::vector<int32_t>& ids, size_t n_scored,
                             const PrefixCache* prefix) {
  std::vector<float> logprobs(n_scored);
  std::vector<uint8_t> greedy(n_scored);
  score(model, {{ids.data(), ids.size(), n_scored, prefix}}, depth_of(model), logprobs.data(),
        greedy.data());
  return logprobs;
}

PrefixCache* build(Model* model, const std::vector<int32_t>& ids, const PrefixCache* parent) {
  return build_prefix(model, ids.data(), ids.size(), depth_of(model), parent);
}

// What a second prefix may extend: nothing in a prefix-LM model, where a prompt sees itself whole.
const PrefixCache* base_of(const Model* model, const PrefixCache* prefix) {
  return descriptor(model).prefix_lm ? nullptr : prefix;
}

// ---- loading ----

void check_defaults(const std::string& path) {
  Model* plain = load_model(path);
  Model* spelled = kLoadModel(path, 2048, 0);
  EXPECT(plain != nullptr && spelled != nullptr && last_error().empty());
  if (plain != nullptr && spelled != nullptr) {
    EXPECT(vram_usage_bytes(plain) == vram_usage_bytes(spelled));
  }
  Model* chunked = load_model(path, 2048, 64);
  EXPECT(chunked != nullptr && vram_usage_bytes(chunked) < vram_usage_bytes(plain));
  for (Model* model : {plain, spelled, chunked}) free_model(model);
  free_model(nullptr);
}

void check_refused_loads(const std::string& path) {
  EXPECT(load_model(path + ".missing") == nullptr && last_error_has(".missing"));
  EXPECT(load_model(path, 0) == nullptr && last_error_has("max_seq_len=0"));
  EXPECT(load_model(path, -5) == nullptr && last_error_has("max_seq_len=-5"));
  EXPECT(load_model(path, 1 << 30) == nullptr && last_error_has("max_seq_len"));
  EXPECT(load_model(path, 64, 65) == nullptr && last_error_has("prefill_chunk=65"));
  EXPECT(load_model(path, 64, -1) == nullptr && last_error_has("prefill_chunk=-1"));
  // Each thread has its own last error.
  const std::string before = last_error();
  std::thread([&] { free_model(load_model(path, kRows)); }).join();
  EXPECT(last_error() == before);
  Model* model = load_model(path, kRows);
  EXPECT(model != nullptr && last_error().empty());
  free_model(model);
}

void check_damaged_files(const std::string& path, const std::string& scratch) {
  std::ifstream in(path, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  const std::string copy = scratch + "/damaged.tloop";
  const auto refused = [&](const std::string& bytes, const std::string& field) {
    std::ofstream(copy, std::ios::binary) << bytes;
    return load_model(copy, kRows) == nullptr && last_error_has(field);
  };
  for (const size_t size : {size_t{0}, size_t{63}}) EXPECT(refused(whole.substr(0, size), ""));
  for (const size_t size : {size_t{64}, whole.size() / 2, whole.size() - 1}) {
    EXPECT(refused(whole.substr(0, size), "file_bytes"));
  }
  uint64_t data_offset;  // of the first blob; its place in the preamble is part of the format
  std::memcpy(&data_offset, whole.data() + 24, sizeof(data_offset));
  std::string flipped = whole;
  flipped[data_offset] = static_cast<char>(flipped[data_offset] ^ 1);
  EXPECT(refused(flipped, "crc32"));
  std::remove(copy.c_str());
}

// All or nothing under every budget: whatever allocation is the one that does not fit.
void check_budgets(const std::string& path, const Setup& setup) {
  LoadOptions options = options_of(setup);
  Model* model = load_model(path, options);
  EXPECT(model != nullptr);
  if (model == nullptr) return;
  const size_t whole = vram_usage_bytes(model);
  free_model(model);
  for (size_t budget = 64; budget < whole; budget += whole / 40) {
    options.budget_bytes = budget;
    EXPECT(load_model(path, options) == nullptr && last_error_has(std::to_string(budget)));
  }
  options.budget_bytes = whole;
  model = load_model(path, options);
  EXPECT(model != nullptr && vram_usage_bytes(model) == whole);
  free_model(model);
}

// ---- memory and handles ----

void check_memory(Model* model) {
  const size_t start = vram_usage_bytes(model);
  const auto ids = some_ids(model, 12);
  score_one(model, ids, 5, nullptr);  // what is allocated lazily, once
  const size_t loaded = vram_usage_bytes(model);
  EXPECT(loaded >= start && start > 0);
  PrefixCache* prefix = build(model, ids, nullptr);
  EXPECT(vram_usage_bytes(model) == loaded + prefix_bytes(prefix));
  const PrefixCache* base = base_of(model, prefix);
  PrefixCache* child = build(model, ids, base);
  EXPECT(prefix_length(prefix) == 12 && prefix_length(child) == (base != nullptr ? 24u : 12u));
  EXPECT(vram_usage_bytes(model) == loaded + prefix_bytes(prefix) + prefix_bytes(child));
  size_t reported = 0;
  for (const auto& [owner, bytes] : memory_report(model)) reported += bytes;
  EXPECT(reported == vram_usage_bytes(model));
  score_one(model, ids, 5, child);
  free_prefix(child);
  EXPECT(vram_usage_bytes(model) == loaded + prefix_bytes(prefix));
  free_prefix(prefix);
  free_prefix(nullptr);
  EXPECT(vram_usage_bytes(model) == loaded);
}

// A prefix gives the bits of the whole; that of a prefix-LM model those of any other such prefix.
void check_prefix_changes_no_bit(Model* model) {
  const auto ids = some_ids(model, 30);
  for (const int cut : {1, 8, 20}) {
    const auto scored = [&] {
      PrefixCache* prefix = build(model, {ids.begin(), ids.begin() + cut}, nullptr);
      const auto logprobs = score_one(model, {ids.begin() + cut, ids.end()}, 9, prefix);
      free_prefix(prefix);
      return logprobs;
    };
    const bool causal = !descriptor(model).prefix_lm;
    EXPECT(scored() == (causal ? score_one(model, ids, 9, nullptr) : scored()));
  }
}

void check_refused_calls(Model* model, Model* other) {
  const auto ids = some_ids(model, 6);
  const auto vocab = static_cast<int32_t>(descriptor(model).vocab_size);
  const size_t before = vram_usage_bytes(model);
  for (const int32_t bad : {-1, vocab, INT32_MAX}) {
    EXPECT(throws<InvalidInputError>([&] { build(model, {1, bad}, nullptr); }));
    EXPECT(throws<InvalidInputError>([&] { score_one(model, {1, bad, 1}, 1, nullptr); }));
  }
  EXPECT(throws<InvalidInputError>([&] { build(model, {}, nullptr); }));
  EXPECT(throws<InvalidInputError>([&] { score_one(model, ids, 6, nullptr); }));
  EXPECT(
      throws<InvalidInputError>([&] { build_prefix(model, ids.data(), ids.size(), 0, nullptr); }));
  EXPECT(throws<RowBudgetError>([&] { build(model, some_ids(model, kRows + 1), nullptr); }));
  PrefixCache* foreign = build(other, ids, nullptr);
  EXPECT(throws<MismatchError>([&] { build(model, ids, foreign); }));
  if (descriptor(model).prefix_lm) {
    PrefixCache* prompt = build(model, ids, nullptr);
    EXPECT(throws<MismatchError>([&] { build(model, ids, prompt); }));
    free_prefix(prompt);
  }
  EXPECT(throws<MismatchError>([&] { score_one(model, ids, 2, foreign); }));
  free_prefix(foreign);
  EXPECT(vram_usage_bytes(model) == before);
  EXPECT(score_one(model, ids, 2, nullptr).size() == 2);
}

// A model, two prefixes of one parent: freed in each of the 24 orders. While the model lives, its
// bytes fall back to where they were; once it is freed, what is left can only be freed.
void check_every_order(const std::string& path, const Setup& setup) {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    Model* model = load_model(path, options_of(setup));
    const auto ids = some_ids(model, 5);
    score_one(model, ids, 2, nullptr);
    const size_t before = vram_usage_bytes(model);
    PrefixCache* parent = build(model, ids, nullptr);
    const PrefixCache* base = base_of(model, parent);
    const size_t length = base != nullptr ? 10 : 5;  // of a child
    PrefixCache* handles[] = {parent, build(model, ids, base), build(model, ids, base)};
    bool open = true;
    for (const int next : order) {
      if (next == 3) {
        if (order.back() == 3) EXPECT(vram_usage_bytes(model) == before);
        free_model(model);
        open = false;
        continue;
      }
      PrefixCache* handle = handles[next];
      if (open) EXPECT(prefix_length(handle) == (next == 0 ? 5 : length));
      if (!open) EXPECT(throws<ClosedHandleError>([&] { prefix_length(handle); }));
      if (!open) EXPECT(throws<ClosedHandleError>([&] { prefix_bytes(handle); }));
      free_prefix(handle);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

// A handle of a freed model does not serve another one, not even of the same file.
void check_after_free(const std::string& path, const Setup& setup) {
  Model* first = load_model(path, options_of(setup));
  const auto ids = some_ids(first, 5);
  PrefixCache* stale = build(first, ids, nullptr);
  free_model(first);
  Model* second = load_model(path, options_of(setup));
  const size_t before = vram_usage_bytes(second);
  EXPECT(throws<Error>([&] { score_one(second, ids, 2, stale); }));
  EXPECT(throws<Error>([&] { build(second, ids, stale); }));
  EXPECT(vram_usage_bytes(second) == before);
  free_prefix(stale);
  EXPECT(score_one(second, ids, 2, nullptr).size() == 2);
  free_model(second);
}

// ---- depth, generation, pools and plans ----

// A resume handle at a depth has the bits of a run at that depth, whatever ran in between.
void check_resume(Model* model) {
  const std::vector<int32_t> ids = some_ids(model, 40);
  const int depth = depth_of(model), deeper = depth + 1;
  std::vector<float> full(39);
  std::vector<uint8_t> greedy(39);
  score(model, {{ids.data(), 40, 39, nullptr}}, deeper, full.data(), greedy.data());
  const size_t before = vram_usage_bytes(model);
  for (const bool keep_cache : {false, true}) {
    std::vector<ResumeHandle*> handles =
        start_resume(model, {{ids.data(), 40, 39, nullptr}}, depth, deeper, keep_cache);
    EXPECT(resume_logprobs(handles[0]) == score_one(model, ids, 39, nullptr));
    EXPECT(vram_usage_bytes(model) == before + resume_bytes(handles[0]));
    upgrade_resume(model, handles, deeper);
    EXPECT(throws<InvalidInputError>(
        [&] { upgrade_resume(model, {handles[0], nullptr}, deeper + 1); }, "handle 1"));
    EXPECT(resume_depth(handles[0]) == deeper && resume_logprobs(handles[0]) == full);
    EXPECT(throws<MismatchError>([&] { upgrade_resume(model, handles, deeper + 1); }));
    if (keep_cache) {
      PrefixCache* rows = resume_prefix(handles[0]);
      EXPECT(prefix_length(rows) == 39 && prefix_depth(rows) == deeper);
      free_prefix(rows);
    } else {
      EXPECT(throws<MismatchError>([&] { resume_prefix(handles[0]); }));
    }
    free_resume(handles[0]);
  }
  free_resume(nullptr);
  EXPECT(vram_usage_bytes(model) == before);
}

// Greedy ids are what scoring calls greedy, with the same log-probabilities.
void check_generation(Model* model) {
  std::vector<int32_t> ids = some_ids(model, 20);
  GenerateRequest request;
  request.ids = ids.data();
  request.n_ids = ids.size();
  request.max_new_tokens = 6;
  size_t seen = 0;
  const auto count = [&](size_t, int32_t, float) { ++seen; };
  const std::vector<Completion> one = generate(model, {request}, 0, count);
  const std::vector<Completion> two = generate(model, {request, request}, 1);
  EXPECT(seen == 6 && one[0].ids.size() == 6 && one[0].finish == Finish::kLength);
  EXPECT(two[0].ids == one[0].ids && two[1].logprobs == one[0].logprobs);
  const auto prompt = static_cast<int64_t>(ids.size());
  ids.insert(ids.end(), one[0].ids.begin(), one[0].ids.end());
  ScoreRequest scored{ids.data(), ids.size(), 6, nullptr};
  if (descriptor(model).prefix_lm) scored.prompt_len = prompt;
  std::vector<float> logprobs(6);
  std::vector<uint8_t> greedy(6);
  score(model, {scored}, depth_of(model), logprobs.data(), greedy.data());
  EXPECT(logprobs == one[0].logprobs && greedy == std::vector<uint8_t>(6, 1));
  GenerateRequest bad = request;
  bad.n_ids = 0;
  EXPECT(throws<InvalidInputError>([&] { generate(model, {request, bad}); }, "request 1"));
  bad = request;
  bad.sampling.top_p = 0.0;
  EXPECT(throws<InvalidInputError>([&] { generate(model, {request, bad}); },
                                   "for request 1 with top_p=0"));
}

// Requests that join a batch at different steps, with a score in between, come to what they come to
// alone; a bad one changes nothing.
void check_live_generation(Model* model) {
  const std::vector<int32_t> ids = some_ids(model, 12);
  GenerateRequest request;
  request.ids = ids.data();
  request.max_new_tokens = 6;
  std::vector<GenerateRequest> requests;
  for (const size_t n : {12, 7, 3}) {
    request.n_ids = n;
    requests.push_back(request);
  }
  const std::vector<Completion> alone = generate(model, requests, 1);
  const size_t before = vram_usage_bytes(model);
  Generation* generation = make_generation(model);
  GenerateEvents events;
  size_t joined = 0;
  for (int turn = 0; turn < 100 && events.finished.size() < requests.size(); ++turn) {
    if (joined < requests.size()) {
      EXPECT(generation_add(generation, requests[joined]) == joined);
      ++joined;
    }
    EXPECT(generation_step(generation, &events));
    if (turn == 4) generation_put_back(generation);
    score_one(model, ids, 3, nullptr);
  }
  EXPECT(events.finished.size() == requests.size());
  for (const auto& [key, completion] : events.finished) {
    EXPECT(completion.ids == alone[key].ids && completion.logprobs == alone[key].logprobs);
  }
  EXPECT(events.tokens.size() == 18 && events.failed.empty());
  EXPECT(!generation_step(generation, &events) && !generation_cancel(generation, 0));
  request.n_ids = 0;
  EXPECT(throws<InvalidInputError>([&] { generation_add(generation, request); }, "request 3"));
  EXPECT(vram_usage_bytes(model) == before);
  request.n_ids = 5;
  EXPECT(generation_add(generation, request) == 3 && generation_step(generation, &events));
  EXPECT(vram_usage_bytes(model) > before && generation_cancel(generation, 3));
  EXPECT(vram_usage_bytes(model) == before);
  free_generation(generation);
  free_generation(nullptr);
}

void check_pool(Model* model) {
  const std::vector<int32_t> ids = some_ids(model, 30);
  const size_t before = vram_usage_bytes(model);
  PrefixPool* pool = make_pool(model, 0);
  const int64_t key = pool_create(pool, ids.data(), 20, depth_of(model));
  EXPECT(key > 0 && pool_bytes(pool) == vram_usage_bytes(model) - before);
  EXPECT(pool_find(pool, ids.data(), 30, depth_of(model)) == key);
  EXPECT(pool_find(pool, ids.data(), 10, depth_of(model)) == 0);
  EXPECT(pool_create(pool, ids.data(), 20, depth_of(model)) == key);  // held already
  EXPECT(pool_bytes(pool) == vram_usage_bytes(model) - before);
  PrefixCache* held = pool_get(pool, key);
  EXPECT(prefix_length(held) == 20);
  pool_pin(pool, key);
  EXPECT(throws<InvalidInputError>([&] { pool_evict(pool, key); }));
  pool_unpin(pool, key);
  pool_evict(pool, key);
  const std::vector<Eviction> report = pool_evictions(pool);
  EXPECT(report.size() == 1 && report[0].key == key && report[0].asked);
  EXPECT(vram_usage_bytes(model) > before);  // the handle outlives the eviction
  free_prefix(held);
  EXPECT(vram_usage_bytes(model) == before);
  EXPECT(throws<InvalidInputError>([&] { pool_get(pool, key); }));
  free_pool(pool);
  free_pool(nullptr);
}

void check_plan(const std::string& path, const Setup& setup, Model* model) {
  const MemoryPlan plan = plan_memory(path, options_of(setup), depth_of(model), 20);
  EXPECT(plan.owners == memory_report(model));
  PrefixCache* prefix = build(model, some_ids(model, 20), nullptr);
  EXPECT(plan.prefix_tokens == prefix_bytes(prefix));
  free_prefix(prefix);
  EXPECT(plan.warnings.empty() == cache_mode_warning(model).empty());
}

void check_setup(const std::string& path, const Setup& setup) {
  check_budgets(path, setup);
  Model* model = load_model(path, options_of(setup));
  Model* other = load_model(path, options_of(setup));
  EXPECT(model != nullptr && other != nullptr);
  if (model != nullptr && other != nullptr) {
    EXPECT(numerics_id(model) == numerics_id(other));
    check_memory(model);
    check_prefix_changes_no_bit(model);
    check_refused_calls(model, other);
    check_resume(model);
    check_generation(model);
    check_live_generation(model);
    check_pool(model);
    check_plan(path, setup, other);
    check_every_order(path, setup);
    check_after_free(path, setup);
  }
  free_model(model);
  free_model(other);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s SCRATCH_FOLDER MODEL.tloop...\n", argv[0]);
    return 2;
  }
  for (int i = 2; i < argc; ++i) {
    const std::string path = argv[i];
    where = path;
    check_defaults(path);
    check_refused_loads(path);
    check_damaged_files(path, argv[1]);
    for (const Setup& setup : kSetups) {
      where = path + ", " + setup.cache_mode + ", isa '" + setup.cpu_isa + "', " +
              name_of(setup.numeric_mode);
      check_setup(path, setup);
    }
  }
  std::printf("%d models, %zu setups each: %d broken promises\n", argc - 2, std::size(kSetups),
              broken);
  return broken == 0 ? 0 : 1;
}
