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

TEST(Recollection, ALimitLearnedFromAHeavierCallFades) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  EXPECT_LE(size_of_call(memory, kMiB, 1), 64);
  const std::int64_t light = size_of_call(memory, 1024, 1);
  EXPECT_LE(light, 1024);
  EXPECT_EQ(size_of_call(memory, 1024, 1), 1024) << "the first light call needed next to nothing";
}

TEST(Recollection, ALimitOfTheSameKindOfCallStays) {
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

TEST(Recollection, MemoryThatEachCallFreesFirstCountsAsAvailable) {
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
    EXPECT_EQ(call > 0 ? failures_of(attempts) : 0, 0) << "in call " << call;
    EXPECT_GE(call > 1 ? attempts.back().size() : kLargest, kLargest * 97 / 100) << "call " << call;
  }
}

TEST(Recollection, AQuadraticNeedIsNotTakenForALightCall) {
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

TEST(Recollection, ANewKindOfCallBeginsWithWhatAWiderOneKnows) {
  SizeMemory memory;
  const Budget budget = room_for(64 * kMiB);
  const std::int64_t known = size_of_call(memory, kMiB, 1, 0);
  std::vector<Attempt> attempts;
  batch(1024, [&](std::int64_t size) { const at::Tensor all = tensor_of(size * kMiB); },
        {.memory = &memory, .key = 2, .wider_key = 0, .attempts = &attempts});
  EXPECT_EQ(failures_of(attempts), 0);
  EXPECT_GE(attempts.back().size(), known);
}

TEST(Recollection, KindsOfCallDoNotHoldEachOtherBack) {
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

}  // namespace
}  // namespace brim
