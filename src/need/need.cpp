#include "need/need.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <ranges>
#include <utility>

#include "need/index_of.h"
#include "need/search_constants.h"

namespace brim {
namespace {

using detail::index_of;

/// What one attempt shows; null if nothing. What a failure held and asked for is less than the work
/// needs, by as much as it had not reached: without a trace it is no request of a size.
std::shared_ptr<const Trace> shown_by(const Attempt& attempt) {
  if (attempt.trace || !attempt.fitted() || !attempt.need()) {
    return attempt.trace;
  }
  return trace_of_peak(*attempt.need());
}

bool is_foreseen(const Attempt& attempt) { return attempt.trace && attempt.trace->foreseen; }

/// The newest that was traced on fake tensors; null if there is none.
const Attempt* newest_foreseen(std::span<const Attempt> attempts) {
  const auto found = std::find_if(attempts.rbegin(), attempts.rend(), is_foreseen);
  return found == attempts.rend() ? nullptr : &*found;
}

/// What a peak of another size lacks or has more beside that of the newest, for all that is known:
/// what one call left (gradients, a state) may be what the next one freed, or found.
std::int64_t level(const Attempt& other, const Attempt& newest) {
  const std::int64_t more = other.held - newest.held;
  return other.size() < newest.size() ? std::clamp<std::int64_t>(more, -*other.need(), 0)
                                      : std::max<std::int64_t>(more, 0);
}

/// The sizes at which a request is known, and its bytes there.
struct Points {
  double least_size, least_bytes;
  double most_size, most_bytes;

  /// @param below whether the nearest smaller size counts, and not the least.
  /// @param above whether the nearest larger size counts, and not the largest.
  void add(double size, double bytes, double at_size, bool below, bool above) {
    if (below && size < at_size ? least_size == at_size || size > least_size : size < least_size) {
      least_size = size;
      least_bytes = bytes;
    }
    if (above && size > at_size ? most_size == at_size || size < most_size : size > most_size) {
      most_size = size;
      most_bytes = bytes;
    }
  }
};

}  // namespace

Need::Need(const Attempt& newest, std::span<const Attempt> attempts, const InUse& in_use,
           std::optional<std::int64_t> available)
    : trace_(newest.trace || newest.fitted()
                 ? shown_by(newest)
                 : trace_of_peak(*newest.need() - std::max<std::int64_t>(newest.left, 0))),
      size_(static_cast<double>(newest.size())),
      recorded_(newest.trace != nullptr),
      growth_(trace_->requests.size()),
      there_(trace_->requests.size()),
      freed_first_(trace_->requests.size()) {
  const GrowthByBytes alike = match(newest, attempts);
  const Attempt* found = recorded_ && !foreseen() ? newest_foreseen(attempts) : nullptr;
  const auto traced =
      found == nullptr ? std::nullopt : std::optional(Need(*found, attempts, {}, {}));
  if (traced) {
    constexpr double kSameBytes = 0.001;  // sizes are whole numbers
    grow_like(traced->growth_at(size_), kSameBytes);
  }
  known_ = share_known();
  grow_like(alike, 0);
  const auto left = [&](const Trace::Request& request) {
    return !request.freed && in_use && in_use(request.address) ? static_cast<double>(request.bytes)
                                                               : 0.0;
  };
  learn_from_failures(attempts, left);
  find_what_is_there(left);
  if (!recorded_ && available && newest.available) {
    there_.front() = static_cast<double>(std::clamp<std::int64_t>(
        *newest.available - *available, 0, std::max<std::int64_t>(newest.left, 0)));
  }
  if (traced) {
    free_as(*traced);
  }
  if (foreseen()) {
    available_then_ = newest.available;
    available_ = available;
    learn_from_runs(attempts);
  }
}

/// Finds how requests grow that other sizes show too.
/// @return by bytes, how the fastest of them grows.
Need::GrowthByBytes Need::match(const Attempt& newest, std::span<const Attempt> attempts) {
  const auto& requests = trace_->requests;
  std::vector<Points> points;
  for (const auto& request : requests) {
    const auto bytes = static_cast<double>(request.bytes);
    points.push_back({size_, bytes, size_, bytes});
  }
  for (const Attempt& attempt : attempts) {
    const auto other = shown_by(attempt);
    if (other == nullptr || attempt.size() == newest.size() ||
        (attempt.trace != nullptr) != recorded_ || is_foreseen(attempt) != foreseen()) {
      continue;
    }
    const auto same = matched(*trace_, *other);
    for (std::size_t i = trace_->older; i < requests.size(); ++i) {
      if (same[i] == Trace::kNone) {
        continue;
      }
      const std::int64_t bytes = other->requests[index_of(same[i])].bytes;
      if (recorded_ && (attempt.size() > newest.size()) == (bytes < requests[i].bytes) &&
          bytes != requests[i].bytes) {
        continue;  // less at a larger size: it only looks like the same
      }
      // Peaks are sums, of which only a near one bounds the growth. Of a request, sizes that are
      // far apart show it best: near ones may be padded to the same. Those that were traced on
      // fake tensors are near what they are to show.
      points[i].add(static_cast<double>(attempt.size()),
                    static_cast<double>(bytes + (recorded_ ? 0 : level(attempt, newest))), size_,
                    !recorded_ || foreseen(), foreseen());
    }
  }
  GrowthByBytes result;
  for (std::size_t i = trace_->older; i < requests.size(); ++i) {
    const Points& at = points[i];
    if (at.least_size < at.most_size) {
      const auto bytes = static_cast<double>(requests[i].bytes);
      // Both pass through what the newest trace shows.
      const detail::RequestGrowth to_most(bytes, size_, at.most_bytes, at.most_size);
      const detail::RequestGrowth to_least(bytes, size_, at.least_bytes, at.least_size);
      growth_[i] = Growth{.up = at.most_size > size_ ? to_most : to_least,
                          .down = at.least_size < size_ ? to_least : to_most};
      add_faster(result, requests[i].bytes, *growth_[i], size_);
    }
  }
  return result;
}

void Need::add_faster(GrowthByBytes& all, std::int64_t bytes, const Growth& growth, double size) {
  Growth& place = all.try_emplace(bytes, growth).first->second;
  place = growth.up.at(2 * size) > place.up.at(2 * size) ? growth : place;
}

/// By bytes that a request has at `size`, how the fastest of them grows from there.
Need::GrowthByBytes Need::growth_at(double size) const {
  GrowthByBytes result;
  for (std::size_t i = trace_->older; i < growth_.size(); ++i) {
    if (growth_[i]) {
      const auto at = [&](double each) { return static_cast<double>(bytes_at(i, each, 1)); };
      add_faster(result, bytes_at(i, size, 1),
                 {.up = {at(size), size, at(2 * size), 2 * size},
                  .down = {at(size), size, at(size / 2), size / 2}},
                 size);
    }
  }
  return result;
}

/// Requests whose growth is not known grow as those that have as many bytes.
/// @param tolerance the share of their bytes by which these may differ.
void Need::grow_like(const GrowthByBytes& all, double tolerance) {
  for (std::size_t i = trace_->older; i < growth_.size(); ++i) {
    const std::int64_t bytes = trace_->requests[i].bytes;
    const auto off = [&](const auto& place) { return std::abs(place->first - bytes); };
    auto nearest = all.lower_bound(bytes);
    if (nearest != all.begin() &&
        (nearest == all.end() || off(std::prev(nearest)) < off(nearest))) {
      --nearest;
    }
    if (!growth_[i] && nearest != all.end() &&
        static_cast<double>(off(nearest)) <= tolerance * static_cast<double>(bytes)) {
      growth_[i] = nearest->second;
    }
  }
}

double Need::share_known() const {
  double all = 0;
  double known = 0;
  for (std::size_t i = trace_->older; i < growth_.size(); ++i) {
    const auto bytes = static_cast<double>(trace_->requests[i].bytes);
    all += bytes;
    known += growth_[i] ? bytes : 0.0;
  }
  return all > 0 ? known / all : 0;
}

bool Need::is_mostly_known() const { return known_ > search::kMostlyKnown; }

/// What failed attempts have left, and by how much they needed more than was expected.
void Need::learn_from_failures(std::span<const Attempt> attempts, const Left& left) {
  int fits = 0;  // since the attempt
  for (const Attempt& attempt : std::views::reverse(attempts)) {
    fits += attempt.fitted() ? 1 : 0;
    if (fits > 1) {
      return;  // they know better
    }
    if (fits == 0 && attempt.trace && attempt.trace != trace_) {
      for (const Trace::Request& request : attempt.trace->requests) {
        leftover_ += left(request);
      }
    }
    const double step = static_cast<double>(attempt.size()) - size_;
    if (attempt.expected && attempt.need() && step > 0) {
      const auto bytes = static_cast<double>(*attempt.need() - *attempt.expected);
      short_per_item_ = std::max(short_per_item_, bytes / step);
    }
  }
}

/// What the next call will find, and free or replace.
void Need::find_what_is_there(const Left& left) {
  const auto& requests = trace_->requests;
  for (std::size_t i = trace_->older; i < requests.size(); ++i) {
    there_[i] = requests[i].adds_up ? 0.0 : left(requests[i]);
  }
  for (std::size_t i = 0; i < trace_->older; ++i) {
    const auto bytes = static_cast<double>(requests[i].bytes);
    if (requests[i].from_failure && !requests[i].made_again) {
      there_[i] = bytes;
      missing_ += bytes;
    }
    if (requests[i].successor != Trace::kNone) {
      const std::size_t successor = index_of(requests[i].successor);
      there_[i] = left(requests[successor]);
      there_[successor] = 0;
    }
    if (foreseen()) {
      there_[i] = bytes;
    }
  }
}

/// A run that needed more than was traced on fake tensors raises all of it.
void Need::learn_from_runs(std::span<const Attempt> attempts) {
  for (const Attempt& attempt : attempts) {
    if (!is_foreseen(attempt) && attempt.need()) {
      const Held expected = held(static_cast<double>(attempt.size()), 1);
      const double bytes = expected.most - already_there(expected, attempt.available);
      scale_ = bytes > 0 ? std::max(scale_, static_cast<double>(*attempt.need()) / bytes) : scale_;
    }
  }
}

/// What a later call frees before it begins, such as gradients, is known from what was traced: it
/// is what was left there and has as many bytes, in the same order. A later call knows by itself.
void Need::free_as(const Need& traced) {
  const auto older = std::span(trace_->requests).first(trace_->older);
  if (!std::ranges::all_of(older, &Trace::Request::from_failure)) {
    return;
  }
  const Trace& trace = *traced.trace_;
  std::vector<bool> is_left(trace.requests.size());
  std::vector<bool> is_freed(trace.requests.size());
  std::size_t e = 0;
  for (; e < trace.later; ++e) {
    const std::int32_t event = trace.events[e];
    is_left[index_of(event < 0 ? ~event : event)] = event >= 0;
  }
  for (; e < trace.events.size() && trace.events[e] < 0; ++e) {
    is_freed[index_of(~trace.events[e])] = true;
  }
  std::map<std::int64_t, std::vector<bool>> there;  // by bytes: whether it is freed
  for (std::size_t i = trace.older; i < is_left.size(); ++i) {
    if (is_left[i]) {
      there[traced.bytes_at(i, size_, 1)].push_back(is_freed[i]);
    }
  }
  std::map<std::int64_t, std::vector<std::size_t>> here;
  for (std::size_t i = trace_->older; i < there_.size(); ++i) {
    if (there_[i] > 0) {
      here[trace_->requests[i].bytes].push_back(i);
    }
  }
  for (const auto& [bytes, requests] : here) {
    const auto found = there.find(bytes);
    for (std::size_t k = 0; found != there.end() && k < requests.size(); ++k) {
      if (found->second.size() == requests.size() && found->second[k]) {
        freed_first_[requests[k]] = true;
        missing_ -= std::exchange(there_[requests[k]], 0.0);
      }
    }
  }
}

std::optional<Need> Need::of_fits(std::span<const Attempt> attempts, const InUse& in_use,
                                  std::optional<std::int64_t> available) {
  const auto fit = std::find_if(attempts.rbegin(), attempts.rend(), [](const Attempt& attempt) {
    return attempt.fitted() && !is_foreseen(attempt);
  });
  const Attempt* traced = newest_foreseen(attempts);
  const Attempt* newest =
      fit != attempts.rend() && (fit->trace || traced == nullptr) ? &*fit : traced;
  if (newest == nullptr || (newest != traced && !newest->need())) {
    return std::nullopt;
  }
  const Need need(*newest, attempts, in_use, available);
  return traced != nullptr && !need.is_mostly_known() ? Need(*traced, attempts, in_use, available)
                                                      : need;
}

std::optional<Need> Need::of_failure(const Attempt& failure, std::span<const Attempt> attempts,
                                     const InUse& in_use) {
  if (!failure.need()) {
    return std::nullopt;
  }
  return Need(failure, failure.trace ? attempts : std::span<const Attempt>(), in_use, {});
}

std::int64_t Need::bytes_at(std::size_t request, double size, double power) const {
  if (growth_[request] && !recorded_ && size > size_ && power > 1) {
    return growth_[request]->up.most_at(size, power);
  }
  if (size < size_ && power > 1) {
    return growth_[request]
               ? growth_[request]->down.least_at(size)
               : detail::RequestGrowth::least_of(
                     static_cast<double>(trace_->requests[request].bytes), size_, size);
  }
  return growth_[request]
             ? (size > size_ ? growth_[request]->up : growth_[request]->down).at(size)
             : detail::whole_bytes(static_cast<double>(trace_->requests[request].bytes) *
                                   (power == 0 ? 1.0 : std::pow(size / size_, power)));
}

Need::Held Need::held(double size, double power, bool frees_first) const {
  std::vector<double> bytes(there_.size());
  double now = missing_;
  for (std::size_t i = trace_->older; i < bytes.size(); ++i) {
    bytes[i] = static_cast<double>(bytes_at(i, size, power));
    now -= frees_first ? there_[i] : 0.0;
  }
  double most = std::max(now, 0.0);
  for (const std::int32_t event : trace_->events) {
    const auto request = index_of(event < 0 ? ~event : event);
    if (event < 0) {
      now -= (request < trace_->older ? there_ : bytes)[request];
    } else {
      now += bytes[request] - (frees_first ? 0.0 : there_[request]);
    }
    most = std::max(most, now);
  }
  return {.most = most, .left = now};
}

/// Bytes that the calls since the trace have left, which the next one need not make; negative where
/// they have freed already what it would.
double Need::already_there(const Held& held, std::optional<std::int64_t> available) const {
  if (!foreseen() || !available_then_ || !available) {
    return 0;
  }
  const double older = std::accumulate(
      there_.begin(), there_.begin() + static_cast<std::ptrdiff_t>(trace_->older), 0.0);
  return std::clamp(static_cast<double>(*available_then_ - *available), -older,
                    std::max(held.left, 0.0));
}

/// How fast what is not known grows at most.
double Need::power_above(double size, double power) const {
  return foreseen() ? kInProportion : size > size_ ? power : 0;
}

double Need::upper(double size, double power) const {
  const double short_by = short_per_item_ * std::max(size - size_, 0.0);
  const Held at = held(size, power_above(size, power));
  return scale_ * std::max(at.most - already_there(at, available_), 0.0) + short_by;
}

double Need::lower(double size) const {
  const Held at = held(size, size > size_ ? 0 : 3, true);
  return std::max(at.most - already_there(at, available_), 0.0) - leftover_;
}

}  // namespace brim
