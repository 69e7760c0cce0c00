// What an adaptive call costs in C++ when it fits at once: brim::batch around a function that does
// nothing, and the parts of that cost. An accelerator is in use if there is one, so that its random
// generators are kept too. Nanoseconds over the bare call.
//
//     ./dev bench adapt
//     perf record -g build/2.13.0/benchmarks/bench_adapt loop    the first case without end
#include <ATen/Context.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/detail/random_state.h>
#include <brim/memory/stats.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "harness.h"

namespace {

using brim::bench::nanoseconds;
using brim::bench::repeated;

constexpr int kCalls = 20000;
constexpr int kRounds = 101;

[[gnu::noinline]] std::int64_t tiny(std::int64_t size) {
  asm volatile("" ::"r"(size));  // not to be optimised away
  return size;
}

}  // namespace

int main(int count, char** /*arguments*/) {
  const c10::Device device = brim::default_device();  // begins to use it
  static const brim::AdaptOptions plain{.restore_random_state = false};
  static const brim::AdaptOptions on_cpu{.device = c10::Device(at::kCPU)};
  static const brim::AdaptOptions on_device{.device = device};
  std::vector<brim::bench::Case> cases{
      repeated("brim::batch", [](int i) { brim::batch(i, tiny); }),
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
  }
  while (count > 1) {
    cases.front().loop(kCalls);
  }
  const std::vector<double> times = brim::bench::medians(cases, kRounds, kCalls);
  std::thread([] {}).join();  // from now on the C library's locks are atomic
  const double threaded = brim::bench::medians(cases, kRounds, kCalls).front();
  const double bare = times[1];
  const brim::bench::Table table("A call that fits, tiny function, C++: over the bare call",
                                 c10::DeviceTypeName(device.type(), /*lower_case=*/true));
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (i != 1) {
      const char* target = device.is_cpu() ? "target <= 30 ns" : "target <= 60 ns";
      table.row(cases[i].name, nanoseconds(times[i] - bare), i == 0 ? target : "");
    }
  }
  table.row("brim::batch, once there were two threads", nanoseconds(threaded - bare));
  return 0;
}
