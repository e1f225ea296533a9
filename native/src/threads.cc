#include "threads.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace tinyloop {

namespace {

// Steps of one layer follow each other within microseconds: a worker that sleeps between them costs
// more than it saves. After this long without work the process is idle and the worker sleeps.
constexpr std::chrono::microseconds kSpin{50};

template <typename Predicate>
bool spin_until(Predicate done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();  // replicas may share a core
  }
  return true;
}

}  // namespace

int available_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

Threads::Threads(int count) {
  for (int thread = 1; thread < count; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

Threads::~Threads() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Threads::run(int64_t items, const std::function<void(int64_t, int)>& task) {
  if (items <= 0) return;
  if (workers_.empty() || items == 1) {
    for (int64_t item = 0; item < items; ++item) task(item, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    items_ = items;
    task_ = &task;
    next_item_ = 0;
    busy_ = static_cast<int>(workers_.size());
    ++round_;
  }
  wake_.notify_all();
  take_items(0);
  // Every worker must have left the round before the next one may change items_ and task_.
  while (busy_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
}

void Threads::take_items(int thread) {
  for (int64_t item = next_item_++; item < items_; item = next_item_++) (*task_)(item, thread);
}

void Threads::work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    const auto has_work = [&] { return round_ != seen || stopping_; };
    if (!spin_until(has_work)) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, has_work);
    }
    if (stopping_) return;
    seen = round_;
    take_items(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace tinyloop
