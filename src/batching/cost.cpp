#include <brim/batching/cost.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "number_text.h"

namespace brim::batching {
namespace {

std::int64_t whole_part(double maximum) {
  return maximum >= 0x1p63 ? std::numeric_limits<std::int64_t>::max()
                           : static_cast<std::int64_t>(std::floor(maximum));
}

[[noreturn]] void not_positive(const std::string& maximum) {
  throw std::invalid_argument("max_total_size must be a positive, finite number, got " + maximum);
}

}  // namespace

Cost Cost::custom(LargestCount largest_count, Price price) {
  if (!largest_count || !price) {
    throw std::invalid_argument("a custom cost needs both largest_count and price");
  }
  Cost cost(Kind::custom);
  cost.largest_count_ = std::move(largest_count);
  cost.price_ = std::move(price);
  return cost;
}

Limit::Limit(Cost cost, std::int64_t maximum)
    : cost_(std::move(cost)), whole_(maximum), real_(static_cast<double>(maximum)) {
  if (maximum <= 0) {
    not_positive(std::to_string(maximum));
  }
  // Above 2^53 the nearest double may be larger, and a budget must not grow.
  if (real_ >= 0x1p63 || static_cast<std::int64_t>(real_) > maximum) {
    real_ = std::nextafter(real_, 0.0);
  }
}

Limit::Limit(Cost cost, double maximum) : cost_(std::move(cost)), whole_(0), real_(maximum) {
  if (!(maximum > 0) || !std::isfinite(maximum)) {
    not_positive(brim::detail::text(maximum));
  }
  whole_ = whole_part(maximum);
}

}  // namespace brim::batching
