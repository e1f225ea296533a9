// The pool's books as a private class, for tests: any Python object may be an entry's payload.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "making.h"
#include "prefix_pool.h"
#include "tinyloop/errors.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

using tinyloop::PoolLedger;
using Ids = py::array_t<int32_t, py::array::c_style>;

PoolLedger make_ledger(size_t budget_bytes, const std::string& evict) {
  if (evict == "lru") return {budget_bytes, tinyloop::EvictPolicy::kLru};
  if (evict == "never") return {budget_bytes, tinyloop::EvictPolicy::kNever};
  throw tinyloop::InvalidInputError("cannot make a pool with evict='" + evict +
                                    "': it is neither lru nor never");
}

int64_t put(PoolLedger& ledger, const Ids& ids, int depth, size_t bytes,
            std::optional<int64_t> parent, const py::object& payload, int64_t variant) {
  tinyloop::PoolEntry entry;
  entry.ids.assign(ids.data(), ids.data() + ids.size());
  entry.depth = depth;
  entry.variant = variant;
  entry.bytes = bytes;
  entry.parent = parent;
  entry.payload = std::make_shared<py::object>(payload);
  return ledger.put(std::move(entry));
}

std::optional<int64_t> find(const PoolLedger& ledger, const Ids& ids, int depth, bool exactly) {
  const auto rule = exactly ? tinyloop::DepthRule::kExactly : tinyloop::DepthRule::kAtLeast;
  return ledger.find({ids.data(), static_cast<size_t>(ids.size())}, depth, rule);
}

py::list evicted(PoolLedger& ledger) {
  py::list report;
  for (const tinyloop::Eviction& line : ledger.evicted()) {
    report.append(py::make_tuple(line.key, line.bytes, line.asked));
  }
  return report;
}

}  // namespace

void bind_pool_ledger(py::module_& m) {
  py::class_<PoolLedger> ledger(m, "_PoolLedger");
  tinyloop::require_constructor(ledger);
  ledger.def(py::init(&make_ledger), "budget_bytes"_a, "evict"_a = "lru")
      .def("put", &put, "ids"_a.noconvert(), "depth"_a, "bytes"_a, "parent"_a = py::none(),
           "payload"_a = py::none(), "variant"_a = 0)
      .def("make_room", &PoolLedger::make_room, "bytes"_a, "keep"_a = py::none())
      .def(
          "get",
          [](PoolLedger& ledger, int64_t key) {
            return *std::static_pointer_cast<py::object>(ledger.get(key));
          },
          "key"_a)
      .def("find", &find, "ids"_a.noconvert(), "depth"_a, "exactly"_a = false)
      .def("pin", &PoolLedger::pin, "key"_a)
      .def("unpin", &PoolLedger::unpin, "key"_a)
      .def("evict", &PoolLedger::evict, "key"_a)
      .def("evicted", &evicted)
      .def_property_readonly("bytes", &PoolLedger::bytes)
      .def_property_readonly("budget_bytes", &PoolLedger::budget_bytes)
      .def("keys", &PoolLedger::keys)
      .def_property_readonly("closed", &PoolLedger::closed)
      .def("close", &PoolLedger::close);
}
