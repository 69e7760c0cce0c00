#pragma once

#include <ATen/autocast_mode.h>

namespace brim::tests {

/// Autocast on the CPU, as `with torch.autocast("cpu", type)`.
class AutocastOn {
 public:
  explicit AutocastOn(at::ScalarType type) : before_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_dtype(at::kCPU, type);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~AutocastOn() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, before_);
  }
  AutocastOn(const AutocastOn&) = delete;
  AutocastOn& operator=(const AutocastOn&) = delete;

 private:
  at::ScalarType before_;
};

}  // namespace brim::tests
