// A fixed pool of compute threads that one engine owns.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace tinyloop {

// Runs a loop's items on the caller and on n - 1 workers. Which thread takes which item is not
// fixed, so an item must write only what belongs to it; results then do not depend on the number
// of threads. Items must not throw.
class Threads {
 public:
  // Throws LoadError if the system does not start that many threads; none is left running then.
  explicit Threads(int count);
  // In a forked child the threads do not exist: their state is then left alone, not joined.
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const;

  // Calls task(item, thread) for every item in [0, items), 0 <= thread < count(); returns when all
  // are done. A worker that the system does not let run holds nobody up: the others take its items.
  void run(int64_t items, const std::function<void(int64_t item, int thread)>& task);

 private:
  struct State;
  std::unique_ptr<State> state_;
  pid_t owner_process_;
};

inline constexpr int kMaxThreads = 1024;

// How many processors this process may run on (its affinity mask), at least 1.
int available_processors();

}  // namespace tinyloop
