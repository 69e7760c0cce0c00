#pragma once

namespace brim {

/// Whether no other libbrim was in the process when this one was loaded. Operators and the CPU
/// allocator exist once, so a second copy does nothing; see check_only_copy.
bool is_first_copy();

}  // namespace brim
