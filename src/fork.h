#pragma once

namespace brim {

/// Whether this process was forked, since libbrim was loaded, from another one.
bool is_forked_child() noexcept;

/// Whether torch had begun to use an accelerator before that fork. Its driver refuses to work in
/// the child.
bool forked_with_accelerator() noexcept;

}  // namespace brim
