#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching {

/// How documents are laid into a row.
struct PackedRowOptions {
  /// Each document takes a multiple of this many places, with padding at its end: 2 · CP · TP where
  /// documents are shared out over context and tensor parallel ranks.
  std::int64_t document_multiple = 1;
  /// The whole row has a multiple of this many places. The padding is a document of its own.
  std::int64_t row_multiple = 1;
  /// The row has this many places, padded alike; 0: as many as it needs.
  std::int64_t row_length = 0;
};

/// Which blocks of keys each block of queries attends to, as a list per row of blocks: the lists of
/// FlexAttention's BlockMask. Row r of the lists has `columns` places, of which the first are used.
struct BlockLists {
  std::int64_t rows = 0;                  ///< blocks of queries
  std::int64_t columns = 0;               ///< blocks of keys
  std::vector<std::int32_t> counts;       ///< per row, of blocks that are attended in part
  std::vector<std::int32_t> indices;      ///< rows × columns
  std::vector<std::int32_t> full_counts;  ///< per row, of blocks that are attended as a whole
  std::vector<std::int32_t> full_indices;
};

/// Where documents lie in one row of tokens: the arithmetic of a packed batch, which is done once
/// per batch on the host.
///
///     const PackedRow row(lengths, {.row_multiple = 8});
///     std::vector<std::int64_t> positions(row.size());
///     row.write_positions({}, positions);
///     flash_attn_varlen(q, k, v, row.offsets(), row.longest(), …);
///
/// Padding at the end of a document counts as a part of it, which causal attention allows: no token
/// sees what follows it. Padding at the end of the row is one more document, so that its outputs
/// are numbers too. Immutable.
class BRIM_API PackedRow {
 public:
  /// @param lengths tokens of each document.
  /// @throws std::invalid_argument if there is no document, one is empty, an option is not allowed,
  ///     or the documents do not fit row_length or 32 bits.
  explicit PackedRow(std::span<const std::int64_t> lengths, const PackedRowOptions& options = {});

  /// The number of documents, without the padding at the end.
  [[nodiscard]] std::size_t documents() const { return lengths_.size(); }
  /// The number of places, padding included.
  [[nodiscard]] std::int64_t size() const { return offsets_.back(); }
  /// The place where each document begins, and the size: FlashAttention's cu_seqlens. One more
  /// document than documents() if the row is padded at its end.
  [[nodiscard]] std::span<const std::int32_t> offsets() const { return offsets_; }
  /// The same of the tokens alone, as if there was no padding between them: what TransformerEngine
  /// takes beside the offsets. The padding at the end of the row counts as tokens.
  [[nodiscard]] std::vector<std::int32_t> token_offsets() const;
  /// The longest document, with its padding: max_seqlen.
  [[nodiscard]] std::int64_t longest() const;
  [[nodiscard]] std::int64_t length(std::size_t document) const { return lengths_[document]; }

  /// Writes the position of each place in its document.
  /// @param begins the first position of each document, for parts of longer ones; 0 if empty.
  void write_positions(std::span<const std::int64_t> begins, std::span<std::int64_t> out) const;
  /// Writes the number of each place's document, from 0 on.
  void write_documents(std::span<std::int32_t> out) const;
  /// Labels of tokens that predict the next one are those one place before it: moves the values of
  /// each document by one, in place.
  /// @param next what follows the last token of each document; `none` if nothing does.
  void shift(std::span<std::int64_t> values, std::span<const std::int64_t> next,
             std::int64_t none) const;
  /// Writes `none` at the first place of each document, and at all padding.
  void mask_first(std::span<std::int64_t> values, std::int64_t none) const;

  /// The blocks of the mask that lets each place attend to its own document.
  /// @param causal and of it only to places up to its own.
  /// @throws std::invalid_argument if `block` is not positive.
  [[nodiscard]] BlockLists blocks(std::int64_t block, bool causal) const;

 private:
  void check_size(std::size_t given) const;

  std::vector<std::int64_t> lengths_;
  std::vector<std::int32_t> offsets_;
};

}  // namespace brim::batching
