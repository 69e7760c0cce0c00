#include <brim/batching/batching.h>
#include <brim/batching/interruption.h>
#include <brim/batching/sample_index.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <utility>

#include "batching/batch_fill.h"
#include "batching/bucket_counts.h"
#include "batching/bucket_index.h"
#include "batching/bucket_reader.h"
#include "batching/permutation.h"
#include "batching/sample_table.h"

namespace brim::batching {
namespace {

using brim::detail::check_argument;
using detail::BucketCounts;
using detail::BucketMembers;
using detail::BucketReader;
using detail::SampleTable;

constexpr std::size_t kBatchesInBlock = 1024;
constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

/// A batch from one bucket, then from another. All that it knows is how far each bucket is read.
template <class T>
class BucketSource : public BatchSource {
 public:
  /// Keeps references to everything but the seed.
  BucketSource(const BucketMembers& index, const SampleTable<T>& table,
               const BucketOptions& options, std::uint64_t seed)
      : columns_(table.columns()), options_(options), seed_(seed) {
    const bool with_sizes = options.batch_sizes.empty();
    buckets_.reserve(index.buckets());
    for (std::size_t b = 0; b < index.buckets(); ++b) {
      buckets_.emplace_back(index, b, with_sizes ? &table : nullptr, options.shuffle,
                            detail::mix(seed, b));
      rest_ += usable(b);
    }
  }

  bool fill(Batches& block, std::int64_t world_size) override {
    const std::size_t enough = block.count() + kBatchesInBlock;
    const std::size_t begin = block.indices.size();
    while (rest_ > 0) {
      // The last block takes a remainder that is too small for a block of its own.
      if (block.count() >= enough && std::cmp_greater(rest_, block.indices.size() - begin)) {
        return true;
      }
      check_interruption();
      const std::size_t bucket = choose_bucket();
      // One for each rank, so that all have work of one kind in a step.
      for (std::int64_t i = 0; i < world_size && left(bucket) > 0; ++i) {
        read_batch(bucket, block);
      }
    }
    if (options_.drop_last) {
      report_dropped(block);
    }
    return false;
  }

  [[nodiscard]] std::int64_t rest() const override { return rest_; }

  [[nodiscard]] Cursor cursor() const override {
    Cursor words{drawn_};
    for (const BucketReader<T>& bucket : buckets_) {
      words.push_back(bucket.taken());
    }
    return words;
  }

  void seek(const Cursor& cursor) override {
    bool valid = cursor.size() == 1 + buckets_.size() && cursor[0] >= 0;
    std::int64_t rest = 0;
    for (std::size_t b = 0; valid && b < buckets_.size(); ++b) {
      valid = cursor[1 + b] >= 0 && cursor[1 + b] <= usable(b);
      rest += usable(b) - cursor[1 + b];
    }
    check_argument(valid, "the position is not one of these buckets");
    drawn_ = cursor[0];
    rest_ = rest;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      buckets_[b].seek(cursor[1 + b]);
    }
  }

 private:
  // The number of samples of the bucket that come into a batch.
  [[nodiscard]] std::int64_t usable(std::size_t bucket) const {
    const std::int64_t size = buckets_[bucket].size();
    return options_.drop_last ? size - size % options_.batch_sizes[bucket] : size;
  }
  [[nodiscard]] std::int64_t left(std::size_t bucket) const {
    return usable(bucket) - buckets_[bucket].taken();
  }

  // At random, in proportion to the samples that are left in each bucket; or the first.
  [[nodiscard]] std::size_t choose_bucket() {
    const std::uint64_t random = detail::mix(~seed_, static_cast<std::uint64_t>(drawn_++));
    std::int64_t place = 0;
    if (options_.shuffle) {
      place = static_cast<std::int64_t>(detail::below(random, static_cast<std::uint64_t>(rest_)));
    }
    std::size_t bucket = 0;
    while (place >= left(bucket)) {
      place -= left(bucket++);
    }
    return bucket;
  }

  void read_batch(std::size_t bucket, Batches& block) {
    BucketReader<T>& reader = buckets_[bucket];
    std::size_t taken = 0;
    double load = 0.0;
    if (options_.batch_sizes.empty()) {
      taken = take_what_fits(reader, load);
    } else {
      const auto size = static_cast<std::size_t>(options_.batch_sizes[bucket]);
      taken = std::min(size, reader.look_ahead(size));
      // Batches of one bucket are alike; between buckets, longer samples cost more.
      const double upper = options_.boundaries[bucket + 1];
      load = static_cast<double>(taken) *
             (std::isfinite(upper) ? upper : 2 * options_.boundaries[bucket]);
    }
    const auto samples = reader.samples().first(taken);
    block.indices.insert(block.indices.end(), samples.begin(), samples.end());
    block.close(load);
    reader.take(taken);
    rest_ -= static_cast<std::int64_t>(taken);
  }

  std::size_t take_what_fits(BucketReader<T>& reader, double& load) const {
    return detail::with_fill(columns_, [&](auto fill, auto at) {
      const auto readable = [&] {
        return [=, sizes = reader.sizes()](std::size_t i) { return at(sizes, i); };
      };
      std::size_t taken = 0;
      std::size_t ahead = 0;
      do {
        ahead = reader.look_ahead(std::max(2 * taken, std::size_t{1}));
        taken = detail::add_what_fits(fill, 0, taken, ahead, readable());
        // If all that was looked at fits, there may be more.
      } while (taken == ahead && reader.look_ahead(2 * taken) > ahead);
      const auto multiple = static_cast<std::size_t>(options_.batch_multiple);
      taken = detail::keep_multiple(fill, 0, taken, multiple, readable());
      load = fill.load();
      return taken;
    });
  }

  void report_dropped(Batches& block) {
    for (BucketReader<T>& bucket : buckets_) {
      const std::size_t dropped =
          bucket.look_ahead(static_cast<std::size_t>(bucket.size() - bucket.taken()));
      for (const std::int64_t sample : bucket.samples().first(dropped)) {
        block.left_out.push_back({sample, LeftOutReason::dropped_last});
      }
    }
  }

  const Columns<T>& columns_;
  const BucketOptions& options_;
  std::uint64_t seed_;
  std::vector<BucketReader<T>> buckets_;
  std::int64_t rest_ = 0;   // the number of samples that still come into a batch
  std::int64_t drawn_ = 0;  // the number of buckets chosen so far
};

template <class T>
class BucketBatching : public detail::TableBatching<T> {
 public:
  BucketBatching(const SizeSpan<T>& sizes, Columns<T> columns, BucketOptions options)
      : detail::TableBatching<T>(with_sizes(sizes, std::move(columns), options), Order{},
                                 options.oversize),
        options_(with_truncated(sizes, std::move(options))),
        find_(detail::edges_of<T>(options_.boundaries)),
        left_out_(this->table().left_out()) {
    std::vector<LeftOut> outside;
    if (sizes.size() > options_.index_bytes / 2 && size_tells_left_out(sizes)) {
      members_ = by_counts(sizes, outside);
    } else {
      members_ = detail::group(sizes, find_, options_.boundaries.size() - 1, left_out_, outside);
    }
    left_out_.insert(left_out_.end(), outside.begin(), outside.end());
  }

  [[nodiscard]] std::unique_ptr<BatchSource> epoch(std::uint64_t seed) const override {
    return std::make_unique<BucketSource<T>>(*members_, this->table(), options_, seed);
  }
  [[nodiscard]] bool ranks_decide_blocks() const override { return true; }
  [[nodiscard]] const std::vector<LeftOut>& left_out() const override { return left_out_; }

  [[nodiscard]] BatchFigures figures(std::span<const std::int64_t> batch) const override {
    BatchFigures result = this->table().figures(batch);
    if (!options_.batch_sizes.empty() && !batch.empty()) {
      const T size = this->table().columns()[0].sizes[static_cast<std::size_t>(batch[0])];
      result.load = static_cast<double>(batch.size()) /
                    static_cast<double>(options_.batch_sizes[find_(size)]);
      result.work = result.padded;
    }
    return result;
  }

 private:
  // Checks the arguments. With batch sizes alone nothing is over a budget; the sizes are checked
  // all the same.
  static Columns<T> with_sizes(const SizeSpan<T>& sizes, Columns<T> columns,
                               const BucketOptions& options) {
    detail::check_boundaries(options.boundaries);
    if (!options.batch_sizes.empty()) {
      const std::size_t buckets = options.boundaries.size() - 1;
      check_argument(options.batch_sizes.size() == buckets,
                     "batch_size must be one number, or one for each of the ", buckets,
                     " buckets, got ", options.batch_sizes.size());
      for (const std::int64_t size : options.batch_sizes) {
        check_argument(size > 0, "batch_size must be positive, got ", size);
      }
      check_argument(columns.empty(), "buckets take either batch_size or max_total_size, not both");
      columns.push_back({sizes, Limit(Cost::count(), kNoLimit)});
      if (options.index != nullptr) {
        options.index->describe(columns);
      }
    }
    check_argument(!columns.empty(), "buckets need batch_size or max_total_size");
    check_argument(detail::multiple_argument(options.batch_multiple, columns) == 1 ||
                       options.batch_sizes.empty(),
                   "buckets take either batch_size or batch_multiple, not both");
    check_argument(!options.drop_last || !options.batch_sizes.empty(),
                   "drop_last needs batch_size: under max_total_size no batch has a size to reach");
    check_argument(columns[0].sizes.size() == sizes.size(),
                   "there must be as many costs as sizes, got ", columns[0].sizes.size(), " and ",
                   sizes.size());
    if (!detail::same_memory(columns[0].sizes, sizes)) {  // else the table checks them
      check_sizes(Columns<T>{{sizes, Limit(Cost::count(), kNoLimit)}});
    }
    return columns;
  }

  // The largest size that fits all budgets by this very size.
  [[nodiscard]] T largest_fitting(const SizeSpan<T>& sizes) const {
    T most = std::numeric_limits<T>::max();
    for (const Column<T>& column : this->table().columns()) {
      if (detail::same_memory(column.sizes, sizes) &&
          column.limit.cost().kind() != Cost::Kind::joined) {
        most = std::min(most, detail::largest_fitting_size<T>(column.limit));
      }
    }
    return most;
  }

  // A size that is truncated is in the bucket of what is left of it, which thus has no upper end.
  [[nodiscard]] BucketOptions with_truncated(const SizeSpan<T>& sizes,
                                             BucketOptions options) const {
    if (options.oversize == Oversize::truncate && options.batch_sizes.empty()) {
      const auto most = static_cast<double>(largest_fitting(sizes));
      const auto above = std::ranges::upper_bound(options.boundaries, most);
      if (above != options.boundaries.begin() && above != options.boundaries.end()) {
        *above = std::numeric_limits<double>::infinity();
        options.boundaries.erase(above + 1, options.boundaries.end());
      }
    }
    return options;
  }

  // Whether the sample's size alone decides that it is left out: not if it is over another budget,
  // or over one that goes by several sizes.
  [[nodiscard]] bool size_tells_left_out(const SizeSpan<T>& sizes) const {
    const Columns<T>& columns = this->table().columns();
    return left_out_.empty() ||
           std::all_of(columns.begin(), columns.end(), [&](const Column<T>& column) {
             return column.limit.cost().kind() != Cost::Kind::joined &&
                    (detail::same_memory(column.sizes, sizes) ||
                     detail::fits_alone(column.limit, detail::largest_of(column)));
           });
  }

  [[nodiscard]] std::unique_ptr<BucketMembers> by_counts(const SizeSpan<T>& sizes,
                                                         std::vector<LeftOut>& outside) {
    const std::size_t buckets = options_.boundaries.size() - 1;
    const T most = left_out_.empty() ? std::numeric_limits<T>::max() : largest_fitting(sizes);
    const auto find = [&](T size) {
      return size <= most ? find_(size) : static_cast<std::uint32_t>(buckets);
    };
    const auto make = [&] {
      return detail::count_buckets_of(sizes, buckets, options_.index_bytes, find,
                                      options_.index == nullptr ? 0 : options_.index->threads());
    };
    if (options_.index != nullptr && options_.index->is_of(sizes)) {
      std::ostringstream settings;
      settings.precision(17);
      settings << "buckets in " << options_.index_bytes << " bytes, sizes up to " << most
               << ", boundaries";
      for (const double boundary : options_.boundaries) {
        settings << ' ' << boundary;
      }
      counts_ = options_.index->bucket_counts(settings.str(), make);
    } else {
      const auto own = std::make_shared<detail::OwnBucketCounts>(make());
      counts_ = {own, &own->counts};
    }
    detail::append_outside(sizes, *counts_, find, left_out_, outside);
    return std::make_unique<detail::BucketSelect<T>>(
        sizes, detail::ranges_of<T>(options_.boundaries, most), *counts_);
  }

  BucketOptions options_;
  detail::BucketFinder<T> find_;
  std::shared_ptr<const BucketCounts> counts_;  // what members_ refers to, if it does
  std::unique_ptr<const BucketMembers> members_;
  std::vector<LeftOut> left_out_;
};

}  // namespace

std::shared_ptr<const Batching> bucket_batching(
    std::variant<SizeSpan<std::int64_t>, SizeSpan<double>> sizes, AnyColumns columns,
    BucketOptions options) {
  return std::visit(
      [&]<class T>(const SizeSpan<T>& some) -> std::shared_ptr<const Batching> {
        auto* same = std::get_if<Columns<T>>(&columns);
        check_argument(same != nullptr,
                       "sizes and costs must both be whole numbers or both be real");
        return std::make_shared<BucketBatching<T>>(some, std::move(*same), std::move(options));
      },
      sizes);
}

}  // namespace brim::batching
