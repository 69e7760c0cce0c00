#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace brim {

/// The limit of the tightest budget that is open on `device`, in bytes; empty where none is.
std::optional<std::int64_t> budget_in_force(c10::Device device);

}  // namespace brim
