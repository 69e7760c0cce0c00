#pragma once

#include <brim/export.h>

#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching {

/// Documents of which the long ones are cut into parts that fit a batch, each a sample of its own:
/// the parts of a document follow each other, and all but the last are as long as fits.
///
///     const DocumentParts parts(lengths, 4096);
///     auto batching = packed_batching(one column of parts.sizes(), …);
///     for (const std::int64_t sample : batch) {
///       const auto [document, begin, end] = parts[sample];
///       …
///     }
///
/// Immutable, so any number of threads may use it. A LookAheadStream does the same with
/// Oversize::split.
class BRIM_API DocumentParts {
 public:
  struct Part {
    std::int64_t document;
    std::int64_t begin;  ///< of its tokens
    std::int64_t end;
  };

  /// @throws std::invalid_argument if `largest` is not positive, or a length is negative. A
  ///     document without tokens has one part, without tokens.
  DocumentParts(std::span<const std::int64_t> lengths, std::int64_t largest);

  /// The number of parts.
  [[nodiscard]] std::int64_t size() const { return firsts_.back(); }
  /// @throws std::invalid_argument if there is no such part.
  [[nodiscard]] Part operator[](std::int64_t part) const;
  /// The number of tokens in each part.
  [[nodiscard]] std::vector<std::int64_t> sizes() const;

 private:
  std::vector<std::int64_t> lengths_;
  std::vector<std::int64_t> firsts_;  // the number of parts before each document, and of all
  std::int64_t largest_;
};

}  // namespace brim::batching
