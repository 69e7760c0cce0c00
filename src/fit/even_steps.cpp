#include <brim/fit/even_steps.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

#include "check_argument.h"

namespace brim {

using detail::check_argument;

EvenSteps::EvenSteps(std::shared_ptr<RankChannel> channel, const Options& options)
    : options_(options),
      total_(options.total),
      read_(options.done),
      steps_(options.done),
      agreed_(options.done) {
  check_argument(options.ahead > 0, "ahead must be positive, got ", options.ahead);
  check_argument(options.done >= 0, "done must not be negative, got ", options.done);
  if (channel) {
    ranks_.emplace(std::move(channel), "even");
  } else {
    options_.at_end = AtEnd::stop;  // nobody has more
  }
}

// The batches of the next window are read while those of this one are given, two per step, since
// the next may be twice as large. A rank that reads a window at once would stand still meanwhile.
std::int64_t EvenSteps::to_read() const {
  const bool no_more = total_ && read_ >= *total_ && options_.at_end == AtEnd::stop;
  if (ended_ || no_more) {
    return 0;
  }
  const std::int64_t needed = agreed_ + (ranks_ || steps_ == agreed_ ? window_ : 0);
  const std::int64_t missing = std::max<std::int64_t>(needed - read_, 0);
  return steps_ == agreed_ ? missing : std::min<std::int64_t>(missing, 2);
}

void EvenSteps::end() {
  if (total_) {
    return;  // of a repetition
  }
  total_ = read_;
  check_argument(options_.at_end == AtEnd::stop || read_ > 0,
                 "at_end \"repeat\" needs at least one batch on every rank, and this one has none");
}

bool EvenSteps::step() {
  if (steps_ == agreed_ && !ended_) {
    agree();
  }
  if (steps_ == agreed_) {
    return false;
  }
  ++steps_;
  return true;
}

void EvenSteps::agree() {
  const bool repeats = options_.at_end == AtEnd::repeat;
  const std::int64_t target = agreed_ + window_;
  constexpr std::int64_t kMore = std::numeric_limits<std::int64_t>::max() / 2;
  // How far this rank can go, as a number of which the largest is the answer for all.
  std::int64_t number =
      repeats ? total_.value_or(kMore) : -std::min(total_.value_or(target), target);
  if (ranks_) {
    if (exchanges_ == 0) {
      ranks_->same("at_end=" + std::string(repeats ? "repeat" : "stop") + ", ahead=" +
                   std::to_string(options_.ahead) + ", after " + std::to_string(steps_) + " steps");
    }
    ranks_->begin({&agreed_, 1});
    std::array<std::int64_t, 3> numbers{number, first_, -first_};
    ranks_->most(numbers);
    number = numbers[0];
    alike_ = first_ != 0 && numbers[1] == -numbers[2];
  }
  ++exchanges_;
  const std::int64_t last = repeats ? number : -number;  // no step comes after this one
  ended_ = last < target || (repeats && last == target);
  agreed_ = std::max(agreed_, std::min(last, target));
  window_ = ranks_ ? std::min(2 * window_, options_.ahead) : 1;
}

void EvenSteps::fail(const std::string& why) noexcept {
  ended_ = true;
  if (ranks_) {
    ranks_->fail(why);
  }
}

}  // namespace brim
