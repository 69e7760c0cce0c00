#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>
#include <optional>

namespace brim::nn {

/// Which random numbers of torch come next, on the CPU and on one device. Allocates no tensor where
/// that is the CPU or a GPU of CUDA.
class RandomState {
 public:
  /// As it is now.
  explicit RandomState(c10::Device device) : device_(device) {
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(cpu.mutex());
    auto* const own = cpu.get<at::CPUGeneratorImpl>();
    engine_ = own->engine();
    next_float_ = own->next_float_normal_sample();
    next_double_ = own->next_double_normal_sample();
    if (device.is_cuda()) {
      at::Generator other = generator();
      const std::lock_guard others(other.mutex());
      seed_ = other.current_seed();
      offset_ = other.get_offset();
    } else if (!device.is_cpu()) {
      at::Generator other = generator();
      const std::lock_guard others(other.mutex());
      state_ = other.get_state();
    }
  }

  /// From here on.
  void put_in_force() const {
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(cpu.mutex());
    auto* const own = cpu.get<at::CPUGeneratorImpl>();
    own->set_engine(engine_);
    own->set_next_float_normal_sample(next_float_);
    own->set_next_double_normal_sample(next_double_);
    if (!device_.is_cpu()) {
      at::Generator other = generator();
      const std::lock_guard others(other.mutex());
      if (device_.is_cuda()) {
        other.set_current_seed(seed_);
        other.set_offset(offset_);
      } else {
        other.set_state(state_);
      }
    }
  }

 private:
  [[nodiscard]] at::Generator generator() const {
    return at::globalContext().defaultGenerator(device_);
  }

  c10::Device device_;
  at::mt19937 engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
  std::uint64_t seed_ = 0;
  std::uint64_t offset_ = 0;
  at::Tensor state_;
};

/// In force while this lives; then that of before.
class WithRandomState {
 public:
  WithRandomState(const RandomState& state, c10::Device device) : before_(device) {
    state.put_in_force();
  }
  WithRandomState(const WithRandomState&) = delete;
  WithRandomState& operator=(const WithRandomState&) = delete;
  ~WithRandomState() { before_.put_in_force(); }

 private:
  RandomState before_;
};

}  // namespace brim::nn
