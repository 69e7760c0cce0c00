#include "memory/running_operator.h"

#include <ATen/record_function.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

namespace brim {
namespace {

std::atomic<std::uint64_t> watch{0};  // the number of the newest one
std::atomic<std::int32_t> begun{0};   // operators, since it began

/// What runs on this thread.
struct Running {
  std::uint64_t watch = 0;  // that it was told by
  RunningOperator now{};
  std::vector<std::uint64_t> around{};  // the paths of the operators that are not inside another
};
thread_local Running running;

std::uint64_t joined(std::uint64_t path, const char* name) {
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15U;
  return (path ^ std::hash<std::string_view>()(name)) * kOdd;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  Running& here = running;
  if (const std::uint64_t newest = watch.load(std::memory_order_relaxed); here.watch != newest) {
    here = {.watch = newest};
  }
  if (here.around.empty()) {
    here.now.number = begun.fetch_add(1, std::memory_order_relaxed);
    here.now.name = joined(0, function.name());
    here.now.path = 0;
  }
  here.around.push_back(here.now.path);
  here.now.path = joined(here.now.path, function.name());
  return nullptr;
}

void end(const at::RecordFunction& /*function*/, at::ObserverContext* /*context*/) {
  Running& here = running;
  if (!here.around.empty()) {  // else it began before the watch
    here.now.path = here.around.back();
    here.around.pop_back();
  }
}

}  // namespace

OperatorWatch::OperatorWatch() {
  begun.store(0, std::memory_order_relaxed);
  watch.fetch_add(1, std::memory_order_relaxed);
  callback_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&begin, &end)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

OperatorWatch::~OperatorWatch() { at::removeCallback(callback_); }

RunningOperator running_operator() noexcept {
  return running.watch == watch.load(std::memory_order_relaxed) ? running.now : RunningOperator{};
}

}  // namespace brim
