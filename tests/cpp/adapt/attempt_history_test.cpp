// What a call makes of what earlier calls learned: of heavier calls under the same key, and of a
// wider kind of call.

#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;

std::int64_t size_of_call(SizeMemory& memory, std::int64_t bytes_per_item, std::uint64_t key,
                          std::optional<std::uint64_t> wider = std::nullopt) {
  return batch(1024,
               [&](std::int64_t size) {
                 const at::Tensor all = tensor_of(size * bytes_per_item);
                 return size;
               },
               {.memory = &memory, .key = key, .wider_key = wider});
}

TEST(AttemptHistory, ALimitLearnedFromAHeavierCallFades) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  EXPECT_LE(size_of_call(memory, kMiB, 1), 64);
  const std::int64_t light = size_of_call(memory, 1024, 1);
  EXPECT_LE(light, 1024);
  EXPECT_EQ(size_of_call(memory, 1024, 1), 1024) << "the first light call needed next to nothing";
}

TEST(AttemptHistory, ALimitOfTheSameKindOfCallStays) {
  for (const std::int64_t bytes : {kMiB / 2, kMiB, 3 * kMiB}) {
    SizeMemory memory;
    const Budget budget = room_for(64 * kMiB);
    size_of_call(memory, bytes, 1);
    for (int call = 0; call < 5; ++call) {
      std::vector<Attempt> attempts;
      batch(1024, [&](std::int64_t size) { const at::Tensor all = tensor_of(size * bytes); },
            {.memory = &memory, .key = 1, .attempts = &attempts});
      EXPECT_EQ(failures_of(attempts), 0) << bytes << " in call " << call;
    }
  }
}

TEST(AttemptHistory, MemoryThatEachCallFreesFirstCountsAsAvailable) {
  SizeMemory memory;
  at::Tensor gradients;
  at::Tensor state;
  const Budget budget = room_for(64 * kMiB);
  constexpr std::int64_t kLargest = (64 - 8 - 16) * 16;  // beside the gradients and the state
  for (int call = 0; call < 6; ++call) {
    std::vector<Attempt> attempts;
    batch(8192,
          [&](std::int64_t size) {
            gradients.reset();
            {
              const at::Tensor first = tensor_of(size * kMiB / 32);
              const at::Tensor second = tensor_of(size * kMiB / 32);
              gradients = tensor_of(8 * kMiB);
            }
            state = state.defined() ? state : tensor_of(16 * kMiB);
          },
          {.memory = &memory, .key = 1, .attempts = &attempts});
    // The second call may fail once: it finds a state that the first one had room for.
    EXPECT_LE(call > 0 ? failures_of(attempts) : 0, call == 1 ? 1 : 0) << "in call " << call;
    EXPECT_GE(call > 1 ? attempts.back().size() : kLargest, kLargest * 97 / 100) << "call " << call;
  }
}

TEST(AttemptHistory, AQuadraticNeedIsNotTakenForALightCall) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  int failures = 0;
  for (int call = 0; call < 8; ++call) {
    std::vector<Attempt> attempts;
    batch(4096, [&](std::int64_t size) { const at::Tensor all = tensor_of(size * size * 256); },
          {.memory = &memory, .key = 1, .attempts = &attempts});
    failures += call >= 2 ? failures_of(attempts) : 0;
  }
  EXPECT_EQ(failures, 0);
}

TEST(AttemptHistory, ANewKindOfCallBeginsWithWhatAWiderOneKnows) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  const std::int64_t known = size_of_call(memory, kMiB, 1, 0);
  std::vector<Attempt> attempts;
  batch(1024, [&](std::int64_t size) { const at::Tensor all = tensor_of(size * kMiB); },
        {.memory = &memory, .key = 2, .wider_key = 0, .attempts = &attempts});
  EXPECT_EQ(failures_of(attempts), 0);
  EXPECT_GE(attempts.back().size(), known);
}

TEST(AttemptHistory, AWiderKindOfCallLearnsFromLaterFailuresAlone) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  size_of_call(memory, kMiB, 2);  // a failure elsewhere: from now on all calls are measured
  size_of_call(memory, 1024, 1, 0);
  ASSERT_FALSE(memory.recall(0).empty());
  ASSERT_EQ(failures_of(memory.recall(0)), 0);
  const auto first = memory.recall(0);
  size_of_call(memory, 1024, 1, 0);
  EXPECT_EQ(memory.recall(0).size(), first.size());
  size_of_call(memory, kMiB, 1, 0);
  EXPECT_GT(failures_of(memory.recall(0)), 0);
}

TEST(AttemptHistory, KindsOfCallDoNotHoldEachOtherBack) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  size_of_call(memory, kMiB, 1, 0);
  size_of_call(memory, kMiB / 8, 2, 0);
  EXPECT_GE(size_of_call(memory, kMiB / 8, 2, 0), 450) << "512 would fit";
  std::vector<Attempt> attempts;
  batch(1024, [&](std::int64_t size) { const at::Tensor all = tensor_of(size * kMiB); },
        {.memory = &memory, .key = 1, .wider_key = 0, .attempts = &attempts});
  EXPECT_EQ(failures_of(attempts), 0) << "nor forget";
}

std::vector<Attempt> call_of_kind(SizeMemory& memory, std::int64_t bytes_per_item,
                                  std::uint64_t key, Strategy strategy = Strategy::predictive) {
  std::vector<Attempt> attempts;
  batch(4096, [&](std::int64_t size) { const at::Tensor all = tensor_of(size * bytes_per_item); },
        {.strategy = strategy, .memory = &memory, .key = key, .kind = 77, .attempts = &attempts});
  return attempts;
}

TEST(AttemptHistory, ACallWithOtherLengthsBeginsWhereOneOfItsKindFitted) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  EXPECT_GT(failures_of(call_of_kind(memory, kMiB, 1)), 0);
  const std::int64_t known = call_of_kind(memory, kMiB, 1).back().size();
  for (std::uint64_t key = 2; key < 6; ++key) {
    for (int call = 0; call < 4; ++call) {
      const auto attempts = call_of_kind(memory, kMiB, key);
      EXPECT_EQ(failures_of(attempts), 0) << "key " << key << ", call " << call;
      EXPECT_GE(attempts.back().size(), known * 9 / 10) << "key " << key << ", call " << call;
    }
    EXPECT_GE(call_of_kind(memory, kMiB, key).back().size(), 62);
  }
}

TEST(AttemptHistory, AHintThatIsTooLowIsLeftWithoutAFailure) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  call_of_kind(memory, kMiB, 1);
  std::int64_t last = 0;
  for (int call = 0; call < 6; ++call) {
    const auto attempts = call_of_kind(memory, kMiB / 32, 2);
    EXPECT_EQ(failures_of(attempts), 0) << "call " << call;
    last = attempts.back().size();
  }
  EXPECT_GE(last, 2048 * 97 / 100);
}

TEST(AttemptHistory, AHintThatIsTooHighFailsNoMoreOftenThanWithoutIt) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  for (int call = 0; call < 3; ++call) {
    call_of_kind(memory, kMiB / 32, 1);
  }
  SizeMemory fresh;
  const auto without = call_of_kind(fresh, kMiB, 2);
  const auto with = call_of_kind(memory, kMiB, 2);
  EXPECT_LE(failures_of(with), failures_of(without));
  EXPECT_GE(with.back().size(), 32);
}

TEST(AttemptHistory, HalvingTakesNoHint) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  const auto first = call_of_kind(memory, kMiB, 1, Strategy::halving);
  const auto second = call_of_kind(memory, kMiB, 2, Strategy::halving);
  EXPECT_EQ(second.front().size(), 4096);
  EXPECT_EQ(first.size(), second.size());
}

/// As a training step: what the first call leaves (an optimizer's state), later ones find.
struct FirstCallLeavesState {
  at::Tensor state{};
  at::Tensor gradients{};

  void operator()(std::int64_t size) {
    gradients.reset();
    const at::Tensor activations = tensor_of(size * kMiB / 64);
    gradients = tensor_of(2 * kMiB);
    state = state.defined() ? state : tensor_of(4 * kMiB);
  }
};

TEST(AttemptHistory, ASizeThatFittedIsNotGivenUpForWhatTheFirstCallLeft) {
  for (const std::int64_t spare : {1, 2, 3}) {
    SizeMemory memory;
    const Budget budget = room_for((7 + spare) * kMiB);
    size_of_call(memory, kMiB, 2);  // a failure elsewhere: from now on all calls are measured
    FirstCallLeavesState work;
    int call = 0;
    for (const std::int64_t most : {64, 64, 48, 64, 32, 64}) {
      std::vector<Attempt> attempts;
      batch(most, [&](std::int64_t size) { work(size); },
            {.memory = &memory, .key = 1, .attempts = &attempts});
      ++call;
      EXPECT_EQ(attempts.back().size(), most) << "call " << call << ", spare " << spare;
      EXPECT_EQ(failures_of(attempts), 0) << "call " << call << ", spare " << spare;
    }
  }
}

}  // namespace
}  // namespace brim
