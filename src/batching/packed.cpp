#include <brim/batching/batching.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include "batching/bin_packing.h"
#include "batching/packed_source.h"
#include "batching/sample_table.h"

namespace brim::batching {
namespace {

// Shares of the samples, in order of preference, that a shuffled epoch leaves to best fit; and how
// many times the batches of best fit alone are acceptable for that.
constexpr double kShares[] = {0.0625, 0.125, 0.25, 0.375, 0.5};
constexpr double kMoreBatches = 1.002;
constexpr std::int64_t kTrialSamples = 10'000;

template <class T>
class PackedBatching : public detail::TableBatching<T> {
 public:
  PackedBatching(Columns<T> columns, const Order& order, const PackOptions& options)
      : detail::TableBatching<T>(std::move(columns), order, options.oversize),
        window_(options.window.value_or(std::max<std::int64_t>(this->table().size(), 1))),
        batch_multiple_(
            detail::multiple_argument(options.batch_multiple, this->table().columns())) {
    detail::check_argument(window_ > 0, "window must be positive, got ", window_);
    detail::check_packed_multiple(batch_multiple_, this->table().columns());
    if (this->table().shuffled()) {
      best_fit_ = smallest_share();
    }
  }

  [[nodiscard]] std::unique_ptr<BatchSource> epoch(std::uint64_t seed) const override {
    return std::make_unique<detail::PackedSource<T, const detail::SampleTable<T>>>(
        this->table(), window_, best_fit_, seed, batch_multiple_);
  }

 private:
  // If a few samples fill a batch, taking them as they come leaves gaps that nothing fills. How
  // many must be left to best fit is tried out with random samples.
  [[nodiscard]] double smallest_share() const {
    const detail::SampleTable<T>& table = this->table();
    detail::BinPacking<T> packing(table.columns());
    const std::int64_t count = std::min({table.size(), window_, kTrialSamples});
    if (packing.padded() || count == 0) {
      return 1.0;
    }
    std::vector<std::int64_t> samples(static_cast<std::size_t>(count));
    table.read(table.permutation(0), 0, samples);
    std::vector<T> sizes;
    const auto over = [&](std::int64_t sample) {
      table.gather({&sample, 1}, sizes);
      return !detail::MultiFill<T>(table.columns()).fits_alone(sizes.data());
    };
    if (table.has_oversize()) {
      std::erase_if(samples, over);
    }
    table.gather(samples, sizes);
    const auto bins = [&](double share) {
      packing.pack(sizes, detail::mixing_of(samples.size(), share, 1));
      return static_cast<double>(packing.bins());
    };
    const double most = bins(1.0) * kMoreBatches;
    const auto* const found = std::find_if(std::begin(kShares), std::end(kShares),
                                           [&](double share) { return bins(share) <= most; });
    return found == std::end(kShares) ? 1.0 : *found;
  }

  std::int64_t window_;
  std::size_t batch_multiple_;
  double best_fit_ = 1.0;  // the share of samples left to it
};

}  // namespace

std::shared_ptr<const Batching> packed_batching(AnyColumns columns, Order order,
                                                PackOptions options) {
  return std::visit(
      [&]<class T>(Columns<T>& some) -> std::shared_ptr<const Batching> {
        return std::make_shared<PackedBatching<T>>(std::move(some), order, options);
      },
      columns);
}

}  // namespace brim::batching
