// A way for the caller of a long call to stop it between two layers.
#pragma once

#include <chrono>
#include <functional>

namespace tinyloop {

// While it lives, calls of this thread ask `poll` from time to time; what `poll` throws ends the
// call, which then has changed nothing. Of nested scopes the innermost is asked.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<void()> poll);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  friend void poll_interrupt();
  std::function<void()> poll_;
  std::chrono::steady_clock::time_point next_;
  InterruptScope* outer_;
};

// Asks the scope of this thread, if there is one, unless it was asked a moment ago.
void poll_interrupt();

}  // namespace tinyloop
