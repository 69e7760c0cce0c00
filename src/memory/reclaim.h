#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace brim {

/// Gives up what can be had again, until at least `bytes` of a device are free that were not, or
/// there is nothing left. Called inside of an allocation, on any thread and under any lock: it
/// allocates no tensor, and takes no lock that is held around an allocation.
/// @returns the bytes that became free; 0 where nothing could be given up
using Reclaim = std::int64_t (*)(c10::Device device, std::int64_t bytes) noexcept;

/// For the error where nothing is left: what was given up, as the end of a sentence; may be empty.
using GivenUp = std::string (*)(c10::Device device);

/// From now on, allocators ask this before they refuse. There is one in the process.
void set_reclaim(Reclaim reclaim, GivenUp given_up);

/// What an allocator asks before it refuses: whether another try is worth it.
/// @param bytes that are missing
[[nodiscard]] BRIM_API bool reclaimed(c10::Device device, std::int64_t bytes) noexcept;

[[nodiscard]] BRIM_API std::string given_up(c10::Device device);

/// Counts bytes that were given up before any request asked for them, since earlier steps had
/// shown that they must go.
BRIM_API void count_foreseen(std::int64_t bytes) noexcept;

/// Bytes that were given up so far in this process, for a request or in foresight. One number for
/// all devices: whoever compares it before and after some work learns that it ran under pressure.
[[nodiscard]] BRIM_API std::int64_t bytes_given_up() noexcept;

/// What allocators that see it say of memory that another stream uses (Tensor.record_stream). Such
/// memory may still be read after its tensor has gone.
BRIM_API void note_use_on_another_stream() noexcept;

/// Whether any memory was, in this process.
[[nodiscard]] BRIM_API bool is_used_on_other_streams() noexcept;

}  // namespace brim
