#pragma once

#include <brim/adapt/options.h>
#include <brim/adapt/size_memory.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace brim::detail {

/// What is remembered of calls of the same kind. Bytes are modelled for one device only, that of
/// the newest attempt. Of attempts on other devices only "it fitted" or "it did not" is kept, and
/// only while about as much is free there as at that time.
struct AttemptHistory {
  std::vector<Attempt> attempts{};
  std::optional<c10::Device> device{};      ///< of the bytes; empty as long as nothing is known
  std::optional<std::int64_t> available{};  ///< bytes that are free there now
  bool is_wider = true;                     ///< nothing is known of this kind of call itself
  bool others_failed = false;               ///< calls with other lengths, while these have not

  /// Whether the last call fitted with other values.
  [[nodiscard]] bool moves_to(std::span<const std::int64_t> values) const;

  /// Removes the attempt's bytes where they are of another device than `device`.
  void drop_foreign_bytes(Attempt& attempt);
};

/// The newest fit; null if there is none.
inline const Attempt* last_fit(std::span<const Attempt> attempts) {
  const auto newest =
      std::find_if(attempts.rbegin(), attempts.rend(), std::mem_fn(&Attempt::fitted));
  return newest == attempts.rend() ? nullptr : &*newest;
}

/// What that asked for; null if it is not known.
inline std::shared_ptr<const Trace> last_trace(std::span<const Attempt> attempts) {
  const Attempt* last = last_fit(attempts);
  return last == nullptr ? nullptr : last->trace;
}

/// Whether the requests of the next call are worth recording even at the same size: nothing is
/// known yet, or those of the last one are known, and what it left moves for some calls.
inline bool still_moving(std::span<const Attempt> attempts) {
  constexpr std::int64_t kCallsToSettle = 8;
  const Attempt* last = last_fit(attempts);
  return attempts.empty() || (last != nullptr && last->trace && last->calls < kCallsToSettle);
}

/// The options' kind of call where it is of use. Halving finds no way up from a hint, and with
/// collectives inside, the failure that a wrong one leads to is final.
std::optional<std::uint64_t> hinting_kind(const AdaptOptions& options);

/// @param values the number of the call's sizes: what has another number of them is no such call.
/// @param hints whether to hope where nothing is known that calls with tensors of other lengths
/// need
///     as much. Not in a range, whose first parts are short and show more.
AttemptHistory recall(const AdaptOptions& options, std::size_t values = 1, bool hints = false);

}  // namespace brim::detail
