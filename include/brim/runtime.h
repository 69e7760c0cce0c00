#pragma once

#include <brim/export.h>

namespace brim {

/// The version of brim, as `"0.1.0"`.
BRIM_API const char* version() noexcept;

/// The version of torch that this library was built with. Binaries do not carry over between
/// torch's minor versions.
BRIM_API const char* built_with_torch() noexcept;

}  // namespace brim
