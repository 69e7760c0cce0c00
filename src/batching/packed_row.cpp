#include <brim/batching/packed_row.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "check_argument.h"

namespace brim::batching {
namespace {

using brim::detail::check_argument;

// Offsets have 32 bits, as attention kernels take them.
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

std::int64_t rounded_up(std::int64_t number, std::int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

void check_multiple(const char* name, std::int64_t multiple, std::int64_t least) {
  check_argument(multiple >= least && multiple <= kMost, name, " must be from ", least,
                 " to 2^31 - 1, got ", multiple);
}

}  // namespace

PackedRow::PackedRow(std::span<const std::int64_t> lengths, const PackedRowOptions& options)
    : lengths_(lengths.begin(), lengths.end()) {
  check_multiple("document_multiple", options.document_multiple, 1);
  check_multiple("row_multiple", options.row_multiple, 1);
  check_multiple("row_length", options.row_length, 0);
  check_argument(options.row_length % options.row_multiple == 0,
                 "row_length must be a multiple of row_multiple = ", options.row_multiple, ", got ",
                 options.row_length);
  check_argument(!lengths.empty(), "a packed row needs at least one document");
  std::int64_t end = 0;
  offsets_.reserve(lengths.size() + 2);
  offsets_.push_back(0);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    check_argument(lengths[i] > 0, "documents must have at least one token, got ", lengths[i],
                   " for document ", i);
    check_argument(lengths[i] <= kMost - end &&
                       rounded_up(lengths[i], options.document_multiple) <= kMost - end,
                   "a packed row holds fewer than 2^31 tokens, got more with document ", i);
    end += rounded_up(lengths[i], options.document_multiple);
    offsets_.push_back(static_cast<std::int32_t>(end));
  }
  check_argument(options.row_length == 0 || end <= options.row_length, "documents take ", end,
                 " places, but row_length is ", options.row_length);
  const std::int64_t size =
      options.row_length > 0 ? options.row_length : rounded_up(end, options.row_multiple);
  check_argument(size <= kMost, "a packed row holds fewer than 2^31 tokens, got ", size);
  if (size > end) {
    offsets_.push_back(static_cast<std::int32_t>(size));
  }
}

std::vector<std::int32_t> PackedRow::token_offsets() const {
  std::vector<std::int32_t> result{0};
  result.reserve(offsets_.size());
  for (const std::int64_t length : lengths_) {
    result.push_back(result.back() + static_cast<std::int32_t>(length));
  }
  if (offsets_.size() > lengths_.size() + 1) {
    result.push_back(result.back() + offsets_.back() - offsets_[lengths_.size()]);
  }
  return result;
}

std::int64_t PackedRow::longest() const {
  std::int32_t result = 0;
  for (std::size_t i = 0; i + 1 < offsets_.size(); ++i) {
    result = std::max(result, offsets_[i + 1] - offsets_[i]);
  }
  return result;
}

void PackedRow::check_size(std::size_t given) const {
  check_argument(std::cmp_equal(given, size()), "there must be ", size(),
                 " values, one per place, got ", given);
}

void PackedRow::write_positions(std::span<const std::int64_t> begins,
                                std::span<std::int64_t> out) const {
  check_size(out.size());
  check_argument(begins.empty() || begins.size() == documents(), "there must be ", documents(),
                 " begins, one per document, got ", begins.size());
  for (std::size_t i = 0; i + 1 < offsets_.size(); ++i) {
    std::iota(out.begin() + offsets_[i], out.begin() + offsets_[i + 1],
              i < begins.size() ? begins[i] : 0);
  }
}

void PackedRow::write_documents(std::span<std::int32_t> out) const {
  check_size(out.size());
  for (std::size_t i = 0; i + 1 < offsets_.size(); ++i) {
    std::fill(out.begin() + offsets_[i], out.begin() + offsets_[i + 1],
              static_cast<std::int32_t>(i));
  }
}

void PackedRow::shift(std::span<std::int64_t> values, std::span<const std::int64_t> next,
                      std::int64_t none) const {
  check_size(values.size());
  check_argument(next.size() == documents(), "there must be ", documents(),
                 " next values, one per document, got ", next.size());
  for (std::size_t i = 0; i < documents(); ++i) {
    const auto begin = values.begin() + offsets_[i];
    const auto end = begin + static_cast<std::ptrdiff_t>(lengths_[i]);
    std::copy(begin + 1, end, begin);
    *(end - 1) = next[i];
    std::fill(end, values.begin() + offsets_[i + 1], none);
  }
  std::fill(values.begin() + offsets_[documents()], values.end(), none);
}

void PackedRow::mask_first(std::span<std::int64_t> values, std::int64_t none) const {
  check_size(values.size());
  for (std::size_t i = 0; i < documents(); ++i) {
    const auto begin = values.begin() + offsets_[i];
    *begin = none;
    std::fill(begin + static_cast<std::ptrdiff_t>(lengths_[i]), values.begin() + offsets_[i + 1],
              none);
  }
  std::fill(values.begin() + offsets_[documents()], values.end(), none);
}

// A block of queries sees, of its first document, all places from its beginning on; of its last, if
// nothing is causal, those up to its end. Everything between belongs to documents that lie in the
// block. A block of keys is seen as a whole if one document covers both blocks.
BlockLists PackedRow::blocks(std::int64_t block, bool causal) const {
  check_argument(block > 0, "block must be positive, got ", block);
  BlockLists lists;
  lists.rows = lists.columns = (size() + block - 1) / block;
  const auto cells = static_cast<std::size_t>(lists.rows * lists.columns);
  lists.counts.assign(static_cast<std::size_t>(lists.rows), 0);
  lists.full_counts = lists.counts;
  lists.indices.assign(cells, 0);
  lists.full_indices.assign(cells, 0);
  std::size_t first = 0;  // the document of the block's first place
  for (std::int64_t row = 0; row < lists.rows; ++row) {
    const std::int64_t begin = row * block;
    const std::int64_t end = std::min(begin + block, size());
    while (offsets_[first + 1] <= begin) {
      ++first;
    }
    std::size_t last = first;
    while (offsets_[last + 1] < end) {
      ++last;
    }
    // No block is whole that the end of the row cuts off.
    const bool one = first == last && begin + block <= offsets_[first + 1];
    const std::int64_t last_column = causal ? row : (offsets_[last + 1] - 1) / block;
    for (std::int64_t column = offsets_[first] / block; column <= last_column; ++column) {
      const bool whole = one && column * block >= offsets_[first] &&
                         (column + 1) * block <= offsets_[first + 1] &&
                         (!causal || column < row || block == 1);
      auto& count = (whole ? lists.full_counts : lists.counts)[static_cast<std::size_t>(row)];
      auto& indices = whole ? lists.full_indices : lists.indices;
      indices[static_cast<std::size_t>(row * lists.columns + count++)] =
          static_cast<std::int32_t>(column);
    }
  }
  return lists;
}

}  // namespace brim::batching
