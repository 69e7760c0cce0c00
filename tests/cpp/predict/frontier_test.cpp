// Which batches are measured near a limit, on made-up programs: none over it afterwards, well used.

#include <brim/predict/memory_model.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "predict/frontier.h"

namespace brim {
namespace {

using Need = std::function<double(double, double)>;

constexpr std::int64_t kMost = 2000;
const std::vector<std::int64_t> kLengths{8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512};

/// Measures what is asked for. Returns the model, and how many were measured.
std::pair<MemoryModel, int> follow(const Need& need, double limit) {
  std::vector<MemorySample> samples;
  for (const auto& [n, length] : {std::pair(1, 8), std::pair(2, 8), std::pair(1, 12)}) {
    samples.push_back({double(n), double(length), need(n, length), false});
  }
  MemoryModel model;
  model.fit(samples, SizeKind::batch, false);
  int count = 0;
  while (const auto shape = detail::next_at_the_limit(model, kLengths, kMost, limit, 0.02)) {
    const auto n = static_cast<double>(shape->first);
    const auto length = static_cast<double>(shape->second);
    samples.push_back({n, length, need(n, length), need(n, length) > 2 * limit});
    model.fit(samples, SizeKind::batch, false);
    if (++count == 40) {
      break;
    }
  }
  return {model, count};
}

TEST(NextAtTheLimit, LeavesNothingOverTheLimitAndLittleOfItUnused) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> unit(0, 1);
  std::vector<double> used;
  for (int round = 0; round < 100; ++round) {
    const double held = 1e6 * (1 + 9 * unit(random));
    const double floor = held * (1 + unit(random));
    const double per_sample = unit(random) < 0.5 ? 0 : std::pow(2, 8 + 8 * unit(random));
    const double per_token = std::pow(2, 6 + 6 * unit(random));
    const double per_pair = unit(random) < 0.5 ? 0 : std::pow(2, 2 + 4 * unit(random));
    const Need need = [&](double n, double l) {
      return std::max({floor, held + per_sample * n + per_token * n * l,
                       held + per_token * n * l / 2 + per_pair * n * l * l});
    };
    const double limit = std::max(3e7, 1.05 * need(1, 512));
    const auto [model, count] = follow(need, limit);
    ASSERT_LE(count, 25);
    for (const std::int64_t whole : kLengths) {
      const auto length = static_cast<double>(whole);
      const auto n = static_cast<double>(std::min(model.largest_batch(length, limit), kMost));
      ASSERT_GE(n, 1) << "a sample that fits is left out";
      ASSERT_LE(need(n, length), limit);
      if (n < kMost) {
        used.push_back(need(n, length) / std::max(limit - per_sample - per_token * length, floor));
      }
    }
  }
  std::sort(used.begin(), used.end());
  EXPECT_GT(used[used.size() / 2], 0.95);
  EXPECT_GT(used[used.size() / 20], 0.85);
}

TEST(NextAtTheLimit, ASampleThatIsTooLongIsMeasuredOnceAndThenNoMore) {
  const auto [model, count] =
      follow([](double n, double l) { return 1e6 + (l > 100 ? 1e9 : 1e4) * n; }, 1e8);
  EXPECT_GE(model.largest_batch(96, 1e8), 1000);
  EXPECT_EQ(model.largest_batch(128, 1e8), 0);
  EXPECT_LE(std::count_if(model.samples().begin(), model.samples().end(),
                          [](const MemorySample& sample) { return sample.peak > 1e8; }),
            9);
  EXPECT_LT(count, 25);
}

}  // namespace
}  // namespace brim
