#pragma once

#include <brim/adapt/options.h>
#include <c10/util/StringUtil.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "adaptive_config.h"
#include "interpreter.h"

namespace brim::python {

/// What the logger "brim" is told of one call: failed attempts at INFO, those that fit at DEBUG,
/// and at INFO the size that a call with failures used in the end.
class CallLog {
 public:
  explicit CallLog(const AdaptiveConfig& config)
      : config_(config), wanted_(invoke(attribute(logger(), "getEffectiveLevel")).cast<int>()) {}

  [[nodiscard]] bool is_wanted() const { return wanted_ <= kInfo; }

  void add(const Attempt& attempt) {
    tell(attempt.fitted() ? kDebug : kInfo, "%s: %r", config_.log_name, attempt);
    if (attempt.fitted()) {
      used_ = std::max(used_, attempt.values);  // the last part of a range is a remainder
      return;
    }
    if (failures_++ == 0) {
      first_ = attempt.values;
    }
    used_.clear();
  }

  void finish() const {
    if (failures_ > 0 && !used_.empty()) {
      tell(kInfo, "%s: used %s = %s, after %d failed attempt(s) from %s on", config_.log_name,
           config_.options.name, c10::str(c10::Join(", ", used_)), failures_,
           c10::str(c10::Join(", ", first_)));
    }
  }

 private:
  static constexpr int kDebug = 10;
  static constexpr int kInfo = 20;

  static pybind11::handle logger() {
    static const pybind11::handle found = provided("logger");
    return found;
  }

  template <class... Arguments>
  void tell(int level, const Arguments&... arguments) const {
    if (level >= wanted_) {
      invoke(attribute(logger(), "log"), level, arguments...);
    }
  }

  const AdaptiveConfig& config_;
  int wanted_;
  int failures_ = 0;
  std::vector<std::int64_t> first_;  // that failed
  std::vector<std::int64_t> used_;   // since the last failure
};

}  // namespace brim::python
