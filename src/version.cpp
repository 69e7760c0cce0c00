#include <brim/runtime.h>
#include <brim/version.h>

#include <atomic>

namespace brim {
namespace {

std::atomic<Waiter> current_waiter{nullptr};

}  // namespace

const char* version() noexcept { return BRIM_VERSION_STRING; }

const char* built_with_torch() noexcept { return BRIM_TORCH_VERSION; }

void set_waiter(Waiter waiter) noexcept { current_waiter.store(waiter); }

void run_waiting(void (*wait)(const void*), const void* context) {
  if (const Waiter waiter = current_waiter.load()) {
    waiter(wait, context);
  } else {
    wait(context);
  }
}

}  // namespace brim
