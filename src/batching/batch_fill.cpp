#include <brim/batching/batch_fill.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "batching/batch_fill.h"
#include "number_text.h"

namespace brim::batching {

struct BatchFill::Parts {
  Columns<double> columns;  // the fill refers to their limits
  detail::MultiFill<double> fill;

  explicit Parts(Columns<double> of) : columns(std::move(of)), fill(columns) {}

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

BatchFill::BatchFill(std::vector<Limit> limits) {
  if (limits.empty()) {
    throw std::invalid_argument("a fill needs at least one limit");
  }
  Columns<double> columns;
  columns.reserve(limits.size());
  for (Limit& limit : limits) {
    columns.push_back({{}, std::move(limit)});
  }
  parts_ = std::make_unique<Parts>(std::move(columns));
}

BatchFill::~BatchFill() = default;
BatchFill::BatchFill(BatchFill&&) noexcept = default;
BatchFill& BatchFill::operator=(BatchFill&&) noexcept = default;

bool BatchFill::fits_alone(std::span<const double> sizes) const {
  return parts_->fill.fits_alone(parts_->check(sizes));
}

bool BatchFill::fits(std::span<const double> sizes) const {
  return parts_->fill.fits(parts_->check(sizes));
}

void BatchFill::add(std::span<const double> sizes) { parts_->fill.add(parts_->check(sizes)); }

void BatchFill::clear() { parts_->fill.clear(); }

double BatchFill::load() const { return parts_->fill.load(); }

}  // namespace brim::batching
