#pragma once

#include <brim/adapt/agreement.h>
#include <brim/export.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace brim {

/// Lets the ranks of a job measure together (FitOptions::ranks): all run the same batches in the
/// same order, and each takes for its own what the rank that needs most has measured. So all find
/// the same limit, and it holds on every rank. Work may have collectives inside, as a step of
/// DistributedDataParallel: no rank runs a batch that the others do not run.
///
///     brim::FitRanks ranks(channel);
///     ranks.same("12000 proteins, padded");
///     const auto fitted = brim::fit_batching(sizes, work, make, {.budget = b, .ranks = &ranks});
///
/// All ranks make the same calls. For one thread.
class BRIM_API FitRanks {
 public:
  static constexpr std::size_t kMostNumbers = 5;  ///< in one exchange

  /// @param task what the ranks do together, for errors.
  explicit FitRanks(std::shared_ptr<RankChannel> channel, std::string task = "fit")
      : channel_(std::move(channel)), task_(std::move(task)) {}

  /// Replaces each number by the largest that any rank passed. Blocks until every rank has called
  /// it. @throws RankError if a rank has failed, is gone, or has begun another batch.
  void most(std::span<std::int64_t> numbers);

  /// The least that any rank passed; otherwise as `most`.
  [[nodiscard]] std::int64_t least(std::int64_t number);

  /// Checks that all ranks passed the same text. @throws RankError that shows two that differ.
  void same(const std::string& text);

  /// The next exchange is the last: after it nobody waits for this rank, and `fail` does nothing.
  void end_with_next() noexcept { ends_with_next_ = true; }

  /// Notes the batch that this rank runs. The next exchange checks that all run the same.
  void begin(std::span<const std::int64_t> batch);

  /// For a rank that cannot go on: the others, which wait for it in their next exchange, get a
  /// RankError with the reason. Does nothing after a RankError, which all ranks have got.
  void fail(const std::string& why) noexcept;

 private:
  void exchange(std::span<std::int64_t> numbers, const std::string& own);

  std::shared_ptr<RankChannel> channel_;
  std::string task_;
  std::int64_t doing_ = 0;  // a number made of what was measured so far
  bool ends_with_next_ = false;
  bool ended_ = false;
};

}  // namespace brim
