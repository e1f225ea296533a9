#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include "format.h"
#include "threads.h"

namespace tinyloop {

namespace {

// The explicit option, else the environment switch, else the default.
std::string resolve(const std::string& option, const char* variable, const char* fallback) {
  if (!option.empty()) return option;
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? value : fallback;
}

void expect(const std::string& what, const std::string& value,
            std::initializer_list<const char*> known, const std::string& hint) {
  if (std::find(known.begin(), known.end(), value) != known.end()) return;
  std::string names;
  for (const char* name : known) names += (names.empty() ? "" : ", ") + std::string(name);
  throw LoadError("cannot load with " + what + "='" + value + "': this build knows " + names +
                  hint);
}

LoadOptions resolve_options(LoadOptions o) {
  o.device = resolve(o.device, "TINYLOOP_DEVICE", "cpu");
  o.cache_mode = resolve(o.cache_mode, "TINYLOOP_KV", "fp16");
  o.fp16_cache = resolve(o.fp16_cache, "TINYLOOP_FP16_CACHE", "auto");
  o.cpu_isa = resolve(o.cpu_isa, "TINYLOOP_CPU_ISA", "");
  const std::string deterministic = resolve("", "TINYLOOP_DETERMINISTIC", "1");
  expect("device", o.device, {"cpu"}, "");
  expect("cache_mode", o.cache_mode, {"fp16"}, "");
  expect("fp16_cache", o.fp16_cache, {"off", "auto"},
         ": the CPU backend unpacks weights in registers and has no FP16 cache");
  expect("TINYLOOP_DETERMINISTIC", deterministic, {"1"},
         ": the CPU backend is always deterministic");
  o.fp16_cache = "off";  // what auto means for this device, whatever the header and the budget
  if (o.threads < 0 || o.threads > kMaxThreads) {
    throw LoadError("cannot load with threads=" + std::to_string(o.threads) + ": it must be 0.." +
                    std::to_string(kMaxThreads) + ", 0 for all processors");
  }
  return o;
}

void check_rows(const LoadOptions& o, const Descriptor& d) {
  const auto refuse = [&](const std::string& name, int value, int64_t low, int64_t high) {
    throw LoadError("cannot load with " + name + "=" + std::to_string(value) + ": it must be " +
                    std::to_string(low) + ".." + std::to_string(high));
  };
  const int64_t limit = std::min<int64_t>(d.max_positions, INT32_MAX);
  if (o.max_seq_len < 1 || o.max_seq_len > limit) {
    throw LoadError("cannot load with max_seq_len=" + std::to_string(o.max_seq_len) +
                    ": the model has positions for 1.." + std::to_string(limit) + " rows");
  }
  if (o.prefill_chunk < 0 || o.prefill_chunk > o.max_seq_len) {
    refuse("prefill_chunk", o.prefill_chunk, 0, o.max_seq_len);
  }
}

// Uploads tensors by name and knows which of the table were used.
class Uploader {
 public:
  Uploader(const ModelFile& file, Backend& backend, Account& account)
      : file_(file), backend_(backend), account_(account) {}

  std::unique_ptr<Weight> weight(const std::string& name, int64_t outputs, int64_t inputs) {
    return backend_.upload(checked(name, outputs, inputs), account_);
  }
  Vector vector(const std::string& name, int64_t size) {
    const TensorEntry& entry = checked(name, size, 0);
    Vector vector{account_.allocate(entry.bytes, Owner::kWeights, name.c_str())};
    std::memcpy(vector.block.as<uint8_t>(), entry.data, entry.bytes);
    return vector;
  }
  void expect_all_used() const {
    for (const TensorEntry& entry : file_.tensors) {
      if (used_.count(entry.name) == 0) {
        throw LoadError("cannot read the model file: tensor '" + entry.name +
                        "': the descriptor has no place for it");
      }
    }
  }

 private:
  const TensorEntry& checked(const std::string& name, int64_t rows, int64_t cols) {
    const TensorEntry& entry = file_.require(name, rows, cols);
    check_crc(entry);
    used_.insert(name);
    return entry;
  }
  const ModelFile& file_;
  Backend& backend_;
  Account& account_;
  std::set<std::string> used_;
};

Layer load_layer(Uploader& upload, const Descriptor& d, int64_t index) {
  const std::string at = "layers." + std::to_string(index) + ".";
  Layer layer;
  layer.qkv = upload.weight(at + "qkv", d.qkv_width(), d.hidden_size);
  layer.o = upload.weight(at + "o", d.hidden_size, d.q_width());
  layer.gate_up = upload.weight(at + "gate_up", 2 * d.ffn_size, d.hidden_size);
  layer.down = upload.weight(at + "down", d.hidden_size, d.ffn_size);
  layer.norm_attn_in = upload.vector(at + "norm_attn_in", d.hidden_size);
  layer.norm_ffn_in = upload.vector(at + "norm_ffn_in", d.hidden_size);
  if (d.norm_placement == NormPlacement::kSandwich) {
    layer.norm_attn_out = upload.vector(at + "norm_attn_out", d.hidden_size);
    layer.norm_ffn_out = upload.vector(at + "norm_ffn_out", d.hidden_size);
  }
  return layer;
}

// Runs one phase of a load and puts its name before the message of a failure.
template <typename Phase>
void in_phase(const char* name, const std::string& path, Phase phase) {
  const auto where = [&] {
    return "load of '" + display(path) + "' failed in phase '" + name + "': ";
  };
  try {
    phase();
  } catch (const OutOfMemoryError& error) {
    throw OutOfMemoryError(where() + error.what());
  } catch (const LoadError& error) {
    throw LoadError(where() + error.what());
  } catch (const std::bad_alloc&) {
    throw OutOfMemoryError(where() + "the system has no memory for the load's own tables");
  }
}

}  // namespace

std::shared_ptr<Engine> Engine::load(const std::string& path, const LoadOptions& options) {
  auto engine = std::make_shared<Engine>();
  std::unique_ptr<MappedFile> mapped;
  ModelFile file;
  in_phase("header", path, [&] {
    engine->options = resolve_options(options);
    mapped = std::make_unique<MappedFile>(path);
    file = parse_file(mapped->data(), mapped->bytes());
    check_rows(engine->options, file.descriptor);
    engine->descriptor = file.descriptor;
    engine->metadata = file.metadata;
    engine->owner_process_ = ::getpid();
    engine->account = std::make_shared<Account>(engine->options.budget_bytes);
    engine->backend = make_cpu_backend(engine->options.cpu_isa, engine->options.threads,
                                       engine->options.numeric_mode == NumericMode::kFp32);
  });
  in_phase("weights", path, [&] { engine->load_weights(file); });
  in_phase("buffers", path, [&] { engine->allocate_buffers(); });
  return engine;
}

void Engine::load_weights(const ModelFile& file) {
  const Descriptor& d = descriptor;
  Uploader upload(file, *backend, *account);
  weights.embed = upload.weight("embed", d.vocab_size, d.hidden_size);
  if (!d.tied_head) weights.head = upload.weight("head", d.vocab_size, d.hidden_size);
  for (int64_t i = 0; i < d.n_layers; ++i) weights.layers.push_back(load_layer(upload, d, i));
  weights.final_norm = upload.vector("final_norm", d.hidden_size);
  weights.inv_freq = upload.vector("rope.inv_freq", d.head_dim / 2);
  if (d.exit_gate) {
    weights.exit_gate_weight = upload.vector("exit_gate.weight", d.hidden_size);
    weights.exit_gate_bias = upload.vector("exit_gate.bias", 1);
  }
  upload.expect_all_used();
}

void Engine::allocate_buffers() {
  const Descriptor& d = descriptor;
  BufferPool& b = buffers;
  const int64_t rows = options.max_seq_len;
  const auto element = static_cast<int64_t>(backend->activation_bytes());
  b.scratch_rows = options.prefill_chunk > 0 ? options.prefill_chunk : rows;
  b.scratch1_width = std::max(d.qkv_width(), 2 * d.ffn_size);
  b.attn_down_width = std::max(d.q_width(), d.ffn_size);
  const auto take = [&](int64_t bytes, Owner owner, const char* what) {
    return account->allocate(static_cast<size_t>(bytes), owner, what);
  };
  b.main = take(rows * d.hidden_size * 4, Owner::kMain, "main");
  b.norm = take(b.scratch_rows * d.hidden_size * element, Owner::kScratch, "norm");
  b.scratch1 = take(b.scratch_rows * b.scratch1_width * element, Owner::kScratch, "scratch1");
  b.attn_down = take(b.scratch_rows * b.attn_down_width * element, Owner::kScratch, "attn_down");
  b.pass_kv = take(2 * rows * d.kv_width() * element, Owner::kRequest, "keys and values of a pass");
  b.rope = take(rows * d.head_dim * 4, Owner::kTables, "rope");
  b.row_ids = take(3 * rows * 4, Owner::kTables, "row ids");
  b.row_scores = take(rows * 5, Owner::kTables, "row scores");
  WorkspaceShape shape;
  shape.max_inputs = std::max({d.hidden_size, d.q_width(), d.ffn_size});
  shape.vocab_size = d.vocab_size;
  shape.head_dim = d.head_dim;
  backend->allocate_workspace(shape, *account);
}

std::string Engine::numerics_id() const {
  const char* mode = options.numeric_mode == NumericMode::kFp32 ? "fp32" : "fp16";
  return backend->identity() + "/" + mode + "/kv-" + options.cache_mode + "/fp16cache-" +
         options.fp16_cache;
}

void Engine::require_usable() const {
  if (closed_) throw ClosedHandleError("cannot use the model: it was closed");
  if (::getpid() != owner_process_) {
    throw ConcurrentUseError("cannot use the model in process " + std::to_string(::getpid()) +
                             ": it belongs to process " + std::to_string(owner_process_) +
                             ", load it again after a fork");
  }
}

ForwardGuard::ForwardGuard(Engine& engine) : engine_(engine) {
  engine.require_usable();
  if (engine.in_use.test_and_set(std::memory_order_acquire)) {
    throw ConcurrentUseError(
        "cannot start a forward: another one runs on this model; use one thread, a lock, or a "
        "model "
        "for each worker");
  }
}

}  // namespace tinyloop
