#include "threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tinyloop/errors.h"

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

// A round in one word: how many items it has and which is next. A claim is one fetch_add, which
// says both; so a thread that comes late to a round either gets an item of the round that runs, or
// none.
constexpr int kItemBits = 32;
constexpr uint64_t pack_round(uint64_t items) { return items << kItemBits; }
constexpr uint64_t items_of(uint64_t round) { return round >> kItemBits; }
constexpr uint64_t next_of(uint64_t round) { return round & ((uint64_t{1} << kItemBits) - 1); }

}  // namespace

int available_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

struct Threads::State {
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> round{0};
  std::atomic<int64_t> finished{0};  // items of the round that are done
  const std::function<void(int64_t, int)>* task = nullptr;

  bool has_items() const {
    const uint64_t now = round.load(std::memory_order_acquire);
    return next_of(now) < items_of(now);
  }

  // Whoever holds an item keeps its round open, so the task may be read after the claim.
  void take_items(int thread) {
    int64_t done = 0;
    while (has_items()) {
      const uint64_t claim = round.fetch_add(1, std::memory_order_acq_rel);
      if (next_of(claim) >= items_of(claim)) break;
      (*task)(static_cast<int64_t>(next_of(claim)), thread);
      ++done;
    }
    if (done != 0) finished.fetch_add(done, std::memory_order_release);
  }

  void work(int thread) {
    const auto wanted = [this] { return has_items() || stopping; };
    for (;;) {
      if (!spin_until(wanted)) {
        std::unique_lock<std::mutex> lock(mutex);
        wake.wait(lock, wanted);
      }
      if (stopping) return;
      take_items(thread);
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }
};

Threads::Threads(int count) : state_(std::make_unique<State>()), owner_process_(::getpid()) {
  State* state = state_.get();
  try {
    for (int thread = 1; thread < count; ++thread) {
      state->workers.emplace_back([state, thread] { state->work(thread); });
    }
  } catch (const std::system_error& error) {
    const size_t started = state->workers.size();
    state->stop();
    throw LoadError("cannot start " + std::to_string(count - 1) +
                    " compute threads: the system gave " + std::to_string(started) + " (" +
                    error.what() + "); load with fewer threads");
  }
}

Threads::~Threads() {
  if (::getpid() == owner_process_) {
    state_->stop();
  } else {
    static_cast<void>(state_.release());
  }
}

int Threads::count() const { return static_cast<int>(state_->workers.size()) + 1; }

void Threads::run(int64_t items, const std::function<void(int64_t, int)>& task) {
  if (items <= 0) return;
  State& s = *state_;
  if (s.workers.empty() || items == 1) {
    for (int64_t item = 0; item < items; ++item) task(item, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.task = &task;
    s.finished.store(0, std::memory_order_relaxed);
    s.round.store(pack_round(static_cast<uint64_t>(items)), std::memory_order_release);
  }
  s.wake.notify_all();
  s.take_items(0);
  while (s.finished.load(std::memory_order_acquire) != items) std::this_thread::yield();
}

}  // namespace tinyloop
