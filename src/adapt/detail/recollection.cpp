#include "adapt/detail/recollection.h"

#include <brim/adapt/size_search.h>
#include <brim/memory/stats.h>
#include <c10/util/Exception.h>

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

}  // namespace

void Recollection::drop_foreign_bytes(Attempt& attempt) {
  if (!device) {
    device = attempt.device;
  }
  if (attempt.device != *device) {
    attempt.peak = attempt.requested = attempt.available = std::nullopt;
  }
}

double Recollection::margin(c10::Device otherwise) const {
  constexpr double kAccelerator = 0.02;
  return packs(otherwise) ? SizeSearchOptions{}.margin : kAccelerator;
}

bool Recollection::packs(c10::Device otherwise) const {
  return device.value_or(otherwise).is_cpu();
}

Recollection recall(const AdaptOptions& options) {
  Recollection result;
  if (options.memory != nullptr) {
    result.attempts = options.memory->recall(options.key);
  }
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
  return result;
}

}  // namespace brim::detail
