#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace brim {

struct CpuRandomSnapshot;

/// The state of torch's default random generators, so that work that is repeated draws the same
/// numbers again.
///
/// Taking one costs a few nanoseconds as long as no random number was drawn since the last one on
/// this thread: the snapshot of the CPU's generator (2.5 kB) is shared between them and only copied
/// when the generator has moved on. For CUDA and XPU it is a seed and an offset; other
/// accelerators' generators, and those that the user made, are not covered.
///
/// Belongs to the thread that took it.
class BRIM_API RandomState {
 public:
  /// Takes the state of the CPU's generator, and of the accelerator's if `device` is a CUDA or XPU
  /// device.
  explicit RandomState(c10::Device device);
  ~RandomState();
  RandomState(RandomState&& other) noexcept
      : cpu_(std::exchange(other.cpu_, nullptr)), accelerator_(other.accelerator_) {}
  RandomState& operator=(RandomState&& other) noexcept {
    std::swap(cpu_, other.cpu_);
    std::swap(accelerator_, other.accelerator_);
    return *this;
  }

  /// Puts the generators back to where they were.
  void restore() const;

 private:
  struct Accelerator {
    c10::Device device;
    std::uint64_t seed;
    std::uint64_t offset;
  };

  CpuRandomSnapshot* cpu_;  // counts its users, who are all on one thread
  std::optional<Accelerator> accelerator_;
};

}  // namespace brim
