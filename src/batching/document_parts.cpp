#include <brim/batching/document_parts.h>

#include <algorithm>

#include "check_argument.h"

namespace brim::batching {

using brim::detail::check_argument;

DocumentParts::DocumentParts(std::span<const std::int64_t> lengths, std::int64_t largest)
    : lengths_(lengths.begin(), lengths.end()), largest_(largest) {
  check_argument(largest > 0, "largest must be positive, got ", largest);
  firsts_.reserve(lengths.size() + 1);
  firsts_.push_back(0);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    check_argument(lengths[i] >= 0, "sizes must not be negative, got ", lengths[i], " at index ",
                   i);
    const std::int64_t more = lengths[i] == 0 ? 0 : (lengths[i] - 1) / largest;
    firsts_.push_back(firsts_.back() + 1 + more);
  }
}

DocumentParts::Part DocumentParts::operator[](std::int64_t part) const {
  check_argument(part >= 0 && part < size(), "part must be from 0 to ", size() - 1, ", got ", part);
  const auto after = std::upper_bound(firsts_.begin(), firsts_.end(), part);
  const std::int64_t document = after - firsts_.begin() - 1;
  const auto at = static_cast<std::size_t>(document);
  const std::int64_t begin = (part - firsts_[at]) * largest_;
  return {document, begin, lengths_[at] - begin < largest_ ? lengths_[at] : begin + largest_};
}

std::vector<std::int64_t> DocumentParts::sizes() const {
  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(size()));
  for (std::size_t i = 0; i < lengths_.size(); ++i) {
    const std::int64_t whole = firsts_[i + 1] - firsts_[i] - 1;
    result.insert(result.end(), static_cast<std::size_t>(whole), largest_);
    result.push_back(lengths_[i] - whole * largest_);
  }
  return result;
}

}  // namespace brim::batching
