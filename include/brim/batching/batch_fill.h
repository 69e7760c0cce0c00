#pragma once

#include <brim/batching/cost.h>
#include <brim/export.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace brim::batching {

/// How full one batch is, for programs that build batches sample by sample:
///
///     brim::batching::BatchFill fill({{brim::batching::Cost::padded(), 16384.0}});
///     for (const Request& request : requests) {
///       const double size = request.length();
///       if (!fill.fits({&size, 1})) { run(batch); fill.clear(); }
///       fill.add({&size, 1});
///     }
///
/// Each call takes one size per limit. @throws std::invalid_argument for another number of sizes,
/// or one that is negative, NaN or infinite. For one thread.
class BRIM_API BatchFill {
 public:
  /// @throws std::invalid_argument if there is no limit.
  explicit BatchFill(std::vector<Limit> limits);
  ~BatchFill();
  BatchFill(BatchFill&&) noexcept;
  BatchFill& operator=(BatchFill&&) noexcept;

  /// Whether the sample fits an empty batch.
  [[nodiscard]] bool fits_alone(std::span<const double> sizes) const;
  /// Whether the sample fits this batch.
  [[nodiscard]] bool fits(std::span<const double> sizes) const;
  void add(std::span<const double> sizes);
  /// Lowers sizes to the largest that fit an empty batch; whole sizes stay whole.
  void truncate(std::span<double> sizes) const;
  /// Starts another batch.
  void clear();
  /// Cost as a share of the budget; of the fullest if there are several.
  [[nodiscard]] double load() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

namespace detail {

/// @throws std::invalid_argument: the sample exceeds the budget by itself.
[[noreturn]] BRIM_API void refuse_oversize(std::int64_t sample, std::span<const double> sizes);

}  // namespace detail

}  // namespace brim::batching
