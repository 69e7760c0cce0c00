#pragma once

#include <brim/adapt/options.h>
#include <brim/adapt/size_memory.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace brim::detail {

/// What is remembered of calls of the same kind. Bytes are modelled for one device only, that of
/// the newest attempt. Of attempts on other devices only "it fitted" or "it did not" is kept, and
/// only while about as much is free there as at that time.
struct Recollection {
  std::vector<Attempt> attempts{};
  std::optional<c10::Device> device{};      ///< of the bytes; empty as long as nothing is known
  std::optional<std::int64_t> available{};  ///< bytes that are free there now
  bool is_wider = true;                     ///< nothing is known of this kind of call itself

  /// Whether the last call fitted with other values.
  [[nodiscard]] bool moves_to(std::span<const std::int64_t> values) const;

  /// Removes the attempt's bytes where they are of another device than `device`.
  void drop_foreign_bytes(Attempt& attempt);

  /// The share of memory that an unconfirmed prediction leaves free: an accelerator's allocator
  /// hands out blocks, and its count of bytes says little about how they lie.
  /// @param otherwise the device of a call of which nothing is known.
  [[nodiscard]] double margin(c10::Device otherwise) const;
  /// Whether that device can use all of its free bytes: the CPU has no blocks that do not fit.
  [[nodiscard]] bool packs(c10::Device otherwise) const;
};

Recollection recall(const AdaptOptions& options);

}  // namespace brim::detail
