#pragma once

#include <brim/export.h>

namespace torch::autograd {
class SavedVariable;
}

// How a program, such as brim's Python package, watches what layers keep without changing it.

namespace brim::nn {

/// A pair of saved-tensor hooks that holds each tensor as it is. Layers act as if it were not
/// there; other hooks may hold tensors elsewhere, and layers keep away from what they hold.
struct HooksThatWatch {
  const void* unpack = nullptr;  // the PyObject of the second of the pair; null: none watch
  const void* below = nullptr;   // that of the hooks in force without the pair
  /// Whether the pair holds it; not called for what no hooks hold. Called without the GIL.
  bool (*holds)(const torch::autograd::SavedVariable& saved) = nullptr;
};

/// Those of this thread.
[[nodiscard]] BRIM_API HooksThatWatch hooks_that_watch() noexcept;

/// For this thread, until the next call. The objects must live until then.
BRIM_API void set_hooks_that_watch(const HooksThatWatch& hooks) noexcept;

}  // namespace brim::nn
