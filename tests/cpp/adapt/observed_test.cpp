// Watching changes nothing: a call that is recorded, observed or restored chooses the same sizes as
// one that is not.

#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/saved_state.h>
#include <brim/adapt/size_memory.h>
#include <brim/testing/clock_by_hand.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;

using Work = std::function<void(std::int64_t)>;

/// Kinds of work, each made anew for a series of calls.
const std::map<std::string, std::function<Work()>>& works() {
  static const std::map<std::string, std::function<Work()>> all{
      {"linear", [] { return Work([](std::int64_t n) { tensor_of(n * kMiB / 64); }); }},
      {"quadratic", [] { return Work([](std::int64_t n) { tensor_of(n * n * 256); }); }},
      {"leaves a state",
       [] {
         auto state = std::make_shared<at::Tensor>();
         return Work([=](std::int64_t n) {
           const at::Tensor activations = tensor_of(n * kMiB / 64);
           *state = state->defined() ? *state : tensor_of(2 * kMiB);
         });
       }},
      {"frees what it left",
       [] {
         auto gradients = std::make_shared<at::Tensor>();
         return Work([=](std::int64_t n) {
           gradients->reset();
           const at::Tensor first = tensor_of(n * kMiB / 128);
           *gradients = tensor_of(kMiB);
           const at::Tensor second = tensor_of(n * kMiB / 128);
         });
       }},
      {"keeps results",
       [] {
         auto kept = std::make_shared<std::vector<at::Tensor>>();
         return Work([=](std::int64_t n) {
           const at::Tensor inside = tensor_of(n * kMiB / 64);
           kept->push_back(tensor_of(kMiB / 16));
         });
       }},
  };
  return all;
}

/// The sizes of all attempts of some calls, with maxima that vary.
std::vector<std::int64_t> sizes_of(const Work& work, std::int64_t room,
                                   const std::function<void(AdaptOptions&)>& option) {
  SizeMemory memory;
  std::vector<std::int64_t> sizes;
  const Budget budget = room_for(room);
  for (const std::int64_t maximum : {64, 64, 64, 48, 64, 128, 64, 128}) {
    AdaptOptions options{.memory = &memory, .key = 1};
    option(options);
    batch(
        maximum,
        [&](std::int64_t size) {
          sizes.push_back(size);
          work(size);
        },
        options);
  }
  return sizes;
}

TEST(Observed, AWatchedCallChoosesTheSameSizes) {
  std::vector<Attempt> attempts;
  const std::map<std::string, std::function<void(AdaptOptions&)>> watching{
      {"attempts", [&](AdaptOptions& options) { options.attempts = &attempts; }},
      {"observer", [](AdaptOptions& options) { options.observer = [](const Attempt&) {}; }},
      {"restore", [](AdaptOptions& options) { options.restore = [](SavedState&) {}; }}};
  for (const auto& [kind, make] : works()) {
    for (const std::int64_t eighths : {6, 9, 12, 17, 20, 26, 34}) {
      const std::int64_t room = eighths * kMiB / 8;
      const bool needs_more = kind == "leaves a state" || kind == "frees what it left";
      const auto expected = sizes_of(make(), room + (needs_more ? 2 * kMiB : 0), [](auto&) {});
      for (const auto& [name, option] : watching) {
        EXPECT_EQ(sizes_of(make(), room + (needs_more ? 2 * kMiB : 0), option), expected)
            << kind << " with " << name << " and " << eighths << " / 8 MiB";
      }
    }
  }
}

TEST(Observed, AFirstAttemptThatFitsIsToldButNotLearned) {
  SizeMemory memory;
  std::vector<Attempt> attempts;
  batch(8, [](std::int64_t size) { tensor_of(size * 1024); },
        {.memory = &memory, .key = 1, .attempts = &attempts});
  ASSERT_EQ(attempts.size(), 1U);
  EXPECT_EQ(attempts.front().peak, 8 * 1024);
  EXPECT_FALSE(memory.may_know_something());
}

TEST(Observed, TimingDoesNotMakeASizeSmallerByABytesModel) {
  testing::ClockByHand clock;
  for (const std::int64_t spare : {1, 2, 3}) {
    SizeMemory memory;
    const Budget budget = room_for((3 + spare) * kMiB);
    at::Tensor state;
    for (int call = 0; call < 8; ++call) {
      batch(64,
            [&](std::int64_t size) {
              // The larger, the faster, by far: only the half is tried, and not chosen.
              clock.advance(std::chrono::milliseconds(size == 64 ? 2 : 20));
              EXPECT_TRUE(size == 64 || size == 32) << "call " << call << ": " << size;
              const at::Tensor activations = tensor_of(size * kMiB / 64);
              state = state.defined() ? state : tensor_of(2 * kMiB);
            },
            {.objective = Objective::throughput, .memory = &memory, .key = 1});
      if (call < 2) {
        EXPECT_EQ(memory.recall(1).back().size(), 64) << "call " << call;
      }
    }
  }
}

}  // namespace
}  // namespace brim
