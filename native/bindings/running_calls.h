// Calls that run without the GIL, and the end of the interpreter.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "interrupt.h"

namespace tinyloop {

// Holds a place among the running calls, then gives the GIL up; in the reverse order at the end.
// In the main thread, signals are looked at from time to time: Ctrl-C ends the call.
//
// An interpreter that finalizes ends a thread where it takes the GIL back, and C++ frames do not
// survive that; so the module's exit hook waits for the calls that run, and a thread that comes
// later is parked: an error would make it print while the interpreter goes away, which aborts the
// process. The thread that finalizes may still call.
class WithoutGil {
 private:
  struct Place {
    Place();
    ~Place();
  };
  Place place_;
  std::unique_ptr<InterruptScope> interrupt_ = watch_signals();
  pybind11::gil_scoped_release nogil_;

  static std::unique_ptr<InterruptScope> watch_signals();
};

// The module's exit hook.
void wait_for_calls();

}  // namespace tinyloop
