#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "memory/backend.h"
#include "memory/running_operator.h"

namespace brim {

/// Notes what a device's allocator does on all threads, until it is taken or destroyed. There is
/// one at a time: a second one stays empty, as does one on a device that cannot tell.
class AllocationLog {
 public:
  explicit AllocationLog(c10::Device device)
      : log_(backend_for(device).log()),
        number_(log_ == nullptr ? 0 : log_->start(device.index())) {
    if (number_ != 0) {
      operators_.emplace();
    }
  }
  ~AllocationLog() { take(); }
  AllocationLog(const AllocationLog&) = delete;
  AllocationLog& operator=(const AllocationLog&) = delete;

  /// The events; none if there were too many.
  std::vector<AllocationEvent> take() {
    operators_.reset();
    return number_ == 0 ? std::vector<AllocationEvent>() : log_->end(std::exchange(number_, 0));
  }

 private:
  EventLog* log_;         // null: the device cannot tell
  std::uint64_t number_;  // 0: not open
  std::optional<OperatorWatch> operators_{};
};

}  // namespace brim
