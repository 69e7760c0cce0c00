#include <brim/batching/gauge.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "batching/gauge.h"
#include "number_text.h"

namespace brim::batching {

struct Gauge::Parts {
  Columns<double> columns;  // the gauge refers to their limits
  detail::MultiGauge<double> gauge;

  explicit Parts(Columns<double> of) : columns(std::move(of)), gauge(columns) {}

  [[nodiscard]] const double* check(std::span<const double> sizes) const {
    if (sizes.size() != columns.size()) {
      throw std::invalid_argument("there must be one size for each of the " +
                                  std::to_string(columns.size()) + " limits, got " +
                                  std::to_string(sizes.size()));
    }
    for (const double size : sizes) {
      if (!(size >= 0) || !std::isfinite(size)) {
        throw std::invalid_argument("sizes must be finite and not negative, got " +
                                    brim::detail::text(size));
      }
    }
    return sizes.data();
  }
};

Gauge::Gauge(std::vector<Limit> limits) {
  if (limits.empty()) {
    throw std::invalid_argument("a gauge needs at least one limit");
  }
  Columns<double> columns;
  columns.reserve(limits.size());
  for (Limit& limit : limits) {
    columns.push_back({{}, std::move(limit)});
  }
  parts_ = std::make_unique<Parts>(std::move(columns));
}

Gauge::~Gauge() = default;
Gauge::Gauge(Gauge&&) noexcept = default;
Gauge& Gauge::operator=(Gauge&&) noexcept = default;

bool Gauge::fits_alone(std::span<const double> sizes) const {
  return parts_->gauge.fits_alone(parts_->check(sizes));
}

bool Gauge::fits(std::span<const double> sizes) const {
  return parts_->gauge.fits(parts_->check(sizes));
}

void Gauge::add(std::span<const double> sizes) { parts_->gauge.add(parts_->check(sizes)); }

void Gauge::clear() { parts_->gauge.clear(); }

double Gauge::load() const { return parts_->gauge.load(); }

}  // namespace brim::batching
