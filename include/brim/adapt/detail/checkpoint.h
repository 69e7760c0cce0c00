#pragma once

#include <brim/adapt/detail/random_state.h>
#include <brim/adapt/options.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace brim {

/// The state before an attempt: how much memory was in use, the random state, and whether torch
/// used oneDNN. Cheap, because it is taken on the path of a call that fits.
class Checkpoint {
 public:
  /// Whether to read how much memory of an accelerator is in use. That takes microseconds, many
  /// times the rest. Without it a first failed attempt is not checked for memory that did not come
  /// back; the attempts after it are.
  enum class Detail : std::uint8_t { all, cheap };

  explicit Checkpoint(const AdaptOptions& options, Detail detail = Detail::all);

  /// The device that the options name, or the current one. The current one is looked up when it is
  /// needed, after a failure or for all details: the driver takes its time.
  c10::Device device() const;

  /// Bytes that tensors held on `device` at that time; empty for a device that was not read.
  std::optional<std::int64_t> held(c10::Device device) const;

  void restore_random_state() const;

  /// If memory runs out inside a matrix product of oneDNN, torch switches it off for the rest of
  /// the process, and everything after is slower. After a failed attempt it is on again.
  void restore_onednn() const;

 private:
  mutable std::optional<c10::Device> device_;
  std::int64_t cpu_held_;
  std::optional<std::int64_t> device_held_;  // of an accelerator
  std::optional<RandomState> random_;
  bool onednn_;
};

}  // namespace brim
