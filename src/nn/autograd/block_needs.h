#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace brim::nn {

/// A call of a block of layers.
struct BlockCall {
  std::size_t part = 0;             // the block, its limit, the types and dimensions of its inputs
  std::vector<std::int64_t> sizes;  // of its inputs
};

/// What calls of blocks needed from their begin until their backward was over, where nothing had to
/// go meanwhile.
class BlockNeeds {
 public:
  /// Bytes that must be free for this call, so that none of its values has to go. A call of the
  /// same sizes needs the same, give or take a quarter. One that is smaller in some of its sizes,
  /// and larger in none, needs less, but may be followed by more than that one was: twice. Nothing
  /// where no such call is known.
  [[nodiscard]] std::optional<std::int64_t> room_for(const BlockCall& call) const {
    const auto found = calls_.find(call.part);
    if (found == calls_.end()) {
      return std::nullopt;
    }
    std::optional<std::int64_t> room;
    for (const Known& known : found->second) {
      if (known.sizes == call.sizes) {
        return known.bytes + known.bytes / 4;
      }
      if (std::ranges::equal(call.sizes, known.sizes, std::ranges::less_equal())) {
        room = std::min(room.value_or(2 * known.bytes), 2 * known.bytes);
      }
    }
    return room;
  }

  void set(const BlockCall& call, std::int64_t bytes) {
    forget(call);
    std::vector<Known>& known = calls_[call.part];
    constexpr std::size_t kMost = 32;  // of a part: loops whose shapes never come back
    if (known.size() == kMost) {
      known.erase(std::ranges::min_element(known, {}, &Known::bytes));  // says least of others
    }
    known.push_back({call.sizes, bytes});
  }

  void forget(const BlockCall& call) {
    const auto found = calls_.find(call.part);
    if (found != calls_.end()) {
      std::erase_if(found->second, [&](const Known& known) { return known.sizes == call.sizes; });
    }
  }

  void clear() { calls_.clear(); }

 private:
  struct Known {
    std::vector<std::int64_t> sizes;
    std::int64_t bytes = 0;
  };
  std::unordered_map<std::size_t, std::vector<Known>> calls_;
};

}  // namespace brim::nn
