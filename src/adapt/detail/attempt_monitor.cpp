#include "adapt/detail/attempt_monitor.h"

#include <brim/memory/bytes.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <brim/need/trace.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <sstream>

#include "adapt/detail/running_calls.h"
#include "adapt/detail/searching.h"
#include "memory/backend.h"
#include "memory/reclaim.h"

namespace brim {
namespace {

// A summary of more attempts than this would hide what matters.
constexpr std::size_t kMostFailures = 24;

/// What may stay behind without being called a leak: libraries keep workspaces of torch's
/// accelerator memory for good.
std::int64_t tolerated(c10::Device device, std::int64_t attempt_peak) {
  constexpr std::int64_t kCpu = std::int64_t{64} << 10;
  constexpr std::int64_t kAccelerator = std::int64_t{64} << 20;
  return std::max(device.is_cpu() ? kCpu : kAccelerator, attempt_peak / 100);
}

}  // namespace

std::string detail::describe(const Attempt& attempt) {
  const bool of_memory =
      attempt.outcome == OomKind::device_memory || attempt.outcome == OomKind::host_memory;
  std::string text = of_memory ? "out of " : "";
  text += attempt.fitted() ? "fitted" : to_string(attempt.outcome);
  if (attempt.peak) {
    text += (attempt.fitted() ? ", peak " : ", held ") + format_bytes(*attempt.peak);
  }
  if (attempt.requested) {
    text += ", asked for " + format_bytes(*attempt.requested) + " more";
  }
  return text;
}

AttemptMonitor::AttemptMonitor(const AdaptOptions& options, Checkpoint checkpoint)
    : options_(options), checkpoint_(std::move(checkpoint)) {}

void AttemptMonitor::begin(bool new_size, bool record, std::shared_ptr<const Trace> before,
                           std::optional<std::int64_t> expected) {
  before_ = std::move(before);
  expected_ = expected;
  const c10::Device device = checkpoint_.device();
  only_observed_ = false;
  if (new_size && !device.is_cpu()) {
    release_cached(device);
    released_ = true;
  }
  // Work on CPU tensors is not told apart from work on an accelerator until it has run, so both are
  // watched where both can be.
  const bool host_too = !options_.device && !device.is_cpu() && CpuAllocator::installed();
  take_log(device);  // of an attempt that ended with another error
  if (new_size || released_ || record) {
    log_.emplace(device);
    if (host_too) {
      host_log_.emplace(c10::Device(c10::DeviceType::CPU));
    }
  }
  if (host_too) {
    meter_.emplace(std::vector<c10::Device>{device, c10::DeviceType::CPU});
  } else {
    meter_.emplace(device);
  }
  HostLimit::begin_attempt();
  ended_elsewhere_ = calls_ended_elsewhere();
  given_up_ = bytes_given_up();
  begun_ = Clock::now();
}

void AttemptMonitor::begin_observed() {
  begin(false, true);
  only_observed_ = true;
}

std::vector<AllocationEvent> AttemptMonitor::take_log(c10::Device device) {
  auto& log = device == checkpoint_.device() ? log_ : host_log_;
  auto events = log ? log->take() : std::vector<AllocationEvent>();
  log_.reset();
  host_log_.reset();
  return events;
}

c10::Device AttemptMonitor::tightest_device() const {
  const c10::Device device = checkpoint_.device();
  if (device.is_cpu() || meter_->devices().size() == 1) {
    return device;
  }
  const c10::Device host(c10::DeviceType::CPU);
  // Asking an accelerator for its free memory is slow: only where the work held some of it.
  const auto use = [&](c10::Device on) {
    const auto peak = static_cast<double>(meter_->peak(on));
    return peak == 0 ? 0.0 : peak / (static_cast<double>(backend_for(on).headroom(on).free) + peak);
  };
  return use(host) >= use(device) ? host : device;
}

Attempt AttemptMonitor::fitted(std::span<const std::int64_t> values) {
  const std::chrono::duration<double> seconds = Clock::now() - begun_;
  meter_->close();
  const c10::Device device = tightest_device();
  const auto room = backend_for(device).headroom(device);
  const std::int64_t held = meter_->start(device);
  Attempt attempt{.values = {values.begin(), values.end()},
                  .peak = meter_->peak(device),
                  .held = held,
                  .left = room.allocated - held,
                  .available = room.allocated + room.free - held,
                  .given_up = bytes_given_up() - given_up_,
                  .device = device,
                  .seconds = seconds.count(),
                  .repeats = needed_release_.has_value()};
  if (const auto events = take_log(device); !events.empty()) {
    attempt.trace = trace_of(events, true, before_.get(), failed_, detail::blocks_in_use(device));
  }
  publish(attempt);
  meter_.reset();
  return attempt;
}

std::optional<Attempt> AttemptMonitor::failed(std::span<const std::int64_t> values,
                                              const detail::Failure& failure) {
  const OomCause& cause = failure.cause;
  last_message_ = failure.message;
  checkpoint_.restore_onednn();
  const auto events = take_log(checkpoint_.device());
  // A message may name a device that is not here (a wrapped error, a test): then its figures say
  // nothing of the one that is watched. The host can always be looked at.
  const bool on_host = cause.device && cause.device->is_cpu();
  const c10::Device device =
      on_host && !options_.device ? c10::Device(c10::DeviceType::CPU) : checkpoint_.device();
  const bool elsewhere = names_another(cause, device);
  failed_on_ = device;
  Attempt attempt{.values = {values.begin(), values.end()},
                  .outcome = cause.kind,
                  .requested = cause.requested,
                  .device = device,
                  .repeats = needed_release_.has_value(),
                  .expected = std::exchange(expected_, std::nullopt)};
  if (!events.empty() && !only_observed_) {
    attempt.trace = trace_of(events, false);
    failed_.push_back(attempt.trace);
  }
  const std::optional<std::int64_t> before = checkpoint_.held(device);
  std::optional<std::int64_t> start = before;
  std::optional<std::int64_t> observed_peak;
  if (meter_) {
    const std::chrono::duration<double> seconds = Clock::now() - begun_;
    attempt.seconds = seconds.count();
    meter_->close();
    const std::vector<c10::Device> watched = meter_->devices();
    const bool measured = std::find(watched.begin(), watched.end(), device) != watched.end();
    if (measured && only_observed_) {
      observed_peak = meter_->peak(device);
    } else if (measured) {
      start = meter_->start(device);
      attempt.peak = meter_->peak(device);
    }
    meter_.reset();
  }
  if (before) {
    const std::int64_t held_then = cause.in_use.value_or(*before) - *before;
    wait_for_memory(device, std::max(attempt.peak.value_or(0), held_then));
  }
  const auto room = backend_for(device).headroom(device);
  const std::int64_t limit = room.allocated + room.free;
  attempt.held = start.value_or(room.allocated);
  attempt.left = room.allocated - attempt.held;
  attempt.available = limit - attempt.held;
  if (cause.in_use && !elsewhere) {
    attempt.peak = std::max<std::int64_t>(*cause.in_use - attempt.held, 0);
  }
  hopeless_ = cause.kind == OomKind::size_limit ||
              (!elsewhere && cause.requested && *cause.requested > limit);
  needed_release_.reset();
  if (!elsewhere && !device.is_cpu() && !released_ &&
      (cause.kind == OomKind::library_workspace ||
       (cause.kind == OomKind::device_memory && should_have_fitted(cause, limit)))) {
    release_cached(device);
    if (!options_.exact_halving) {
      needed_release_ = attempt;
    }
  }
  released_ = needed_release_.has_value();
  Attempt told = attempt;
  if (only_observed_) {
    told.peak = attempt.peak ? attempt.peak : observed_peak;
  }
  publish(told);
  if (needed_release_) {
    return std::nullopt;
  }
  // Bytes of another device, or of a kernel's size limit, would spoil the model of this one.
  if (elsewhere || cause.kind == OomKind::size_limit) {
    attempt.peak = attempt.requested = attempt.available = std::nullopt;
  }
  return attempt;
}

void AttemptMonitor::wait_for_memory(c10::Device device, std::int64_t attempt_peak) {
  const std::int64_t before = *checkpoint_.held(device);
  const auto left = [&] { return backend_for(device).peak(device).current - before; };
  const std::int64_t tolerance = tolerated(device, attempt_peak);
  if (left() <= tolerance) {
    return;
  }
  if (options_.collect_garbage) {
    options_.collect_garbage();
  }
  const std::int64_t kept = left();
  // While other threads are in calls of their own, it cannot be told whose memory it is.
  if (kept > tolerance && !warned_ && !another_call_runs()) {
    warned_ = true;
    TORCH_WARN(format_bytes(kept), " of a failed attempt's memory on ", device.str(),
               " did not come back: something still refers to its tensors, or another thread has "
               "allocated since; less is left for the next attempt");
  }
}

void AttemptMonitor::wait_for_others_or_give_up() {
  constexpr auto kLongest = std::chrono::seconds(30);
  if (!deadline_) {
    deadline_ = std::chrono::steady_clock::now() + kLongest;
  }
  const c10::Device device = failed_on_.value_or(checkpoint_.device());
  if (hopeless_ || !wait_for_another_call(ended_elsewhere_, *deadline_, device)) {
    give_up(device);
  }
}

void AttemptMonitor::publish(const Attempt& attempt) {
  if (options_.attempts != nullptr) {
    options_.attempts->push_back(attempt);
  }
  if (options_.observer) {
    options_.observer(attempt);
  }
  if (!attempt.fitted()) {
    if (failures_.size() == kMostFailures) {
      failures_.erase(failures_.begin() + 1);  // the first one stays: it says where the call began
    }
    failures_.push_back(attempt);
  }
}

void AttemptMonitor::give_up(c10::Device device) const {
  const MemoryStats stats = memory_stats(device);
  const Fragmentation cache = fragmentation(device);
  std::ostringstream out;
  out << last_message_ << "\nIt does not fit even with " << options_.name << " = "
      << c10::Join(", ", failures_.back().values) << ", the smallest that is allowed. Tried:";
  for (const Attempt& attempt : failures_) {
    out << "\n  " << options_.name << " = " << c10::Join(", ", attempt.values) << ": "
        << detail::describe(attempt);
  }
  const std::int64_t held = checkpoint_.held(device).value_or(stats.allocated);
  out << "\nOn " << device.str() << ": limit " << format_bytes(stats.limit)
      << ", in use before the call " << format_bytes(held) << ", free now "
      << format_bytes(stats.free) << ", cached and unusable " << format_bytes(cache.stuck);
  if (const auto budget = budget_in_force(device); budget && *budget <= stats.limit) {
    out << "\nThe budget of " << format_bytes(*budget)
        << " is too small: " << (held >= *budget ? "it was used up before the call, by " : "")
        << format_bytes(held)
        << (held >= *budget ? " that are held" : " of it were in use before the call");
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, out.str());
}

}  // namespace brim
