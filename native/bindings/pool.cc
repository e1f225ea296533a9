// PrefixPool for Python.
#include "pool.h"

#include <pybind11/stl.h>

#include "arrays.h"
#include "bindings.h"
#include "faces.h"
#include "making.h"
#include "running_calls.h"

namespace py = pybind11;

namespace tinyloop {

namespace {

// The GIL serialises the books; create() lets go of it only while the model computes.
struct PyPool {
  std::shared_ptr<Pool> pool;  // null once closed: a closed pool must not keep its model's memory

  Pool& open() const {
    if (!pool) throw ClosedHandleError("cannot use the pool: it was closed");
    pool->require_open();
    return *pool;
  }
  void close() {
    if (pool) pool->ledger.close();
    pool.reset();
  }
};

EvictPolicy evict_policy(const std::string& name) {
  if (name == "lru") return EvictPolicy::kLru;
  if (name == "never") return EvictPolicy::kNever;
  throw InvalidInputError("cannot make a pool with evict='" + name + "': it is lru or never");
}

std::span<const int32_t> span_of(const Array<int32_t>& ids) {
  return {ids.data(), static_cast<size_t>(ids.size())};
}

PyPool open_pool(const PyModel& model, std::optional<size_t> budget_bytes,
                 const std::string& evict) {
  if (budget_bytes == size_t{0}) {
    throw InvalidInputError(
        "cannot make a pool with budget_bytes=0: it must be positive, or None for no limit");
  }
  return {std::make_shared<Pool>(model.open(), budget_bytes.value_or(0), evict_policy(evict))};
}

int64_t create(const PyPool& face, const py::object& token_ids, std::optional<int> depth,
               std::optional<int64_t> parent, std::optional<bool> upgradable) {
  Pool& pool = face.open();
  const std::shared_ptr<Pool> alive = face.pool;
  const auto ids = require<int32_t>(token_ids, "token_ids");
  const int loops = depth.value_or(static_cast<int>(pool.engine->descriptor.loops));
  const bool keep = upgradable.value_or(pool.engine->descriptor.loops > 1);
  const Pool::Room room = pool.check_room_for(span_of(ids), loops, parent, keep);
  if (room.held) return *room.held;
  const ForwardGuard guard(*pool.engine);
  const auto build = [&] {
    const WithoutGil nogil;
    return prefill_guarded(pool.engine, ids.data(), static_cast<size_t>(ids.size()), loops,
                           room.parent, keep);
  };
  std::shared_ptr<PrefixState> built;
  try {
    built = build();
  } catch (const OutOfMemoryError&) {
    // The memory of those that must go anyway may be what was missing.
    if (!face.open().ledger.make_room(room.bytes, parent)) throw;
    built = build();
  }
  return face.open().hold(std::move(built), parent);
}

std::optional<int64_t> find(const PyPool& face, const py::object& token_ids,
                            std::optional<int> depth) {
  Pool& pool = face.open();
  const auto ids = require<int32_t>(token_ids, "token_ids");
  return pool.find(span_of(ids), depth.value_or(static_cast<int>(pool.engine->descriptor.loops)));
}

py::list evicted(const PyPool& face) {
  py::list report;
  for (const Eviction& line : face.open().ledger.evicted()) {
    report.append(py::make_tuple(line.key, line.bytes, line.asked));
  }
  return report;
}

}  // namespace

}  // namespace tinyloop

void bind_pool(py::module_& m) {
  using namespace tinyloop;
  using namespace py::literals;
  py::class_<PyPool> pool(m, "PrefixPool",
                          "Prefixes of one model under a byte budget. Parents outlive their "
                          "children; every eviction is reported by evicted().");
  require_constructor(pool);
  pool.def(py::init(&open_pool), "model"_a, "budget_bytes"_a, "evict"_a = "lru")
      .def("create", &create, "token_ids"_a, "depth"_a = py::none(), "parent_key"_a = py::none(),
           py::kw_only(), "upgradable"_a = py::none(),
           "The key of the prefix, built unless an equal one is held: the same ids from position 0 "
           "on, depth and upgradability. Then that one's key comes back, which is a use of it; its "
           "pins and its parent stay as they are.")
      .def(
          "put",
          [](const PyPool& p, const PyPrefix& prefix) { return p.open().put(prefix.open()); },
          "prefix"_a,
          "The key of the prefix, or of an equal one that is held already, as for create().")
      .def(
          "get", [](const PyPool& p, int64_t key) { return PyPrefix{p.open().get(key)}; }, "key"_a)
      .def("find", &find, "token_ids"_a, "depth"_a = py::none())
      .def(
          "pin", [](const PyPool& p, int64_t key) { p.open().ledger.pin(key); }, "key"_a)
      .def(
          "unpin", [](const PyPool& p, int64_t key) { p.open().ledger.unpin(key); }, "key"_a)
      .def(
          "evict", [](const PyPool& p, int64_t key) { p.open().ledger.evict(key); }, "key"_a)
      .def("evicted", &evicted)
      .def("keys", [](const PyPool& p) { return p.open().ledger.keys(); })
      .def_property_readonly("bytes", [](const PyPool& p) { return p.open().ledger.bytes(); })
      .def_property_readonly("budget_bytes",
                             [](const PyPool& p) { return p.open().ledger.budget_bytes(); })
      .def_property_readonly("closed", [](const PyPool& p) { return !p.pool; })
      .def("close", &PyPool::close)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyPool& p, const py::args&) { p.close(); });
}
