#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace brim {
class AllocationGates;
}

namespace brim::testing {

/// Makes chosen allocations fail with c10::OutOfMemoryError, to test how a program behaves when
/// memory runs out.
///
///     brim::testing::OomInjector injector(3, 2);  // the 3rd and the 4th allocation from now fail
///     EXPECT_THROW(run(), c10::OutOfMemoryError);
///
/// Counts the allocations of every thread on the CPU, or on all CUDA devices together, from its
/// construction on (empty tensors allocate nothing). Several may be open at once: each counts every
/// allocation, and an allocation fails if any of them says so. A value that layers keep only while
/// there is room (Recompute::automatic) is given up first, and the allocation is tried, and
/// counted, again. Thread-safe.
class BRIM_API OomInjector {
 public:
  /// @param at the first allocation that fails, counted from 1. @param count how many fail in a row
  /// from there.
  /// @throws c10::ValueError if `at` or `count` is below 1 or `device` is neither the CPU nor CUDA,
  ///     c10::NotImplementedError where CUDA's allocator is not torch's own.
  explicit OomInjector(std::int64_t at, std::int64_t count = 1,
                       c10::Device device = c10::DeviceType::CPU);

  /// Throws what the constructor would throw.
  static void check_arguments(std::int64_t at, std::int64_t count, c10::Device device);

  ~OomInjector();
  OomInjector(const OomInjector&) = delete;
  OomInjector& operator=(const OomInjector&) = delete;

  /// Stops injecting; the counts stay readable. A second call does nothing.
  void close() noexcept;

  std::int64_t allocations() const;  ///< the number of allocations seen, the failed ones included
  std::int64_t failures() const;     ///< the number of failures injected

 private:
  class Gate;
  AllocationGates* gates_ = nullptr;
  std::unique_ptr<Gate> gate_;
  bool closed_ = false;
};

}  // namespace brim::testing
