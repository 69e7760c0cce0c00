#pragma once

#include <brim/memory/allocation_event.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "memory/backend.h"

namespace brim {

/// Notes what a device's allocator does on all threads, until it is taken or destroyed. There is
/// one at a time: a second one stays empty, as does one on a device that cannot tell.
class AllocationLog {
 public:
  explicit AllocationLog(c10::Device device)
      : device_(device), number_(backend_for(device).start_log(device)) {}
  ~AllocationLog() { take(); }
  AllocationLog(const AllocationLog&) = delete;
  AllocationLog& operator=(const AllocationLog&) = delete;

  /// The events; none if there were too many.
  std::vector<AllocationEvent> take() {
    return number_ == 0 ? std::vector<AllocationEvent>()
                        : backend_for(device_).end_log(std::exchange(number_, 0));
  }

 private:
  c10::Device device_;
  std::uint64_t number_;  // 0: not open
};

}  // namespace brim
