#include <brim/batching/cost.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <sstream>
#include <type_traits>
#include <utility>
#include <vector>

#include "batching/batch_fill.h"
#include "check_argument.h"

namespace brim::batching {
namespace {

using brim::detail::check_argument;

constexpr std::pair<std::string_view, Cost::Kind> kNamed[] = {
    {"sum", Cost::Kind::sum},
    {"count", Cost::Kind::count},
    {"padded", Cost::Kind::padded},
    {"padded_product", Cost::Kind::padded_product},
    {"padded_squared", Cost::Kind::padded_squared},
    {"flops", Cost::Kind::flops},
};

constexpr const char* kNotPositive = "max_total_size must be a positive, finite number, got ";

std::int64_t whole_part(double maximum) {
  return maximum >= 0x1p63 ? std::numeric_limits<std::int64_t>::max()
                           : static_cast<std::int64_t>(std::floor(maximum));
}

// More than fit any budget that holds; the search for a count ends there.
constexpr std::uint64_t kMostInABatch = std::uint64_t{1} << 40;

/// The largest number below `end` that fits, where all below it do; 0 is taken to fit. The numbers
/// tried first are `first` and those after it by `next`: a cost is not asked about sizes that no
/// sample has.
template <class Fits, class Next>
std::uint64_t largest_fitting(std::uint64_t first, std::uint64_t end, const Next& next,
                              const Fits& fits) {
  std::uint64_t largest = 0;
  std::uint64_t too_large = first;
  while (too_large < end && fits(too_large)) {
    largest = too_large;
    too_large = next(too_large);
  }
  while (too_large - largest > 1) {
    const std::uint64_t middle = largest + (too_large - largest) / 2;
    (fits(middle) ? largest : too_large) = middle;
  }
  return largest;
}

std::uint64_t twice(std::uint64_t number) { return 2 * number; }

/// A price that is checked each time.
template <class Price, class Longest>
Price checked_price(Price price) {
  check_argument(static_cast<bool>(price), "a cost needs a price");
  return [price = std::move(price)](std::int64_t count, Longest longest) {
    const double cost = price(count, longest);
    if (!(cost >= 0)) {
      std::ostringstream size;
      if constexpr (std::is_same_v<Longest, double>) {
        size << longest;
      } else {
        const char* separator = "";
        for (const double each : longest) {
          size << std::exchange(separator, " × ") << each;
        }
      }
      check_argument(false, "cost must give numbers that are not negative, got ", cost, " for ",
                     count, " samples of size ", size.str());
    }
    return cost;
  };
}

/// How many samples stay within a budget, by trial.
template <class Price, class Longest>
std::int64_t searched_count(const Price& price, Longest longest, double budget) {
  return static_cast<std::int64_t>(
      largest_fitting(1, kMostInABatch, twice, [&](std::uint64_t count) {
        return price(static_cast<std::int64_t>(count), longest) <= budget;
      }));
}

template <class T>
void check_that_some_size_fits(const Limit& limit) {
  check_argument(detail::fits_alone(limit, T{0}),
                 "no sample fits max_total_size, of whatever size");
}

}  // namespace

Cost Cost::named(std::string_view name) {
  const auto* const found = std::find_if(std::begin(kNamed), std::end(kNamed),
                                         [&](const auto& known) { return known.first == name; });
  check_argument(found != std::end(kNamed), "cost must be ", names(),
                 " or a fitted MemoryModel, got \"", name, "\"");
  return Cost(found->second);
}

std::string Cost::names() {
  std::ostringstream result;
  const char* separator = "";
  for (const auto& [name, kind] : kNamed) {
    result << std::exchange(separator, ", ") << '"' << name << '"';
  }
  return result.str();
}

Cost Cost::custom(LargestCount largest_count, Price price) {
  check_argument(largest_count && price, "a custom cost needs both largest_count and price");
  Cost cost(Kind::custom);
  cost.largest_count_ = std::move(largest_count);
  cost.price_ = std::move(price);
  return cost;
}

Cost Cost::priced(Price price) {
  const auto checked = checked_price<Price, double>(std::move(price));
  const auto largest_count = [checked](double longest, double budget) {
    return searched_count(checked, longest, budget);
  };
  return custom(remembered(largest_count), checked);
}

Cost Cost::joint(JointCount largest_count, JointPrice price) {
  check_argument(largest_count && price, "a custom cost needs both largest_count and price");
  Cost cost =
      custom(remembered([largest_count](double longest, double budget) {
               return largest_count({&longest, 1}, budget);
             }),
             [price](std::int64_t count, double longest) { return price(count, {&longest, 1}); });
  cost.joint_count_ = std::move(largest_count);
  cost.joint_price_ = std::move(price);
  return cost;
}

Cost Cost::joint(JointPrice price) {
  const auto checked = checked_price<JointPrice, std::span<const double>>(std::move(price));
  // Orders of the same samples that are compared ask about the same sizes again and again.
  struct Answers {
    std::mutex mutex;
    std::map<std::vector<double>, std::int64_t> counts;  // the budget comes first
  };
  return joint(
      [checked, answers = std::make_shared<Answers>()](std::span<const double> longest,
                                                       double budget) {
        constexpr std::size_t kMostKept = std::size_t{1} << 16;
        std::vector<double> key{budget};
        key.insert(key.end(), longest.begin(), longest.end());
        {
          const std::lock_guard lock(answers->mutex);
          const auto found = answers->counts.find(key);
          if (found != answers->counts.end()) {
            return found->second;
          }
        }
        const std::int64_t count = searched_count(checked, longest, budget);
        const std::lock_guard lock(answers->mutex);
        if (answers->counts.size() < kMostKept) {
          answers->counts.emplace(std::move(key), count);
        }
        return count;
      },
      checked);
}

Cost::LargestCount remembered(Cost::LargestCount largest_count) {
  // An entry is the answer plus 1; 0 means not asked yet.
  struct Answers {
    std::atomic<double> budget = 0.0;  // 0 if none was asked for
    std::vector<std::atomic<std::int64_t>> counts =
        std::vector<std::atomic<std::int64_t>>(std::size_t{1} << 16);
  };
  return [answers = std::make_shared<Answers>(), ask = std::move(largest_count)](double longest,
                                                                                 double budget) {
    double first = 0.0;
    const bool same = answers->budget.compare_exchange_strong(first, budget) || first == budget;
    if (!same || longest >= static_cast<double>(answers->counts.size()) ||
        longest != std::floor(longest)) {
      return ask(longest, budget);
    }
    std::atomic<std::int64_t>& entry = answers->counts[static_cast<std::size_t>(longest)];
    std::int64_t answer = entry.load(std::memory_order_relaxed);
    if (answer == 0) {
      answer = ask(longest, budget) + 1;
      entry.store(answer, std::memory_order_relaxed);
    }
    return answer - 1;
  };
}

Limit::Limit(Cost cost, std::int64_t maximum)
    : cost_(std::move(cost)), whole_(maximum), real_(static_cast<double>(maximum)) {
  check_argument(maximum > 0, kNotPositive, maximum);
  // Above 2^53 the nearest double may be larger, and a budget must not grow.
  if (real_ >= 0x1p63 || static_cast<std::int64_t>(real_) > maximum) {
    real_ = std::nextafter(real_, 0.0);
  }
}

Limit::Limit(Cost cost, double maximum) : cost_(std::move(cost)), whole_(0), real_(maximum) {
  check_argument(maximum > 0 && std::isfinite(maximum), kNotPositive, maximum);
  whole_ = whole_part(maximum);
}

std::int64_t Limit::largest_whole_size() const {
  check_that_some_size_fits<std::int64_t>(*this);
  return static_cast<std::int64_t>(
      largest_fitting(1, std::uint64_t{1} << 63, twice, [&](std::uint64_t size) {
        return detail::fits_alone(*this, static_cast<std::int64_t>(size));
      }));
}

// Doubles that are not negative are in the order of their bits, of which the 52 lowest are the
// fraction: one more above them is twice the number.
double Limit::largest_real_size() const {
  check_that_some_size_fits<double>(*this);
  return std::bit_cast<double>(largest_fitting(
      std::bit_cast<std::uint64_t>(1.0),
      std::bit_cast<std::uint64_t>(std::numeric_limits<double>::infinity()),
      [](std::uint64_t bits) { return bits + (std::uint64_t{1} << 52); },
      [&](std::uint64_t bits) { return detail::fits_alone(*this, std::bit_cast<double>(bits)); }));
}

}  // namespace brim::batching
