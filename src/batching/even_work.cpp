#include <brim/batching/even_work.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "batching/batch_fill.h"
#include "batching/bin_packing.h"
#include "batching/exchange.h"
#include "check_argument.h"

namespace brim::batching {
namespace {

using brim::detail::check_argument;

double work_of(std::span<const std::int64_t> batch, std::span<const double> work) {
  double total = 0.0;
  for (const std::int64_t sample : batch) {
    total += work[static_cast<std::size_t>(sample)];
  }
  return total;
}

template <class T>
class EvenSource : public BatchSource {
 public:
  EvenSource(std::unique_ptr<BatchSource> source, const Columns<T>& columns,
             std::span<const double> work)
      : source_(std::move(source)), columns_(columns), work_(work) {}

  bool fill(Batches& block, std::int64_t world_size) override {
    const std::size_t before = block.count();
    const bool more = source_->fill(block, world_size);
    for (std::size_t b = before; b < block.count(); ++b) {
      block.loads[b] = work_of(block[b], work_);
    }
    return more;
  }

  void even_out(Batches& block, std::size_t first, std::size_t count) override {
    const auto begin = static_cast<std::size_t>(block.offsets[first]);
    const std::span<std::int64_t> samples =
        std::span(block.indices)
            .subspan(begin, static_cast<std::size_t>(block.offsets[first + count]) - begin);
    const bool summed = sums() == 1;
    costs_.resize(samples.size());
    sizes_.resize(samples.size());
    for (std::size_t i = 0; i < samples.size(); ++i) {
      costs_[i] = work_[static_cast<std::size_t>(samples[i])];
      sizes_[i] = summed ? size_of(samples[i]) : 0.0;
    }
    detail::Division division{std::vector<std::uint32_t>(samples.size())};
    for (std::size_t b = 0; b < count; ++b) {
      for (std::int64_t i = block.offsets[first + b]; i < block.offsets[first + b + 1]; ++i) {
        division.part[static_cast<std::size_t>(i) - begin] = static_cast<std::uint32_t>(b);
      }
    }
    // Several budgets would have to hold at once: then batches of like work are all there is.
    if (sums() <= 1) {
      detail::exchange({costs_, sizes_, cap()}, count, counted(), division);
    }
    rewrite(block, first, count, division);
  }

  [[nodiscard]] std::int64_t rest() const override { return source_->rest(); }
  [[nodiscard]] Cursor cursor() const override { return source_->cursor(); }
  void seek(const Cursor& cursor) override { source_->seek(cursor); }

 private:
  [[nodiscard]] const Column<T>& summed() const {
    return *std::ranges::find_if(columns_, [](const Column<T>& column) {
      return column.limit.cost().kind() == Cost::Kind::sum;
    });
  }
  [[nodiscard]] std::ptrdiff_t sums() const {
    return std::ranges::count_if(columns_, [](const Column<T>& column) {
      return column.limit.cost().kind() == Cost::Kind::sum;
    });
  }
  // Then batches keep their number of samples.
  [[nodiscard]] bool counted() const { return std::cmp_less(sums(), columns_.size()); }

  // Samples over the budget by themselves are truncated to it, or alone.
  [[nodiscard]] double size_of(std::int64_t sample) const {
    return static_cast<double>(summed().sizes[static_cast<std::size_t>(sample)]);
  }

  [[nodiscard]] double cap() const {
    if (sums() == 0) {
      return 0.0;
    }
    const auto maximum = static_cast<double>(detail::maximum_of<T>(summed().limit));
    // Sums of fractions depend on their order.
    return detail::all_whole<double>(sizes_) ? maximum : maximum * (1 - 0x1p-32);
  }

  void rewrite(Batches& block, std::size_t first, std::size_t count,
               const detail::Division& division) {
    const std::int64_t begin = block.offsets[first];
    const std::int64_t end = block.offsets[first + count];
    samples_.assign(block.indices.begin() + begin, block.indices.begin() + end);
    places_.assign(count + 1, begin);
    for (const std::uint32_t batch : division.part) {
      ++places_[batch + 1];
    }
    for (std::size_t b = 0; b < count; ++b) {
      places_[b + 1] += places_[b] - begin;
      block.offsets[first + b + 1] = places_[b + 1];
    }
    for (std::size_t i = 0; i < samples_.size(); ++i) {
      block.indices[static_cast<std::size_t>(places_[division.part[i]]++)] = samples_[i];
    }
    for (std::size_t b = first; b < first + count; ++b) {
      block.loads[b] = work_of(block[b], work_);
    }
  }

  std::unique_ptr<BatchSource> source_;
  const Columns<T>& columns_;
  std::span<const double> work_;
  std::vector<double> costs_;
  std::vector<double> sizes_;
  std::vector<std::int64_t> samples_;
  std::vector<std::int64_t> places_;
};

template <class T>
class EvenWork : public Batching {
 public:
  EvenWork(std::shared_ptr<const Batching> batching, Columns<T> columns,
           std::span<const double> work)
      : batching_(std::move(batching)), columns_(std::move(columns)), work_(work) {
    for (const Column<T>& column : columns_) {
      const Cost::Kind kind = column.limit.cost().kind();
      check_argument(kind == Cost::Kind::sum || kind == Cost::Kind::count,
                     "work needs a budget with cost=\"sum\": padded samples cost what the longest "
                     "does, as cost=\"flops\" says");
      check_argument(column.sizes.size() == work.size(), "work must be as many as sizes, ",
                     column.sizes.size(), ", got ", work.size());
    }
    for (std::size_t i = 0; i < work.size(); ++i) {
      check_argument(work[i] >= 0 && std::isfinite(work[i]),
                     "work must be finite and not negative, got ", work[i], " at index ", i);
    }
  }

  [[nodiscard]] std::unique_ptr<BatchSource> epoch(std::uint64_t seed) const override {
    return std::make_unique<EvenSource<T>>(batching_->epoch(seed), columns_, work_);
  }
  [[nodiscard]] std::int64_t samples() const override { return batching_->samples(); }
  [[nodiscard]] const std::vector<LeftOut>& left_out() const override {
    return batching_->left_out();
  }
  [[nodiscard]] BatchFigures figures(std::span<const std::int64_t> batch) const override {
    BatchFigures figures = batching_->figures(batch);
    figures.work = work_of(batch, work_);
    return figures;
  }

 private:
  std::shared_ptr<const Batching> batching_;
  Columns<T> columns_;
  std::span<const double> work_;
};

}  // namespace

std::shared_ptr<const Batching> even_work(std::shared_ptr<const Batching> batching,
                                          AnyColumns columns, std::span<const double> work) {
  return std::visit(
      [&]<class T>(Columns<T>& some) -> std::shared_ptr<const Batching> {
        return std::make_shared<EvenWork<T>>(std::move(batching), std::move(some), work);
      },
      columns);
}

}  // namespace brim::batching
