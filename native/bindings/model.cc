// Model and PrefixCache for Python: check, convert, release the GIL, call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

#include "bindings.h"
#include "calls.h"

namespace py = pybind11;
using namespace py::literals;

namespace tinyloop {

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// A one-dimensional C-contiguous array of exactly this type, not copied. Read-only is fine: that is
// what a shared object store hands out.
template <typename T>
Array<T> require(const py::object& object, const char* name) {
  const std::string wanted = py::str(py::dtype::of<T>());
  if (!py::isinstance<py::array>(object)) {
    throw py::type_error(std::string(name) + " must be a numpy array of " + wanted + ", found " +
                         std::string(py::str(py::type::of(object))));
  }
  const auto array = py::reinterpret_borrow<py::array>(object);
  const bool contiguous = (array.flags() & py::array::c_style) != 0;
  // Equal, not identical: an array that came through a pickle has a dtype object of its own.
  if (!array.dtype().equal(py::dtype::of<T>()) || array.ndim() != 1 || !contiguous) {
    throw py::type_error(std::string(name) + " must be a contiguous array of " + wanted +
                         " with one axis, found " + std::string(py::str(array.dtype())) + " with " +
                         std::to_string(array.ndim()) + " axes");
  }
  return py::reinterpret_borrow<Array<T>>(object);
}

// Calls that run without the GIL. An interpreter that finalizes ends a thread where it takes the
// GIL back, and C++ frames do not survive that; so the module's exit hook waits for the calls that
// run, and a thread that comes later is parked: an error would make it print while the interpreter
// goes away, which aborts the process. The thread that finalizes may still call. Touched with the
// GIL held.
struct Calls {
  int running = 0;
  std::optional<std::thread::id> closer;
};
Calls& calls() {
  static Calls state;
  return state;
}

[[noreturn]] void park() {
  PyEval_SaveThread();
  for (;;) ::pause();
}

// Holds a place among the running calls, then gives the GIL up; in the reverse order at the end.
class WithoutGil {
 private:
  struct Place {
    Place() {
      const auto& closer = calls().closer;
      if (closer && *closer != std::this_thread::get_id()) park();
      ++calls().running;
    }
    ~Place() { --calls().running; }
  };
  Place place_;
  py::gil_scoped_release nogil_;
};

void wait_for_calls() {
  calls().closer = std::this_thread::get_id();
  while (calls().running > 0) {
    py::gil_scoped_release nogil;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

struct PyPrefix {
  std::shared_ptr<PrefixState> state;

  const std::shared_ptr<PrefixState>& open() const {
    if (!state) throw ClosedHandleError("cannot use the prefix: it was closed");
    state->require_open();
    return state;
  }
};

struct ScoreResult {
  Array<float> logprobs;
  Array<bool> greedy;
  Array<int64_t> offsets;
};

class PyModel {
 public:
  PyModel(std::shared_ptr<Engine> engine, std::string digest)
      : engine_(std::move(engine)), digest_(std::move(digest)) {}

  const std::shared_ptr<Engine>& open() const {
    if (!engine_) throw ClosedHandleError("cannot use the model: it was closed");
    engine_->require_usable();
    return engine_;
  }
  bool closed() const { return !engine_; }
  void close() {
    if (!engine_) return;
    engine_->close();
    const std::shared_ptr<Engine> last = std::move(engine_);
    engine_.reset();
    py::gil_scoped_release nogil;  // joins the compute threads if this was the last owner
    const_cast<std::shared_ptr<Engine>&>(last).reset();
  }
  const std::string& digest() const { return digest_; }

  int depth_or_default(std::optional<int> depth) const {
    return depth ? *depth : static_cast<int>(open()->descriptor.loops);
  }

  ScoreResult score(const py::object& token_ids, const py::object& offsets,
                    const py::object& n_scored,
                    const std::optional<std::vector<std::optional<PyPrefix>>>& prefixes,
                    std::optional<int> depth) const;
  Array<float> score_tokens(const py::object& token_ids, std::optional<int> depth,
                            int64_t prompt_len) const;
  PyPrefix prefix(const py::object& token_ids, std::optional<int> depth,
                  const std::optional<PyPrefix>& parent) const {
    const std::shared_ptr<Engine> engine = open();
    const Array<int32_t> ids = require<int32_t>(token_ids, "token_ids");
    const std::shared_ptr<PrefixState> base = parent ? parent->open() : nullptr;
    const int loops = depth_or_default(depth);
    const int32_t* data = ids.data();
    const auto n = static_cast<size_t>(ids.size());
    const WithoutGil nogil;
    return {prefill(engine, data, n, loops, base)};
  }

 private:
  std::shared_ptr<Engine> engine_;
  std::string digest_;
};

// The items of a call over flat arrays, every index checked.
std::vector<ScoreItem> make_items(const Array<int32_t>& ids, const Array<int64_t>& offsets,
                                  const Array<int32_t>& n_scored,
                                  const std::vector<std::shared_ptr<PrefixState>>& prefixes) {
  const py::ssize_t n = n_scored.size();
  const auto bad = [](const std::string& what) {
    throw InvalidInputError("cannot score: " + what);
  };
  if (offsets.size() != n + 1) {
    bad("offsets has " + std::to_string(offsets.size()) + " entries for " + std::to_string(n) +
        " items; it needs one more than items");
  }
  if (offsets.data()[0] != 0 || offsets.data()[n] != ids.size()) {
    bad("offsets must run from 0 to the number of token ids, " + std::to_string(ids.size()));
  }
  if (!prefixes.empty() && static_cast<py::ssize_t>(prefixes.size()) != n) {
    bad("there are " + std::to_string(prefixes.size()) + " prefixes for " + std::to_string(n) +
        " items");
  }
  std::vector<ScoreItem> items(static_cast<size_t>(n));
  for (py::ssize_t i = 0; i < n; ++i) {
    const int64_t begin = offsets.data()[i], end = offsets.data()[i + 1];
    if (end < begin || end > ids.size()) bad("offsets must not fall, at item " + std::to_string(i));
    if (n_scored.data()[i] < 1) {
      bad("n_scored of item " + std::to_string(i) + " is " + std::to_string(n_scored.data()[i]));
    }
    ScoreItem& item = items[static_cast<size_t>(i)];
    item.ids = ids.data() + begin;
    item.n_ids = static_cast<size_t>(end - begin);
    item.n_scored = static_cast<size_t>(n_scored.data()[i]);
    item.prefix = prefixes.empty() ? nullptr : prefixes[static_cast<size_t>(i)].get();
  }
  return items;
}

ScoreResult PyModel::score(const py::object& token_ids, const py::object& offsets,
                           const py::object& n_scored,
                           const std::optional<std::vector<std::optional<PyPrefix>>>& prefixes,
                           std::optional<int> depth) const {
  const std::shared_ptr<Engine> engine = open();
  const auto ids = require<int32_t>(token_ids, "token_ids");
  const auto starts = require<int64_t>(offsets, "offsets");
  const auto scored = require<int32_t>(n_scored, "n_scored");
  std::vector<std::shared_ptr<PrefixState>> states;
  if (prefixes) {
    for (const std::optional<PyPrefix>& prefix : *prefixes) {
      states.push_back(prefix ? prefix->open() : nullptr);
    }
  }
  const std::vector<ScoreItem> items = make_items(ids, starts, scored, states);
  Array<int64_t> out_offsets(scored.size() + 1);
  int64_t total = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    out_offsets.mutable_data()[i] = total;
    total += static_cast<int64_t>(items[i].n_scored);
  }
  out_offsets.mutable_data()[items.size()] = total;
  // Before anything of that size is allocated: no item may score more than it has.
  if (total > ids.size()) {
    throw InvalidInputError("cannot score: " + std::to_string(total) + " scored ids, but only " +
                            std::to_string(ids.size()) + " are given");
  }
  ScoreResult result{Array<float>(total), Array<bool>(total), out_offsets};
  const int loops = depth_or_default(depth);
  float* logprobs = result.logprobs.mutable_data();
  auto* greedy = reinterpret_cast<uint8_t*>(result.greedy.mutable_data());
  {
    const WithoutGil nogil;
    tinyloop::score(*engine, items, loops, logprobs, greedy);
  }
  return result;
}

Array<float> PyModel::score_tokens(const py::object& token_ids, std::optional<int> depth,
                                   int64_t prompt_len) const {
  const std::shared_ptr<Engine> engine = open();
  if (prompt_len != 0) {
    throw InvalidInputError("cannot score with prompt_len=" + std::to_string(prompt_len) +
                            ": the model is causal, prompt_len is for prefix-LM models");
  }
  const auto ids = require<int32_t>(token_ids, "token_ids");
  if (ids.size() < 1) throw InvalidInputError("cannot score 0 token ids: give at least one");
  const auto n = static_cast<size_t>(ids.size());
  Array<float> logprobs(static_cast<py::ssize_t>(n - 1));
  const int loops = depth_or_default(depth);
  if (n == 1) return logprobs;
  const int32_t* data = ids.data();
  float* out = logprobs.mutable_data();
  {
    const WithoutGil nogil;
    std::vector<uint8_t> greedy(n - 1);
    tinyloop::score(*engine, {{data, n, n - 1, nullptr}}, loops, out, greedy.data());
  }
  return logprobs;
}

py::dict describe(const Descriptor& d) {
  return py::dict(
      "family"_a = d.family, "vocab_size"_a = d.vocab_size, "hidden_size"_a = d.hidden_size,
      "ffn_size"_a = d.ffn_size, "n_q_heads"_a = d.n_q_heads, "n_kv_heads"_a = d.n_kv_heads,
      "head_dim"_a = d.head_dim, "n_layers"_a = d.n_layers, "max_positions"_a = d.max_positions,
      "loops"_a = d.loops, "norm_eps"_a = d.norm_eps,
      "norm_placement"_a = d.norm_placement == NormPlacement::kPre ? "pre" : "sandwich",
      "loop_norm"_a = d.loop_norm, "rope_style"_a = "half", "exit_gate"_a = d.exit_gate,
      "tied_head"_a = d.tied_head, "attn_bias"_a = false, "bos_id"_a = d.bos_id,
      "eos_ids"_a = d.eos_ids, "add_bos"_a = d.add_bos, "chat_template"_a = d.chat_template);
}

NumericMode numeric_mode(const std::string& name) {
  if (name == "fp16") return NumericMode::kFp16;
  if (name == "fp32") return NumericMode::kFp32;
  throw LoadError("cannot load with numeric_mode='" + name + "': it is neither fp16 nor fp32");
}

PyModel load(const py::bytes& path_bytes, const std::string& digest, int max_seq_len,
             int prefill_chunk, const std::string& device, const std::string& cache_mode,
             const std::string& fp16_cache, size_t budget_bytes, int threads,
             const std::string& mode, const std::string& cpu_isa) {
  const std::string path = path_bytes;
  LoadOptions options;
  options.max_seq_len = max_seq_len;
  options.prefill_chunk = prefill_chunk;
  options.device = device;
  options.cache_mode = cache_mode;
  options.fp16_cache = fp16_cache;
  options.budget_bytes = budget_bytes;
  options.threads = threads;
  options.cpu_isa = cpu_isa;
  options.numeric_mode = numeric_mode(mode);
  std::shared_ptr<Engine> engine;
  {
    const WithoutGil nogil;
    engine = Engine::load(path, options);
  }
  return {std::move(engine), digest};
}

void bind_prefix(py::module_& m) {
  py::class_<PyPrefix>(
      m, "PrefixCache",
      "The prefilled state of a token prefix at one depth. Immutable; any number of "
      "requests may share it.")
      .def_property_readonly(
          "length", [](const PyPrefix& p) { return p.open()->length(); },
          "Tokens from position 0, parents included.")
      .def_property_readonly(
          "own_length", [](const PyPrefix& p) { return p.open()->own_length(); },
          "Tokens after the parent's.")
      .def_property_readonly(
          "depth", [](const PyPrefix& p) { return p.open()->depth; }, "Loops it was built with.")
      .def_property_readonly(
          "bytes", [](const PyPrefix& p) { return p.open()->memory.bytes(); },
          "Bytes of its own tokens' keys and values; parents excluded.")
      .def_property_readonly("closed", [](const PyPrefix& p) { return !p.state; })
      .def(
          "close", [](PyPrefix& p) { p.state.reset(); },
          "Gives the handle up; its memory goes when no child and no running call needs it.")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyPrefix& p, const py::args&) { p.state.reset(); });
}

void bind_result(py::module_& m) {
  py::class_<ScoreResult>(m, "ScoreResult")
      .def_readonly("logprobs", &ScoreResult::logprobs,
                    "float32 [S]: natural-log probability of each scored id, item after item.")
      .def_readonly("greedy", &ScoreResult::greedy,
                    "bool [S]: the id is the argmax, the lowest id on ties.")
      .def_readonly("offsets", &ScoreResult::offsets,
                    "int64 [n + 1]: item i's values are [offsets[i], offsets[i + 1]).");
}

}  // namespace

}  // namespace tinyloop

void bind_model(py::module_& m) {
  using namespace tinyloop;
  bind_prefix(m);
  bind_result(m);
  py::class_<PyModel>(m, "Model",
                      "One loaded model. It runs one forward at a time: a second concurrent call "
                      "raises ConcurrentUseError at once and changes nothing.")
      .def("score", &PyModel::score, "token_ids"_a, "offsets"_a, "n_scored"_a, py::kw_only(),
           "prefixes"_a = py::none(), "depth"_a = py::none())
      .def("score_tokens", &PyModel::score_tokens, "token_ids"_a, "depth"_a = py::none(),
           "prompt_len"_a = 0)
      .def("prefix", &PyModel::prefix, "token_ids"_a, "depth"_a = py::none(),
           "parent"_a = py::none())
      .def_property_readonly("vram_usage_bytes",
                             [](const PyModel& p) { return p.open()->account->live_bytes(); })
      .def("memory_report", [](const PyModel& p) { return p.open()->account->report(); })
      .def_property_readonly("descriptor",
                             [](const PyModel& p) { return describe(p.open()->descriptor); })
      .def_property_readonly("metadata", [](const PyModel& p) { return p.open()->metadata; })
      .def_property_readonly("digest", [](const PyModel& p) { return p.digest(); })
      .def_property_readonly("numerics_id",
                             [](const PyModel& p) { return p.open()->numerics_id(); })
      .def_property_readonly("max_seq_len",
                             [](const PyModel& p) { return p.open()->options.max_seq_len; })
      .def_property_readonly("counters",
                             [](const PyModel& p) {
                               const Counters& c = p.open()->counters;
                               return py::dict("rows"_a = c.rows.load(),
                                               "head_rows"_a = c.head_rows.load(),
                                               "passes"_a = c.passes.load());
                             })
      .def_property_readonly("closed", &PyModel::closed)
      .def("close", &PyModel::close)
      .def("_fail_allocation",
           [](const PyModel& p, int64_t n) { p.open()->account->fail_allocation(n); })
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyModel& p, const py::args&) { p.close(); });
  py::module_::import("atexit").attr("register")(py::cpp_function(&wait_for_calls));
  m.def("load_model", &load, "path"_a, py::kw_only(), "digest"_a, "max_seq_len"_a,
        "prefill_chunk"_a, "device"_a, "cache_mode"_a, "fp16_cache"_a, "budget_bytes"_a,
        "threads"_a, "numeric_mode"_a, "cpu_isa"_a);
}
