#include <brim/adapt/parameter_search.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "need/memory_simulation.h"

namespace brim {
namespace {

using simulation::outcome;
using simulation::Random;
using Values = std::vector<std::int64_t>;
using Fits = std::function<bool(const Values&)>;

Values current(const ParameterSearch& search) {
  return {search.next().begin(), search.next().end()};
}

std::vector<Values> tried_until_fit(ParameterSearch& search, const Fits& fits) {
  std::vector<Values> tried;
  while (!search.finished()) {
    tried.push_back(current(search));
    const bool fitted = fits(tried.back());
    search.record({.outcome = outcome(fitted)});
    if (fitted) {
      break;
    }
  }
  return tried;
}

// torch_max_mem 0.1.6, maximize_memory_utilization_decorator, line by line.
std::vector<Values> tried_by_torch_max_mem(Values max_values, const Values& qs, const Fits& fits) {
  std::vector<Values> tried;
  for (std::size_t i = 0; i < max_values.size(); ++i) {
    while (max_values[i] > 0) {
      tried.push_back(max_values);
      if (fits(max_values)) {
        return tried;
      }
      const std::int64_t x = max_values[i] / 2;
      max_values[i] = x <= qs[i] ? x : (x / qs[i]) * qs[i];
    }
    max_values[i] = 1;
  }
  return tried;
}

ParameterSearchOptions random_options(Random& random, Strategy strategy) {
  ParameterSearchOptions options{.strategy = strategy};
  const std::int64_t count = random.integer(1, 5);
  for (std::int64_t i = 0; i < count; ++i) {
    Parameter p{.maximum = random.magnitude(1, 1e5)};
    p.quantum = random.coin() ? 1 : random.magnitude(1, 100);
    p.lower = random.coin() ? 1 : random.integer(1, p.maximum);
    options.parameters.push_back(p);
    if (i == 0 || random.coin()) {
      options.groups.emplace_back();
    }
    options.groups.back().push_back(static_cast<std::size_t>(i));
  }
  return options;
}

TEST(ParameterSearch, HalvingTriesTheValuesOfTorchMaxMemOnceEach) {
  Random random(1);
  int repeats = 0;
  for (int i = 0; i < 3000; ++i) {
    ParameterSearchOptions options{.strategy = Strategy::halving};
    Values maxima;
    Values quanta;
    for (std::int64_t n = random.integer(1, 4); n > 0; --n) {
      maxima.push_back(random.magnitude(1, 5000));
      quanta.push_back(random.coin() ? 1 : random.magnitude(1, 64));
      options.parameters.push_back({.maximum = maxima.back(), .quantum = quanta.back()});
    }
    const double limit = random.real(0, 1.2) * static_cast<double>(maxima.size());
    const Fits fits = [&](const Values& values) {
      double sum = 0;
      for (std::size_t k = 0; k < values.size(); ++k) {
        sum += static_cast<double>(values[k]) / static_cast<double>(maxima[k]);
      }
      return sum <= limit;
    };
    std::vector<Values> expected = tried_by_torch_max_mem(maxima, quanta, fits);
    options.revisit_floor = true;
    ParameterSearch exact(options);
    ASSERT_EQ(tried_until_fit(exact, fits), expected);
    ASSERT_EQ(exact.best().has_value(), fits(expected.back()));
    options.revisit_floor = false;
    const std::size_t all = expected.size();
    expected.erase(std::unique(expected.begin(), expected.end()), expected.end());
    repeats += all > expected.size() ? 1 : 0;
    ParameterSearch search(options);
    ASSERT_EQ(tried_until_fit(search, fits), expected);
    ASSERT_EQ(search.best().has_value(), fits(expected.back()));
  }
  EXPECT_GT(repeats,
            100);  // the original does repeat itself; else this test does not cover what it says
}

TEST(ParameterSearch, SecondParameterIsHalvedAtOnceWhenTheFirstIsAtItsFloor) {
  ParameterSearch search(
      {.strategy = Strategy::halving, .parameters = {{.maximum = 4}, {.maximum = 8}}});
  const auto tried = tried_until_fit(search, [](const Values& v) { return v[1] <= 2; });
  EXPECT_EQ(tried, (std::vector<Values>{{4, 8}, {2, 8}, {1, 8}, {1, 4}, {1, 2}}));
  EXPECT_EQ(search.best(), (Values{1, 2}));
  EXPECT_TRUE(search.finished());
}

TEST(ParameterSearch, GroupsShrinkTogetherInOrderAndNeverRepeatAFailure) {
  Random random(2);
  for (const Strategy strategy : {Strategy::predictive, Strategy::halving, Strategy::bisect}) {
    for (int i = 0; i < 2000; ++i) {
      const ParameterSearchOptions options = random_options(random, strategy);
      const double threshold = random.real(-0.1, 1);
      std::int64_t widest = 0;
      double most = 0;
      for (const Parameter& p : options.parameters) {
        widest += static_cast<std::int64_t>(std::log2(static_cast<double>(p.maximum)) + 1);
        most += std::log2(static_cast<double>(p.maximum) + 1);
      }
      const Fits fits = [&](const Values& values) {
        double sum = 0;
        for (const std::int64_t v : values) {
          sum += std::log2(static_cast<double>(v) + 1);
        }
        return sum <= threshold * most;
      };
      ParameterSearch search(options);
      std::set<Values> failed;
      while (!search.finished()) {
        const Values values = current(search);
        ASSERT_FALSE(failed.contains(values));
        ASSERT_LT(search.attempts(), 40 + 6 * widest);
        bool lowered = false;  // from here on, all groups are at their maximum
        for (std::size_t g = options.groups.size(); g-- > 0;) {
          double smallest = 1;
          double largest = 0;
          for (const std::size_t m : options.groups[g]) {
            const Parameter& p = options.parameters[m];
            const std::int64_t v = values[m];
            ASSERT_TRUE(v >= p.lower && v <= p.maximum);
            ASSERT_TRUE(v <= p.quantum || v % p.quantum == 0 || v == p.lower || v == p.maximum)
                << v << " q " << p.quantum;
            ASSERT_TRUE(!lowered || v == p.lower) << "a group after it is lowered";
            // The fractions of the maximum that round to this value, unless the floor holds it up.
            const double size = static_cast<double>(p.maximum);
            const double step = v < p.quantum ? 1.0 : static_cast<double>(p.quantum);
            if (v > p.lower) {
              smallest = std::min(smallest, (static_cast<double>(v) + step) / size);
              largest = std::max(largest, static_cast<double>(v) / size);
            } else {
              smallest = std::min(
                  smallest,
                  (static_cast<double>(v) + std::max(step, static_cast<double>(p.quantum))) / size);
            }
          }
          ASSERT_GE(smallest, largest) << "no common fraction";
          const bool below =
              std::any_of(options.groups[g].begin(), options.groups[g].end(),
                          [&](std::size_t m) { return values[m] < options.parameters[m].maximum; });
          lowered = lowered || below;
        }
        const bool fitted = fits(values);
        search.record({.outcome = outcome(fitted)});
        if (!fitted) {
          failed.insert(values);
        }
      }
      const auto best = search.best();
      ASSERT_EQ(current(search), best.value_or(current(search)));
      if (best) {
        ASSERT_TRUE(fits(*best));
      } else {  // nothing fits only after the floor of all was tried
        Values floor;
        for (const Parameter& p : options.parameters) {
          floor.push_back(p.lower);
        }
        ASSERT_TRUE(failed.contains(floor));
      }
    }
  }
}

TEST(ParameterSearch, FindsTheLargestOfTheFirstGroupThatCanFit) {
  // Reference: all scales of the group, tried one by one.
  Random random(3);
  for (int i = 0; i < 500; ++i) {
    const std::int64_t a = random.integer(1, 300);
    const std::int64_t b = random.integer(1, a);
    const std::int64_t q = random.integer(1, 16);
    const std::int64_t limit = random.integer(2, a + b);
    const auto value_b = [&](std::int64_t scale) {
      const std::int64_t x = b * scale / a;
      return x == b ? b : std::max<std::int64_t>(1, x <= q ? x : x / q * q);
    };
    Values expected;
    for (std::int64_t scale = 1; scale <= a; ++scale) {
      if (scale + value_b(scale) <= limit) {
        expected = {scale, value_b(scale)};
      }
    }
    for (const Strategy strategy : {Strategy::predictive, Strategy::bisect}) {
      ParameterSearch search({.strategy = strategy,
                              .parameters = {{.maximum = a}, {.maximum = b, .quantum = q}},
                              .groups = {{0, 1}}});
      while (!search.finished()) {
        search.record({.outcome = outcome(search.next()[0] + search.next()[1] <= limit)});
      }
      ASSERT_EQ(search.best(), expected) << a << " " << b << " q " << q << " limit " << limit;
    }
  }
}

TEST(ParameterSearch, IsNoWorseThanHalvingAcrossGroups) {
  // The second parameter is what needs the memory: the first is lowered in vain.
  const std::int64_t available = 1'000'000'000;
  const auto search_with = [&](Strategy strategy) {
    ParameterSearch search(
        {.strategy = strategy, .parameters = {{.maximum = 4096}, {.maximum = 65536}}});
    while (!search.finished() && !search.best()) {
      const Values values = current(search);
      const std::int64_t need = values[0] * 100 + values[1] * 100'000;
      const bool fitted = need <= available;
      search.record({.outcome = outcome(fitted),
                     .peak = fitted ? need : 0,
                     .requested = need,
                     .available = available});
    }
    return search;
  };
  const ParameterSearch ours = search_with(Strategy::predictive);
  const ParameterSearch halving = search_with(Strategy::halving);
  ASSERT_TRUE(ours.best() && halving.best());
  EXPECT_GE(*ours.best(), *halving.best());
  EXPECT_LE(ours.attempts(), halving.attempts() + 1);
}

TEST(ParameterSearch, RemembersWhichGroupWasSearched) {
  const std::int64_t available = 1000;
  const ParameterSearchOptions options{.strategy = Strategy::bisect,
                                       .parameters = {{.maximum = 8}, {.maximum = 100}},
                                       .circumstances = {.available = available}};
  ParameterSearch search(options);
  EXPECT_FALSE(search.remember({.values = {4, 50}, .available = available}));  // no search comes by
  EXPECT_EQ(current(search), (Values{8, 100}));
  EXPECT_TRUE(
      search.remember({.values = {1, 100}, .outcome = outcome(false), .available = available}));
  EXPECT_TRUE(search.remember({.values = {1, 40}, .available = available}));
  EXPECT_EQ(current(search), (Values{1, 40}));
  EXPECT_EQ(search.best(), (Values{1, 40}));

  ParameterSearchOptions richer = options;
  richer.circumstances.available =
      2 * available;  // the failure no longer binds: from the top again
  ParameterSearch again(richer);
  again.remember({.values = {1, 100}, .outcome = outcome(false), .available = available});
  EXPECT_EQ(current(again), (Values{8, 100}));
}

TEST(ParameterSearch, AFailureElsewhereMovesOnToItsGroupAndAFitDoesNot) {
  const ParameterSearchOptions options{.strategy = Strategy::bisect,
                                       .parameters = {{.maximum = 8}, {.maximum = 100}}};
  ParameterSearch fitted(options);
  EXPECT_TRUE(fitted.record_elsewhere({.values = {1, 60}}));
  EXPECT_EQ(current(fitted), (Values{8, 100}));
  ParameterSearch failed(options);
  EXPECT_TRUE(failed.record_elsewhere({.values = {1, 60}, .outcome = outcome(false)}));
  EXPECT_EQ(current(failed).front(), 1);
  EXPECT_LT(current(failed).back(), 60);
}

TEST(ParameterSearch, RemembersAGroupThatShrinksTogether) {
  const ParameterSearchOptions options{.strategy = Strategy::bisect,
                                       .parameters = {{.maximum = 100}, {.maximum = 50}},
                                       .groups = {{0, 1}},
                                       .circumstances = {.available = 1000}};
  ParameterSearch search(options);
  EXPECT_FALSE(search.remember({.values = {60, 10}, .available = 1000}));  // not the same fraction
  EXPECT_TRUE(search.remember({.values = {60, 30}, .available = 1000}));
  EXPECT_EQ(search.best(), (Values{60, 30}));
  EXPECT_TRUE(search.remember({.values = {61, 30}, .outcome = outcome(false), .available = 1000}));
  EXPECT_TRUE(search.finished());
}

TEST(ParameterSearch, WrongOptionIsAnErrorThatNamesIt) {
  const auto message = [](const ParameterSearchOptions& options) -> std::string {
    try {
      const ParameterSearch search(options);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "no error";
  };
  const Parameter good{.maximum = 8};
  EXPECT_NE(message({}).find("parameters=[]"), std::string::npos);
  EXPECT_NE(message({.parameters = {good, {.maximum = 0}}}).find("parameters[1].maximum=0"),
            std::string::npos);
  EXPECT_NE(
      message({.parameters = {{.maximum = 8, .quantum = -1}}}).find("parameters[0].quantum=-1"),
      std::string::npos);
  EXPECT_NE(message({.parameters = {{.maximum = 8, .lower = 0}}}).find("parameters[0].lower=0"),
            std::string::npos);
  EXPECT_NE(message({.parameters = {good}, .groups = {{}}}).find("groups[0]=[]"),
            std::string::npos);
  EXPECT_NE(message({.parameters = {good}, .groups = {{0}, {1}}}).find("groups[1] holds 1"),
            std::string::npos);
  EXPECT_NE(message({.parameters = {good}, .groups = {{0, 0}}}).find("groups[0] holds 0"),
            std::string::npos);
  EXPECT_NE(message({.parameters = {good, good}, .groups = {{1}}}).find("lacks the parameter 0"),
            std::string::npos);
  EXPECT_NE(message({.parameters = {good}, .circumstances = {.margin = 2}}).find("margin=2"),
            std::string::npos);
  ParameterSearch search({.parameters = {good, good}});
  EXPECT_THROW(search.remember({.values = {1}}), std::invalid_argument);
  EXPECT_THROW(search.remember({.values = {1, 0}}), std::invalid_argument);
}

}  // namespace
}  // namespace brim
