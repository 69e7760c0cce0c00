// What an adaptive call costs in C++ when it fits at once: brim::batch around a function that does
// nothing, and what it is made of. Where there is an accelerator it is in use, so that its random
// generators are kept too. Nanoseconds over the bare call, medians over batches that take turns.
//
//     ./dev bench adapt
//     perf record -g build/2.13.0/benchmarks/bench_adapt loop    one case without end: the first
#include <ATen/Context.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/detail/random_state.h>
#include <brim/memory/stats.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

namespace {

constexpr int kCalls = 20000;
constexpr int kBatches = 101;

[[gnu::noinline]] std::int64_t tiny(std::int64_t size) {
  asm volatile("" ::"r"(size));  // not to be optimised away
  return size;
}

struct Case {
  const char* name;
  const char* target;
  std::function<void()> loop;
  std::vector<double> times{};
};

template <class Work>
Case repeated(const char* name, const Work& work, const char* target = "") {
  return {name, target, [work] {
            for (int i = 1; i <= kCalls; ++i) {
              work(i);
            }
          }};
}

double nanoseconds(const std::function<void()>& loop) {
  const auto begin = std::chrono::steady_clock::now();
  loop();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin)
             .count() /
         kCalls;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + kBatches / 2, values.end());
  return values[kBatches / 2];
}

}  // namespace

int main(int count, char** /*arguments*/) {
  const c10::Device device = brim::default_device();  // begins to use it
  static const brim::AdaptOptions defaults;
  static const brim::AdaptOptions plain{.restore_random_state = false};
  static const brim::AdaptOptions on_cpu{.device = c10::Device(at::kCPU)};
  static const brim::AdaptOptions on_device{.device = device};
  std::vector<Case> cases{
      repeated(
          "brim::batch", [](int i) { brim::batch(i, tiny); }, "target <= 60 ns"),
      repeated("bare", [](int i) { tiny(i); }),
      repeated("brim::batch, random state not kept", [](int i) { brim::batch(i, tiny, plain); }),
      repeated("brim::batch, device = cpu", [](int i) { brim::batch(i, tiny, on_cpu); }),
  };
  if (!device.is_cpu()) {
    const auto part = [&](const char* name, auto work) { cases.push_back(repeated(name, work)); };
    part("brim::batch, the device named", [](int i) { brim::batch(i, tiny, on_device); });
    part("  of it: the random state", [device](int) { const brim::RandomState state(device); });
    part("  of it: the current device",
         [device](int) { c10::impl::VirtualGuardImpl(device.type()).getDevice(); });
    part("  of it: a checkpoint, cheap",
         [](int) { const brim::Checkpoint checkpoint(defaults, brim::Checkpoint::Detail::cheap); });
    part("  of it: a checkpoint with what is held there",
         [](int) { const brim::Checkpoint checkpoint(defaults); });
  }
  while (count > 1) {
    cases.front().loop();
  }
  for (int batch = 0; batch < kBatches; ++batch) {
    for (Case& one : cases) {
      one.times.push_back(nanoseconds(one.loop));
    }
  }
  const double bare = median(cases[1].times);
  std::printf("A call that fits, tiny function, C++, on %s: over the bare call of %.1f ns\n",
              device.str().c_str(), bare);
  for (const Case& one : cases) {
    if (&one != &cases[1]) {
      std::printf("  %-46s %8.1f ns   %s\n", one.name, median(one.times) - bare, one.target);
    }
  }
  return 0;
}
