#pragma once

#include <brim/batching/batch_fill.h>
#include <brim/batching/batching.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace brim::batching {

/// Batches of samples that are read one by one, for data without a length or an end. A batch is
/// closed when the next sample does not fit.
///
///     brim::batching::SampleStream<Request> stream(
///         [&] { return queue.pop(); },  // a std::optional<Request>, empty at the end
///         [](const Request& request, std::span<double> sizes) { sizes[0] = request.length(); },
///         {{brim::batching::Cost::padded(), 16384.0}});
///     while (auto batch = stream.next()) { run(*batch); }
///
/// For one thread.
template <class Sample>
class SampleStream {
 public:
  using Read = std::function<std::optional<Sample>()>;
  /// Writes the sizes of a sample, one per limit.
  using SizesOf = std::function<void(const Sample&, std::span<double>)>;

  /// @param skip the number of samples to read and drop first: the begin() of an earlier stream.
  /// @throws std::invalid_argument if there is no limit, or for Oversize::split.
  SampleStream(Read read, SizesOf sizes_of, std::vector<Limit> limits,
               Oversize oversize = Oversize::leave_out, std::int64_t skip = 0)
      : read_(std::move(read)),
        sizes_of_(std::move(sizes_of)),
        sizes_(limits.size()),
        fill_(std::move(limits)),
        oversize_(oversize),
        begin_(skip) {
    if (oversize == Oversize::split) {
      throw std::invalid_argument("oversize \"split\" is for a LookAheadStream");
    }
  }

  /// The next batch, empty at the end, which an exception is too. Reads one sample more than the
  /// batch has.
  /// @throws std::invalid_argument for a sample that exceeds the budget by itself with
  ///     Oversize::error, or if there are fewer samples than to skip; what the functions throw.
  [[nodiscard]] std::optional<std::vector<Sample>> next() {
    if (std::exchange(ended_, true)) {
      return std::nullopt;
    }
    // Not before the first batch is needed: a stream may be made and never used.
    for (; samples_read_ < begin_; ++samples_read_) {
      if (!read_()) {
        throw std::invalid_argument("the state is of other samples: it stands at sample " +
                                    std::to_string(begin_) + ", and there are only " +
                                    std::to_string(samples_read_));
      }
    }
    std::vector<Sample> batch;
    fill_.clear();
    if (pending_) {
      fill_.add(sizes_);
      batch.push_back(std::move(*pending_));
      pending_.reset();
    }
    while (std::optional<Sample> sample = read_()) {
      const std::int64_t place = samples_read_++;
      sizes_of_(*sample, sizes_);
      if (oversize_ == Oversize::truncate) {
        fill_.truncate(sizes_);
      }
      const bool alone = oversize_ == Oversize::alone;
      if (fill_.fits(sizes_) || (batch.empty() && alone)) {
        fill_.add(sizes_);
        batch.push_back(std::move(*sample));
      } else if (!alone && !fill_.fits_alone(sizes_)) {
        leave_out(place);
      } else {
        pending_ = std::move(sample);
        begin_ = place;
        ended_ = false;
        return given(std::move(batch));
      }
    }
    begin_ = samples_read_;
    return batch.empty() ? std::nullopt : given(std::move(batch));
  }

  /// The number of samples read, of samples in batches, and of batches.
  [[nodiscard]] std::int64_t samples_read() const { return samples_read_; }
  [[nodiscard]] std::int64_t batched() const { return batched_; }
  [[nodiscard]] std::int64_t batches() const { return batches_; }
  /// Index of the sample that the next batch begins with.
  [[nodiscard]] std::int64_t begin() const { return begin_; }
  /// Indices of samples that exceed the budget by themselves.
  [[nodiscard]] const std::vector<std::int64_t>& left_out() const { return left_out_; }

 private:
  std::optional<std::vector<Sample>> given(std::vector<Sample> batch) {
    ++batches_;
    batched_ += static_cast<std::int64_t>(batch.size());
    return batch;
  }

  void leave_out(std::int64_t place) {
    if (oversize_ == Oversize::error) {
      detail::refuse_oversize(place, sizes_);
    }
    left_out_.push_back(place);
  }

  Read read_;
  SizesOf sizes_of_;
  std::vector<double> sizes_;  // of the sample that was read last
  BatchFill fill_;
  Oversize oversize_;
  bool ended_ = false;
  std::optional<Sample> pending_;  // the sample that did not fit the last batch
  std::int64_t samples_read_ = 0;
  std::int64_t begin_;
  std::int64_t batched_ = 0;
  std::int64_t batches_ = 0;
  std::vector<std::int64_t> left_out_;
};

}  // namespace brim::batching
