#include <brim/need/trace.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "need/memory_simulation.h"

namespace brim {
namespace {

using simulation::Random;

struct Operator {
  std::uint64_t name;
  std::vector<std::uint64_t> paths;  // of its requests
};

Trace trace_of_operators(const std::vector<Operator>& operators, bool complete = true) {
  Trace trace;
  trace.complete = complete;
  for (std::size_t i = 0; i < operators.size(); ++i) {
    for (const std::uint64_t path : operators[i].paths) {
      trace.events.push_back(static_cast<std::int32_t>(trace.requests.size()));
      trace.requests.push_back({.bytes = 1,
                                .operation = static_cast<std::int32_t>(i),
                                .name = operators[i].name,
                                .path = path});
    }
  }
  return trace;
}

std::vector<Operator> of_names(const std::vector<std::uint64_t>& names) {
  std::vector<Operator> operators;
  for (const std::uint64_t name : names) {
    operators.push_back({name, {name}});
  }
  return operators;
}

std::size_t longest_common(const std::vector<std::uint64_t>& a,
                           const std::vector<std::uint64_t>& b) {
  std::vector<std::vector<std::size_t>> length(a.size() + 1,
                                               std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < b.size(); ++j) {
      length[i + 1][j + 1] =
          a[i] == b[j] ? length[i][j] + 1 : std::max(length[i][j + 1], length[i + 1][j]);
    }
  }
  return length.back().back();
}

TEST(Matched, PairsAsManyOperatorsAsALongestCommonSubsequence) {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::uint64_t> from(static_cast<std::size_t>(random.integer(0, 40)));
    std::ranges::generate(from, [&] { return static_cast<std::uint64_t>(random.integer(1, 6)); });
    std::vector<std::uint64_t> to;
    for (const std::uint64_t name : from) {
      while (random.integer(0, 4) == 0) {
        to.push_back(static_cast<std::uint64_t>(random.integer(1, 6)));
      }
      if (random.integer(0, 6) != 0) {
        to.push_back(name);
      }
    }
    const auto same = matched(trace_of_operators(of_names(from)), trace_of_operators(of_names(to)));
    ASSERT_EQ(same.size(), from.size());
    std::int32_t last = -1;
    std::size_t pairs = 0;
    for (std::size_t each = 0; each < same.size(); ++each) {
      if (same[each] != Trace::kNone) {
        ASSERT_GT(same[each], last) << "not in order";
        ASSERT_EQ(from[each], to.at(static_cast<std::size_t>(same[each])));
        last = same[each];
        ++pairs;
      }
    }
    ASSERT_EQ(pairs, longest_common(from, to));
  }
}

TEST(Matched, AWorkspaceStaysInsideItsOperator) {
  const Trace plain = trace_of_operators({{1, {10}}, {2, {20, 21}}, {2, {20, 21}}, {3, {30}}});
  const Trace with = trace_of_operators({{1, {10}}, {2, {20, 29, 21}}, {2, {20, 21}}, {3, {30}}});
  EXPECT_EQ(matched(plain, with), (std::vector<std::int32_t>{0, 1, 3, 4, 5, 6}));
  EXPECT_EQ(matched(with, plain), (std::vector<std::int32_t>{0, 1, Trace::kNone, 2, 3, 4, 5}));
}

TEST(Matched, ATraceThatAFailureCutIsMatchedUpToThere) {
  const std::vector<Operator> all{{1, {10, 11, 12}}, {2, {20, 21, 22}}, {3, {30}}};
  for (std::size_t requests = 1; requests <= 6; ++requests) {
    std::vector<Operator> begun(all.begin(), all.begin() + (requests <= 3 ? 1 : 2));
    begun.back().paths.resize(requests <= 3 ? requests : requests - 3);
    const Trace cut = trace_of_operators(begun, false);
    const auto same = matched(trace_of_operators(all), cut);
    for (std::size_t i = 0; i < same.size(); ++i) {
      EXPECT_EQ(same[i], i < requests ? static_cast<std::int32_t>(i) : Trace::kNone) << requests;
    }
    const auto back = matched(cut, trace_of_operators(all));
    for (std::size_t i = 0; i < back.size(); ++i) {
      EXPECT_EQ(back[i], static_cast<std::int32_t>(i));
    }
  }
}

TEST(Matched, OnlyTheLastOperatorOfAFailureIsMatchedInOrderAlone) {
  // In the whole trace the operator has a workspace ahead of its other requests.
  for (const bool whole_first : {false, true}) {
    const Trace last = trace_of_operators({{1, {10}}, {2, {20, 21}}}, false);
    const Trace whole = trace_of_operators({{1, {10}}, {2, {29, 20, 21}}});
    EXPECT_EQ(whole_first ? matched(whole, last) : matched(last, whole),
              whole_first ? (std::vector<std::int32_t>{0, 1, 2, Trace::kNone})
                          : (std::vector<std::int32_t>{0, 1, 2}));
    const Trace inner = trace_of_operators({{2, {20, 21}}, {3, {30}}}, false);
    const Trace outer = trace_of_operators({{2, {29, 20, 21}}, {3, {30}}});
    EXPECT_EQ(whole_first ? matched(outer, inner) : matched(inner, outer),
              whole_first ? (std::vector<std::int32_t>{Trace::kNone, 0, 1, 2})
                          : (std::vector<std::int32_t>{1, 2, 3}));
  }
}

TEST(Matched, WhatWasHeldBeforeIsNotMatched) {
  Trace from = trace_of_operators(of_names({1, 2}));
  from.requests.insert(from.requests.begin(), {.bytes = 5, .operation = 0, .name = 1, .path = 1});
  from.older = 1;
  const Trace to = trace_of_operators(of_names({1, 2}));
  EXPECT_EQ(matched(from, to), (std::vector<std::int32_t>{Trace::kNone, 0, 1}));
  EXPECT_EQ(matched(to, from), (std::vector<std::int32_t>{1, 2}));
}

TEST(Matched, WorksThatHaveNothingInCommonAreNotMatched) {
  Random random(2);
  std::vector<std::uint64_t> from(3000);
  std::vector<std::uint64_t> to(3000);
  std::ranges::generate(from, [&] { return static_cast<std::uint64_t>(random.integer(1, 1000)); });
  std::ranges::generate(to, [&] { return static_cast<std::uint64_t>(random.integer(1001, 2000)); });
  EXPECT_TRUE(std::ranges::all_of(
      matched(trace_of_operators(of_names(from)), trace_of_operators(of_names(to))),
      [](std::int32_t same) { return same == Trace::kNone; }));
}

}  // namespace
}  // namespace brim
