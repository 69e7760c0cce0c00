#include <brim/batching/batch_fill.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "batching/batch_fill.h"
#include "check_argument.h"

namespace brim::batching {

using brim::detail::check_argument;

struct BatchFill::Parts {
  Columns<double> columns;  // the fill refers to their limits
  detail::MultiFill<double> fill;

  std::vector<double> largest = {};  // sizes that fit an empty batch, once asked for

  explicit Parts(Columns<double> of) : columns(std::move(of)), fill(columns) {}

  [[nodiscard]] const double* check(std::span<const double> sizes) const {
    check_argument(sizes.size() == columns.size(), "there must be one size for each of the ",
                   columns.size(), " limits, got ", sizes.size());
    for (const double size : sizes) {
      check_argument(size >= 0 && std::isfinite(size),
                     "sizes must be finite and not negative, got ", size);
    }
    return sizes.data();
  }
};

BatchFill::BatchFill(std::vector<Limit> limits) {
  check_argument(!limits.empty(), "a fill needs at least one limit");
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

void BatchFill::truncate(std::span<double> sizes) const {
  std::vector<double>& largest = parts_->largest;
  for (std::size_t i = largest.size(); i < parts_->columns.size(); ++i) {
    detail::refuse_to_truncate(parts_->columns[i].limit);
    largest.push_back(parts_->columns[i].limit.largest_real_size());
  }
  (void)parts_->check(sizes);
  std::transform(sizes.begin(), sizes.end(), largest.begin(), sizes.begin(),
                 [](double size, double most) { return detail::truncated(size, most); });
}

void BatchFill::clear() { parts_->fill.clear(); }

double BatchFill::load() const { return parts_->fill.load(); }

void detail::refuse_oversize(std::int64_t sample, std::span<const double> sizes) {
  std::ostringstream message;
  message << "sample " << sample << " exceeds the budget by itself: its size is";
  for (const double size : sizes) {
    message << " " << size;
  }
  throw std::invalid_argument(message.str());
}

}  // namespace brim::batching
