#include "adapt/detail/attempt_history.h"

#include <brim/memory/stats.h>
#include <brim/need/size_search.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>
#include <utility>

#include "adapt/detail/searching.h"
#include "memory/backend.h"

namespace brim::detail {
namespace {

/// A file may have attempts on a device that this machine does not have.
bool exists(c10::Device device) {
  try {
    resolve_device(device);
    return true;
  } catch (const c10::ValueError&) {
    return false;
  }
}

/// Whether there is clearly more memory now where a size failed, or clearly less where it fitted.
bool outdated(const Attempt& attempt) {
  if (!exists(attempt.device) || !attempt.available) {
    return !exists(attempt.device);
  }
  constexpr double kClearly = 1.1;
  const auto then = static_cast<double>(*attempt.available);
  const auto now = static_cast<double>(backend_for(attempt.device).headroom(attempt.device).free);
  return attempt.fitted() ? now * kClearly < then : now > then * kClearly;
}

/// Whether newer fits show that a size would fit now by far, although it once failed: that was a
/// heavier call, which nothing in the key tells from these. Otherwise it would hold them back for
/// good. The fits are extrapolated linearly; what makes up for a need that grows faster is that
/// they must stay below a fraction of what the failure itself held and asked for.
bool refuted(const Attempt& failure, std::span<const Attempt> newer, std::int64_t available) {
  constexpr double kFarBelow = 1.0 / 8;
  constexpr double kSafely = 0.9;
  if (failure.values.size() != 1 || !failure.need()) {
    return false;
  }
  const auto then = static_cast<double>(*failure.need());
  return std::any_of(newer.begin(), newer.end(), [&](const Attempt& fit) {
    if (!fit.fitted() || !fit.need() || fit.device != failure.device || fit.values.size() != 1) {
      return false;
    }
    const double times = static_cast<double>(failure.size()) / static_cast<double>(fit.size());
    const double expected = static_cast<double>(*fit.need()) * times;
    return expected <= kFarBelow * then && expected <= kSafely * static_cast<double>(available);
  });
}

void drop_refuted(std::vector<Attempt>& attempts, std::int64_t available) {
  std::vector<Attempt> kept;
  for (std::size_t i = 0; i < attempts.size(); ++i) {
    const auto newer = std::span(attempts).subspan(i + 1);
    if (attempts[i].fitted() || !refuted(attempts[i], newer, available)) {
      kept.push_back(attempts[i]);
    }
  }
  attempts = std::move(kept);
}

bool any_failed(std::span<const Attempt> attempts) {
  return !std::ranges::all_of(attempts, &Attempt::fitted);
}

/// What is known of this kind of call, else of the nearest wider one of which something is.
std::vector<Attempt> nearest(const AdaptOptions& options, bool hints, AttemptHistory& result) {
  if (options.memory == nullptr) {
    return {};
  }
  std::vector<Attempt> own = options.memory->recall(options.key);
  result.is_wider = own.empty();
  if (result.is_wider && options.wider_key) {
    own = options.memory->recall(*options.wider_key);
  }
  const auto kind = hints ? hinting_kind(options) : std::nullopt;
  if (!kind || any_failed(own)) {
    return own;
  }
  // Lengths say much about the need: the kind counts only where its calls have failed.
  std::vector<Attempt> others = options.memory->recall(*kind);
  result.others_failed = any_failed(others);
  return own.empty() && result.others_failed ? others : own;
}

}  // namespace

bool AttemptHistory::moves_to(std::span<const std::int64_t> values) const {
  const Attempt* last = last_fit(attempts);
  return last != nullptr && !std::ranges::equal(last->values, values);
}

void AttemptHistory::drop_foreign_bytes(Attempt& attempt) {
  if (!device) {
    device = attempt.device;
  }
  if (attempt.device != *device) {
    attempt.peak = attempt.requested = attempt.available = std::nullopt;
  }
}

std::optional<std::uint64_t> hinting_kind(const AdaptOptions& options) {
  const bool useful = options.strategy == Strategy::predictive && !cannot_repeat(options);
  return useful ? options.kind : std::nullopt;
}

AttemptHistory recall(const AdaptOptions& options, std::size_t values, bool hints) {
  AttemptHistory result;
  result.attempts = nearest(options, hints, result);
  std::erase_if(result.attempts,
                [&](const Attempt& attempt) { return attempt.values.size() != values; });
  if (result.attempts.empty()) {
    return result;
  }
  const c10::Device device = result.attempts.back().device;
  if (!exists(device)) {
    return {};
  }
  result.device = device;
  std::erase_if(result.attempts, [&](const Attempt& attempt) {
    return attempt.device != device && outdated(attempt);
  });
  for (Attempt& attempt : result.attempts) {
    result.drop_foreign_bytes(attempt);
  }
  result.available = backend_for(device).headroom(device).free;
  drop_refuted(result.attempts, *result.available);
  return result;
}

}  // namespace brim::detail
