#include "predict/frontier.h"

#include <algorithm>
#include <cmath>
#include <ranges>

#include "bisect.h"

namespace brim::detail {
namespace {

// A smaller unused share of the limit is not worth a measurement.
constexpr double kUnused = 0.03;
// The bound of a batch that is measured may exceed the limit by this factor.
constexpr double kBeyond = 1.5;
// If little is known (the bound of work with a high floor grows with the floor), any term may grow
// by this factor from a batch that stays within the limit.
constexpr double kGrowth = 4;

/// The most samples of a length that may be measured.
std::int64_t within_reach(const MemoryModel& model, std::int64_t most, double length,
                          double limit) {
  auto result = static_cast<double>(model.largest_batch(length, kBeyond * limit));
  for (const MemorySample& sample : model.samples()) {
    if (!sample.out_of_memory && sample.peak <= limit) {
      const double shorter = std::min(1.0, sample.length / length);
      result = std::max(result, std::floor(kGrowth * sample.n * shorter * shorter));
    }
  }
  return static_cast<std::int64_t>(std::min(result, static_cast<double>(most)));
}

/// Whether one sample of that length was measured to exceed the limit.
bool known_to_fail(const MemoryModel& model, double length, double limit) {
  return std::any_of(model.samples().begin(), model.samples().end(), [&](const MemorySample& s) {
    return s.n == 1 && s.length <= length && (s.out_of_memory || s.peak > limit);
  });
}

bool measured_near(const MemoryModel& model, double n, double length) {
  constexpr double kNear = 1.1;
  const auto near = [](double a, double b) { return a <= kNear * b && b <= kNear * a; };
  return std::any_of(model.samples().begin(), model.samples().end(),
                     [&](const MemorySample& s) { return near(s.n, n) && near(s.length, length); });
}

}  // namespace

std::optional<BatchShape> next_at_the_limit(const MemoryModel& model,
                                            std::span<const std::int64_t> lengths,
                                            std::int64_t most, double limit, double caution) {
  std::optional<BatchShape> result;
  std::optional<BatchShape> alone;
  double largest = kUnused;
  // Longest first: it is chosen if several lengths cannot be used at all.
  for (const std::int64_t whole : std::views::reverse(lengths)) {
    const auto length = static_cast<double>(whole);
    const std::int64_t safe = std::min(model.largest_batch(length, limit), most);
    const double used = safe > 0 ? model.peak(static_cast<double>(safe), length) / limit : 0.0;
    if (1 - used <= largest) {
      continue;
    }
    const std::int64_t reach = within_reach(model, most, length, limit);
    std::int64_t n = largest_that_holds(safe, reach + 1, [&](std::int64_t count) {
      return model.peak(static_cast<double>(count), length) <= limit / (1 + caution);
    });
    // Samples are left out only if one was measured to exceed the limit.
    if (n == 0 && !known_to_fail(model, length, limit)) {
      n = reach > 0 ? 1 : 0;
      alone = {1, whole};
    }
    if (n > safe) {
      largest = 1 - used;
      result = {n, whole};
    }
  }
  if (result || alone) {
    return result ? result : alone;
  }
  // The model expects all of the limit to be used. Measurements nearby must confirm that.
  for (const std::int64_t length : {lengths.back(), lengths[lengths.size() / 2], lengths.front()}) {
    const std::int64_t n = std::min(model.largest_batch(static_cast<double>(length), limit), most);
    if (n > 0 && !measured_near(model, static_cast<double>(n), static_cast<double>(length))) {
      return BatchShape(n, length);
    }
  }
  return std::nullopt;
}

}  // namespace brim::detail
