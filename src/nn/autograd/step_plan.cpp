#include "nn/autograd/step_plan.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace brim::nn {
namespace {

constexpr int kMostPatience = 1024;

/// From those that take least to be computed again.
std::vector<StepValue*> by_work(Step& step) {
  std::vector<StepValue*> values;
  for (StepValue& value : step) {
    values.push_back(&value);
  }
  std::ranges::stable_sort(
      values, {}, [](const StepValue* value) { return std::pair(value->work, value->seconds); });
  return values;
}

bool can_go(const StepValue& value) { return value.frees && value.bytes > 0; }

std::int64_t bytes_that_go(const Step& step) {
  std::int64_t bytes = 0;
  for (const StepValue& value : step) {
    bytes += value.goes && value.frees ? value.bytes : 0;
  }
  return bytes;
}

/// As many bytes go as now, of those that take least.
void choose_again(Step& step) {
  std::int64_t bytes = bytes_that_go(step);
  for (StepValue* const value : by_work(step)) {
    value->goes = bytes > 0 && can_go(*value);
    bytes -= can_go(*value) ? value->bytes : 0;
  }
}

/// An eighth of the bytes that go are kept again, of those that take most; or as many more go, of
/// those that take least.
void change_a_little(Step& step, bool keeps) {
  std::vector<StepValue*> values = by_work(step);
  if (keeps) {
    std::ranges::reverse(values);
  }
  std::int64_t bytes = std::max<std::int64_t>(bytes_that_go(step) / 8, 1);
  for (StepValue* const value : values) {
    if (value->goes == keeps && can_go(*value) && bytes > 0) {
      value->goes = !keeps;
      bytes -= value->bytes;
    }
  }
}

}  // namespace

void StepPlan::make_of(Step&& step) {
  step_ = std::move(step);
  choose_again(step_);
  be_patient();
  is_timed_ = false;
}

void StepPlan::take_times(const std::function<double(std::size_t)>& seconds_of) {
  if (is_timed_) {
    return;
  }
  // Of blocks with the same bytes, which are layers that the model repeats, the mean: else the
  // clock would choose among equals, of which the oldest go best.
  std::unordered_map<std::int64_t, std::pair<double, double>> sums;  // seconds, and bytes
  for (const StepValue& value : step_) {
    if (value.is_block() && value.bytes > 0) {
      const double seconds = seconds_of(value.part);
      if (seconds == 0) {
        return;
      }
      sums[value.bytes].first += seconds;
      sums[value.bytes].second += static_cast<double>(value.bytes);
    }
  }
  is_timed_ = true;
  for (StepValue& value : step_) {
    if (value.is_block() && value.bytes > 0) {
      value.seconds = sums[value.bytes].first / sums[value.bytes].second;
    }
  }
  choose_again(step_);
}

void StepPlan::has_served(bool barely) {
  if (barely) {
    change_a_little(step_, /*keeps=*/false);
    be_patient();
  } else if (++served_ >= patience_) {
    change_a_little(step_, /*keeps=*/true);
    served_ = 0;
    is_tried_ = true;
  }
  // The first step without blocks runs short, since its layers keep other values than planned.
  constexpr int kSettled = 8;
  spares_blocks_ = (is_tried_ || (served_ >= kSettled && !needed_blocks_)) && leaves_enough();
}

bool StepPlan::leaves_enough() const {
  std::int64_t all = 0;
  std::int64_t kept = 0;
  std::int64_t largest = 0;  // of these; when memory runs out, a layer may be at work with it
  bool has_blocks = false;
  for (const StepValue& value : step_) {
    if (value.is_block()) {
      has_blocks = true;
      if (value.goes) {
        return false;
      }
    } else {
      all += value.bytes;
      if (!value.goes && can_go(value)) {
        kept += value.bytes;
        largest = std::max(largest, value.bytes);
      }
    }
  }
  return has_blocks && 4 * (kept - largest) >= all;
}

void StepPlan::needs_blocks() {
  needed_blocks_ = is_tried_ = true;  // so that the next attempt comes later
  be_patient();
}

void StepPlan::be_patient() {
  if (std::exchange(is_tried_, false)) {
    patience_ = std::min(2 * patience_, kMostPatience);
  }
  served_ = 0;
  spares_blocks_ = false;
}

}  // namespace brim::nn
