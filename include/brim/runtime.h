#pragma once

#include <brim/export.h>

namespace brim {

/// The version of brim, as `"0.1.0"`.
BRIM_API const char* version() noexcept;

/// The version of torch that this library was built with. Binaries do not carry over between
/// torch's minor versions.
BRIM_API const char* built_with_torch() noexcept;

/// @throws c10::Error if another copy of libbrim was loaded before this one: two would count CPU
/// memory and register operators twice. Everything that counts or limits CPU memory calls it.
BRIM_API void check_only_copy();

/// Runs `wait(context)`, which may block for long. The Python package sets one that releases the
/// GIL meanwhile.
using Waiter = void (*)(void (*wait)(const void*), const void* context);
/// Throws if whoever waits wants to stop, as by Ctrl-C. Called only in waits that may be given up,
/// never after one that other ranks or threads depend on.
using InterruptCheck = void (*)();
/// Sets both, for the whole process. Either may be null.
BRIM_API void set_waiter(Waiter waiter, InterruptCheck check = nullptr) noexcept;

/// Runs `wait(context)` through the waiter that was set, or directly.
BRIM_API void run_waiting(void (*wait)(const void*), const void* context);

}  // namespace brim
