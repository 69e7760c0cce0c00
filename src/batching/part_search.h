#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching::detail {

/// Looks for a division of a few items under a cap by trying one after the other, the fullest part
/// with room first. For what packing leaves open: whether fewer parts would do.
class PartSearch {
 public:
  /// @param sizes descend.
  PartSearch(std::span<const double> sizes, double cap, bool equal_count)
      : sizes_(sizes), cap_(cap), equal_count_(equal_count) {}

  /// Whether the items go into this many parts. No, too, once `tries` are used up, from which it
  /// takes one for each part that it looks at.
  bool run(std::size_t parts, std::int64_t& tries);

  /// The part of each item.
  [[nodiscard]] const std::vector<std::uint32_t>& part() const { return part_; }

 private:
  struct Part {
    double total = 0.0;
    std::size_t count = 0;
  };

  bool place(std::size_t item);
  [[nodiscard]] bool has_room(const Part& part, double size) const;

  std::span<const double> sizes_;
  double cap_;
  bool equal_count_;
  std::vector<Part> parts_;
  std::vector<std::uint32_t> part_;
  std::size_t floor_ = 0;   // items that each part may have
  std::size_t larger_ = 0;  // parts that may have one more
  double spare_ = 0.0;      // room that may stay unused
  std::int64_t* tries_ = nullptr;
};

}  // namespace brim::batching::detail
