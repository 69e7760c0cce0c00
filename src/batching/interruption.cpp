#include <brim/batching/interruption.h>

#include <utility>

namespace brim::batching {
namespace {

thread_local InterruptionGuard* innermost_guard = nullptr;

}  // namespace

InterruptionGuard::InterruptionGuard(std::function<void()> check)
    : check_(std::move(check)), outer_(std::exchange(innermost_guard, this)) {}

InterruptionGuard::~InterruptionGuard() { innermost_guard = outer_; }

void check_interruption() {
  if (innermost_guard != nullptr) {
    innermost_guard->check_();
  }
}

}  // namespace brim::batching
