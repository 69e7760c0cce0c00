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
  bool warm = false;  ///< this process has run the size before; see add_fact
};

/// Adds a fact to those of one key, oldest first, and drops the one that it makes superfluous: that
/// of the same size and outcome, else the oldest of its own kind where there are many, so that many
/// fits do not push out the failures, nor the other way round.
///
/// The first time that a process runs a size has one-time work in it (a compiler, cold caches): its
/// rate is not counted, what was known before stays.
BRIM_API void add_fact(std::vector<SizeFact>& facts, SizeFact fact);

/// What earlier calls learned about sizes, by key, for the next call to start from.
///
/// Facts are kept, not conclusions: how many bytes a size needed and how many there were. So a
/// limit learned when memory was short does not hold when there is more, and a size learned for one
/// shape of the arguments says nothing about another, because the shape is part of the key. Each
/// key keeps the newest few facts; the least recently used key is dropped when there are too many.
///
/// With a directory, what is learned is kept across processes: one small text file per key,
/// replaced atomically, read on the first use of the key. A file that is damaged or not ours is
/// ignored with a warning. Only news is written, by a thread in the background: at once, then at
/// most once a second, the rest when the program exits. A directory keeps at most 64 MiB, of the
/// keys used last.
///
/// Thread-safe. Owned by the caller; it must outlive the calls that use it.
class BRIM_API SizeMemory {
 public:
  static constexpr std::size_t kFactsPerKey = 16;
  static constexpr std::size_t kDefaultCapacity = 4096;

  explicit SizeMemory(std::size_t capacity = kDefaultCapacity,
                      std::optional<std::filesystem::path> directory = std::nullopt);
  SizeMemory(const SizeMemory&) = delete;
  SizeMemory& operator=(const SizeMemory&) = delete;

  /// False as long as nothing at all can be recalled: asked before anything else on the path of a
  /// call that fits.
  bool may_know_something() const noexcept {
    return count_.load(std::memory_order_acquire) != 0 || (directory_ && has_files());
  }

  /// The facts of a key, oldest first; empty where there are none.
  std::vector<SizeFact> recall(std::uint64_t key);

  void learn(std::uint64_t key, const SizeFact& fact);

  /// Drops what is known about one key, or about all; files included.
  void forget(std::uint64_t key);
  void clear();

  /// Writes what all memories of the process have learned and not written yet. Only who ends the
  /// process without running exit handlers (`_exit`) needs it.
  static void flush();

  /// How many keys are known in this process.
  std::size_t size() const { return count_.load(std::memory_order_acquire); }

  /// `$XDG_CACHE_HOME/brim/sizes`, else `~/.cache/brim/sizes`.
  /// @throws c10::Error where neither variable is set.
  static std::filesystem::path default_directory();

 private:
  struct Entry {
    std::uint64_t key;
    std::vector<SizeFact> facts;
    std::vector<SizeFact> kept;  // in the file, or on the way there
  };
  enum class Files : std::uint8_t { unknown, none, some };

  bool has_files() const noexcept;
  Entry& entry(std::uint64_t key);
  std::filesystem::path file_of(std::uint64_t key) const;

  mutable std::mutex mutex_;
  std::atomic<std::size_t> count_{0};
  mutable std::atomic<Files> files_{Files::unknown};  // in the directory, when it was first asked
  std::size_t capacity_;
  std::optional<std::filesystem::path> directory_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::uint64_t, std::list<Entry>::iterator> by_key_;
};

}  // namespace brim
