#pragma once

#include <brim/adapt/size_memory.h>
#include <brim/export.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

/// Writes the files of all SizeMemories of the process, in the background: the first news at once,
/// then at most once a second, the rest at exit. No more than `kMostBytes` a directory are kept.
///
/// Thread-safe. A forked child starts with nothing to write: what its parent had queued, the parent
/// writes. What cannot be written is a warning, once a directory.
namespace brim::size_writer {

inline constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;

/// Queues the attempts of a key, in the place of what is queued for the file already.
BRIM_API void put(const std::filesystem::path& file, std::uint64_t key,
                  std::vector<Attempt> attempts);

/// What `size_file::read` would give if all that is queued were written.
BRIM_API std::vector<Attempt> read(const std::filesystem::path& file, std::uint64_t key);
BRIM_API bool any(const std::filesystem::path& directory);

/// Drop what is queued and what is written.
BRIM_API void remove(const std::filesystem::path& file);
BRIM_API void remove_all(const std::filesystem::path& directory);

/// Writes all that is queued before it returns.
BRIM_API void flush();

}  // namespace brim::size_writer
