#include "adapt/running_calls.h"

#include <brim/adapt/checkpoint.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "fork.h"
#include "waiting.h"

namespace brim {

/// The calls of one thread. Only that thread writes, so that a call that fits pays for no lock and
/// for no cache line that others write to.
struct ThreadCalls {
  const std::thread::id thread = std::this_thread::get_id();
  std::atomic<int> running{0};
  std::atomic<std::uint64_t> ended{0};
  std::atomic<bool> waiting{false};
};

namespace {

struct AllThreads {
  std::mutex mutex;
  std::vector<const ThreadCalls*> threads;
};

AllThreads& all_threads();

ThreadCalls& this_thread() {
  struct Registered {
    ThreadCalls calls;
    Registered() {
      AllThreads& all = all_threads();
      const std::lock_guard lock(all.mutex);
      all.threads.push_back(&calls);
    }
    ~Registered() {
      AllThreads& all = all_threads();
      const std::lock_guard lock(all.mutex);
      std::erase(all.threads, &calls);
    }
  };
  thread_local Registered registered;
  return registered.calls;
}

AllThreads& all_threads() {
  static auto* const instance = [] {
    auto* all = new AllThreads;
    hold_during_fork(all->mutex, [] {  // a child has the thread that forked only
      std::erase_if(all_threads().threads, [](const ThreadCalls* calls) {
        return calls->thread != std::this_thread::get_id();
      });
    });
    return all;
  }();
  return *instance;
}

struct Others {
  int running = 0;
  std::uint64_t ended = 0;
};

Others others() {
  const ThreadCalls* const own = &this_thread();
  AllThreads& all = all_threads();
  Others result;
  const std::lock_guard lock(all.mutex);
  for (const ThreadCalls* thread : all.threads) {
    if (thread != own) {
      result.ended += thread->ended.load();
      result.running += thread->running.load() > 0 && !thread->waiting.load() ? 1 : 0;
    }
  }
  return result;
}

}  // namespace

RunningCall::RunningCall() : calls_(&this_thread()) {
  calls_->running.store(calls_->running.load(std::memory_order_relaxed) + 1,
                        std::memory_order_relaxed);
}

RunningCall::~RunningCall() {
  if (calls_ != nullptr) {
    calls_->running.store(calls_->running.load(std::memory_order_relaxed) - 1,
                          std::memory_order_relaxed);
    calls_->ended.store(calls_->ended.load(std::memory_order_relaxed) + 1,
                        std::memory_order_release);
  }
}

bool another_call_runs() { return others().running > 0; }

bool wait_for_another_call(std::chrono::steady_clock::time_point deadline) {
  constexpr auto kPause = std::chrono::milliseconds(2);
  const Others before = others();
  if (before.running == 0) {
    return false;
  }
  struct Waiting {
    ThreadCalls& calls = this_thread();
    Waiting() { calls.waiting.store(true); }
    ~Waiting() { calls.waiting.store(false); }
  } const guard;
  while (std::chrono::steady_clock::now() < deadline) {
    waiting([&] { std::this_thread::sleep_for(kPause); });
    const Others now = others();
    if (now.ended != before.ended || now.running == 0) {
      return true;
    }
  }
  return false;
}

}  // namespace brim
