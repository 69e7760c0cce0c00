#pragma once

namespace brim {

/// Whether no other libbrim was in the process when this one was loaded. The second one is of no
/// use: operators and the CPU allocator exist once. It does no harm either; see check_only_copy.
bool is_first_copy();

}  // namespace brim
