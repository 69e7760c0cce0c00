#include <brim/fit/fit_ranks.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "adapt/thread_ranks.h"

namespace brim {
namespace {

using tests::ThreadChannel;
using tests::ThreadRanks;

/// What `work(ranks, rank)` threw on each of two ranks; empty for nothing.
template <class Work>
std::vector<std::string> errors_of(const Work& work) {
  ThreadRanks all(2);
  std::vector<std::string> texts;
  for (const std::exception_ptr& error : all.run([&](std::int64_t rank) {
         FitRanks ranks(std::make_shared<ThreadChannel>(all, rank));
         work(ranks, rank);
       })) {
    try {
      texts.emplace_back();
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const RankError& failure) {
      texts.back() = failure.what();
    }
  }
  return texts;
}

TEST(FitRanks, EachNumberIsTheLargestOfAllRanks) {
  const auto errors = errors_of([](FitRanks& ranks, std::int64_t rank) {
    ranks.same("the same");
    ranks.begin(std::array<std::int64_t, 2>{3, 4});
    std::array<std::int64_t, 3> numbers{rank, -rank, 7};
    ranks.most(numbers);
    EXPECT_EQ(numbers, (std::array<std::int64_t, 3>{1, 0, 7}));
    EXPECT_EQ(ranks.least(5 - rank), 4);
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(FitRanks, DifferentTextsAreAnErrorOnAllThatShowsThem) {
  const auto errors = errors_of(
      [](FitRanks& ranks, std::int64_t rank) { ranks.same(rank == 0 ? "ten" : "eleven"); });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_NE(errors[0].find("rank 0 has ten, and rank 1 has eleven"), std::string::npos);
}

TEST(FitRanks, AnotherBatchIsAnErrorOnAll) {
  const auto errors = errors_of([](FitRanks& ranks, std::int64_t rank) {
    ranks.begin(std::array<std::int64_t, 1>{rank});
    std::int64_t number = 1;
    ranks.most({&number, 1});
  });
  EXPECT_FALSE(errors[0].empty());
  EXPECT_EQ(errors[0], errors[1]);
}

TEST(FitRanks, AfterTheLastExchangeAFailureIsToldToNobody) {
  ThreadRanks all(2);
  const auto errors = all.run([&](std::int64_t rank) {
    const auto channel = std::make_shared<ThreadChannel>(all, rank);
    FitRanks ranks(channel);
    ranks.same("the same");
    ranks.end_with_next();
    ranks.same("the end");
    ranks.fail("nobody waits for this");
    EXPECT_EQ(channel->exchanges(), 2);
  });
  EXPECT_FALSE(errors[0]);
  EXPECT_FALSE(errors[1]);
}

TEST(FitRanks, AFailureReachesTheOthersInTheirNextExchange) {
  const auto errors = errors_of([](FitRanks& ranks, std::int64_t rank) {
    ranks.same("the same");
    if (rank == 1) {
      ranks.fail("no such sample");
      ranks.fail("and nobody waits for this");
      return;
    }
    (void)ranks.least(1);
  });
  EXPECT_EQ(errors[0], "rank 1 failed in fit: no such sample");
  EXPECT_TRUE(errors[1].empty());
}

}  // namespace
}  // namespace brim
