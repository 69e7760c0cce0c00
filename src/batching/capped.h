#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "batching/division.h"
#include "batching/exchange.h"

namespace brim::batching::detail {

/// Divisions under a cap on the sum of a part's sizes. Each item fits by itself.
class CappedDivider {
 public:
  /// `costs` and `sizes` are as many, and checked. With `equal_count` the numbers of items in two
  /// parts differ by one at most.
  CappedDivider(std::span<const double> costs, std::span<const double> sizes, double cap,
                bool equal_count);

  /// What no number of parts can be below.
  [[nodiscard]] std::size_t least_parts() const;
  /// The fewest parts that packing, and a search of bounded length, put all items into. Any larger
  /// number holds them too.
  [[nodiscard]] std::size_t fewest_parts() { return packed().parts; }

  /// Parts of nearly equal cost, none over the cap, where the best division without a cap is over
  /// it; no value if none was found, never so for fewest_parts() or more.
  [[nodiscard]] std::optional<Division> divide(std::size_t parts);

 private:
  struct Packed {
    std::vector<std::uint32_t> part;  // of each item, the largest first
    std::size_t parts;
  };

  [[nodiscard]] bool holds(std::span<const std::uint32_t> part, std::size_t parts) const;
  [[nodiscard]] std::optional<Division> divide_unordered(std::size_t parts);
  bool least_loaded(std::size_t parts, std::size_t in_order, Division& division) const;
  [[nodiscard]] const Packed& packed();
  [[nodiscard]] Packed best_fit() const;
  [[nodiscard]] Packed even_sizes() const;
  void search_fewer(Packed& found) const;
  void spread(std::vector<std::uint32_t>& part, std::size_t used, std::size_t parts) const;
  void spread_equally(std::vector<std::uint32_t>& part, std::size_t used, std::size_t parts) const;

  bool equal_count_;
  double cap_;                        // of all items of a part; one that is alone has been checked
  std::vector<std::uint32_t> order_;  // the largest first, of these the costliest
  std::vector<double> costs_;         // in that order
  std::vector<double> sizes_;
  std::optional<Packed> packed_{};
};

}  // namespace brim::batching::detail
