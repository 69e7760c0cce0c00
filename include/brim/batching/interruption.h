#pragma once

#include <brim/export.h>

#include <functional>

namespace brim::batching {

/// Lets long calls of batching be ended. While it lives, this thread calls `check` now and then
/// from inside of them (between windows, blocks and batches of tables, plans and buckets); an
/// exception of `check` ends the call and comes through. A BatchStream whose next() was ended this
/// way stands where it stood before.
///
///     const brim::batching::InterruptionGuard guard([&] { if (cancelled) throw Cancelled(); });
///     const auto report = brim::batching::report(*batching, seed);
///
/// `check` is called often and should return at once. The innermost guard of a thread counts.
class BRIM_API InterruptionGuard {
 public:
  explicit InterruptionGuard(std::function<void()> check);
  ~InterruptionGuard();
  InterruptionGuard(const InterruptionGuard&) = delete;
  InterruptionGuard& operator=(const InterruptionGuard&) = delete;

 private:
  std::function<void()> check_;
  InterruptionGuard* outer_;

  friend void check_interruption();
};

/// Calls the check of this thread's guard, if there is one.
BRIM_API void check_interruption();

}  // namespace brim::batching
