#include <brim/memory/budget.h>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "fork.h"
#include "memory/backend.h"

namespace brim {
namespace {

/// The limits of the open budgets of every device. Kept as a list and not as "the previous limit",
/// because budgets of several threads may end in any order.
struct OpenBudgets {
  std::mutex mutex;
  std::unordered_map<c10::Device, std::vector<std::int64_t>> limits;
};

OpenBudgets& open_budgets() { return shared_object<OpenBudgets>(); }

std::optional<std::int64_t> tightest(const std::vector<std::int64_t>& limits) {
  if (limits.empty()) {
    return std::nullopt;
  }
  return *std::min_element(limits.begin(), limits.end());
}

std::int64_t open_budget(const ByteLimit& limit, c10::Device device) {
  DeviceBackend& backend = backend_for(device);
  backend.prepare(device);
  OpenBudgets& open = open_budgets();
  const std::lock_guard lock(open.mutex);
  auto& limits = open.limits[device];
  const std::int64_t whole = limit.is_percentage() ? backend.stats(device).limit : 0;
  const std::int64_t bytes = limit.resolve(whole);
  limits.reserve(limits.size() + 1);  // nothing may fail once the limit is set
  backend.set_limit(device, std::min(bytes, tightest(limits).value_or(bytes)));
  limits.push_back(bytes);
  return bytes;
}

thread_local int beyond_budgets = 0;

}  // namespace

BeyondBudget::BeyondBudget() { ++beyond_budgets; }

void BeyondBudget::close() noexcept {
  if (!closed_) {
    closed_ = true;
    --beyond_budgets;
  }
}

bool BeyondBudget::is_open() noexcept { return beyond_budgets > 0; }

std::optional<std::int64_t> budget_in_force(c10::Device device) {
  OpenBudgets& open = open_budgets();
  const std::lock_guard lock(open.mutex);
  return tightest(open.limits[resolve_device(device)]);
}

Budget::Budget(ByteLimit limit, c10::Device device)
    : device_(resolve_device(device)),
      limit_(open_budget(limit, device_)),
      onednn_(device_.is_cpu() && at::globalContext().userEnabledMkldnn()) {}

Budget::Budget(std::int64_t bytes, c10::Device device)
    : Budget(ByteLimit::of_bytes(bytes), device) {}

Budget::Budget(std::string_view limit, c10::Device device)
    : Budget(ByteLimit::parse(limit), device) {}

Budget::~Budget() { close(); }

void Budget::close() noexcept {
  if (closed_) {
    return;
  }
  closed_ = true;
  if (onednn_) {
    at::globalContext().setUserEnabledMkldnn(true);
  }
  OpenBudgets& open = open_budgets();
  const std::lock_guard lock(open.mutex);
  auto& limits = open.limits[device_];
  limits.erase(std::find(limits.begin(), limits.end(), limit_));
  try {
    backend_for(device_).set_limit(device_, tightest(limits));
  } catch (...) {
    // The device is in an error state that has been reported elsewhere, and takes no new limit.
  }
}

}  // namespace brim
