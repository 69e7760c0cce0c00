#include <brim/adapt/detail/throughput.h>

#include <algorithm>

#include "adapt/size_lattice.h"

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
  double best = 0.0;
  bool knows_largest = false;
  const detail::SizeLattice allowed{lower, largest, quantum};
  // The last part of a range is as short as the remainder: not a size to choose.
  const auto counts = [&](const Attempt& attempt) {
    const std::int64_t size = attempt.size();
    return attempt.fitted() && attempt.rate > 0 && size <= largest && allowed.floor(size) == size;
  };
  for (const Attempt& attempt : attempts) {
    if (counts(attempt)) {
      best = std::max(best, attempt.rate);
      knows_largest = knows_largest || static_cast<double>(attempt.size()) >=
                                           kSameSize * static_cast<double>(largest);
    }
  }
  if (!knows_largest) {
    return largest;
  }
  std::int64_t smallest = largest;
  for (const Attempt& attempt : attempts) {
    if (counts(attempt) && attempt.rate >= best * (1.0 - kNegligible)) {
      smallest = std::min(smallest, attempt.size());
    }
  }
  const std::int64_t half = std::max(floor_to_multiple(smallest / 2, quantum), lower);
  const bool tried = std::any_of(attempts.begin(), attempts.end(), [&](const Attempt& attempt) {
    return counts(attempt) && attempt.size() <= half;
  });
  return tried ? smallest : half;
}

}  // namespace brim
