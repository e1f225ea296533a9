#include "running_calls.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>

namespace py = pybind11;

namespace tinyloop {

namespace {

int running = 0;                    // calls of all threads; touched with the GIL held
thread_local int running_here = 0;  // of them, this thread's: a callback may call again
pid_t process = ::getpid();         // whose calls these are
std::atomic<std::thread::id> closer{std::thread::id()};  // who finalizes, once somebody does

// Ends a call from within. No caller sees it: the thread is parked before.
struct InterpreterEnds : std::exception {};

bool is_left_behind() {
  const std::thread::id id = closer.load();
  return id != std::thread::id() && id != std::this_thread::get_id();
}

void forget_threads_of_the_parent() {
  if (process == ::getpid()) return;
  process = ::getpid();
  running = running_here;
  closer = std::thread::id();
}

// Called with the GIL held. Nobody needs to wait for this thread's calls any more.
[[noreturn]] void park() {
  running -= running_here;
  PyEval_SaveThread();
  for (;;) ::pause();
}

}  // namespace

CallPlace::CallPlace() : errors_before(std::uncaught_exceptions()) {
  forget_threads_of_the_parent();
  if (is_left_behind()) park();
  ++running;
  ++running_here;
}
CallPlace::~CallPlace() {
  if (std::uncaught_exceptions() > errors_before && is_left_behind()) park();
  --running;
  --running_here;
}

// Python runs its signal handlers in the main thread alone.
std::unique_ptr<InterruptScope> WithoutGil::watch() {
  const py::module_ threading = py::module_::import("threading");
  const bool is_main =
      threading.attr("get_ident")().equal(threading.attr("main_thread")().attr("ident"));
  return std::make_unique<InterruptScope>([is_main] {
    if (is_left_behind()) throw InterpreterEnds();
    if (!is_main) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

void wait_for_calls() {
  forget_threads_of_the_parent();
  closer = std::this_thread::get_id();
  while (running > running_here) {
    py::gil_scoped_release nogil;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace tinyloop
