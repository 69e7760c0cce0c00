#pragma once

#include <brim/export.h>
#include <brim/need/attempt.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace brim {

/// Adds an attempt to those of one key, oldest first. It replaces the one with the same values and
/// outcome. Where there are many, the oldest fit makes room for a fit and the oldest failure for a
/// failure, so that neither kind pushes out the other.
///
/// The first run of a size in a process includes one-time work (a compiler, cold caches): its rate
/// is not counted, and the rate known before stays.
BRIM_API void add_attempt(std::vector<Attempt>& attempts, Attempt attempt);

/// What earlier calls learned about sizes, by key, for the next call to start from.
///
/// It keeps attempts, not conclusions: how many bytes a size needed and how many there were. So a
/// limit learned when memory was short does not hold when there is more, and a size learned for one
/// shape of the arguments is at most a hint for another (AdaptOptions::kind), because the shape is
/// part of the key. Each key keeps the newest few attempts; the least recently used key is dropped
/// when there are too many.
///
/// With a directory, what is learned is kept across processes: one small text file per key, read
/// on the first use of the key. Only news is written, by the call that learned it: a temporary file
/// that is renamed, in less than a millisecond on a local disk. (One file for all keys would take
/// longer the more is known, and processes would overwrite each other's keys.) If several processes
/// write one file, the last one wins. A file that is damaged or not ours is ignored with a warning;
/// a directory that cannot be written is one warning, and not tried again. A directory keeps about
/// 16,384 files, those used last.
///
/// Thread-safe, and safe to fork: a child knows what its parent knew. Owned by the caller; it must
/// outlive the calls that use it.
class BRIM_API SizeMemory {
 public:
  static constexpr std::size_t kAttemptsPerKey = 16;
  static constexpr std::size_t kDefaultCapacity = 4096;

  explicit SizeMemory(std::size_t capacity = kDefaultCapacity,
                      std::optional<std::filesystem::path> directory = std::nullopt);
  SizeMemory(const SizeMemory&) = delete;
  SizeMemory& operator=(const SizeMemory&) = delete;

  /// False as long as nothing at all can be recalled. Cheap: every call asks it first.
  bool may_know_something() const noexcept {
    return had_files_ || count_.load(std::memory_order_acquire) != 0;
  }

  /// The attempts of a key, oldest first; empty if there are none.
  std::vector<Attempt> recall(std::uint64_t key);

  void learn(std::uint64_t key, const Attempt& attempt);

  /// Drops what is known about one key, or about all; files included.
  void forget(std::uint64_t key);
  void clear();

  /// Does nothing: what a call has learned is in its file when the call returns.
  static void flush() noexcept {}

  /// The number of keys known in this process.
  std::size_t size() const { return count_.load(std::memory_order_acquire); }

  /// `$XDG_CACHE_HOME/brim/sizes`, else `~/.cache/brim/sizes`.
  /// @throws c10::Error where neither variable is set.
  static std::filesystem::path default_directory();

 private:
  struct Entry {
    std::uint64_t key;
    std::vector<Attempt> attempts;
    std::vector<Attempt> kept;  // in the file
  };

  Entry& entry(std::uint64_t key, std::vector<std::string>& warnings);
  std::filesystem::path file_of(std::uint64_t key) const;
  void keep(Entry& entry, std::vector<std::string>& warnings);

  std::atomic<std::size_t> count_{0};
  std::size_t capacity_;
  std::optional<std::filesystem::path> directory_;
  bool had_files_;  // in the directory, at the beginning
  bool cannot_write_ = false;
  std::size_t writes_ = 0;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::uint64_t, std::list<Entry>::iterator> by_key_;
};

}  // namespace brim
