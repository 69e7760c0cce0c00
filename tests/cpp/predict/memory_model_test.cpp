// MemoryModel on made-up programs whose need is known: what it recovers, its bounds, its promises.

#include <brim/predict/memory_model.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using tests::message_of;
using Need = std::function<double(double, double)>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const std::vector<std::pair<double, double>> kShapes{{1, 16},  {2, 32},  {64, 16}, {1, 512},
                                                     {8, 128}, {8, 256}, {64, 512}};

std::vector<MemorySample> measure(const Need& need,
                                  const std::vector<std::pair<double, double>>& shapes = kShapes) {
  std::vector<MemorySample> samples;
  samples.reserve(shapes.size());
  for (const auto& [n, length] : shapes) {
    samples.push_back({n, length, need(n, length), false});
  }
  return samples;
}

MemoryModel model_of(const Need& need) {
  MemoryModel model;
  model.fit(measure(need), SizeKind::batch);
  return model;
}

double worst_error(const MemoryModel& model, const Need& need) {
  double worst = 0;
  for (const double n : {1, 2, 3, 5, 8, 13, 24, 48, 64}) {
    for (const double length : {16, 20, 33, 64, 100, 200, 300, 384, 512}) {
      worst = std::max(worst, std::abs(model.peak(n, length) / need(n, length) - 1));
    }
  }
  return worst;
}

TEST(MemoryModel, RecoversOnePhaseExactly) {
  const Need need = [](double n, double l) { return 5e6 + 700 * n * l + 8 * n * l * l; };
  const MemoryModel model = model_of(need);
  EXPECT_LT(worst_error(model, need), 1e-6);
  EXPECT_LT(model.error().worst, 1e-6);
  EXPECT_LT(model.margin(), 0.01);
}

TEST(MemoryModel, RecoversTheFloorOfAnOptimizerStep) {
  const Need need = [](double n, double l) {
    return std::max(1.5e7, 6e6 + 9000 * n * l + 20 * n * l * l);
  };
  const MemoryModel model = model_of(need);
  EXPECT_NEAR(model.state().floor, 1.5e7, 1);
  EXPECT_LT(worst_error(model, need), 0.001);
}

TEST(MemoryModel, RecoversTwoPhasesAboveAFloor) {
  const Need need = [](double n, double l) {
    return std::max(
        {4e5, 2e5 + 8000 * n * l + 40 * n * l * l, 2e5 + 3000 * n * l + 63 * n * l * l});
  };
  const MemoryModel model = model_of(need);
  EXPECT_EQ(model.state().phases.size(), 2U);
  EXPECT_LT(worst_error(model, need), 0.05);
}

TEST(MemoryModel, TakesAnotherTermWhereTheSamplesCallForIt) {
  const Need need = [](double n, double l) { return 1e6 + 2e6 * n + 3 * n * l; };
  EXPECT_LT(worst_error(model_of(need), need), 0.02);
}

TEST(MemoryModel, OneSizeHasALineOrAParabola) {
  std::vector<MemorySample> exact;
  for (const double size : {1.0, 10.0, 50.0, 100.0}) {
    exact.push_back({size, 0, 1000 + 10 * size + size * size, false});
  }
  MemoryModel model;
  model.fit(exact, SizeKind::size);
  EXPECT_NEAR(model.peak(70), 1000 + 700 + 4900, 1e-6);
  const std::int64_t most = model.largest_size(12000);
  EXPECT_LE(model.safe_peak(static_cast<double>(most)), 12000);
  EXPECT_GT(model.safe_peak(static_cast<double>(most + 1)), 12000);
  EXPECT_EQ(model.largest_size(10), 0);
}

TEST(MemoryModel, NeverFallsAsASizeGrowsWhateverTheSamples) {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> decades(0, 6);
  for (int round = 0; round < 200; ++round) {
    std::vector<MemorySample> samples =
        measure([&](double, double) { return std::pow(10, decades(random)); });
    samples.push_back({32, 300, 1e7, true});
    MemoryModel model;
    model.fit(samples, SizeKind::batch);
    for (double n = 0; n < 80; n += 7) {
      for (double l = 0; l < 600; l += 31) {
        ASSERT_LE(model.peak(n, l), model.peak(n + 1, l));
        ASSERT_LE(model.peak(n, l), model.peak(n, l + 1));
      }
    }
    ASSERT_GE(model.peak(32, 300), 1e7);
    ASSERT_GE(model.margin(), 0);
  }
}

TEST(MemoryModel, LargestBatchIsTheLastThatIsSafe) {
  std::mt19937 random(6);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int round = 0; round < 300; ++round) {
    const double a = 1e7 * unit(random);
    const double b = 1e4 * unit(random);
    const double c = 30 * unit(random);
    const double floor = 2e7 * unit(random);
    const MemoryModel model = model_of(
        [&](double n, double l) { return std::max(floor, a + b * n * l + c * n * l * l); });
    const double length = std::floor(1 + 600 * unit(random));
    const double budget = std::pow(10, 6 + 7 * unit(random));
    const std::int64_t n = model.largest_batch(length, budget);
    if (n > 0) {
      ASSERT_LE(model.safe_peak(static_cast<double>(n), length), budget);
    }
    ASSERT_GT(model.safe_peak(static_cast<double>(n + 1), length), budget);
  }
}

TEST(MemoryModel, SafePeakIsNeverBelowTheNeedOfAProgramOfItsKind) {
  std::mt19937 random(8);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int round = 0; round < 100; ++round) {
    const double held = 1e6 * (1 + unit(random));
    const double per_sample = unit(random) < 0.5 ? 0 : 1e5 * unit(random);
    const double per_token = 1e3 * unit(random);
    const double per_pair = unit(random) < 0.5 ? 0 : 10 * unit(random);
    const Need need = [&](double n, double l) {
      return std::max({1.5 * held, held + per_sample * n + per_token * n * l,
                       held + 0.7 * per_token * n * l + per_pair * n * l * l});
    };
    const MemoryModel model = model_of(need);
    EXPECT_LT(model.margin(), 0.0011);
    for (const double n : {1, 2, 3, 5, 8, 13, 24, 48, 64, 100}) {
      for (const double length : {5, 16, 20, 33, 64, 100, 200, 300, 384, 512, 1000}) {
        ASSERT_GE(model.safe_peak(n, length), need(n, length));
        ASSERT_LE(model.peak(n, length), model.safe_peak(n, length));
      }
    }
  }
}

TEST(MemoryModel, SafePeakIsNeverBelowWhatWasMeasured) {
  const std::vector<std::vector<double>> noisy{
      {10, 20, 40, 95, 82, 320}, {60, 50, 40, 30, 20, 10}, {50, 20, 40, 80, 160, 1}};
  for (const std::vector<double>& peaks : noisy) {
    std::vector<MemorySample> samples;
    for (std::size_t i = 0; i < peaks.size(); ++i) {
      samples.push_back({static_cast<double>(1 << i), 0, peaks[i], false});
    }
    MemoryModel model;
    model.fit(samples, SizeKind::size);
    for (const MemorySample& sample : samples) {
      EXPECT_GE(model.safe_peak(sample.n), sample.peak);
      const auto largest = static_cast<double>(model.largest_size(sample.peak - 1));
      EXPECT_LT(largest, sample.n);
    }
    for (double size = 1; size < 40; ++size) {
      EXPECT_LE(model.safe_peak(size), model.safe_peak(size + 1));
    }
  }
}

TEST(MemoryModel, WhatWasMeasuredBeforeAJumpSaysNothingOfLongerSamples) {
  for (const double jump : {1e6, 1e8}) {
    for (const bool of_each : {false, true}) {
      const Need need = [&](double n, double l) {
        return 1e4 + 10 * n * l + (l > 100 ? jump * (of_each ? n : 1) : 0);
      };
      MemoryModel model;
      model.fit(measure(need, {{1, 16}, {300, 16}, {1, 90}, {300, 90}, {300, 95}, {1, 110}}),
                SizeKind::batch);
      EXPECT_LT(model.margin(), 0.01) << "what lies before it is known";
      ASSERT_EQ(model.jumps().size(), 1U);
      EXPECT_EQ(model.jumps()[0].after, 95);
      EXPECT_EQ(model.jumps()[0].from, 110);
      for (const double n : {1, 2, 7, 100, 300}) {
        for (const double length : {16, 50, 90, 91, 95, 99, 101, 110, 200}) {
          EXPECT_GE(model.safe_peak(n, length), (1 - 1e-9) * need(n, length)) << n << " " << length;
        }
      }
      EXPECT_LE(model.safe_peak(300, 90), 1.01 * need(300, 90));
    }
  }
}

TEST(MemoryModel, NeedThatGrowsWithTheSquareOfTheNumberDoesNotJumpAtALength) {
  const Need need = [](double n, double) { return 1000 * n * n; };
  MemoryModel model;
  model.fit(measure(need, {{1, 8}, {64, 8}, {1, 10}, {32, 10}, {1, 40}, {20, 40}}),
            SizeKind::batch);
  EXPECT_TRUE(model.jumps().empty());
}

TEST(MemoryModel, LargestBatchOfEmptySamplesEnds) {
  std::vector<MemorySample> samples =
      measure([](double n, double l) { return 1e5 + 64 * n * l + n * l * l; });
  samples[1].peak *= 1.1;
  MemoryModel model;
  model.fit(samples, SizeKind::batch);
  const double low = model.safe_peak(1, 0);
  const double high = model.safe_peak(1e6, 0);
  const double budget = (low + high) / 2;
  const std::int64_t n = model.largest_batch(0, budget);
  EXPECT_GE(n, 1);
  EXPECT_LE(model.safe_peak(static_cast<double>(n), 0), budget);
}

TEST(MemoryModel, SizesThatWouldOverflowAreRejected) {
  using Error = std::invalid_argument;
  const MemoryModel model = model_of([](double n, double l) { return 1e6 + n * l * l; });
  EXPECT_GT(model.peak(1, 1e100), 1e199);
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.peak(1, 1e155)); }),
                  "length must be at most 1e100, got 1e+155");
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.largest_batch(1e155, 1e9)); }),
                  "length must be at most 1e100");
  MemoryModel other;
  const std::vector<MemorySample> huge{{1, 0, 1}, {1e200, 0, 2}};
  EXPECT_CONTAINS(message_of<Error>([&] { other.fit(huge, SizeKind::size); }),
                  "sizes must be at most 1e100");
}

TEST(MemoryModel, LargestBatchIsBoundedWhereTheNeedDoesNotGrow) {
  MemoryModel model;
  model.fit(measure([](double, double) { return 100.0; }), SizeKind::batch);
  EXPECT_EQ(model.largest_batch(10, 100), 64) << "the most that was measured";
  EXPECT_EQ(model.largest_batch(10, 1000), 639) << "it may begin to grow there";
  EXPECT_EQ(model.largest_batch(10, 99), 0);
  EXPECT_EQ(model.largest_batch(10, std::numeric_limits<double>::infinity()),
            MemoryModel::kLargestSize);
}

TEST(MemoryModel, ABoundRaisesTheModelAndOnlyWhereItMust) {
  const Need need = [](double n, double l) { return 1e6 + 1000 * n * l; };
  std::vector<MemorySample> samples = measure(need);
  samples.push_back({64, 1024, 1e6, true});  // says nothing new
  MemoryModel model;
  model.fit(samples, SizeKind::batch);
  EXPECT_LT(worst_error(model, need), 1e-6);
  samples.back().peak = 3 * need(64, 1024);
  model.fit(samples, SizeKind::batch);
  EXPECT_GE(model.peak(64, 1024), 3 * need(64, 1024));
  EXPECT_LT(std::abs(model.peak(8, 128) / need(8, 128) - 1), 0.1);
}

TEST(MemoryModel, LeaveOneOutIsWhatARefitSays) {
  const Need need = [](double n, double l) {
    return 1e6 + 900 * n * l + (n > 4 && l > 99 ? 3e5 * n : 0);
  };
  const std::vector<MemorySample> samples = measure(need);
  MemoryModel model;
  model.fit(samples, SizeKind::batch);
  ASSERT_EQ(model.error().each.size(), samples.size());
  double worst = 0;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    std::vector<MemorySample> others = samples;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    MemoryModel without;
    without.fit(others, SizeKind::batch);
    const double error = without.peak(samples[i].n, samples[i].length) / samples[i].peak - 1;
    EXPECT_NEAR(model.error().each[i], error, 1e-12);
    worst = std::max(worst, std::abs(error));
  }
  EXPECT_NEAR(model.error().worst, worst, 1e-12);
  EXPECT_GT(worst, 0.01) << "there is something to report";
  EXPECT_GT(model.margin(), 0.005);
}

TEST(MemoryModel, ManySamplesAreFittedToo) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> noise(0.99, 1.01);
  std::vector<MemorySample> samples;
  const Need need = [](double n, double l) {
    return std::max(3e6, 1e6 + 900 * n * l + 3 * n * l * l);
  };
  for (double n = 1; n <= 64; n *= 2) {
    for (double l = 16; l <= 512; l *= 1.2) {
      samples.push_back({n, l, need(n, l) * noise(random), false});
    }
  }
  ASSERT_GT(samples.size(), 100U);
  MemoryModel model;
  model.fit(samples, SizeKind::batch);
  EXPECT_LT(worst_error(model, need), 0.03);
  EXPECT_LT(model.error().worst, 0.04);
}

TEST(MemoryModel, WhatIsHeldAllTheTimeMovesAllBoundsByAsMuch) {
  const Need need = [](double n, double l) {
    return std::max(3e4 + 70 * n * l + n * l * l, 1e5 + 900 * n);
  };
  for (const double held : {1e3, 1e6, 1e12}) {
    std::vector<MemorySample> samples = measure(need);
    MemoryModel alone;
    alone.fit(samples, SizeKind::batch);
    for (MemorySample& sample : samples) {
      sample.peak += held;
      sample.base = held;
    }
    samples.front().base += 100;  // what all of them held counts
    MemoryModel model;
    model.fit(samples, SizeKind::batch);
    for (const double n : {1.0, 7.0, 1000.0}) {
      for (const double length : {16.0, 300.0, 5000.0}) {
        const double expected = alone.safe_peak(n, length);
        EXPECT_NEAR(model.safe_peak(n, length) - held, expected, 1e-3 * expected + 1e-9 * held);
      }
    }
    EXPECT_EQ(MemoryModel::from_state(model.state()).safe_peak(99, 99), model.safe_peak(99, 99));
    // Without that knowledge, a phase below what was held might grow.
    for (MemorySample& sample : samples) {
      sample.base = 0;
    }
    MemoryModel unknowing;
    unknowing.fit(samples, SizeKind::batch);
    EXPECT_GE(unknowing.safe_peak(1000, 300), model.safe_peak(1000, 300));
  }
}

TEST(MemoryModel, AStateBringsTheModelBack) {
  const Need need = [](double n, double l) { return 1e6 + 900 * n * l; };
  const MemoryModel model = model_of(need);
  const MemoryModel again = MemoryModel::from_state(model.state());
  EXPECT_EQ(again.safe_peak(9, 99), model.safe_peak(9, 99));
  EXPECT_EQ(again.samples(), model.samples());
  MemoryModelState wrong = model.state();
  wrong.phases.front().pop_back();
  EXPECT_THROW(MemoryModel::from_state(wrong), std::invalid_argument);
  wrong = model.state();
  wrong.phases.front().front() = -1;
  EXPECT_THROW(MemoryModel::from_state(wrong), std::invalid_argument);
  EXPECT_THROW(MemoryModel::from_state({}), std::invalid_argument);
}

TEST(MemoryModel, TextTellsTermsErrorAndMargin) {
  MemoryModel model = model_of([](double n, double l) { return 1048576 + 2048 * n * l; });
  const std::string text = model.to_string();
  EXPECT_CONTAINS(text, "1.00 MiB + 2.00 KiB · nL");
  EXPECT_CONTAINS(text, "from 7 measured sizes");
  EXPECT_CONTAINS(text, "margin");
  EXPECT_CONTAINS(MemoryModel().to_string(), "not fitted");
}

TEST(MemoryModel, PeakOfABatchIsThatOfItsLongest) {
  const MemoryModel model = model_of([](double n, double l) { return 1e6 + 900 * n * l; });
  const std::vector<double> lengths{10, 300, 20};
  EXPECT_EQ(model.peak_of(lengths), model.peak(3, 300));
  EXPECT_EQ(model.peak_of({}), 0);
}

TEST(MemoryModel, WrongInputIsNamedAndKeepsTheFit) {
  using Error = std::invalid_argument;
  const Need need = [](double n, double l) { return 1e6 + 900 * n * l; };
  MemoryModel model = model_of(need);
  const double before = model.peak(4, 4);
  const auto fit = [&](std::size_t at, MemorySample wrong) {
    std::vector<MemorySample> samples = measure(need);
    samples[at] = wrong;
    return message_of<Error>([&] { model.fit(samples, SizeKind::batch); });
  };
  EXPECT_CONTAINS(fit(2, {0, 1, 1}), "sizes must be finite and positive, got 0 in sample 2");
  EXPECT_CONTAINS(fit(1, {1, kNan, 1}), "sizes must be finite and positive, got nan in sample 1");
  EXPECT_CONTAINS(fit(0, {1, 1, -5}), "peaks must be finite and positive, got -5 in sample 0");
  EXPECT_CONTAINS(fit(1, {1, 1, 5, false, 6}), "base must be from 0 to the peak of 5, got 6");
  EXPECT_CONTAINS(fit(1, {1, 1, 5, false, kNan}), "base must be from 0 to the peak of 5, got nan");
  const std::vector<MemorySample> few{{1, 1, 1}, {1, 1, 2}, {2, 2, 9, true}, {3, 3, 9}};
  EXPECT_CONTAINS(message_of<Error>([&] { model.fit(few, SizeKind::batch); }),
                  "at least 3 different ones that did not run out of memory, got 2");
  EXPECT_EQ(model.peak(4, 4), before);
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.peak(4)); }), "n and length");
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.largest_size(4)); }), "batches");
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.peak(-1, 4)); }), "n must be");
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.largest_batch(1, kNan)); }),
                  "budget must be 0 or more, got nan");
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.largest_batch(1, -1)); }),
                  "budget must be 0 or more, got -1");
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(MemoryModel().peak(1)); }),
                  "fit or probe first");
}

}  // namespace
}  // namespace brim
