#include <brim/memory/stats.h>
#include <brim/nn/pressure.h>
#include <c10/util/Exception.h>

#include <cstddef>

#include "memory/allocation_log.h"
#include "memory/backend.h"
#include "nn/autograd/slots.h"

namespace brim::nn {
namespace {

/// Notes what happens to the values of a device, until it is taken or destroyed.
class PressureLog {
 public:
  PressureLog(DeviceSlots& slots, const EventLog& log) : slots_(slots) { slots_.record(&log); }
  ~PressureLog() { take(); }
  PressureLog(const PressureLog&) = delete;
  PressureLog& operator=(const PressureLog&) = delete;

  std::vector<PressureMark> take() { return slots_.record(nullptr); }

 private:
  DeviceSlots& slots_;
};

/// What the last one held, and what this mark changes.
PressureMoment after(const PressureMoment& last, const PressureMark& mark) {
  using enum PressureMark::What;
  const bool is_again = mark.what == again;
  return {.held = last.held,
          .given_up = last.given_up + (is_again ? -mark.bytes : mark.bytes),
          .dropped = mark.what == dropped ? mark.bytes : 0,
          .again = is_again ? mark.bytes : 0};
}

}  // namespace

std::vector<PressureMoment> record_pressure(const std::function<void()>& work, c10::Device device) {
  device = resolve_device(device);
  DeviceBackend& backend = backend_for(device);
  const EventLog* const log = backend.log();
  TORCH_CHECK_NOT_IMPLEMENTED(log != nullptr, "allocations on ", device, " cannot be recorded");
  backend.prepare(device);
  const PressureMoment begin{.held = backend.peak(device).current};
  TORCH_CHECK(!log->is_open(), "allocations on ", device, " are recorded already");
  AllocationLog allocations(device);
  PressureLog values(slots_of(device), *log);
  work();
  const std::vector<PressureMark> marks = values.take();
  const bool is_empty = log->size() == 0;
  const std::vector<AllocationEvent> events = allocations.take();
  TORCH_CHECK(is_empty || !events.empty(), "the step has too many allocations to be recorded");

  std::vector<PressureMoment> moments{begin};
  auto mark = marks.begin();
  for (std::size_t place = 0; place <= events.size(); ++place) {
    const bool is_last = place == events.size();
    for (; mark != marks.end() && (mark->place <= place || is_last); ++mark) {
      moments.push_back(after(moments.back(), *mark));
    }
    if (!is_last && !events[place].refused) {
      const AllocationEvent& event = events[place];
      const PressureMoment& last = moments.back();
      moments.push_back({.held = last.held + (event.freed ? -event.bytes : event.bytes),
                         .given_up = last.given_up});
    }
  }
  return moments;
}

}  // namespace brim::nn
