#pragma once

// What the tests of the adaptive calls share.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <brim/adapt/options.h>
#include <brim/memory/budget.h>
#include <brim/memory/cpu.h>
#include <brim/memory/stats.h>
#include <brim/testing/oom_injector.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tensors.h"

namespace brim::tests {

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

/// Bytes that CPU tensors hold now.
inline std::int64_t held_now() {
  install_cpu_allocator();
  return held();
}

/// A budget of so many bytes above what is held now.
inline Budget room_for(std::int64_t bytes) { return Budget(held_now() + bytes, at::kCPU); }

/// Collects what TORCH_WARN says on this thread.
class CapturedWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts_.push_back(warning.msg()); }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::vector<std::string> texts_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

/// What a caching allocator would say, without any memory being touched.
[[noreturn]] inline void throw_out_of_memory() {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU out of memory.");
}

/// Holds `base` bytes, then also `slope` for each item: how most batched functions use memory.
struct AffineWork {
  std::int64_t base = 0;
  std::int64_t slope = 1;

  void operator()(std::int64_t size) const {
    const at::Tensor constant = tensor_of(base);
    const at::Tensor growing = tensor_of(slope * size);
  }
  std::int64_t largest_within(std::int64_t bytes) const { return (bytes - base) / slope; }
};

inline std::vector<std::int64_t> sizes_of(const std::vector<Attempt>& attempts) {
  std::vector<std::int64_t> sizes;
  for (const Attempt& attempt : attempts) {
    sizes.push_back(attempt.values.front());
  }
  return sizes;
}

inline int failures_of(const std::vector<Attempt>& attempts) {
  int failures = 0;
  for (const Attempt& attempt : attempts) {
    failures += attempt.fitted() ? 0 : 1;
  }
  return failures;
}

/// Runs `work`, which returns a tensor, without failures and then with some at every allocation
/// that it makes: the result must be the same to the bit.
template <class Work>
void expect_same_result_wherever_it_fails(const Work& work) {
  const auto result_of = [&] {
    at::manual_seed(1234);
    return work();
  };
  install_cpu_allocator();
  const at::Tensor expected = result_of().clone();
  std::int64_t allocations = 0;
  {
    const testing::OomInjector counter(kNever);
    result_of();
    allocations = counter.allocations();
  }
  ASSERT_GT(allocations, 0);
  for (std::int64_t at = 1; at <= allocations; ++at) {
    for (const std::int64_t count : {1, 3}) {
      const testing::OomInjector injector(at, count);
      const at::Tensor result = result_of();
      ASSERT_EQ(injector.failures(), count) << at;
      ASSERT_TRUE(result.equal(expected)) << "after " << count << " from allocation " << at;
    }
  }
}

/// The same for what a call leaves behind: `Job()` sets things up, `run()` is the adaptive call, in
/// which each allocation fails once, and `result()` what is to be the same.
template <class Job>
void expect_same_state_wherever_it_fails() {
  install_cpu_allocator();
  const auto result_of = [](std::int64_t at, std::int64_t& allocations) {
    Job job;
    {
      const testing::OomInjector injector(at);
      job.run();
      allocations = injector.allocations();
    }
    return job.result();
  };
  std::int64_t allocations = 0;
  const at::Tensor expected = result_of(kNever, allocations);
  ASSERT_GT(allocations, 0);
  for (std::int64_t at = 1; at <= allocations; ++at) {
    std::int64_t of_this = 0;
    ASSERT_TRUE(result_of(at, of_this).equal(expected)) << "after failing at allocation " << at;
    ASSERT_GT(of_this, allocations);
  }
}

}  // namespace brim::tests
