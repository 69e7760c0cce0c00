#pragma once

#include <brim/need/attempt.h>

#include <cstdint>
#include <filesystem>
#include <vector>

/// Writes the files of all SizeMemories of the process: the first news for a directory at once,
/// then in the background at most once a second, the rest at exit. A directory is kept near 64 MiB.
///
/// Thread-safe. A forked child starts with nothing to write: what its parent had queued, the parent
/// writes. A directory that cannot be written is
/// a warning, and not tried again.
namespace brim::size_writer {

/// Queues the attempts of a key, in place of what is queued for the file already.
void put(const std::filesystem::path& file, std::uint64_t key, std::vector<Attempt> attempts);

/// What `size_file` would find if all that is queued were written.
std::vector<Attempt> read(const std::filesystem::path& file, std::uint64_t key);
bool any(const std::filesystem::path& directory);

/// Drop what is queued and what is written.
void remove(const std::filesystem::path& file);
void remove_all(const std::filesystem::path& directory);

/// Writes all that is queued before it returns.
void flush();

}  // namespace brim::size_writer
