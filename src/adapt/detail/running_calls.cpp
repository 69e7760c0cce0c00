#include "adapt/detail/running_calls.h"

#include <brim/adapt/detail/running_call.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "fork.h"
#include "memory/backend.h"
#include "memory/host_room.h"
#include "per_thread.h"
#include "waiting.h"

namespace brim {

namespace {

/// The calls of one thread. Other threads find it among AllThreads.
struct ThreadCalls {
  const pthread_t thread = pthread_self();
  RunningCall::Counts counts{.host_limit = detail::host_limit_of_thread()};
  std::atomic<bool> waiting{false};

  ThreadCalls();
  ~ThreadCalls();
};

struct AllThreads {
  std::mutex mutex;
  std::vector<const ThreadCalls*> threads;
  std::uint64_t ended = 0;  // calls of threads that are gone

  /// A child has the thread that forked only.
  void in_forked_child() {
    std::erase_if(threads, [](const ThreadCalls* calls) {
      return pthread_equal(calls->thread, pthread_self()) == 0;
    });
  }
};

AllThreads& all_threads() { return shared_object<AllThreads>(); }

ThreadCalls::ThreadCalls() {
  AllThreads& all = all_threads();
  const std::lock_guard lock(all.mutex);
  all.threads.push_back(this);
}

ThreadCalls::~ThreadCalls() {
  AllThreads& all = all_threads();
  const std::lock_guard lock(all.mutex);
  std::erase(all.threads, this);
  all.ended += counts.ended.load();
}

ThreadCalls& this_thread() { return PerThread<ThreadCalls>::get(); }

std::int64_t cpu_nanoseconds(pthread_t thread) {
  clockid_t clock{};
  timespec used{};
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &used) != 0) {
    return 0;
  }
  return std::int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
}

struct Others {
  int running = 0;
  std::uint64_t ended = 0;
  std::int64_t nanoseconds = 0;  // of CPU time, used by those that run
};

Others others() {
  const ThreadCalls* const own = &this_thread();
  AllThreads& all = all_threads();
  Others result;
  const std::lock_guard lock(all.mutex);
  result.ended = all.ended;
  for (const ThreadCalls* thread : all.threads) {
    if (thread != own) {
      const RunningCall::Counts& counts = thread->counts;
      result.ended += counts.ended.load();
      if (counts.begun.load() != counts.ended.load() && !thread->waiting.load()) {
        ++result.running;
        result.nanoseconds += cpu_nanoseconds(thread->thread);
      }
    }
  }
  return result;
}

bool limits_host(const AdaptOptions& options) {
  const c10::DeviceType kind = options.device ? options.device->type() : default_device_type();
  return options.host_limit && kind == c10::DeviceType::CPU;
}

}  // namespace

RunningCall::RunningCall(const AdaptOptions& options)
    : counts_(this_thread().counts),
      host_limit_(limits_host(options) ? HostLimit::State::open : HostLimit::State::closed,
                  counts_.host_limit) {
  increment(counts_.begun);
}

bool another_call_runs() { return others().running > 0; }

std::uint64_t calls_ended_elsewhere() { return others().ended; }

bool wait_for_another_call(std::uint64_t since, std::chrono::steady_clock::time_point deadline,
                           c10::Device device) {
  using SteadyClock = std::chrono::steady_clock;
  constexpr auto kPause = std::chrono::milliseconds(2);
  constexpr auto kStandstill = std::chrono::seconds(1);
  const Others before = others();
  if (before.ended == since && before.running == 0) {
    return false;
  }
  struct Waiting {
    ThreadCalls& calls = this_thread();
    Waiting() { calls.waiting.store(true); }
    ~Waiting() { calls.waiting.store(false); }
  } const guard;
  const auto progress = [&](const Others& now) {
    return std::pair(now.nanoseconds, backend_for(device).peak(device).current);
  };
  auto last = progress(before);
  auto moved = SteadyClock::now();
  while (SteadyClock::now() < deadline) {
    waiting([&] { std::this_thread::sleep_for(kPause); });
    throw_if_interrupted();
    const Others now = others();
    if (now.ended != since || now.running == 0) {
      return true;
    }
    // A call may wait for a thread that it has started, or for autograd's, and so for this call.
    if (const auto latest = progress(now); latest != last) {
      last = latest;
      moved = SteadyClock::now();
    } else if (SteadyClock::now() - moved > kStandstill) {
      return false;
    }
  }
  return false;
}

}  // namespace brim
