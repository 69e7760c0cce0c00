#include <brim/fit/even_steps.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "adapt/thread_ranks.h"

namespace brim {
namespace {

using tests::ThreadChannel;
using tests::ThreadRanks;
using AtEnd = EvenSteps::AtEnd;

/// What one rank does in an epoch: the batches that it gave, by number.
struct Epoch {
  std::vector<std::int64_t> given;
  std::int64_t most_held = 0;
  std::int64_t exchanges = 0;
  std::size_t left = 0;
  std::int64_t total = -1;
};

/// Gives the batches 0 … count - 1, again and again if they are to be repeated.
Epoch run(EvenSteps& steps, std::int64_t count, std::int64_t begin = 0, std::int64_t stop = -1) {
  Epoch epoch;
  std::deque<std::int64_t> held;
  std::int64_t next = begin;
  const auto read = [&] {
    for (std::int64_t n = steps.to_read(); n > 0; --n) {
      if (next == count) {
        steps.end();
        next = 0;
        if (steps.to_read() == 0) {
          break;
        }
      }
      held.push_back(next++);
      steps.read();
    }
    epoch.most_held = std::max(epoch.most_held, static_cast<std::int64_t>(held.size()));
  };
  while (stop != 0) {
    while (steps.to_read() > 0) {
      read();
    }
    if (!steps.step()) {
      break;
    }
    epoch.given.push_back(held.front());
    held.pop_front();
    read();
    --stop;
  }
  epoch.exchanges = steps.exchanges();
  epoch.left = held.size();
  epoch.total = steps.total().value_or(-1);
  return epoch;
}

std::vector<Epoch> run_all(const std::vector<std::int64_t>& counts,
                           const EvenSteps::Options& options,
                           std::vector<std::string>* errors = nullptr) {
  ThreadRanks all(static_cast<std::int64_t>(counts.size()));
  std::vector<Epoch> epochs(counts.size());
  const auto thrown = all.run([&](std::int64_t rank) {
    const auto i = static_cast<std::size_t>(rank);
    EvenSteps steps(std::make_shared<ThreadChannel>(all, rank), options);
    try {
      epochs[i] = run(steps, counts[i]);
    } catch (const std::invalid_argument& error) {
      steps.fail(error.what());
      throw;
    }
  });
  for (const std::exception_ptr& error : thrown) {
    std::string text;
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const std::exception& failure) {
      text = failure.what();
    }
    if (errors != nullptr) {
      errors->push_back(text);
    } else {
      EXPECT_EQ(text, "");
    }
  }
  return epochs;
}

TEST(EvenSteps, AllRanksStopAfterTheLastBatchOfTheShortest) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::int64_t> counts(1 + random() % 8);
    const auto most = static_cast<std::int64_t>(1 + random() % 60);
    std::ranges::generate(counts, [&] { return static_cast<std::int64_t>(random()) % most; });
    const std::int64_t least = *std::ranges::min_element(counts);
    const auto ahead = static_cast<std::int64_t>(1 + random() % 16);
    for (std::size_t rank = 0; const Epoch& epoch : run_all(counts, {.ahead = ahead})) {
      ASSERT_EQ(std::ssize(epoch.given), least);
      for (std::int64_t n = 0; n < least; ++n) {
        ASSERT_EQ(epoch.given[static_cast<std::size_t>(n)], n);
      }
      ASSERT_LE(epoch.most_held, 2 * ahead);
      ASSERT_LE(epoch.exchanges, 6 + least / ahead);
      ASSERT_LE(least + static_cast<std::int64_t>(epoch.left), counts[rank++]);
    }
  }
}

TEST(EvenSteps, ShorterRanksRepeatUntilTheLongestIsAtItsEnd) {
  std::mt19937 random(2);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::int64_t> counts(2 + random() % 7);
    const auto most = static_cast<std::int64_t>(1 + random() % 60);
    std::ranges::generate(counts, [&] { return 1 + static_cast<std::int64_t>(random()) % most; });
    const std::int64_t longest = *std::ranges::max_element(counts);
    const auto ahead = static_cast<std::int64_t>(1 + random() % 16);
    const auto epochs = run_all(counts, {.at_end = AtEnd::repeat, .ahead = ahead});
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
      ASSERT_EQ(std::ssize(epochs[rank].given), longest);
      for (std::int64_t n = 0; n < longest; ++n) {
        ASSERT_EQ(epochs[rank].given[static_cast<std::size_t>(n)], n % counts[rank]);
      }
    }
  }
}

TEST(EvenSteps, AResumedEpochHasTheStepsThatWereLeft) {
  for (const AtEnd at_end : {AtEnd::stop, AtEnd::repeat}) {
    for (const std::int64_t done : {0, 1, 5, 11, 12, 17}) {
      const std::vector<std::int64_t> counts{23, 12, 40};
      ThreadRanks all(3);
      std::vector<Epoch> epochs(3);
      const auto errors = all.run([&](std::int64_t rank) {
        const auto i = static_cast<std::size_t>(rank);
        const bool over = done >= counts[i];
        const bool stop = at_end == AtEnd::stop;
        EvenSteps steps(std::make_shared<ThreadChannel>(all, rank),
                        {.at_end = at_end,
                         .ahead = 4,
                         .done = stop ? std::min<std::int64_t>(done, 12) : done,
                         .total = over ? std::optional(counts[i]) : std::nullopt});
        epochs[i] = run(steps, counts[i], stop && over ? counts[i] : done % counts[i]);
      });
      for (std::size_t rank = 0; rank < 3; ++rank) {
        EXPECT_FALSE(errors[rank]);
        const std::int64_t whole = at_end == AtEnd::stop ? 12 : 40;
        ASSERT_EQ(std::ssize(epochs[rank].given), std::max<std::int64_t>(whole - done, 0));
        for (std::size_t n = 0; n < epochs[rank].given.size(); ++n) {
          ASSERT_EQ(epochs[rank].given[n], (done + static_cast<std::int64_t>(n)) % counts[rank]);
        }
      }
    }
  }
}

TEST(EvenSteps, OneRankReadsNothingAheadAndTalksToNobody) {
  EvenSteps steps(nullptr, {.at_end = AtEnd::repeat});
  const Epoch epoch = run(steps, 5);
  EXPECT_EQ(std::ssize(epoch.given), 5);
  EXPECT_EQ(epoch.most_held, 1);
}

TEST(EvenSteps, ARankWithNothingToRepeatEndsTheEpochOnAll) {
  std::vector<std::string> errors;
  run_all({4, 0, 6}, {.at_end = AtEnd::repeat}, &errors);
  EXPECT_NE(errors[0].find("rank 1 failed in even: at_end \"repeat\" needs"), std::string::npos);
  EXPECT_NE(errors[1].find("this one has none"), std::string::npos);
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(EvenSteps, OtherOptionsOnOneRankAreAnErrorOnAll) {
  ThreadRanks all(2);
  const auto errors = all.run([&](std::int64_t rank) {
    EvenSteps steps(std::make_shared<ThreadChannel>(all, rank), {.done = rank});
    run(steps, 9);
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THROW(std::rethrow_exception(error), RankError);
  }
}

TEST(EvenSteps, WrongOptionsAreErrors) {
  EXPECT_THROW(EvenSteps(nullptr, {.ahead = 0}), std::invalid_argument);
  EXPECT_THROW(EvenSteps(nullptr, {.done = -1}), std::invalid_argument);
}

}  // namespace
}  // namespace brim
