#pragma once

#include <brim/memory/out_of_memory.h>

#include <string>

namespace brim {

/// Keeps the figures of an error of our own, for classify and classify_message to find them again
/// by its text, on whichever thread. `text` must name every figure exactly: equal texts then have
/// equal figures. The latest of them are kept.
void remember_refusal(const std::string& text, const OomCause& cause) noexcept;

}  // namespace brim
