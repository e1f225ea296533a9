#include "running_calls.h"

#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

namespace py = pybind11;

namespace tinyloop {

namespace {

// Touched with the GIL held.
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

}  // namespace

WithoutGil::Place::Place() {
  const auto& closer = calls().closer;
  if (closer && *closer != std::this_thread::get_id()) park();
  ++calls().running;
}
WithoutGil::Place::~Place() { --calls().running; }

// Python runs its signal handlers in the main thread alone.
std::unique_ptr<InterruptScope> WithoutGil::watch_signals() {
  const py::module_ threading = py::module_::import("threading");
  if (!threading.attr("get_ident")().equal(threading.attr("main_thread")().attr("ident"))) {
    return nullptr;
  }
  return std::make_unique<InterruptScope>([] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

void wait_for_calls() {
  calls().closer = std::this_thread::get_id();
  while (calls().running > 0) {
    py::gil_scoped_release nogil;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace tinyloop
