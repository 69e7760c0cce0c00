#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <brim/export.h>

namespace brim {

/// A limit as a person writes it: a number of bytes, or a share of a whole that is known only
/// later.
///
/// Accepted: `"512MiB"`, `"8GB"`, `"1.5 GiB"`, `"1048576"`, `"64B"`, or a percentage `"50%"`. kB,
/// MB … EB are powers of 1000; KiB, MiB … EiB powers of 1024; case does not matter. A lone letter
/// (`"8G"`) is refused because tools disagree about what it means.
class BRIM_API ByteLimit {
 public:
  /// @param name of the argument, for errors.
  /// @throws c10::ValueError if `bytes` is zero or negative.
  static ByteLimit of_bytes(std::int64_t bytes, std::string_view name = "limit");

  /// @param name of the argument, for errors.
  /// @throws c10::ValueError if `text` is not of the form above, is not positive, is over 100 %, or
  /// does not fit 63 bits.
  static ByteLimit parse(std::string_view text, std::string_view name = "limit");

  /// The limit in bytes, where a percentage is a share of `whole` bytes; at least 1.
  std::int64_t resolve(std::int64_t whole) const;

  bool is_percentage() const { return percent_ > 0; }

 private:
  ByteLimit(std::int64_t bytes, double percent) : bytes_(bytes), percent_(percent) {}

  std::int64_t bytes_;  // 0 when this is a percentage
  double percent_;      // 0 when this is a number of bytes
};

/// `bytes` for people, in binary units: `"1.50 GiB"`, `"512 B"`, `"-2.00 MiB"`.
BRIM_API std::string format_bytes(std::int64_t bytes);

}  // namespace brim
