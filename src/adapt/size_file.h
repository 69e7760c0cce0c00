#pragma once

#include <brim/export.h>
#include <brim/need/attempt.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

/// The files of a SizeMemory: one per key, a few lines of text.
namespace brim::size_file {

/// The file of a key inside the directory: its 16 hexadecimal digits and ".brim-sizes".
BRIM_API std::string name(std::uint64_t key);

/// The attempts in a file; none where there is no file. A damaged or foreign file gives none and a
/// warning: it is text that is parsed field by field, and never executed.
BRIM_API std::vector<Attempt> read(const std::filesystem::path& file, std::uint64_t key);

/// Replaces the file atomically: a reader sees the old text or the new one, whoever else writes it.
/// @return the error of the operating system where that fails.
BRIM_API std::error_code write(const std::filesystem::path& file, std::uint64_t key,
                               const std::vector<Attempt>& attempts);

/// Removes the files that `name` could have named, and nothing else.
BRIM_API void remove_all(const std::filesystem::path& directory);

/// Whether there is one of them.
BRIM_API bool any(const std::filesystem::path& directory);

/// Removes the least recently used files until the rest takes less than `most` bytes on the disk,
/// and what killed writers left behind. Returns the bytes that are left.
BRIM_API std::int64_t prune(const std::filesystem::path& directory, std::int64_t most);

}  // namespace brim::size_file
