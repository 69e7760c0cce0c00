#pragma once

#include <brim/adapt/size_memory.h>
#include <brim/export.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace brim::size_file {

/// The file of a key inside the directory: its 16 hexadecimal digits and ".brim-sizes".
BRIM_API std::string name(std::uint64_t key);

/// The facts in a file; none where there is no file. A damaged or foreign file gives none and a
/// warning: it is text that is parsed field by field, and never executed.
BRIM_API std::vector<SizeFact> read(const std::filesystem::path& file, std::uint64_t key);

/// Replaces the file at once, so that a reader sees the old text or the new one. Failing to write
/// is a warning: what was learned is still known to this process.
BRIM_API void write(const std::filesystem::path& file, std::uint64_t key,
                    const std::vector<SizeFact>& facts);

BRIM_API void remove(const std::filesystem::path& file);

/// Removes the files that `name` could have named, and nothing else.
BRIM_API void remove_all(const std::filesystem::path& directory);

}  // namespace brim::size_file
