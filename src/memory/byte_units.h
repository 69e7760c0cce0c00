#pragma once

#include <optional>
#include <string_view>

namespace brim {

/// Bytes in a unit, in any case: 1 for "" and "B", `kilo` for "kB", 1024 for "KiB", up to EB and
/// EiB.
std::optional<double> unit_bytes(std::string_view name, double kilo = 1000.0);

}  // namespace brim
