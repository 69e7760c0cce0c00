#pragma once

#include <brim/adapt/size_search.h>
#include <brim/export.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace brim {

/// One thing learned about one kind of call: what happened at a size, and how fast it was.
struct SizeFact {
  std::vector<std::int64_t>
      values{};           ///< the size, or the values of all parameters where there are several
  SizeOutcome outcome{};  ///< what happened there; its `size` is the first of the values
  c10::Device device = c10::DeviceType::CPU;  ///< whose bytes the outcome has
  double rate = 0.0;  ///< of a fit: items (or calls) per second; 0 where it was not measured
};

/// What earlier calls learned about sizes, by key, for the next call to start from.
///
/// Facts are kept, not conclusions: how many bytes a size needed and how many there were. So a
/// limit learned when memory was short does not hold when there is more, and a size learned for one
/// shape of the arguments says nothing about another, because the shape is part of the key. Each
/// key keeps the newest few facts; the least recently used key is dropped when there are too many.
///
/// With a directory, what is learned is kept across processes: one small text file per key,
/// replaced atomically, read on the first use of the key. A file that is damaged or not ours is
/// ignored with a warning.
///
/// Thread-safe. Owned by the caller; it must outlive the calls that use it.
class BRIM_API SizeMemory {
 public:
  static constexpr std::size_t kFactsPerKey = 16;

  explicit SizeMemory(std::size_t capacity = 128,
                      std::optional<std::filesystem::path> directory = std::nullopt);
  SizeMemory(const SizeMemory&) = delete;
  SizeMemory& operator=(const SizeMemory&) = delete;

  /// False as long as nothing at all can be recalled: asked before anything else on the path of a
  /// call that fits.
  bool may_know_something() const noexcept {
    return directory_.has_value() || count_.load(std::memory_order_acquire) != 0;
  }

  /// The facts of a key, oldest first; empty where there are none.
  std::vector<SizeFact> recall(std::uint64_t key);

  void learn(std::uint64_t key, const SizeFact& fact);

  /// Drops what is known about one key, or about all; files included.
  void forget(std::uint64_t key);
  void clear();

  /// How many keys are known in this process.
  std::size_t size() const { return count_.load(std::memory_order_acquire); }

  /// `$XDG_CACHE_HOME/brim/sizes`, else `~/.cache/brim/sizes`.
  /// @throws c10::Error where neither variable is set.
  static std::filesystem::path default_directory();

 private:
  using Entry = std::pair<std::uint64_t, std::vector<SizeFact>>;

  std::vector<SizeFact>& entry(std::uint64_t key);
  std::filesystem::path file_of(std::uint64_t key) const;

  mutable std::mutex mutex_;
  std::atomic<std::size_t> count_{0};
  std::size_t capacity_;
  std::optional<std::filesystem::path> directory_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::uint64_t, std::list<Entry>::iterator> by_key_;
};

}  // namespace brim
