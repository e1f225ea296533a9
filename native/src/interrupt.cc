#include "interrupt.h"

#include <utility>

namespace tinyloop {

namespace {

// Soon enough for a person at a keyboard, and too rare to be felt.
constexpr std::chrono::milliseconds kBetweenPolls{50};

thread_local InterruptScope* innermost = nullptr;

}  // namespace

InterruptScope::InterruptScope(std::function<void()> poll)
    : poll_(std::move(poll)),
      next_(std::chrono::steady_clock::now() + kBetweenPolls),
      outer_(std::exchange(innermost, this)) {}

InterruptScope::~InterruptScope() { innermost = outer_; }

void poll_interrupt() {
  InterruptScope* const scope = innermost;
  if (scope == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < scope->next_) return;
  scope->next_ = now + kBetweenPolls;
  scope->poll_();
}

}  // namespace tinyloop
