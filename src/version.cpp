#include <brim/runtime.h>
#include <brim/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <string>

#include "only_copy.h"
#include "waiting.h"

namespace brim {
namespace {

/// The file that this code was loaded from.
std::string own_file() {
  Dl_info info{};
  const bool known = dladdr(reinterpret_cast<const void*>(&is_first_copy), &info) != 0;
  return known && info.dli_fname != nullptr ? info.dli_fname : "libbrim";
}

}  // namespace

const char* version() noexcept { return BRIM_VERSION_STRING; }

const char* built_with_torch() noexcept { return BRIM_TORCH_VERSION; }

bool is_first_copy() {
  static const bool first =
      !c10::Dispatcher::singleton().findSchema({"brim::linear", ""}).has_value();
  return first;
}

namespace {
// Before any initialiser of this copy registers an operator: those run after constructors that have
// a priority.
[[gnu::constructor(101)]] void ask_at_load() { is_first_copy(); }
}  // namespace

void check_only_copy() {
  TORCH_CHECK(is_first_copy(), own_file(),
              " is the second copy of libbrim in this process, which would count memory and "
              "register operators twice: link the program and its extensions to one libbrim (the "
              "Python package has its own in brim/lib)");
}

void set_waiter(Waiter waiter, InterruptCheck check) noexcept {
  current_waiter.store(waiter);
  current_interrupt_check.store(check);
}

void run_waiting(void (*wait)(const void*), const void* context) {
  if (const Waiter waiter = current_waiter.load()) {
    waiter(wait, context);
  } else {
    wait(context);
  }
}

}  // namespace brim
