#include "nn/autograd/time_again.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <mutex>

#include "memory/backend.h"
#include "nn/autograd/slots.h"

namespace brim::nn {
namespace {

constexpr std::size_t kMostRunning = 4096;  // on a device that is far behind; more is not measured
constexpr std::size_t kMostKinds = 4096;    // of loops whose shapes never come back

bool& is_timed() {
  thread_local bool timed = false;
  return timed;
}

c10::Event event_on(c10::Device device) {
  return {device.type(), c10::EventFlag::BACKEND_DEFAULT};  // of which the time can be asked
}

c10::Stream stream_on(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

void AgainTimes::add(double seconds, std::size_t kind, bool counts) {
  total_ += counts ? seconds : 0;
  if (kind != 0) {
    if (kinds_.size() >= kMostKinds) {
      kinds_.clear();
    }
    kinds_[kind] = seconds;
  }
}

void AgainTimes::add(Events events, std::size_t kind, bool counts) {
  read();
  if (running_.size() < kMostRunning) {
    running_.push_back({std::move(events), kind, counts});
  }
}

void AgainTimes::read() noexcept {
  constexpr double kMillisecond = 1e-3;
  try {
    while (!running_.empty() && running_.front().events.second.query()) {
      Run run = std::move(running_.front());
      running_.pop_front();
      add(run.events.first.elapsedTime(run.events.second) * kMillisecond, run.kind, run.counts);
      unused_.push_back(std::move(run.events));
    }
  } catch (const std::exception&) {  // a device whose events tell no time, or that has failed
    running_.clear();
  }
}

std::optional<AgainTimes::Events> AgainTimes::unused_events() {
  if (unused_.empty()) {
    return std::nullopt;
  }
  Events events = std::move(unused_.back());
  unused_.pop_back();
  return events;
}

double AgainTimes::of(std::size_t kind) noexcept {
  read();
  const auto found = kinds_.find(kind);
  return found != kinds_.end() ? found->second : 0;
}

double AgainTimes::total() noexcept {
  read();
  return total_;
}

void AgainTimes::reset() { *this = {}; }

TimedAgain::TimedAgain(DeviceSlots* device, std::size_t kind, bool counts) noexcept
    : slots_(device), kind_(kind) {
  if (slots_ == nullptr || slots_->are_rehearsed() || (is_timed() && kind == 0)) {
    slots_ = nullptr;
    return;
  }
  is_outer_ = counts && !std::exchange(is_timed(), true);
  const c10::Device on = slots_->device();
  if (on.is_cpu()) {
    begin_ = Clock::now();
    return;
  }
  try {
    if (backend_for(on).is_capturing()) {
      return;
    }
    {
      const std::lock_guard lock(slots_->mutex);
      events_ = slots_->times.unused_events();
    }
    if (!events_) {
      events_.emplace(event_on(on), event_on(on));
    }
    events_->first.record(stream_on(on));
  } catch (const std::exception&) {  // a device whose events tell no time
    events_.reset();
  }
}

TimedAgain::~TimedAgain() {
  if (slots_ == nullptr) {
    return;
  }
  if (is_outer_) {
    is_timed() = false;
  }
  try {
    if (slots_->device().is_cpu()) {
      const std::chrono::duration<double> time = Clock::now() - begin_;
      const std::lock_guard lock(slots_->mutex);
      slots_->times.add(time.count(), kind_, is_outer_);
    } else if (events_) {
      events_->second.record(stream_on(slots_->device()));
      const std::lock_guard lock(slots_->mutex);
      slots_->times.add(*std::move(events_), kind_, is_outer_);
    }
  } catch (const std::exception&) {  // the same, or of the lists' memory: it is not counted
  }
}

}  // namespace brim::nn
