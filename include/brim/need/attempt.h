#pragma once

#include <brim/memory/out_of_memory.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace brim {

class Trace;

/// What one attempt at a piece of work showed. The search for a size learns from it, a SizeMemory
/// keeps it, and an observer is told of it. Bytes are those of `device`; missing or negative ones
/// are unknown.
struct Attempt {
  std::vector<std::int64_t> values{};  ///< the size, or the value of each parameter
  OomKind outcome = OomKind::none;     ///< none: it fitted
  std::optional<std::int64_t> peak{};  ///< bytes above `held` at most; of a failure: when it failed
  std::optional<std::int64_t> requested{};  ///< bytes asked for when it failed
  std::int64_t held = 0;                    ///< bytes in use when it began
  /// Bytes more in use when it had ended than when it began; negative where it freed what was
  /// there. Not kept in files.
  std::int64_t left = 0;
  std::optional<std::int64_t> available{};  ///< bytes that it could use
  /// What it asked for, as long as its size has not settled. Not kept in files.
  std::shared_ptr<const Trace> trace{};
  /// Bytes that were given up meanwhile, on any device, to be computed again (see
  /// brim/nn/pressure.h). Not kept in files.
  std::int64_t given_up = 0;
  std::int64_t calls = 1;  ///< the number of calls with these values and outcome, as remembered
  c10::Device device = c10::DeviceType::CPU;  ///< where the bytes were measured
  double seconds = 0.0;     ///< 0 where it was not timed, or ran in another process
  double rate = 0.0;        ///< of a fit: items (or calls) per second; 0 where not measured
  bool repeats = false;     ///< the same values once more, after cached memory had been released
  bool remembered = false;  ///< from an earlier call
  /// Of a failure that was not foreseen: bytes that it was expected to need. Not kept in files.
  std::optional<std::int64_t> expected{};

  [[nodiscard]] bool fitted() const { return outcome == OomKind::none; }
  [[nodiscard]] std::int64_t size() const { return values.front(); }

  /// Bytes that the work needed. Of a failure: at least this, what it held and asked for.
  [[nodiscard]] std::optional<std::int64_t> need() const {
    if (!peak || *peak < 0 || fitted()) {
      return peak && *peak >= 0 ? peak : std::nullopt;
    }
    if (!requested || *requested < 0) {
      return std::nullopt;
    }
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    return *peak > kMost - *requested ? kMost : *peak + *requested;
  }
};

}  // namespace brim
