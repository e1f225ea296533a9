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
// survive that; so the module's exit hook lets the calls that run end at their next layer, waits
// for that, and parks their threads as well as those that come later: an error would make them
// print while the interpreter goes away, which aborts the process. The thread that finalizes may
// still call.
//
// A forked child has one thread, and of the calls that ran those of that thread alone.
struct CallPlace {
  CallPlace();
  ~CallPlace();
  CallPlace(const CallPlace&) = delete;
  CallPlace& operator=(const CallPlace&) = delete;
  const int errors_before;
};

class WithoutGil {
 private:
  CallPlace place_;
  std::unique_ptr<InterruptScope> interrupt_ = watch();
  pybind11::gil_scoped_release nogil_;

  static std::unique_ptr<InterruptScope> watch();
};

// The same for what takes a moment and cannot be interrupted: closing.
class BrieflyWithoutGil {
 private:
  CallPlace place_;
  pybind11::gil_scoped_release nogil_;
};

// The module's exit hook.
void wait_for_calls();

}  // namespace tinyloop
