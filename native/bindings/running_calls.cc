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

void wait_for_calls() {
  calls().closer = std::this_thread::get_id();
  while (calls().running > 0) {
    py::gil_scoped_release nogil;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace tinyloop
