#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <utility>

namespace brim {

/// A copy of the state of the CPU's generator; the state itself is in the source.
struct CpuRandomSnapshot {
  int users =
      0;  ///< RandomStates, and the thread's latest; not atomic, since all are on one thread
};

/// The whole state of a generator that counts.
struct RandomPlace {
  std::uint64_t seed;
  std::uint64_t offset;
};

/// The state of torch's default random generators, so that work that is repeated draws the same
/// numbers again.
///
/// As long as no random number was drawn since the last one on this thread, taking one costs the
/// generator's lock and a comparison, about 15 ns in a process of one thread and 30 ns in others:
/// the snapshot of the CPU's generator (2.5 kB) is shared between them and only copied when the
/// generator has moved on. For CUDA and XPU it is a seed and an offset of each device;
/// other accelerators' generators, and those that the user made, are not covered.
///
/// Belongs to the thread that took it.
class BRIM_API RandomState {
 public:
  /// Takes the state of the CPU's generator, and of all CUDA or XPU devices' if `device` is one of
  /// them. Its index does not matter: work may draw on any.
  explicit RandomState(c10::Device device);
  ~RandomState() {
    if (cpu_ != nullptr && --cpu_->users == 0) {
      destroy(cpu_);
    }
  }
  RandomState(RandomState&& other) noexcept
      : cpu_(std::exchange(other.cpu_, nullptr)),
        kind_(other.kind_),
        accelerators_(std::move(other.accelerators_)) {}
  RandomState& operator=(RandomState&& other) noexcept {
    std::swap(cpu_, other.cpu_);
    std::swap(kind_, other.kind_);
    std::swap(accelerators_, other.accelerators_);
    return *this;
  }

  /// Puts the generators back to where they were.
  void restore() const;

  /// Whether nothing was drawn since.
  [[nodiscard]] bool is_current() const;

 private:
  void take_accelerators();
  static void destroy(CpuRandomSnapshot* snapshot);

  CpuRandomSnapshot* cpu_;
  c10::DeviceType kind_;
  c10::SmallVector<RandomPlace, 8> accelerators_;  // by index; empty before the first use of one
};

}  // namespace brim
