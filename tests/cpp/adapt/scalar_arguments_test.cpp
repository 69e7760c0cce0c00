#include <brim/adapt/scalar_arguments.h>
#include <gtest/gtest.h>

namespace brim {
namespace {

constexpr auto kMost = static_cast<std::uint64_t>(ScalarArguments::kMostValues);

TEST(ScalarArguments, FewValuesTellCallsApart) {
  ScalarArguments scalars;
  for (std::uint64_t call = 0; call < 100; ++call) {
    EXPECT_TRUE(scalars.counts(1, call % kMost));
  }
}

TEST(ScalarArguments, ACounterIsLeftOutForGood) {
  ScalarArguments scalars;
  for (std::uint64_t step = 0; step < kMost; ++step) {
    EXPECT_TRUE(scalars.counts(1, step));
  }
  EXPECT_FALSE(scalars.counts(1, kMost));
  EXPECT_FALSE(scalars.counts(1, 0)) << "also for values that counted before";
  EXPECT_TRUE(scalars.counts(2, 0)) << "another argument";
  scalars.clear();
  EXPECT_TRUE(scalars.counts(1, 0));
}

TEST(ScalarArguments, TooManyArgumentsAreLeftOut) {
  ScalarArguments scalars;
  for (std::uint64_t argument = 0; argument < ScalarArguments::kMostArguments; ++argument) {
    EXPECT_TRUE(scalars.counts(argument, 0));
  }
  EXPECT_FALSE(scalars.counts(ScalarArguments::kMostArguments, 0));
  EXPECT_TRUE(scalars.counts(0, 0));
}

}  // namespace
}  // namespace brim
