// A fixed pool of compute threads that one engine owns.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tinyloop {

// Runs a loop's items on the caller and on n - 1 workers. Which thread takes which item is not
// fixed, so an item must write only what belongs to it; results then do not depend on the number
// of threads. Items must not throw.
class Threads {
 public:
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(item, thread) for every item in [0, items), 0 <= thread < count(); returns when all
  // are done.
  void run(int64_t items, const std::function<void(int64_t item, int thread)>& task);

 private:
  void work(int thread);
  void take_items(int thread);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};  // raised under the mutex once per run()
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> next_item_{0};
  std::atomic<int> busy_{0};
  int64_t items_ = 0;
  const std::function<void(int64_t, int)>* task_ = nullptr;
};

// How many processors this process may run on (its affinity mask), at least 1.
int available_processors();

}  // namespace tinyloop
