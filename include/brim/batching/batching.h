#pragma once

#include <brim/batching/batches.h>
#include <brim/batching/sample_sizes.h>
#include <brim/export.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace brim::batching {

/// Where a BatchSource stands between two blocks: a few numbers that only it understands.
using Cursor = std::vector<std::int64_t>;

/// The batches of one epoch, block after block. A block is a few hundred or thousand batches that
/// are worked out together; what the source knows between two blocks is in its cursor.
///
/// For one thread. Usually read through a BatchStream.
class BRIM_API BatchSource {
 public:
  BatchSource() = default;
  virtual ~BatchSource() = default;
  BatchSource(const BatchSource&) = delete;
  BatchSource& operator=(const BatchSource&) = delete;

  /// Appends the next block. Returns whether there is another one.
  /// @param world_size how many ranks share it: so many batches of one kind are in a row. A block
  ///     is the same again only for as many.
  virtual bool fill(Batches& block, std::int64_t world_size) = 0;

  /// COUNT of samples that are in blocks still to come.
  [[nodiscard]] virtual std::int64_t rest() const = 0;

  [[nodiscard]] virtual Cursor cursor() const = 0;
  /// @throws std::invalid_argument if this kind of source has no such cursor.
  virtual void seek(const Cursor& cursor) = 0;
};

/// What one batch amounts to.
struct BatchFigures {
  double load = 0.0;    ///< cost as a share of the budget; of the fullest where there are several
  double work = 0.0;    ///< what ranks are balanced by: the load, or n × longest where batches have
                        ///< a number of samples in place of a budget
  double sizes = 0.0;   ///< SUM of the sizes (of the first column)
  double padded = 0.0;  ///< SIZE: n × longest (of the first column)
};

/// A way to make batches out of samples: the settings and what depends on nothing else. Each epoch
/// is a source of its own, so epochs may be read side by side.
///
/// Immutable once made, so any number of threads may use it.
class BRIM_API Batching {
 public:
  Batching() = default;
  virtual ~Batching() = default;
  Batching(const Batching&) = delete;
  Batching& operator=(const Batching&) = delete;

  /// @param seed decides every random choice, the same on every machine and for any number of
  ///     threads. It is not used where nothing is shuffled.
  [[nodiscard]] virtual std::unique_ptr<BatchSource> epoch(std::uint64_t seed) const = 0;

  /// COUNT of samples that were given, those that are left out included.
  [[nodiscard]] virtual std::int64_t samples() const = 0;

  /// Samples that are in no batch of any epoch.
  [[nodiscard]] virtual const std::vector<LeftOut>& left_out() const = 0;

  [[nodiscard]] virtual BatchFigures figures(std::span<const std::int64_t> batch) const = 0;
};

/// What happens to a sample that exceeds the budget by itself.
enum class Oversize : std::uint8_t {
  leave_out,  ///< it is in no batch, and reported
  error,      ///< std::invalid_argument naming its index, when the Batching is made
};

/// Which samples to batch, and in which order.
struct BRIM_API Order {
  /// Indices of the samples; all of them, ascending, where empty. An index may stand in it twice.
  std::optional<std::span<const std::int64_t>> indices = {};
  /// Puts them into an order of the epoch's own, decided by its seed.
  bool shuffle = false;
};

/// Batches of samples that follow each other: a batch is closed when the next sample does not fit.
/// @throws std::invalid_argument as check_sizes; if an index in `order` does not exist.
[[nodiscard]] BRIM_API std::shared_ptr<const Batching> ordered_batching(
    AnyColumns columns, Order order = {}, Oversize oversize = Oversize::leave_out);

struct PackOptions {
  /// COUNT of samples that are packed together. A sample comes with its window or, where its batch
  /// could still be filled, with the next; more samples than that where one batch holds more than
  /// a window. Without a value all are packed at once: a little fuller, but an epoch then begins
  /// and resumes only after all of it was packed.
  std::optional<std::int64_t> window = 10'000;
  Oversize oversize = Oversize::leave_out;
};

/// Batches filled as well as possible: the longest sample first, each into the fullest batch that
/// has room for it (best fit decreasing); where samples are padded, samples of like size together.
/// Where the order is shuffled, so are the batches of a window, and who shares a batch changes from
/// epoch to epoch: of sums most samples are taken as they come, for the same fill; padded batches
/// are shifted and in part dealt anew, for up to a fifth more padding.
/// @throws std::invalid_argument as ordered_batching; if the window is not positive.
[[nodiscard]] BRIM_API std::shared_ptr<const Batching> packed_batching(AnyColumns columns,
                                                                       Order order = {},
                                                                       PackOptions options = {});

struct BucketOptions {
  /// Ascending; bucket b holds sizes from boundary b up to, but without, boundary b + 1.
  std::vector<double> boundaries;
  /// COUNT of samples in a batch, one for each bucket; empty where the columns' limits decide.
  std::vector<std::int64_t> batch_sizes;
  /// Leave the last batch of a bucket out where it is not full. Only with `batch_sizes`. Ranks may
  /// still get parts of a batch in the last steps (see BatchStream).
  bool drop_last = false;
  /// Samples inside a bucket in random order, and each batch from a random bucket; else bucket
  /// after bucket, in order.
  bool shuffle = true;
  Oversize oversize = Oversize::leave_out;
};

/// Batches of samples of like size. `sizes` decide the bucket; `columns`, which may be empty where
/// there are `batch_sizes`, how much fits a batch.
/// @throws std::invalid_argument as check_sizes; if boundaries are fewer than two, not ascending or
///     not finite (the last may be infinite); if `batch_sizes` are not as many as buckets, or not
///     positive.
[[nodiscard]] BRIM_API std::shared_ptr<const Batching> bucket_batching(
    std::variant<SizeSpan<std::int64_t>, SizeSpan<double>> sizes, AnyColumns columns,
    BucketOptions options);

}  // namespace brim::batching
