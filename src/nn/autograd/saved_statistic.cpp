#include "nn/autograd/saved_statistic.h"

#include <mutex>

#include "fork.h"
#include "nn/autograd/node.h"

namespace brim::nn {
namespace {

struct Registry {
  std::mutex mutex;
  KeptStatistic::Readers readers;  // by the address of what they read
};

Registry& registry() { return shared_object<Registry>(); }

/// Null for tensors without memory of their own, such as those of tracers.
const void* address_of(const at::Tensor& statistic) {
  return statistic.has_storage() && !is_traced(statistic) ? statistic.const_data_ptr() : nullptr;
}

}  // namespace

void KeptStatistic::keep(const at::Tensor& statistic) {
  saved_ = Kept(statistic);
  const void* const address = address_of(statistic);
  if (address == nullptr) {
    return;
  }
  memory_ = statistic.storage();
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  place_ = all.readers.emplace(address, this);
  is_reading_ = true;
}

at::Tensor KeptStatistic::copy() const {
  if (!memory_) {
    return {};
  }
  const std::lock_guard lock(registry().mutex);
  return copy_;
}

void KeptStatistic::stop_reading() {
  if (!memory_) {
    return;
  }
  at::Tensor copy;  // freed without the lock
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  copy = std::move(copy_);
  if (is_reading_) {
    all.readers.erase(place_);
    is_reading_ = false;
  }
}

void copy_for_readers(const at::Tensor& statistic) {
  const void* const address = address_of(statistic);
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    if (address == nullptr || !all.readers.contains(address)) {
      return;
    }
  }
  // Without the lock: to allocate may free a graph, and with it readers.
  const at::Tensor copy = below_autograd([&] { return statistic.clone(); });
  const std::lock_guard lock(all.mutex);
  const auto [first, last] = all.readers.equal_range(address);
  for (auto reader = first; reader != last; ++reader) {
    reader->second->copy_ = copy;
    reader->second->is_reading_ = false;
  }
  all.readers.erase(first, last);
}

}  // namespace brim::nn
