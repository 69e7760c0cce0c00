#include <brim/batching/cost.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <sstream>
#include <utility>

#include "check_argument.h"

namespace brim::batching {
namespace {

using brim::detail::check_argument;

constexpr std::pair<std::string_view, Cost::Kind> kNamed[] = {
    {"sum", Cost::Kind::sum},
    {"count", Cost::Kind::count},
    {"padded", Cost::Kind::padded},
    {"padded_squared", Cost::Kind::padded_squared},
};

constexpr const char* kNotPositive = "max_total_size must be a positive, finite number, got ";

std::int64_t whole_part(double maximum) {
  return maximum >= 0x1p63 ? std::numeric_limits<std::int64_t>::max()
                           : static_cast<std::int64_t>(std::floor(maximum));
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

}  // namespace brim::batching
