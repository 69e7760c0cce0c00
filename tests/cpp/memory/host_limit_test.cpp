#include <brim/memory/cpu.h>
#include <brim/memory/host_limit.h>
#include <brim/memory/host_memory.h>
#include <brim/memory/stats.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "tensors.h"

namespace brim {
namespace {

using tests::tensor_of;

/// More than the machine has, less than the address space.
std::int64_t too_much() { return 2 * read_host_memory().physical_total; }

std::string refusal() {
  try {
    tensor_of(too_much());
  } catch (const c10::OutOfMemoryError& error) {
    return error.what_without_backtrace();
  }
  return {};
}

bool host_refuses() {
  return refusal().find("that the machine and its cgroups have") != std::string::npos;
}

TEST(HostLimit, RefusesWhatTheMachineDoesNotHave) {
  const HostLimit limit(HostLimit::State::open);
  EXPECT_TRUE(host_refuses());
  EXPECT_NO_THROW(tensor_of(std::int64_t{64} << 20)) << "what it has is given";
}

TEST(HostLimit, HoldsWhileItIsOpenAndOnItsThreadOnly) {
  install_cpu_allocator();  // torch's own refuses with another error
  EXPECT_FALSE(host_refuses());
  {
    const HostLimit limit(HostLimit::State::open);
    bool elsewhere = true;
    std::thread([&] { elsewhere = host_refuses(); }).join();
    EXPECT_FALSE(elsewhere);
    EXPECT_TRUE(host_refuses());
  }
  EXPECT_FALSE(host_refuses());
}

TEST(HostLimit, Nests) {
  {
    const HostLimit outer(HostLimit::State::open);
    {
      const HostLimit inner(HostLimit::State::open);
      const HostLimit closed(HostLimit::State::closed);
      EXPECT_TRUE(host_refuses());
    }
    EXPECT_TRUE(host_refuses()) << "the outer one is open still";
  }
  EXPECT_FALSE(host_refuses());
}

TEST(HostLimit, ARefusedRequestTakesNothing) {
  const HostLimit limit(HostLimit::State::open);
  const std::int64_t before = memory_stats(c10::DeviceType::CPU).allocated;
  EXPECT_TRUE(host_refuses());
  EXPECT_EQ(memory_stats(c10::DeviceType::CPU).allocated, before);
}

TEST(HostLimitDeathTest, HoldsInAProcessThatHasUsedNothingElseOfBrim) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process
  const auto refuses = [] {
    const HostLimit limit(HostLimit::State::open);
    return host_refuses();
  };
  EXPECT_EXIT(std::_Exit(refuses() ? 0 : 1), ::testing::ExitedWithCode(0), "");
  EXPECT_TRUE(refuses()) << "nor does it matter if there was something else";
}

}  // namespace
}  // namespace brim
