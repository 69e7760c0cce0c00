#pragma once

#include <brim/memory/out_of_memory.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace brim {

/// Keeps the figures of an error of our own, for classify and classify_message to find them again
/// by its text, on whichever thread. `text` must name every figure exactly: equal texts then have
/// equal figures. The latest of them are kept.
void remember_refusal(const std::string& text, const OomCause& cause) noexcept;

/// "1.00 KiB (1024 bytes)"
[[nodiscard]] BRIM_API std::string with_exact(std::int64_t bytes);

/// Why a budget refuses, for the function below.
[[nodiscard]] BRIM_API std::string allowed_by_budget(std::int64_t allowed, std::int64_t held);

/// What an allocator of ours says where it refuses, and what reclaiming had given up before.
/// @param why behind "with ... in use"
/// @throws c10::OutOfMemoryError
[[noreturn]] BRIM_API void throw_refusal(c10::Device device, std::int64_t bytes,
                                         std::int64_t in_use, const std::string& why);

}  // namespace brim
