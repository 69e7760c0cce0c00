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

/// The state of a BatchSource between two blocks: a few numbers that only it understands.
using Cursor = std::vector<std::int64_t>;

/// The batches of one epoch, block after block. A block is a few hundred or thousand batches that
/// are computed together; between two blocks the cursor is the whole state of the source.
///
/// For one thread. Usually read through a BatchStream.
class BRIM_API BatchSource {
 public:
  BatchSource() = default;
  virtual ~BatchSource() = default;
  BatchSource(const BatchSource&) = delete;
  BatchSource& operator=(const BatchSource&) = delete;

  /// Appends the next block. Returns whether there is another one.
  /// @param world_size how many ranks share the block: runs of this many batches are of one kind.
  ///     The same block comes again only for the same number.
  virtual bool fill(Batches& block, std::int64_t world_size) = 0;

  /// Exchanges samples among the batches of one step, from `first` on, which ranks run at the same
  /// time. Those of a block that lie in one step are passed after they were put into order.
  virtual void even_out(Batches& /*block*/, std::size_t /*first*/, std::size_t /*count*/) {}

  /// The number of samples in the remaining blocks.
  [[nodiscard]] virtual std::int64_t rest() const = 0;

  [[nodiscard]] virtual Cursor cursor() const = 0;
  /// @throws std::invalid_argument if this kind of source has no such cursor.
  virtual void seek(const Cursor& cursor) = 0;
};

/// Figures of one batch.
struct BatchFigures {
  double load = 0.0;    ///< cost as a share of the budget; of the fullest if there are several
  double work = 0.0;    ///< what ranks are balanced by: the load, or n × longest if batches are
                        ///< limited by their number of samples
  double sizes = 0.0;   ///< the total of the sizes (of the first column)
  double padded = 0.0;  ///< n × longest (of the first column)
};

/// A way to make batches of samples: the settings, and what depends on them alone. Each epoch has
/// its own source, so several epochs may be read at once.
///
/// Immutable, so any number of threads may use it.
class BRIM_API Batching {
 public:
  Batching() = default;
  virtual ~Batching() = default;
  Batching(const Batching&) = delete;
  Batching& operator=(const Batching&) = delete;

  /// @param seed decides every random choice, the same on every machine and for any number of
  ///     threads. It is not used where nothing is shuffled.
  [[nodiscard]] virtual std::unique_ptr<BatchSource> epoch(std::uint64_t seed) const = 0;

  /// The number of samples, including those that are left out.
  [[nodiscard]] virtual std::int64_t samples() const = 0;

  /// Whether sources give other blocks to other numbers of ranks.
  [[nodiscard]] virtual bool ranks_decide_blocks() const { return false; }

  /// Samples that are in no batch of any epoch.
  [[nodiscard]] virtual const std::vector<LeftOut>& left_out() const = 0;

  [[nodiscard]] virtual BatchFigures figures(std::span<const std::int64_t> batch) const = 0;
};

/// What happens to a sample that exceeds the budget by itself.
enum class Oversize : std::uint8_t {
  leave_out,  ///< it is in no batch, and reported
  error,      ///< std::invalid_argument naming its index, when the Batching is made
  alone,      ///< it is in a batch of its own, which exceeds the budget
  truncate,   ///< it counts as the largest size that fits (largest_size), to which the caller cuts
              ///< it
  split,      ///< it is cut into parts that fit, of which each is a sample: LookAheadStream only
};

/// Which samples to batch, and in which order.
struct BRIM_API Order {
  /// Indices of the samples, possibly repeated; all samples in ascending order if empty.
  std::optional<std::span<const std::int64_t>> indices = {};
  /// Shuffles them for each epoch, by its seed.
  bool shuffle = false;
};

/// Batches of samples that follow each other: a batch is closed when the next sample does not fit.
/// @param batch_multiple batches have a multiple of this many samples, unless fewer fit the budget
///     or are left. Batches that are split for ranks, in the last step, may have other numbers.
/// @throws std::invalid_argument as check_sizes; if an index in `order` does not exist.
[[nodiscard]] BRIM_API std::shared_ptr<const Batching> ordered_batching(
    AnyColumns columns, Order order = {}, Oversize oversize = Oversize::leave_out,
    std::int64_t batch_multiple = 1);

/// Options of packed_batching.
struct PackOptions {
  /// The number of samples that are packed together (more if one batch holds more). A sample is in
  /// a batch of its window or, if that batch could still be filled, of the next window. Without a
  /// value all samples are packed at once: slightly fuller, but an epoch then starts and resumes
  /// only after all of it has been packed.
  std::optional<std::int64_t> window = 10'000;
  Oversize oversize = Oversize::leave_out;
  /// See ordered_batching. Only if a cost depends on the longest sample or the count alone.
  std::int64_t batch_multiple = 1;
};

/// Batches filled as well as possible: the longest sample first, each into the fullest batch that
/// has room for it (best fit decreasing); padded samples together with those of like size. If the
/// order is shuffled, so are the batches of a window, and samples share batches with others in each
/// epoch: under a sum, most samples are taken as they come, for the same fill; padded batches are
/// shifted and in part dealt anew, for up to a fifth more padding.
/// @throws std::invalid_argument as ordered_batching; if the window is not positive.
[[nodiscard]] BRIM_API std::shared_ptr<const Batching> packed_batching(AnyColumns columns,
                                                                       Order order = {},
                                                                       PackOptions options = {});

class SampleIndex;

/// Options of bucketed_batching.
struct BucketOptions {
  /// Ascending; bucket b holds sizes from boundary b up to, but not including, boundary b + 1.
  std::vector<double> boundaries;
  /// The number of samples in a batch, one per bucket; empty if the columns' limits decide.
  std::vector<std::int64_t> batch_sizes;
  /// Drops the last batch of a bucket if it is not full. Only with `batch_sizes`. Ranks may still
  /// get parts of a batch in the last steps (see BatchStream).
  bool drop_last = false;
  /// Samples inside a bucket in random order, and each batch from a random bucket; else bucket
  /// after bucket, in order.
  bool shuffle = true;
  Oversize oversize = Oversize::leave_out;
  /// See ordered_batching. Only without `batch_sizes`.
  std::int64_t batch_multiple = 1;
  /// The number of bytes that may be kept about which samples are in which bucket. Two bytes per
  /// sample give the fastest batches; if that is too much, counts per block of samples are kept,
  /// and samples are found by reading a part of their block. Batches are the same.
  std::size_t index_bytes = std::size_t{40} << 20;
  /// Keeps those counts for other processes.
  std::shared_ptr<SampleIndex> index = nullptr;
};

/// Batches of samples of like size. `sizes` decide the bucket; `columns`, which may be empty with
/// `batch_sizes`, how much fits a batch.
/// @throws std::invalid_argument as check_sizes; if boundaries are fewer than two, not ascending or
///     not finite (the last may be infinite); if `batch_sizes` are not as many as buckets, or not
///     positive.
[[nodiscard]] BRIM_API std::shared_ptr<const Batching> bucket_batching(
    std::variant<SizeSpan<std::int64_t>, SizeSpan<double>> sizes, AnyColumns columns,
    BucketOptions options);

}  // namespace brim::batching
