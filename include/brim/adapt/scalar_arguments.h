#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace brim {

/// Tells which numbers and texts among the arguments of one function make a kind of call, and which
/// only count something. A width or a mode takes few values, and each may need another size. A step
/// or an index takes a new value in every call, which would never be met again: an argument that
/// has taken more than kMostValues values is left out from then on.
///
/// Thread-safe.
class BRIM_API ScalarArguments {
 public:
  static constexpr std::size_t kMostValues = 8;
  static constexpr std::size_t kMostArguments = 1024;  ///< further ones are left out

  /// Notes the value and says whether the argument counts. Both are hashes.
  bool counts(std::uint64_t argument, std::uint64_t value);

  void clear();

 private:
  std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::vector<std::uint64_t>>
      values_;  // more than most: left out
};

}  // namespace brim
