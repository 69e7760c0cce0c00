// What an adaptive call costs in C++ when it fits at once: brim::batch around a function that does
// nothing, with and without keeping the random state. The last lines are nanoseconds over the bare
// call, medians over batches that take turns.
//
//     ./dev bench adapt
#include <brim/adapt/adapt.h>

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

int main() {
  brim::AdaptOptions plain;
  plain.restore_random_state = false;
  const std::vector<std::function<void()>> loops{
      [] {
        for (int i = 1; i <= kCalls; ++i) {
          tiny(i);
        }
      },
      [] {
        for (int i = 1; i <= kCalls; ++i) {
          brim::batch(i, tiny);
        }
      },
      [&] {
        for (int i = 1; i <= kCalls; ++i) {
          brim::batch(i, tiny, plain);
        }
      },
  };
  std::vector<std::vector<double>> times(loops.size());
  for (int batch = 0; batch < kBatches; ++batch) {
    for (std::size_t i = 0; i < loops.size(); ++i) {
      times[i].push_back(nanoseconds(loops[i]));
    }
  }
  const double bare = median(times[0]);
  std::printf("A call that fits, tiny function, C++: over the bare call of %.1f ns\n", bare);
  std::printf("  brim::batch                              %6.1f ns   target <= 30 ns\n",
              median(times[1]) - bare);
  std::printf("  brim::batch, random state not kept       %6.1f ns\n", median(times[2]) - bare);
  return 0;
}
