#pragma once

#include <brim/adapt/detail/checkpoint.h>
#include <brim/adapt/options.h>
#include <brim/adapt/parameter_search.h>
#include <brim/export.h>
#include <brim/memory/out_of_memory.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace brim {

/// Whether a call with these options may go straight to the function: nothing is known that would
/// change the size, and nobody wants to hear of a call that fits.
BRIM_API bool may_run_unwatched(const AdaptOptions& options) noexcept;

/// The tries of one call of `batch` or `maximize` (the options must outlive it), for those who
/// drive the loop themselves (the templates in this module, and the Python binding).
///
///     MaximizeRun run({.parameters = {{.maximum = 512}}}, options, Checkpoint(options));
///     for (;;) {
///       run.begin();
///       // call with run.values(); then
///       run.fitted();  // and done, or, outside any catch block:
///       run.failed(std::move(error));
///     }
class BRIM_API MaximizeRun {
 public:
  /// What `rate` counts, for Objective::throughput.
  enum class Rate : std::uint8_t { calls, items };

  /// Whether the first try, at the maxima, is still to be made, or was made before there was a run
  /// and is reported by `failed`. In the second case nothing is recalled: what other calls learned
  /// in the meantime would say that the try had been at their size.
  enum class FirstTry : std::uint8_t { ahead, failed };

  /// @param search its strategy and available bytes are taken from `options` and the device.
  MaximizeRun(const ParameterSearchOptions& search, const AdaptOptions& options,
              Checkpoint checkpoint, Rate rate = Rate::calls, FirstTry first_try = FirstTry::ahead);
  ~MaximizeRun();
  MaximizeRun(MaximizeRun&&) noexcept;

  /// The values to call with now.
  std::span<const std::int64_t> values() const;

  /// Starts a try: puts the random state back if it is not the first.
  void begin();

  void fitted();

  /// Takes the error of a failed try, lets go of it, and chooses the next values.
  /// @throws the error itself if it is not about memory, c10::OutOfMemoryError with a summary at
  /// the floor.
  void failed(std::exception_ptr error);

  /// The same for an error of another language, which the caller has classified and released.
  void failed(const OomCause& cause, const std::string& message);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The tries of one call of `range` or `chunked`: as MaximizeRun, but each fit moves on to the next
/// part.
class BRIM_API RangeRun {
 public:
  /// @param upper the largest step, 1 or more.
  RangeRun(std::int64_t upper, const AdaptOptions& options);
  ~RangeRun();
  RangeRun(RangeRun&&) noexcept;

  /// The step to take now; the last part of a range may be shorter.
  std::int64_t step() const;

  void begin();
  void fitted(std::int64_t size);
  void failed(std::int64_t size, std::exception_ptr error);
  void failed(std::int64_t size, const OomCause& cause, const std::string& message);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace brim
