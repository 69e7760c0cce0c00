#pragma once

#include <brim/export.h>
#include <brim/memory/bytes.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string_view>

namespace brim {

/// Keeps the memory of one device under a limit for as long as this object lives.
///
///     brim::Budget budget("8GiB", at::kCPU);
///     run();  // an allocation that would go over throws c10::OutOfMemoryError
///
/// Budgets hold for the whole process, whichever thread allocates. They nest, and may end in any
/// order: the least of the open ones is in force. A percentage is a share of the limit in force
/// when the budget is opened. A limit below what is in use is allowed; the next allocation fails
/// and says how much was asked for, in use and allowed.
///
/// The limit is on the bytes that tensors hold. On the CPU it is exact (opening a budget installs
/// the counting allocator, see brim/memory/cpu.h; older tensors do not count). On CUDA it is in
/// blocks of torch's caching allocator, and what that takes from the device stays below the limit,
/// too, unless its cache is in pieces that are too small. Other accelerators have no such limit.
///
/// If oneDNN is refused memory, torch takes another kernel and switches oneDNN off for the process;
/// closing the budget switches it on again.
class BRIM_API Budget {
 public:
  /// @throws c10::ValueError if `bytes` is not positive or `device` does not exist,
  ///     c10::NotImplementedError where the device cannot be limited.
  Budget(std::int64_t bytes, c10::Device device);

  /// @param limit as ByteLimit::parse takes it: `"512MiB"`, `"8GB"`, `"50%"`.
  Budget(std::string_view limit, c10::Device device);
  Budget(ByteLimit limit, c10::Device device);

  ~Budget();
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  /// Ends the budget before the object does. A second call does nothing.
  void close() noexcept;

  /// The limit in bytes, a percentage already resolved. An outer budget may be tighter.
  std::int64_t limit() const { return limit_; }
  c10::Device device() const { return device_; }

 private:
  c10::Device device_;
  std::int64_t limit_;
  bool onednn_;  // whether it was on when the budget was opened
  bool closed_ = false;
};

/// While one lives, what its thread allocates on the CPU may exceed budgets: for the little that
/// has to work when memory has run out, such as a report of it.
class BRIM_API BeyondBudget {
 public:
  BeyondBudget();
  ~BeyondBudget() { close(); }
  BeyondBudget(const BeyondBudget&) = delete;
  BeyondBudget& operator=(const BeyondBudget&) = delete;

  /// Ends it early. On the thread that made it.
  void close() noexcept;

  /// Whether this thread has one.
  [[nodiscard]] static bool is_open() noexcept;

 private:
  bool closed_ = false;
};

}  // namespace brim
