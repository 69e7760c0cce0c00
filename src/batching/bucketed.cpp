#include <brim/batching/batching.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "batching/batch_fill.h"
#include "batching/bucket_index.h"
#include "batching/bucket_reader.h"
#include "batching/permutation.h"
#include "batching/sample_table.h"

namespace brim::batching {
namespace {

constexpr std::size_t kBatchesInBlock = 1024;

using detail::BucketFinder;
using detail::BucketIndex;
using detail::SampleTable;

template <class T>
class BucketBatching;

/// A batch from one bucket, then from another. All that it knows is how far each bucket is read.
template <class T>
class BucketSource : public BatchSource {
 public:
  BucketSource(const BucketBatching<T>& batching, std::uint64_t seed);

  bool fill(Batches& block, std::int64_t world_size) override;
  [[nodiscard]] std::int64_t rest() const override { return rest_; }
  [[nodiscard]] Cursor cursor() const override;
  void seek(const Cursor& cursor) override;

 private:
  [[nodiscard]] std::int64_t usable(std::size_t bucket) const;
  [[nodiscard]] std::int64_t left(std::size_t bucket) const {
    return usable(bucket) - buckets_[bucket].taken();
  }
  [[nodiscard]] std::size_t choose_bucket();
  void read_batch(std::size_t bucket, Batches& block);
  void report_dropped(Batches& block);

  const BucketBatching<T>& batching_;
  std::uint64_t seed_;
  std::vector<detail::BucketReader<T>> buckets_;
  std::int64_t rest_ = 0;   // COUNT of samples that still come into a batch
  std::int64_t drawn_ = 0;  // COUNT of buckets chosen so far
};

template <class T>
class BucketBatching : public Batching {
 public:
  BucketBatching(const SizeSpan<T>& sizes, Columns<T> columns, BucketOptions options)
      : options_(std::move(options)),
        given_(static_cast<std::int64_t>(sizes.size())),
        table_(with_sizes(sizes, std::move(columns), options_), Order{}, options_.oversize),
        find_(options_.boundaries),
        left_out_(table_.left_out()) {
    std::vector<LeftOut> outside;
    const bool only_cost = options_.batch_sizes.empty() && table_.columns().size() == 1;
    index_ = detail::group(sizes, only_cost ? table_.columns()[0].sizes : SizeSpan<T>(),
                           std::move(options_.boundaries), table_.left_out(), outside);
    left_out_.insert(left_out_.end(), outside.begin(), outside.end());
  }

  [[nodiscard]] std::unique_ptr<BatchSource> epoch(std::uint64_t seed) const override {
    return std::make_unique<BucketSource<T>>(*this, seed);
  }
  [[nodiscard]] std::int64_t samples() const override { return given_; }
  [[nodiscard]] const std::vector<LeftOut>& left_out() const override { return left_out_; }

  [[nodiscard]] BatchFigures figures(std::span<const std::int64_t> batch) const override {
    BatchFigures result = table_.figures(batch);
    if (!options_.batch_sizes.empty() && !batch.empty()) {
      const T size = table_.columns()[0].sizes[static_cast<std::size_t>(batch[0])];
      result.load = static_cast<double>(batch.size()) /
                    static_cast<double>(options_.batch_sizes[find_(size) - 1]);
      result.work = result.padded;
    }
    return result;
  }

  [[nodiscard]] const BucketIndex& index() const { return index_; }
  [[nodiscard]] const BucketOptions& options() const { return options_; }
  [[nodiscard]] const SampleTable<T>& table() const { return table_; }

 private:
  // With batch sizes alone nothing is over a budget; the sizes are checked all the same.
  static Columns<T> with_sizes(const SizeSpan<T>& sizes, Columns<T> columns,
                               const BucketOptions& options) {
    detail::check_boundaries(options.boundaries);
    if (!options.batch_sizes.empty()) {
      if (options.batch_sizes.size() != options.boundaries.size() - 1) {
        throw std::invalid_argument("batch_size must be one number, or one for each of the " +
                                    std::to_string(options.boundaries.size() - 1) +
                                    " buckets, got " + std::to_string(options.batch_sizes.size()));
      }
      for (const std::int64_t size : options.batch_sizes) {
        if (size <= 0) {
          throw std::invalid_argument("batch_size must be positive, got " + std::to_string(size));
        }
      }
      if (!columns.empty()) {
        throw std::invalid_argument("buckets take either batch_size or max_total_size, not both");
      }
      columns.push_back({sizes, Limit(Cost::count(), kNoLimit)});
    } else if (columns.empty()) {
      throw std::invalid_argument("buckets need batch_size or max_total_size");
    } else if (options.drop_last) {
      throw std::invalid_argument(
          "drop_last needs batch_size: under max_total_size no batch has a size to reach");
    }
    if (columns[0].sizes.size() != sizes.size()) {
      throw std::invalid_argument("there must be as many costs as sizes, got " +
                                  std::to_string(columns[0].sizes.size()) + " and " +
                                  std::to_string(sizes.size()));
    }
    if (!same_memory(columns[0].sizes, sizes)) {  // the others are checked with their table
      check_sizes(Columns<T>{{sizes, Limit(Cost::count(), kNoLimit)}});
    }
    return columns;
  }

  static bool same_memory(const SizeSpan<T>& a, const SizeSpan<T>& b) {
    const auto begin = [](auto stored) -> const void* { return stored.data(); };
    return a.visit(begin) == b.visit(begin);
  }

  static constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

  BucketOptions options_;
  std::int64_t given_;
  SampleTable<T> table_;
  BucketFinder<T> find_;
  std::vector<LeftOut> left_out_;
  BucketIndex index_;
};

template <class T>
BucketSource<T>::BucketSource(const BucketBatching<T>& batching, std::uint64_t seed)
    : batching_(batching), seed_(seed) {
  const BucketIndex& index = batching.index();
  const bool with_sizes = batching.options().batch_sizes.empty();
  buckets_.reserve(index.buckets());
  for (std::size_t b = 0; b < index.buckets(); ++b) {
    buckets_.emplace_back(index, b, with_sizes ? &batching.table() : nullptr,
                          batching.options().shuffle, detail::mix(seed, b));
    rest_ += usable(b);
  }
}

template <class T>
bool BucketSource<T>::fill(Batches& block, std::int64_t world_size) {
  const std::size_t enough = block.count() + kBatchesInBlock;
  const std::size_t begin = block.indices.size();
  while (rest_ > 0) {
    // The last block takes what would be too little for one of its own.
    if (block.count() >= enough && std::cmp_greater(rest_, block.indices.size() - begin)) {
      return true;
    }
    const std::size_t bucket = choose_bucket();
    // As many as there are ranks, so that all have work of one kind in a step.
    for (std::int64_t i = 0; i < world_size && left(bucket) > 0; ++i) {
      read_batch(bucket, block);
    }
  }
  report_dropped(block);
  return false;
}

// COUNT of samples of the bucket that come into a batch.
template <class T>
std::int64_t BucketSource<T>::usable(std::size_t bucket) const {
  const BucketOptions& options = batching_.options();
  const std::int64_t size = buckets_[bucket].size();
  return options.drop_last ? size - size % options.batch_sizes[bucket] : size;
}

// A bucket is chosen as often as it has samples left.
template <class T>
std::size_t BucketSource<T>::choose_bucket() {
  std::size_t bucket = 0;
  if (batching_.options().shuffle) {
    const std::uint64_t random = detail::mix(~seed_, static_cast<std::uint64_t>(drawn_));
    auto place =
        static_cast<std::int64_t>(detail::below(random, static_cast<std::uint64_t>(rest_)));
    while (place >= left(bucket)) {
      place -= left(bucket++);
    }
  } else {
    while (left(bucket) == 0) {
      ++bucket;
    }
  }
  ++drawn_;
  return bucket;
}

template <class T, class Fill, class SizeOf>
std::size_t take(detail::BucketReader<T>& bucket, Fill fill, SizeOf size_of, double& load) {
  std::size_t taken = 0;
  std::size_t ahead = bucket.look_ahead(1);
  while (true) {
    while (taken < ahead && (taken == 0 || fill.fits(size_of(taken)))) {
      fill.add(size_of(taken++));
    }
    // All that was looked at fits: is there more?
    if (taken < ahead || bucket.look_ahead(2 * taken) == ahead) {
      load = fill.load();
      return taken;
    }
    ahead = bucket.look_ahead(2 * taken);
  }
}

template <class T>
std::size_t take_what_fits(detail::BucketReader<T>& bucket, const Columns<T>& columns,
                           double& load) {
  if (columns.size() > 1) {
    return take(
        bucket, detail::MultiFill<T>(columns),
        [&](std::size_t i) { return bucket.sizes() + i * columns.size(); }, load);
  }
  const auto size_of = [&](std::size_t i) { return bucket.sizes()[i]; };
  return columns[0].limit.cost().kind() == Cost::Kind::sum
             ? take(bucket, detail::SumFill<T>(columns[0].limit), size_of, load)
             : take(bucket, detail::PaddedFill<T>(columns[0].limit), size_of, load);
}

template <class T>
void BucketSource<T>::read_batch(std::size_t bucket, Batches& block) {
  const BucketOptions& options = batching_.options();
  detail::BucketReader<T>& reader = buckets_[bucket];
  std::size_t taken = 0;
  double load = 0.0;
  if (!options.batch_sizes.empty()) {
    const auto size = static_cast<std::size_t>(options.batch_sizes[bucket]);
    taken = std::min(size, reader.look_ahead(size));
    // Batches of one bucket are alike; between buckets the longer samples cost more.
    const std::vector<double>& boundaries = batching_.index().boundaries;
    const double upper = boundaries[bucket + 1];
    load = static_cast<double>(taken) * (std::isfinite(upper) ? upper : 2 * boundaries[bucket]);
  } else {
    taken = take_what_fits(reader, batching_.table().columns(), load);
  }
  const auto samples = reader.samples().first(taken);
  block.indices.insert(block.indices.end(), samples.begin(), samples.end());
  block.close(load);
  reader.take(taken);
  rest_ -= static_cast<std::int64_t>(taken);
}

template <class T>
void BucketSource<T>::report_dropped(Batches& block) {
  if (!batching_.options().drop_last) {
    return;
  }
  for (detail::BucketReader<T>& bucket : buckets_) {
    const std::size_t dropped =
        bucket.look_ahead(static_cast<std::size_t>(bucket.size() - bucket.taken()));
    for (const std::int64_t sample : bucket.samples().first(dropped)) {
      block.left_out.push_back({sample, LeftOutReason::dropped_last});
    }
  }
}

template <class T>
Cursor BucketSource<T>::cursor() const {
  Cursor words{drawn_};
  for (const detail::BucketReader<T>& bucket : buckets_) {
    words.push_back(bucket.taken());
  }
  return words;
}

template <class T>
void BucketSource<T>::seek(const Cursor& cursor) {
  bool valid = cursor.size() == 1 + buckets_.size() && cursor[0] >= 0;
  std::int64_t rest = 0;
  for (std::size_t b = 0; valid && b < buckets_.size(); ++b) {
    valid = cursor[1 + b] >= 0 && cursor[1 + b] <= usable(b);
    rest += usable(b) - cursor[1 + b];
  }
  if (!valid) {
    throw std::invalid_argument("the position is not one of these buckets");
  }
  drawn_ = cursor[0];
  rest_ = rest;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].seek(cursor[1 + b]);
  }
}

}  // namespace

std::shared_ptr<const Batching> bucket_batching(
    std::variant<SizeSpan<std::int64_t>, SizeSpan<double>> sizes, AnyColumns columns,
    BucketOptions options) {
  return std::visit(
      [&]<class T>(const SizeSpan<T>& some) -> std::shared_ptr<const Batching> {
        auto* same = std::get_if<Columns<T>>(&columns);
        if (same == nullptr) {
          throw std::invalid_argument("sizes and costs must both be whole numbers or both be real");
        }
        return std::make_shared<BucketBatching<T>>(some, std::move(*same), std::move(options));
      },
      sizes);
}

}  // namespace brim::batching
