#include <brim/adapt/detail/throughput.h>

#include <algorithm>
#include <ranges>

#include "need/size_lattice.h"

namespace brim {
namespace {

// Less than this is within the noise of a timing, and memory is worth more.
constexpr double kNegligible = 0.02;

// The largest size that fits varies slightly from call to call; a rate measured this close to it
// counts as its rate.
constexpr double kSameSize = 0.9;

}  // namespace

std::int64_t throughput_choice(std::span<const Attempt> attempts, std::int64_t largest,
                               std::int64_t lower, std::int64_t quantum) {
  const detail::SizeLattice allowed{lower, largest, quantum};
  // The last part of a range is as short as the remainder: not a size to choose.
  const auto counts = [&](const Attempt& attempt) {
    const std::int64_t size = attempt.size();
    return attempt.fitted() && attempt.rate > 0 && size <= largest && allowed.floor(size) == size;
  };
  auto counted = attempts | std::views::filter(counts);
  const bool knows_largest = std::ranges::any_of(counted, [&](const Attempt& attempt) {
    return static_cast<double>(attempt.size()) >= kSameSize * static_cast<double>(largest);
  });
  if (!knows_largest) {
    return largest;
  }
  const double best = std::ranges::max_element(counted, {}, &Attempt::rate)->rate;
  std::int64_t smallest = largest;
  for (const Attempt& attempt : counted) {
    if (attempt.rate >= best * (1.0 - kNegligible)) {
      smallest = std::min(smallest, attempt.size());
    }
  }
  const std::int64_t half = std::max(floor_to_multiple(smallest / 2, quantum), lower);
  const bool tried =
      std::ranges::any_of(counted, [&](const Attempt& attempt) { return attempt.size() <= half; });
  return tried ? smallest : half;
}

}  // namespace brim
