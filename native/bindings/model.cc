// Model, its loading and its plan for Python: check, convert, release the GIL, call.
#include <pybind11/stl.h>

#include "arrays.h"
#include "bindings.h"
#include "faces.h"
#include "generation.h"
#include "making.h"
#include "plan.h"
#include "running_calls.h"
#include "scoring.h"

namespace tinyloop {

using namespace py::literals;

void PyModel::close() {
  if (!engine_) return;
  engine_->close();
  std::shared_ptr<Engine> last = std::move(engine_);
  engine_.reset();
  const BrieflyWithoutGil nogil;  // joins the compute threads if this was the last owner
  last.reset();
}

namespace {

const char* name(NormPlacement placement) {
  switch (placement) {
    case NormPlacement::kPre:
      return "pre";
    case NormPlacement::kSandwich:
      return "sandwich";
    case NormPlacement::kBranch:
      return "branch";
    case NormPlacement::kSum:
      return "sum";
  }
  return "";
}

const char* name(StateInit init) {
  switch (init) {
    case StateInit::kInput:
      return "input";
    case StateInit::kZero:
      return "zero";
    case StateInit::kNormal:
      return "normal";
  }
  return "";
}

const char* name(QkNorm norm) {
  switch (norm) {
    case QkNorm::kNone:
      return "none";
    case QkNorm::kHead:
      return "head";
    case QkNorm::kFull:
      return "full";
  }
  return "";
}

// The keys of the file's descriptor, by their names there.
py::dict describe(const Descriptor& d) {
  return py::dict(
      "family"_a = d.family, "vocab_size"_a = d.vocab_size, "hidden_size"_a = d.hidden_size,
      "ffn_size"_a = d.ffn_size, "n_q_heads"_a = d.n_q_heads, "n_kv_heads"_a = d.n_kv_heads,
      "head_dim"_a = d.head_dim, "n_layers"_a = d.n_layers, "n_prelude"_a = d.n_prelude,
      "n_coda"_a = d.n_coda, "n_low"_a = d.n_low, "low_cycles"_a = d.low_cycles,
      "max_positions"_a = d.max_positions, "loops"_a = d.loops, "norm_eps"_a = d.norm_eps,
      "norm_placement"_a = name(d.norm_placement), "norm_weight"_a = d.norm_weight,
      "loop_norm"_a = d.loop_norm, "exit_norm"_a = d.exit_norm, "state_init"_a = name(d.state_init),
      "state_std"_a = d.state_std, "inject"_a = d.inject == Inject::kLinear ? "linear" : "none",
      "embed_scale"_a = d.embed_scale,
      "rope_style"_a = d.rope_style == RopeStyle::kPair ? "pair" : "half",
      "qk_norm"_a = name(d.qk_norm), "attn_bias"_a = d.attn_bias, "attn_gate"_a = d.attn_gate,
      "prefix_lm"_a = d.prefix_lm, "exit_gate"_a = d.exit_gate, "tied_head"_a = d.tied_head,
      "bos_id"_a = d.bos_id, "eos_ids"_a = d.eos_ids, "add_bos"_a = d.add_bos,
      "chat_template"_a = d.chat_template);
}

NumericMode numeric_mode(const std::string& mode) {
  if (mode == "fp16") return NumericMode::kFp16;
  if (mode == "fp32") return NumericMode::kFp32;
  if (mode == "bf16") return NumericMode::kBf16;
  throw LoadError("cannot load with numeric_mode='" + mode + "': it is none of fp16, bf16, fp32");
}

// The keywords of a load; native/engine.py gives them all.
LoadOptions load_options(const py::dict& given) {
  LoadOptions o;
  o.max_seq_len = given["max_seq_len"].cast<int>();
  o.prefill_chunk = given["prefill_chunk"].cast<int>();
  o.device = given["device"].cast<std::string>();
  o.cache_mode = given["cache_mode"].cast<std::string>();
  o.fp16_cache = given["fp16_cache"].cast<std::string>();
  o.deterministic = given["deterministic"].cast<std::string>();
  o.budget_bytes = given["budget_bytes"].cast<size_t>();
  o.threads = given["threads"].cast<int>();
  o.cpu_isa = given["cpu_isa"].cast<std::string>();
  o.numeric_mode = numeric_mode(given["numeric_mode"].cast<std::string>());
  o.state_init = given["state_init"].cast<std::string>();
  o.state_seed = given["state_seed"].cast<uint64_t>();
  o.packages = given["packages"].cast<std::string>();
  return o;
}

PyModel load(const py::bytes& path_bytes, const std::string& digest, const py::dict& options) {
  const std::string path = path_bytes;
  const LoadOptions resolved = load_options(options);
  std::shared_ptr<Engine> engine;
  {
    const WithoutGil nogil;
    engine = Engine::load(path, resolved);
  }
  return {std::move(engine), digest};
}

py::dict plan(const py::bytes& path, const py::dict& options, int depth, size_t prefix_length) {
  const MemoryPlan plan = plan_memory(path, load_options(options), depth, prefix_length);
  return py::dict("owners"_a = plan.owners, "total"_a = plan.total,
                  "logit_rows"_a = plan.logit_rows, "prefix_bytes"_a = plan.prefix_tokens,
                  "cache_token_bytes"_a = plan.cache_token, "warnings"_a = plan.warnings);
}

py::list devices() {
  py::list list;
  for (const CudaDevice& d : cuda_devices()) {
    list.append(
        py::make_tuple("cuda:" + std::to_string(d.index), d.name, d.capability, d.total_bytes));
  }
  return list;
}

PyPrefix build_prefix_face(const PyModel& model, const py::object& token_ids,
                           std::optional<int> depth, const std::optional<PyPrefix>& parent,
                           std::optional<bool> upgradable) {
  const std::shared_ptr<Engine> engine = model.open();
  const Array<int32_t> ids = require<int32_t>(token_ids, "token_ids");
  const std::shared_ptr<PrefixState> base = parent ? parent->open() : nullptr;
  const int loops = model.depth_or_default(depth);
  // A model of one loop has nowhere to go; its states would be dead weight.
  const bool keep = upgradable.value_or(engine->descriptor.loops > 1);
  const int32_t* data = ids.data();
  const auto n = static_cast<size_t>(ids.size());
  const WithoutGil nogil;
  return {prefill(engine, data, n, loops, base, keep)};
}

std::vector<PyResume> start_many_face(const PyModel& model, const py::object& token_ids,
                                      const py::object& offsets, const py::object& n_scored,
                                      int depth, std::optional<int> max_depth,
                                      const Prefixes& prefixes, bool keep_cache,
                                      const py::object& prompt_lens) {
  const std::shared_ptr<Engine> engine = model.open();
  const FlatItems flat(token_ids, offsets, n_scored, prefixes);
  const auto prompts = per_item(prompt_lens, flat.size(), "prompt_lens");
  std::vector<StartItem> items;
  for (size_t i = 0; i < flat.size(); ++i) {
    items.push_back({flat.first_id(i), flat.n_ids(i), flat.scored(i), flat.prefix(i),
                     prompts ? prompts->data()[i] : 0});
  }
  const int deepest =
      max_depth.value_or(std::max(depth, static_cast<int>(engine->descriptor.loops)));
  std::vector<std::shared_ptr<ResumeState>> states;
  {
    const WithoutGil nogil;
    states = start(engine, items, depth, deepest, keep_cache);
  }
  std::vector<PyResume> handles;
  for (auto& state : states) handles.push_back({std::move(state)});
  return handles;
}

PyResume start_face(const PyModel& model, const py::object& token_ids, int depth,
                    std::optional<int> max_depth, const std::optional<PyPrefix>& prefix,
                    std::optional<int64_t> n_scored, bool keep_cache) {
  const std::shared_ptr<Engine> engine = model.open();
  const Array<int32_t> ids = require<int32_t>(token_ids, "token_ids");
  const auto n = static_cast<size_t>(ids.size());
  StartItem item{ids.data(), n, 0, prefix ? prefix->open() : nullptr, 0};
  if (n_scored && *n_scored < 1) {
    throw InvalidInputError("cannot start with n_scored=" + std::to_string(*n_scored) +
                            ": at least one id is scored");
  }
  item.n_scored = static_cast<size_t>(n_scored.value_or(static_cast<int64_t>(n) - 1));
  const int deepest =
      max_depth.value_or(std::max(depth, static_cast<int>(engine->descriptor.loops)));
  const WithoutGil nogil;
  return {start(engine, {item}, depth, deepest, keep_cache)[0]};
}

void upgrade_face(const PyModel& model, const std::vector<PyResume>& handles, int depth,
                  const Prefixes& prefixes) {
  const std::shared_ptr<Engine> engine = model.open();
  std::vector<std::shared_ptr<ResumeState>> states;
  std::vector<std::shared_ptr<PrefixState>> bases;
  for (const PyResume& handle : handles) {
    states.push_back(handle.open("handle " + std::to_string(states.size())));
  }
  if (prefixes) {
    bases = open_all(*prefixes, "handle");
    if (bases.size() != states.size()) {
      throw InvalidInputError("cannot upgrade " + std::to_string(states.size()) + " handles on " +
                              std::to_string(bases.size()) + " prefixes: give one for each");
    }
  }
  upgrade_without_gil(engine, states, depth, prefixes ? &bases : nullptr);
}

py::dict counters(const PyModel& model) {
  const std::shared_ptr<Engine> engine = model.open();
  const Counters& c = engine->counters;
  int64_t allocations = engine->account->allocations();
  if (engine->host_account != engine->account) allocations += engine->host_account->allocations();
  return py::dict("rows"_a = c.rows.load(), "head_rows"_a = c.head_rows.load(),
                  "passes"_a = c.passes.load(), "allocations"_a = allocations,
                  "device_waits"_a = engine->backend->waits());
}

void bind_calls(py::class_<PyModel>& model) {
  model
      .def("score", &score_items, "token_ids"_a, "offsets"_a, "n_scored"_a, py::kw_only(),
           "prefixes"_a = py::none(), "depth"_a = py::none(), "exit_threshold"_a = py::none(),
           "min_depth"_a = 1, "by_depth"_a = false, "gates"_a = false, "prompt_lens"_a = py::none())
      .def("score_tokens", &score_tokens, "token_ids"_a, "depth"_a = py::none(), "prompt_len"_a = 0)
      .def("prefix", &build_prefix_face, "token_ids"_a, "depth"_a = py::none(),
           "parent"_a = py::none(), py::kw_only(), "upgradable"_a = py::none())
      .def("start", &start_face, "token_ids"_a, "depth"_a, "max_depth"_a = py::none(),
           "prefix"_a = py::none(), py::kw_only(), "n_scored"_a = py::none(), "keep_cache"_a = true)
      .def("start_many", &start_many_face, "token_ids"_a, "offsets"_a, "n_scored"_a, "depth"_a,
           "max_depth"_a = py::none(), py::kw_only(), "prefixes"_a = py::none(),
           "keep_cache"_a = false, "prompt_lens"_a = py::none())
      .def("upgrade", &upgrade_face, "handles"_a, "depth"_a, py::kw_only(),
           "prefixes"_a = py::none())
      .def("generate", &generate_face, "requests"_a, "on_token"_a = py::none(),
           "max_batch"_a = py::none());
}

void bind_facts(py::class_<PyModel>& model) {
  model
      .def_property_readonly("vram_usage_bytes",
                             [](const PyModel& p) { return p.open()->account->live_bytes(); })
      .def("memory_report", [](const PyModel& p) { return p.open()->account->report(); })
      .def_property_readonly("descriptor",
                             [](const PyModel& p) { return describe(p.open()->descriptor); })
      .def_property_readonly("metadata", [](const PyModel& p) { return p.open()->metadata; })
      .def_property_readonly("digest", [](const PyModel& p) { return p.digest(); })
      .def_property_readonly("numerics_id",
                             [](const PyModel& p) { return p.open()->numerics_id(); })
      .def_property_readonly("block_bytes",
                             [](const PyModel& p) { return p.open()->account->alignment(); })
      .def_property_readonly("max_seq_len",
                             [](const PyModel& p) { return p.open()->options.max_seq_len; })
      .def_property_readonly("cache_mode",
                             [](const PyModel& p) { return p.open()->options.cache_mode; })
      .def_property_readonly("cache_mode_warning",
                             [](const PyModel& p) {
                               const std::shared_ptr<Engine> engine = p.open();
                               return cache_mode_warning(engine->descriptor,
                                                         engine->options.cache_mode);
                             })
      .def_property_readonly("counters", &counters);
}

}  // namespace

}  // namespace tinyloop

namespace py = pybind11;

void bind_model(py::module_& m) {
  using namespace tinyloop;
  py::class_<PyModel> model(m, "Model",
                            "One loaded model. It runs one forward at a time: a second concurrent "
                            "call raises ConcurrentUseError at once and changes nothing.");
  refuse_new(model);
  bind_calls(model);
  bind_start_of_generation(model);
  bind_facts(model);
  model.def_property_readonly("closed", &PyModel::closed)
      .def("close", &PyModel::close)
      .def("_fail_allocation",
           [](const PyModel& p, int64_t n) { p.open()->account->fail_allocation(n); })
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyModel& p, const py::args&) { p.close(); });
  py::module_::import("atexit").attr("register")(py::cpp_function(&wait_for_calls));
  m.def("load_model", &load, "path"_a, py::kw_only(), "digest"_a, "options"_a);
  m.def("has_cuda", &has_cuda_backend);
  m.def("devices", &devices);
  m.def("plan", &plan, "path"_a, "options"_a, "depth"_a, "prefix_length"_a);
}
