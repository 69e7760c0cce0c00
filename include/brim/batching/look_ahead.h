#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/stream.h>
#include <brim/export.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace brim::batching {

/// Options of LookAhead.
struct LookAheadOptions {
  /// The number of samples that are packed together, as PackOptions::window. Up to twice as many
  /// are held. For buckets, the most that wait for their batch to fill.
  std::int64_t samples = 10'000;
  /// Batches of samples of like size, if there are boundaries; see BucketOptions. The first size
  /// decides. A sample outside is left out.
  std::vector<double> boundaries = {};
  /// Packed batches of one look-ahead in random order.
  bool shuffle = false;
  std::uint64_t seed = 0;
  Oversize oversize = Oversize::leave_out;
  /// As PackOptions::batch_multiple.
  std::int64_t batch_multiple = 1;
  /// Sizes count as the next multiple of this, as PackedRowOptions::document_multiple pads them.
  std::int64_t size_multiple = 1;
};

namespace detail {

/// The size of the parts into which samples are cut: the largest that fits a batch, and a multiple
/// of size_multiple. 0 if they are not cut.
/// @throws std::invalid_argument if there are several sizes to cut by, or none of them fits.
[[nodiscard]] BRIM_API std::int64_t part_size(const std::vector<Limit>& limits,
                                              const LookAheadOptions& options);
/// @throws std::invalid_argument for a size that cannot be cut: it has a fraction.
[[nodiscard]] BRIM_API std::int64_t whole_size(double size, std::int64_t sample);

}  // namespace detail

/// The part of a LookAheadStream that needs no samples, only their sizes.
class BRIM_API LookAheadCore {
 public:
  /// Reads the next sample and writes its sizes, unless they are not asked for (an empty span).
  /// Returns false at the end.
  using ReadSizes = std::function<bool(std::span<double>)>;

  LookAheadCore(ReadSizes read, std::vector<Limit> limits, const LookAheadOptions& options,
                Ranks ranks);
  ~LookAheadCore();
  LookAheadCore(LookAheadCore&&) noexcept;
  LookAheadCore& operator=(LookAheadCore&&) = delete;

  /// The numbers of the samples in this rank's next batch; empty at the end.
  [[nodiscard]] std::optional<std::span<const std::int64_t>> next();
  /// No sample with a lower number comes into a batch any more.
  [[nodiscard]] std::int64_t first_needed() const;

  [[nodiscard]] Position position(std::int64_t batches) const;
  void seek(const Position& position);
  [[nodiscard]] std::int64_t given() const;
  [[nodiscard]] std::int64_t samples_read() const;
  [[nodiscard]] std::vector<LeftOut> left_out() const;
  [[nodiscard]] const std::vector<std::uint64_t>& fingerprints() const;
  [[nodiscard]] bool sizes_differ() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// Packed or bucketed batches of samples that are read one by one, for data without a length or an
/// end: a bounded number of samples is read ahead. Packed batches are those of packed_batching with
/// a window of as many samples, for sizes that are real numbers.
///
///     brim::batching::LookAheadStream<Document> stream(
///         [&] { return file.next(); },  // a std::optional<Document>, empty at the end
///         [](const Document& document, std::span<double> sizes) { sizes[0] = document.tokens(); },
///         {{brim::batching::Cost::sum(), 16384.0}}, {.samples = 4096}, {.rank = 2, .world_size =
///         8});
///     while (auto batch = stream.next()) { train(*batch); }
///
/// All ranks read the same samples, and each gets its own batches, as those of a BatchStream. If a
/// rank has several loaders, each may take every n-th batch: skip() passes over one.
///
/// For one thread.
template <class Sample>
class LookAheadStream {
 public:
  using Read = std::function<std::optional<Sample>()>;
  /// Writes the sizes of a sample, one per limit.
  using SizesOf = std::function<void(const Sample&, std::span<double>)>;
  /// Makes the part of a sample from `begin` to `end` of its `size`.
  using Cut =
      std::function<Sample(const Sample&, std::int64_t begin, std::int64_t end, std::int64_t size)>;

  /// @param cut for Oversize::split. Parts follow each other, with all but the last as large as
  ///     fits; each is then a sample with a number of its own.
  /// @throws std::invalid_argument if there is no limit, or an option is not allowed.
  LookAheadStream(Read read, SizesOf sizes_of, std::vector<Limit> limits,
                  const LookAheadOptions& options = {}, Ranks ranks = {}, Cut cut = {})
      : read_(std::move(read)),
        sizes_of_(std::move(sizes_of)),
        cut_(std::move(cut)),
        part_size_(detail::part_size(limits, options)),
        size_multiple_(options.size_multiple),
        row_(limits.size()),
        core_([this](std::span<double> sizes) { return read_sizes(sizes); }, std::move(limits),
              options, ranks) {
    if (part_size_ > 0 && !cut_) {
      throw std::invalid_argument("oversize \"split\" needs a function that cuts samples");
    }
  }
  LookAheadStream(const LookAheadStream&) = delete;
  LookAheadStream& operator=(const LookAheadStream&) = delete;

  /// This rank's next batch, empty at the end.
  /// @throws std::invalid_argument for a sample that exceeds the budget by itself with
  ///     Oversize::error; what the functions throw.
  [[nodiscard]] std::optional<std::vector<Sample>> next() {
    const auto numbers = core_.next();
    if (!numbers) {
      samples_.clear();
      return std::nullopt;
    }
    std::vector<Sample> batch;
    batch.reserve(numbers->size());
    for (const std::int64_t number : *numbers) {
      batch.push_back(*std::exchange(samples_[static_cast<std::size_t>(number - first_)], {}));
    }
    forget();
    return batch;
  }

  /// Passes over this rank's next batch. Returns whether there was one.
  bool skip() {
    const bool more = core_.next().has_value();
    forget();
    return more;
  }

  /// The number of this rank's batches so far, those passed over included.
  [[nodiscard]] std::int64_t given() const { return core_.given(); }
  /// The position after `batches` of them.
  [[nodiscard]] Position position(std::int64_t batches) const { return core_.position(batches); }
  /// Resumes where another stream of the same samples and options stood, with any number of ranks.
  /// Reads and drops the samples before. Only before the first batch.
  /// @throws std::invalid_argument if the position is not one of such a stream.
  void seek(const Position& position) { core_.seek(position); }

  /// The number of samples read.
  [[nodiscard]] std::int64_t samples_read() const { return core_.samples_read(); }
  /// Samples that are in no batch of any rank, by their number.
  [[nodiscard]] std::vector<LeftOut> left_out() const { return core_.left_out(); }

  /// Fingerprints of the sizes of the first 1, 2, 4, 8, … samples, and of all once the end is
  /// reached; none after seek(). Ranks and loaders must read the same samples in the same order,
  /// and can find out by these whether they do.
  [[nodiscard]] const std::vector<std::uint64_t>& fingerprints() const {
    return core_.fingerprints();
  }
  /// Whether two samples were of different sizes. If not, fingerprints tell little.
  [[nodiscard]] bool sizes_differ() const { return core_.sizes_differ(); }

 private:
  bool read_sizes(std::span<double> sizes) {
    if (part_size_ > 0) {
      return read_part(sizes);
    }
    std::optional<Sample> sample = read_();
    if (!sample) {
      return false;
    }
    if (!sizes.empty()) {
      sizes_of_(*sample, sizes);
      round_up(sizes);
    }
    keep(std::move(sample), !sizes.empty());
    return true;
  }

  // A sample that is dropped must be measured too: only its size says how many parts it has.
  bool read_part(std::span<double> sizes) {
    if (!whole_) {
      whole_ = read_();
      if (!whole_) {
        return false;
      }
      sizes_of_(*whole_, row_);
      size_ = detail::whole_size(row_[0], wholes_read_++);
      begin_ = 0;
    }
    const std::int64_t begin = begin_;
    const std::int64_t end = std::min(begin + part_size_, size_);
    const bool last = end == size_;
    std::optional<Sample> part;
    if (!sizes.empty()) {
      std::copy(row_.begin(), row_.end(), sizes.begin());
      sizes[0] = static_cast<double>(end - begin);
      round_up(sizes);
      part = begin == 0 && last ? std::move(whole_)
                                : std::optional<Sample>(cut_(*whole_, begin, end, size_));
    }
    begin_ = end;
    if (last) {
      whole_.reset();
    }
    keep(std::move(part), !sizes.empty());
    return true;
  }

  void round_up(std::span<double> sizes) const {
    if (size_multiple_ > 1) {
      const auto multiple = static_cast<double>(size_multiple_);
      sizes[0] = std::ceil(sizes[0] / multiple) * multiple;
    }
  }

  void keep(std::optional<Sample> sample, bool measured) {
    if (measured) {
      samples_.push_back(std::move(sample));
    } else if (samples_.empty()) {
      ++first_;
    } else {
      samples_.emplace_back();
    }
  }

  void forget() {
    for (const std::int64_t needed = core_.first_needed(); first_ < needed; ++first_) {
      samples_.pop_front();
    }
  }

  Read read_;
  SizesOf sizes_of_;
  Cut cut_;
  std::int64_t part_size_;  // of a sample that is cut; 0: none is
  std::int64_t size_multiple_;
  std::vector<double> row_;      // sizes of the sample that is cut
  std::optional<Sample> whole_;  // the sample that is cut, until its last part is read
  std::int64_t size_ = 0;        // its size
  std::int64_t begin_ = 0;       // of its next part
  std::int64_t wholes_read_ = 0;
  LookAheadCore core_;
  std::deque<std::optional<Sample>> samples_;  // from number first_ on
  std::int64_t first_ = 0;
};

}  // namespace brim::batching
