#pragma once

#include <brim/export.h>

#include <cstddef>
#include <string>
#include <vector>

namespace brim {

/// Lines of a table as text, with columns as wide as their longest cell. All rows have as many
/// cells as `head`. Text is UTF-8.
///
///     layer  bytes
///     ------------
///     conv      12
///     relu       4
///     ------------
///     total     16
///
/// @param left how many columns are aligned left; the others are aligned right
/// @param last one more row under a line of its own; none if empty
BRIM_API std::string text_table(const std::vector<std::string>& head,
                                const std::vector<std::vector<std::string>>& rows,
                                std::size_t left = 1, const std::vector<std::string>& last = {});

}  // namespace brim
