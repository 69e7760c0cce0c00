#pragma once

#include <brim/memory/out_of_memory.h>

#include <string_view>

namespace brim::oom_message {

/// The kind of memory failure that `message` describes, by the texts that torch and the CUDA
/// libraries are known to write.
OomCause parse(std::string_view message) noexcept;

/// Bytes asked for, from "Tried to allocate 2.00 GiB" and its relatives.
std::optional<std::int64_t> requested_bytes(std::string_view message) noexcept;

/// Bytes that tensors held when it failed, from "with 1.00 GiB (… bytes) in use" (brim's own) or
/// "Of the allocated memory 96.00 MiB is allocated by PyTorch" (torch's caching allocators).
std::optional<std::int64_t> bytes_in_use(std::string_view message) noexcept;

}  // namespace brim::oom_message
