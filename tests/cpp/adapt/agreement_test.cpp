#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/agreement.h>
#include <brim/adapt/saved_state.h>
#include <brim/adapt/size_memory.h>
#include <brim/memory/out_of_memory.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "adapt/calls.h"
#include "adapt/thread_ranks.h"

namespace brim {
namespace {

using namespace tests;

/// One rank's function: its memory and its agreement, as a decorated function keeps them.
struct Rank {
  Rank(ThreadRanks& all, std::int64_t number, const AgreementOptions& options = {})
      : channel(std::make_shared<ThreadChannel>(all, number)),
        agreement(channel, options, "step") {}

  /// All threads share one generator, so that none restores it.
  AdaptOptions options() {
    return {.restore_random_state = false,
            .host_limit = false,
            .memory = &memory,
            .ranks = &agreement,
            .name = "batch size"};
  }

  SizeMemory memory;
  std::shared_ptr<ThreadChannel> channel;
  Agreement agreement;
};

std::string text_of(const std::exception_ptr& error) {
  if (!error) {
    return "no error";
  }
  try {
    std::rethrow_exception(error);
  } catch (const RankError& other) {
    return std::string("RankError: ") + other.what();
  } catch (const c10::OutOfMemoryError& memory) {
    return std::string("OutOfMemoryError: ") + memory.what_without_backtrace();
  } catch (const std::exception& own) {
    return own.what();
  }
}

/// Calls of `batch` on all ranks, `limits[rank]` being the largest size that fits there; returns
/// the size that each rank ended each call with, and how many exchanges there were.
struct Calls {
  std::vector<std::vector<std::int64_t>> sizes;
  int exchanges = 0;
};
Calls batch_calls(ThreadRanks& all, const std::vector<std::int64_t>& limits, int calls,
                  const AgreementOptions& options = {}) {
  Calls result{std::vector<std::vector<std::int64_t>>(limits.size())};
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number, options);
    const auto at = static_cast<std::size_t>(number);
    for (int call = 0; call < calls; ++call) {
      result.sizes[at].push_back(batch(
          512,
          [&](std::int64_t size) {
            if (size > limits[at]) {
              throw_out_of_memory();
            }
            return size;
          },
          rank.options()));
    }
    if (number == 0) {
      result.exchanges = rank.channel->exchanges();
    }
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_EQ(text_of(error), "no error");
  }
  return result;
}

TEST(Agreement, AllRanksTakeTheLeastSize) {
  ThreadRanks all(3);
  const auto sizes = batch_calls(all, {512, 100, 300}, 4).sizes;
  EXPECT_EQ(sizes[0], sizes[1]);
  EXPECT_EQ(sizes[0], sizes[2]);
  EXPECT_LE(sizes[0].front(), 100);
  EXPECT_GE(sizes[0].front(), 50);
}

TEST(Agreement, OneExchangePerCallOnceSettled) {
  ThreadRanks all(2);
  // The first call has two: for the first size, and whether it fitted.
  EXPECT_EQ(batch_calls(all, {512, 512}, 1).exchanges, 2);
  EXPECT_EQ(batch_calls(all, {512, 512}, 10).exchanges, 11);
}

TEST(Agreement, WithSettledMostCallsMakeNoExchange) {
  ThreadRanks all(2);
  // The first call has two, three calls show calm, and one comes after 63 without.
  EXPECT_EQ(batch_calls(all, {512, 512}, 68, {.sync = Sync::settled}).exchanges, 2 + 3 + 1);
}

TEST(Agreement, WithSettledARankLowersItsSizeAloneUntilTheNextExchange) {
  ThreadRanks all(2);
  std::vector<std::vector<std::int64_t>> sizes(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number, {.sync = Sync::settled});
    for (int call = 0; call < 70; ++call) {
      sizes[static_cast<std::size_t>(number)].push_back(batch(
          512,
          [&](std::int64_t size) {
            if (number == 1 && call >= 10 && size > 200) {
              throw_out_of_memory();
            }
            return size;
          },
          rank.options()));
    }
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(text_of(errors[1]), "no error");
  EXPECT_EQ(sizes[0][30], 512);
  EXPECT_LE(sizes[1][30], 200);
  EXPECT_EQ(sizes[0].back(), sizes[1].back());
  EXPECT_LE(sizes[0].back(), 200);
}

/// A rank that votes as a reduction over all ranks would.
struct VotingRank : Rank {
  VotingRank(ThreadRanks& all, ThreadRanks& votes, std::int64_t number)
      : Rank(all, number, {.sync = Sync::settled}), ballot(votes, number) {
    agreement.end_with({.vote = [this](bool done) {
      std::vector<std::int64_t> least{done ? 1 : 0};
      ballot.least(least);
      return least.front() == 1;
    }});
  }

  ThreadChannel ballot;
};

TEST(Agreement, WithAVoteSettledCallsMakeNoExchangeAndAllTakeTheSameSizeAtOnce) {
  ThreadRanks all(2);
  ThreadRanks votes(2);
  std::vector<std::vector<std::int64_t>> sizes(2);
  std::vector<int> exchanges;
  const auto errors = all.run([&](std::int64_t number) {
    VotingRank rank(all, votes, number);
    for (int call = 0; call < 200; ++call) {
      sizes[static_cast<std::size_t>(number)].push_back(batch(
          512,
          [&](std::int64_t size) {
            if (number == 1 && call >= 100 && size > 200) {
              throw_out_of_memory();
            }
            return size;
          },
          rank.options()));
      if (number == 0) {
        exchanges.push_back(rank.channel->exchanges());
      }
    }
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(text_of(errors[1]), "no error");
  EXPECT_EQ(exchanges[3], 5);  // the first call has two
  EXPECT_EQ(exchanges[99], 5);
  EXPECT_EQ(sizes[0], sizes[1]);
  EXPECT_EQ(sizes[0][99], 512);
  EXPECT_LE(sizes[0][100], 200);
  EXPECT_EQ(exchanges[199], exchanges[150]);
}

TEST(Agreement, WithAVoteTheSizeGrowsAgainWithoutWaiting) {
  ThreadRanks all(2);
  ThreadRanks votes(2);
  std::vector<std::vector<std::int64_t>> sizes(2);
  const auto errors = all.run([&](std::int64_t number) {
    VotingRank rank(all, votes, number);
    for (int call = 0; call < 40; ++call) {
      if (call == 20) {
        rank.memory.forget(0);  // each would now begin with 512
      }
      sizes[static_cast<std::size_t>(number)].push_back(batch(
          512,
          [&](std::int64_t size) {
            if (number == 1 && call < 20 && size > 200) {
              throw_out_of_memory();
            }
            return size;
          },
          rank.options()));
    }
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(sizes[0], sizes[1]);
  EXPECT_LE(sizes[0][19], 200);
  EXPECT_EQ(sizes[0][21], 512);
}

TEST(Agreement, WithAVoteRandomFailuresAndErrorsMeetAllRanksInTheSameCall) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    const auto count = static_cast<std::int64_t>(2 + seed % 3);
    ThreadRanks all(count);
    ThreadRanks votes(count);
    std::vector<std::vector<std::int64_t>> sizes(static_cast<std::size_t>(count));
    const auto errors = all.run([&](std::int64_t number) {
      std::mt19937 random(seed * 31 + static_cast<std::uint32_t>(number));
      VotingRank rank(all, votes, number);
      const at::Tensor sum = at::zeros({1});
      AdaptOptions options = rank.options();
      options.restore = [&](SavedState& state) { state.add_values(sum); };
      float fitted = 0;
      for (int call = 0; call < 60; ++call) {
        std::int64_t result = 0;
        try {
          if (random() % 50 == 0) {
            rank.agreement.refuse_call("a wrong argument");
            throw std::logic_error("a wrong argument");
          }
          result = batch(
              1000,
              [&](std::int64_t size) {
                sum.add_(1);
                if (random() % 50 == 0) {
                  throw std::logic_error("an error");
                }
                if (size > 2 && random() % 20 == 0) {
                  throw_out_of_memory();
                }
                return size;
              },
              options);
          ++fitted;
        } catch (const RankError&) {
          result = -1;
        } catch (const std::logic_error&) {
          result = -1;
          sum.fill_(fitted);
        }
        EXPECT_EQ(sum.item<float>(), fitted);
        sizes[static_cast<std::size_t>(number)].push_back(result);
      }
    });
    for (std::size_t at = 0; at < errors.size(); ++at) {
      ASSERT_EQ(text_of(errors[at]), "no error") << "seed " << seed;
      ASSERT_EQ(sizes[at], sizes[0]) << "seed " << seed;
    }
  }
}

/// One call per length on this rank, where sizes above `limit` do not fit. Returns the sizes.
std::vector<std::int64_t> calls_of_lengths(Rank& rank, const std::vector<std::int64_t>& lengths,
                                           std::int64_t limit, int& failures) {
  std::vector<std::int64_t> sizes;
  for (const std::int64_t length : lengths) {
    const AdaptOptions options = rank.options();
    sizes.push_back(detail::until_it_fits({.maxima = {&length, 1},
                                           .quanta = {&options.quantum, 1},
                                           .options = options,
                                           .maxima_may_differ = true,
                                           .maxima_are_lengths = true},
                                          [&](std::span<const std::int64_t> values) {
                                            if (values.front() > limit) {
                                              ++failures;
                                              throw_out_of_memory();
                                            }
                                            return values.front();
                                          }));
  }
  return sizes;
}

TEST(Agreement, ARankWithAShortArgumentDoesNotHoldBackTheOthers) {
  ThreadRanks all(2);
  std::vector<std::vector<std::int64_t>> sizes(2);
  std::vector<int> failures(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    const auto at = static_cast<std::size_t>(number);
    sizes[at] = calls_of_lengths(rank,
                                 number == 0 ? std::vector<std::int64_t>{100, 120, 90, 100}
                                             : std::vector<std::int64_t>{10, 3, 110, 10},
                                 1000, failures[at]);
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(text_of(errors[1]), "no error");
  EXPECT_EQ(sizes[0], (std::vector<std::int64_t>{100, 120, 90, 100}));
  EXPECT_EQ(sizes[1], (std::vector<std::int64_t>{10, 3, 110, 10}));
}

TEST(Agreement, WhatDoesNotFitOnARankIsRememberedThroughItsShortArguments) {
  ThreadRanks all(2);
  std::vector<std::vector<std::int64_t>> sizes(2);
  std::vector<int> failures(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    const auto at = static_cast<std::size_t>(number);
    sizes[at] = calls_of_lengths(rank, {number == 0 ? 100 : 10, 100}, number == 0 ? 1000 : 60,
                                 failures[at]);
    const int before = std::exchange(failures[at], 0);
    EXPECT_EQ(before > 0, number == 1);
    const auto more = calls_of_lengths(rank, {100, number == 0 ? 100 : 10, 100},
                                       number == 0 ? 1000 : 60, failures[at]);
    sizes[at].insert(sizes[at].end(), more.begin(), more.end());
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(text_of(errors[1]), "no error");
  EXPECT_EQ(sizes[0][0], 100);
  EXPECT_EQ(sizes[1][0], 10);
  for (const std::size_t call : {1, 2, 4}) {
    EXPECT_EQ(sizes[0][call], sizes[1][call]);
    EXPECT_LE(sizes[0][call], 60);
    EXPECT_GE(sizes[0][call], 30);
  }
  EXPECT_LT(sizes[0][3], 100);  // beside the short one: what failed on the other rank counts
  EXPECT_EQ(sizes[1][3], 10);
}

TEST(Agreement, PerRankSizesStayTheirOwn) {
  ThreadRanks all(2);
  const auto [sizes, exchanges] = batch_calls(all, {512, 100}, 3, {.per_rank = true});
  EXPECT_EQ(sizes[0], (std::vector<std::int64_t>{512, 512, 512}));
  EXPECT_LE(sizes[1].front(), 100);
  EXPECT_EQ(exchanges, 3);
}

TEST(Agreement, AnAttemptThatAnotherRankUndoesIsRestored) {
  ThreadRanks all(2);
  std::vector<at::Tensor> counts{at::zeros({1}), at::zeros({1})};
  std::vector<int> attempts(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    const auto at = static_cast<std::size_t>(number);
    AdaptOptions options = rank.options();
    options.restore = [&](SavedState& state) { state.add_values(counts[at]); };
    std::shared_ptr<int> alive;  // what the undone attempt returned
    batch(
        64,
        [&](std::int64_t size) {
          EXPECT_LE(alive.use_count(), 1) << "its result must be released before it is redone";
          counts[at].add_(1);
          ++attempts[at];
          if (number == 1 && size > 32) {
            throw_out_of_memory();
          }
          alive = std::make_shared<int>(0);
          return alive;
        },
        options);
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(attempts, (std::vector<int>{2, 2}));
  EXPECT_EQ(counts[0].item<float>(), 1);
  EXPECT_EQ(counts[1].item<float>(), 1);
}

TEST(Agreement, AnErrorOfOneRankEndsTheCallOnAll) {
  ThreadRanks all(3);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    batch(
        64,
        [&](std::int64_t /*size*/) {
          if (number == 1) {
            throw std::logic_error("no such file");
          }
        },
        rank.options());
  });
  EXPECT_EQ(text_of(errors[1]), "no such file");
  EXPECT_EQ(text_of(errors[0]), "RankError: rank 1 failed with batch size = 64: no such file");
  EXPECT_EQ(text_of(errors[2]), text_of(errors[0]));
}

TEST(Agreement, ACallThatOneRankCannotBeginEndsOnAllAndTheNextIsInStep) {
  ThreadRanks all(2);
  std::vector<std::string> refused(2);
  std::vector<std::vector<int>> calls(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    const auto at = static_cast<std::size_t>(number);
    for (int call = 0; call < 3; ++call) {
      try {
        if (number == 1 && call == 1) {
          rank.agreement.refuse_call("a wrong argument");
          continue;
        }
        batch(64, [](std::int64_t /*size*/) {}, rank.options());
        calls[at].push_back(call);
      } catch (...) {
        refused[at] = text_of(std::current_exception());
      }
    }
    batch(4, [&](std::int64_t) { rank.agreement.refuse_call("inside"); }, rank.options());
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(text_of(errors[1]), "no error");
  EXPECT_EQ(refused[0], "RankError: rank 1 failed with a wrong argument");
  EXPECT_EQ(refused[1], "");
  EXPECT_EQ(calls[0], (std::vector<int>{0, 2}));
  EXPECT_EQ(calls[1], (std::vector<int>{0, 2}));
}

TEST(Agreement, WhereOneRankDoesNotFitAtTheFloorAllEnd) {
  ThreadRanks all(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    batch(
        4,
        [&](std::int64_t /*size*/) {
          if (number == 0) {
            throw_out_of_memory();
          }
        },
        rank.options());
  });
  EXPECT_CONTAINS(text_of(errors[0]), "OutOfMemoryError: CPU out of memory.");
  EXPECT_CONTAINS(text_of(errors[1]), "RankError: rank 0 failed with batch size = 1: CPU out of");
  EXPECT_FALSE(is_out_of_memory(errors[1]));  // a call around it must not try again alone
}

TEST(Agreement, DifferentCallsAreAnErrorOnAllRanks) {
  ThreadRanks all(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    batch(number == 0 ? 64 : 65, [](std::int64_t /*size*/) {}, rank.options());
  });
  EXPECT_CONTAINS(text_of(errors[0]),
                  "the ranks make different calls:\n  rank 0: step: batch size from 64");
  EXPECT_EQ(text_of(errors[0]), text_of(errors[1]));
}

TEST(Agreement, ARankThatIsGoneIsAnErrorOnTheOthers) {
  ThreadRanks all(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    if (number == 0) {
      batch(64, [](std::int64_t /*size*/) {}, rank.options());
    }
  });
  EXPECT_EQ(text_of(errors[0]), "RankError: a rank is gone");
}

TEST(Agreement, CallsCannotBeNested) {
  ThreadRanks all(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    const AdaptOptions options = rank.options();
    batch(4, [&](std::int64_t) { batch(4, [](std::int64_t) {}, options); }, options);
  });
  EXPECT_CONTAINS(text_of(errors[0]), "runs inside of another one");
  EXPECT_CONTAINS(text_of(errors[1]), "runs inside of another one");
}

TEST(Agreement, SeveralParametersAreLoweredInOrderOnAllRanks) {
  ThreadRanks all(2);
  std::vector<std::vector<std::int64_t>> results(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    const NamedSizes sizes{{{"rows", 64}, {"columns", 32}}, {"depth", 16}};
    for (int call = 0; call < 3; ++call) {
      results[static_cast<std::size_t>(number)] = maximize(
          sizes,
          [&](const Sizes& now) {
            const std::int64_t need = now["rows"] * now["depth"];
            if (need > (number == 0 ? 100 : 7)) {
              throw_out_of_memory();
            }
            return std::vector<std::int64_t>(now.values().begin(), now.values().end());
          },
          rank.options());
    }
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(text_of(errors[1]), "no error");
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0][0], 1);  // rows are at their floor
  EXPECT_LE(results[0][2], 7);
}

TEST(Agreement, RangesOfDifferentLengthAreCoveredOnce) {
  ThreadRanks all(3);
  const std::vector<std::int64_t> lengths{1000, 0, 333};
  std::vector<std::vector<int>> done{std::vector<int>(1000), {}, std::vector<int>(333)};
  std::vector<std::int64_t> longest(3);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    const auto at = static_cast<std::size_t>(number);
    for (int call = 0; call < 3; ++call) {
      range(
          0, lengths[at], 256,
          [&](std::int64_t begin, std::int64_t end) {
            if (end - begin > (number == 2 ? 20 : 100)) {
              throw_out_of_memory();
            }
            for (std::int64_t i = begin; i < end; ++i) {
              ++done[at][static_cast<std::size_t>(i)];
            }
            longest[at] = std::max(longest[at], end - begin);
          },
          rank.options());
    }
  });
  for (std::size_t at = 0; at < 3; ++at) {
    EXPECT_EQ(text_of(errors[at]), "no error");
    EXPECT_TRUE(std::ranges::all_of(done[at], [](int times) { return times == 3; }));
  }
}

TEST(Agreement, StepsOfARangeGrowTogetherUntilTheySettle) {
  ThreadRanks all(2);
  std::vector<std::int64_t> longest(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    auto& own = longest[static_cast<std::size_t>(number)];
    range(
        0, 100, 16, [&](std::int64_t begin, std::int64_t end) { own = std::max(own, end - begin); },
        rank.options());
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(text_of(errors[1]), "no error");
  EXPECT_EQ(longest, (std::vector<std::int64_t>{16, 16}));
}

TEST(Agreement, AnErrorInAPartIsToldToAllRanksWithItsStep) {
  ThreadRanks all(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    const auto part = [&](std::int64_t begin, std::int64_t) {
      if (number == 1 && begin > 0) {
        throw std::logic_error("no such file");
      }
    };
    range(0, 100, 4, part, rank.options());
  });
  EXPECT_EQ(text_of(errors[1]), "no such file");
  EXPECT_CONTAINS(text_of(errors[0]), "RankError: rank 1 failed with batch size = ");
  EXPECT_CONTAINS(text_of(errors[0]), ": no such file");
}

TEST(Agreement, OfALongRangeOnlyTheEndIsExchangedOnceSettled) {
  ThreadRanks all(2);
  std::vector<int> after(3);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number);
    for (int call = 0; call < 3; ++call) {
      range(0, 10'000, 16, [](std::int64_t, std::int64_t) {}, rank.options());
      if (number == 0) {
        after[static_cast<std::size_t>(call)] = rank.channel->exchanges();
      }
    }
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_LE(after[0], 12);
  EXPECT_EQ(after[2], after[0] + 2);
}

TEST(Agreement, WithCollectivesInsideBatchesOfAnyLengthHaveAsManyParts) {
  ThreadRanks all(2);
  const std::vector<std::vector<std::int64_t>> lengths{{8, 8, 3, 7, 90}, {8, 5, 8, 4, 3}};
  std::vector<std::vector<std::int64_t>> parts(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number, {.collectives = Collectives::inside});
    const auto at = static_cast<std::size_t>(number);
    for (const std::int64_t length : lengths[at]) {
      rank.agreement.lengths.own = length;
      batch(
          3,
          [&](std::int64_t size) {
            parts[at].push_back(rank.agreement.lengths.parts);
            EXPECT_EQ(size, (length + parts[at].back() - 1) / parts[at].back());
            EXPECT_LE(size, 3);
          },
          rank.options());
    }
  });
  EXPECT_EQ(text_of(errors[0]), "no error");
  EXPECT_EQ(parts[0].size(), 5U);
  EXPECT_EQ(parts[0], parts[1]);
  EXPECT_GE(parts[0].back(), 30);
}

TEST(Agreement, WithCollectivesInsideSizesGrowFromSmallAndAFailureEndsAllRanks) {
  ThreadRanks all(2);
  std::vector<std::vector<std::int64_t>> sizes(2);
  const auto errors = all.run([&](std::int64_t number) {
    Rank rank(all, number, {.collectives = Collectives::inside});
    for (int call = 0; call < 20; ++call) {
      batch(
          640,
          [&](std::int64_t size) {
            sizes[static_cast<std::size_t>(number)].push_back(size);
            if (number == 1 && call == 15) {
              throw_out_of_memory();
            }
          },
          rank.options());
    }
  });
  EXPECT_EQ(sizes[0], sizes[1]);
  EXPECT_EQ(sizes[0].front(), 10);
  EXPECT_TRUE(std::ranges::is_sorted(sizes[0]));
  EXPECT_CONTAINS(text_of(errors[1]), "collectives inside");
  EXPECT_CONTAINS(text_of(errors[0]), "RankError: rank 1 failed with batch size = ");
}

TEST(Agreement, OptionsThatExcludeEachOtherAreRefused) {
  ThreadRanks all(1);
  const auto channel = std::make_shared<ThreadChannel>(all, 0);
  for (const AgreementOptions& options :
       {AgreementOptions{.per_rank = true, .collectives = Collectives::inside},
        AgreementOptions{.sync = Sync::settled, .collectives = Collectives::inside}}) {
    EXPECT_THROW(Agreement(channel, options), c10::ValueError);
  }
}

/// Failures at random attempts of random ranks: every call ends on every rank with the same size,
/// every part is done once, and what each call adds is there once.
TEST(Agreement, RandomFailuresLeaveAllRanksAtTheSameSize) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    std::mt19937 shared(seed);
    const auto count = static_cast<std::int64_t>(2 + shared() % 3);
    const int calls = 6;
    ThreadRanks all(count);
    std::vector<std::vector<std::int64_t>> sizes(static_cast<std::size_t>(count));
    const auto errors = all.run([&](std::int64_t number) {
      std::mt19937 random(seed * 31 + static_cast<std::uint32_t>(number));
      Rank rank(all, number);
      Rank parts(all, number);
      const at::Tensor sum = at::zeros({1});
      AdaptOptions options = rank.options();
      options.restore = [&](SavedState& state) { state.add_values(sum); };
      const auto maybe_fail = [&](std::int64_t size) {
        if (size > 2 && random() % 4 == 0) {
          throw_out_of_memory();
        }
      };
      for (int call = 0; call < calls; ++call) {
        sizes[static_cast<std::size_t>(number)].push_back(batch(
            1000,
            [&](std::int64_t size) {
              sum.add_(1);
              maybe_fail(size);
              return size;
            },
            options));
        std::vector<int> done(static_cast<std::size_t>(50 + number));
        range(
            0, std::ssize(done), 20,
            [&](std::int64_t begin, std::int64_t end) {
              maybe_fail(end - begin);
              std::for_each(done.begin() + begin, done.begin() + end, [](int& each) { ++each; });
            },
            parts.options());
        EXPECT_TRUE(std::ranges::all_of(done, [](int times) { return times == 1; }));
      }
      EXPECT_EQ(sum.item<float>(), calls);
    });
    for (std::size_t at = 0; at < errors.size(); ++at) {
      ASSERT_EQ(text_of(errors[at]), "no error") << "seed " << seed;
      ASSERT_EQ(sizes[at], sizes[0]) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace brim
