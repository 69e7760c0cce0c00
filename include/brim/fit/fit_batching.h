#pragma once

#include <brim/batching/batching.h>
#include <brim/export.h>
#include <brim/fit/fit_ranks.h>
#include <brim/fit/padded_need.h>
#include <brim/predict/memory_model.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace brim {

/// The limit under which a batching's batches stay within a budget in bytes.
struct BRIM_API FittedLimit {
  batching::Cost::Kind cost = batching::Cost::Kind::padded;  ///< padded or sum
  /// padded: bytes that the model may predict for a batch. sum: the largest total size of a batch.
  std::int64_t maximum = 0;
  /// Of batches (padded) or of total sizes (sum; empty if only one total was measured).
  std::optional<MemoryModel> model = {};
  /// The share by which a batch may need more than measurements of other batches suggest. Above
  /// 0.25, sizes do not determine the need: batches that were not measured may exceed the budget.
  double error = 0.0;
  /// Of samples that are padded in several sizes, instead of a model: `maximum` is what it may
  /// predict. The columns of the other sizes have Limit::joined().
  std::optional<PaddedNeed> need = {};

  [[nodiscard]] batching::Limit limit() const;
};

/// Options of fit_batching and fit_weights.
struct FitOptions {
  std::int64_t budget = 0;  ///< bytes that the device may hold at once, older tensors included
  /// What memory depends on: n samples padded to the longest, or their sum.
  batching::Cost::Kind cost = batching::Cost::Kind::padded;
  std::optional<c10::Device> device = {};  ///< default_device() if empty
  std::int64_t probes = 7;                 ///< batches that are measured first (padded only)
  /// How many sizes a sample has, in each of which it is padded (padded only): 1 to 4.
  std::int64_t columns = 1;
  std::function<void()> collect_garbage = {};  ///< see CollectOptions
  /// The ranks that measure together, with the same sizes and options; null for one. Not owned.
  FitRanks* ranks = nullptr;
};

/// Runs the work on a batch, given the indices of its samples.
using BatchWork = std::function<void(std::span<const std::int64_t>)>;
/// Makes the batching under a limit. Only its batches are read, and it is dropped before any work
/// runs.
using MakeBatching = std::function<std::shared_ptr<const batching::Batching>(const FittedLimit&)>;

/// Measures the work, and finds the limit that fills a budget in bytes and stays under it.
///
///     const auto make = [&](const brim::FittedLimit& fitted) {
///       return bb::packed_batching(bb::Columns<std::int64_t>{{lengths, fitted.limit()}});
///     };
///     const brim::FittedLimit fitted = brim::fit_batching(
///         lengths, [&](std::span<const std::int64_t> batch) { train(batch); }, make,
///         {.budget = 8'000'000'000, .device = at::kCUDA});
///     auto batching = make(fitted);
///
/// The work runs some twenty times, and may then hold up to twice the budget; on CUDA up to a
/// hundred times more, to see what torch's allocator loses between blocks. What it changes, such as
/// the weights of a model that it trains, stays changed: put it back yourself (SavedState).
///
/// @param sizes of all samples by index; of several, `options.columns` of each one after the other.
/// @throws std::invalid_argument for no sizes, a negative size, a cost other than padded and sum, a
///     budget that is not positive or exceeds the device's limit, work that holds no memory, or if
///     not even the smallest sample fits; whatever `work` and `make` throw. With ranks: RankError
///     if another one fails; call `ranks->fail` if this one does.
[[nodiscard]] BRIM_API FittedLimit fit_batching(std::span<const std::int64_t> sizes,
                                                const BatchWork& work, const MakeBatching& make,
                                                const FitOptions& options);

/// For samples with several features that memory depends on, as the nodes and edges of a graph: how
/// much each counts. The sizes of the samples are then combined_sizes, whose sum `fit_batching` can
/// limit. Measures up to some twenty batches for each feature.
///
/// @param features of all samples by index, `columns` of each one after the other.
/// @return about the bytes that a unit of each feature needs, times a common factor.
/// @throws std::invalid_argument for no features, a negative one, or as `fit_batching` for the
///     budget; whatever `work` throws.
[[nodiscard]] BRIM_API std::vector<double> fit_weights(std::span<const std::int64_t> features,
                                                       std::size_t columns, const BatchWork& work,
                                                       const FitOptions& options);

/// The weighted sum of each sample's features, rounded up; at least 1.
[[nodiscard]] BRIM_API std::vector<std::int64_t> combined_sizes(
    std::span<const std::int64_t> features, std::span<const double> weights);

}  // namespace brim
