#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <system_error>
#include <vector>

namespace brim {

/// Who may read what is written. Nobody but the user may change it, whatever the umask is.
enum class Readers : std::uint8_t { owner, everyone };

/// Puts `parts` in place of the file, and makes the folders that are missing. A reader sees the old
/// file or the new one, but never a part of one, whoever else writes it. Should the system go down,
/// the file may be a part of itself: readers must notice that.
/// @param may_be_gone whether readers may for a moment see no file either. That spares
/// milliseconds.
/// @return the error of the operating system where that fails.
BRIM_API std::error_code write_whole(const std::filesystem::path& file,
                                     const std::vector<std::span<const std::byte>>& parts,
                                     Readers readers, bool may_be_gone);

}  // namespace brim
