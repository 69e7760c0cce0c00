#pragma once

#include <brim/export.h>
#include <brim/need/attempt.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

/// The files of a SizeMemory: one per key, a few lines of text. Nothing here throws because of what
/// is on the disk, or waits for another process.
namespace brim::size_file {

/// The file of a key inside the directory: its 16 hexadecimal digits and ".brim-sizes".
BRIM_API std::string name(std::uint64_t key);

/// The attempts in a file; none where there is no file, and empty where it is damaged or foreign.
/// It is text that is parsed field by field, and never executed.
BRIM_API std::optional<std::vector<Attempt>> read(const std::filesystem::path& file,
                                                  std::uint64_t key);

/// Replaces the file: a reader sees the old text, the new one or for a moment no file, but never a
/// part of one, whoever else writes it.
/// @return the error of the operating system where that fails.
BRIM_API std::error_code write(const std::filesystem::path& file, std::uint64_t key,
                               const std::vector<Attempt>& attempts);

/// Removes the least recently used of our files where there are more than `most`: an eighth more
/// than necessary, so that not every new file means another look at all. Foreign files stay.
BRIM_API void prune(const std::filesystem::path& directory, std::size_t most);

}  // namespace brim::size_file
