#include <brim/testing/oom_injector.h>

#include <c10/util/Exception.h>

#include <atomic>

#include "memory/backend.h"

namespace brim::testing {

class OomInjector::Gate final : public AllocationGate {
 public:
  Gate(std::int64_t at, std::int64_t count) : at_(at), count_(count) {}

  bool admit(std::size_t /*bytes*/) noexcept override {
    const std::int64_t number = allocations.fetch_add(1) + 1;
    // Written so that at + count cannot overflow: "fail forever" is a count of 2^63 - 1.
    const bool fails = number >= at_ && number - at_ < count_;
    failures.fetch_add(fails ? 1 : 0);
    return !fails;
  }

  std::atomic<std::int64_t> allocations{0};
  std::atomic<std::int64_t> failures{0};

 private:
  std::int64_t at_;
  std::int64_t count_;
};

void OomInjector::check_arguments(std::int64_t at, std::int64_t count, c10::Device device) {
  TORCH_CHECK_VALUE(at >= 1, "at must be 1 or more (the first allocation from now is 1), got ", at);
  TORCH_CHECK_VALUE(count >= 1, "count must be 1 or more, got ", count);
  TORCH_CHECK_VALUE(device.is_cpu() || device.is_cuda(), "device must be cpu or cuda, got ",
                    device.str(),
                    ": on another accelerator use a small brim::Budget, which fails for real");
}

OomInjector::OomInjector(std::int64_t at, std::int64_t count, c10::Device device) {
  check_arguments(at, count, device);
  gate_ = std::make_unique<Gate>(at, count);
  DeviceBackend& backend = backend_for(device);
  backend.prepare(device);
  gates_ = backend.gates();
  TORCH_CHECK_NOT_IMPLEMENTED(
      gates_ != nullptr, "failures cannot be injected on ", device.str(),
      ": its allocator is not torch's own, or this build of brim has no CUDA support");
  gates_->add(*gate_);
}

OomInjector::~OomInjector() { close(); }

void OomInjector::close() noexcept {
  if (!closed_) {
    closed_ = true;
    gates_->remove(*gate_);
  }
}

std::int64_t OomInjector::allocations() const { return gate_->allocations.load(); }

std::int64_t OomInjector::failures() const { return gate_->failures.load(); }

}  // namespace brim::testing
