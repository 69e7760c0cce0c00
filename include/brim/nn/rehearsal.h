#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>
#include <brim/nn/pressure.h>
#include <brim/predict/allocator_model.h>

#include <cstdint>

// How a program, such as brim's Python package, finds out without running a call what it would give
// up for want of memory, and compute again.

namespace brim::nn {

/// A call that runs on fake tensors, and the memory that it would take, which is modelled. Layers
/// that keep values while there is room (`Recompute::automatic`) keep their fake values in the same
/// way. Where an allocation does not fit, they are given up as they would be in reality, and the
/// call computes them again. Nothing of that counts in pressure(), or for later steps.
///
/// One at a time. Of tensors in the mode alone, in whatever thread that is in force.
class BRIM_API Rehearsal {
 public:
  /// @param options of the device's allocator, with its capacity. 0: all is given up at once
  /// @param grows whether the capacity is what is free: what the call finds held comes on top
  /// @param type of the device
  /// @param seen the device that C++ code sees of the fake tensors that are on it
  /// @param mode the mode of the fake tensors, an object of Python
  Rehearsal(const AllocatorOptions& options, bool grows, c10::DeviceType type, c10::Device seen,
            const void* mode);
  Rehearsal(const Rehearsal&) = delete;
  Rehearsal& operator=(const Rehearsal&) = delete;
  ~Rehearsal();

  /// From here on values are kept. @throws c10::Error if another one goes on
  void begin();

  /// The values that are left go, and none is kept any more. Twice is no error.
  void end();

  /// Memory that the call found. @returns its number, for free()
  std::int64_t hold(std::int64_t bytes);

  /// Memory that the call takes. Where it does not fit when all is given up, it is taken anyway.
  std::int64_t allocate(std::int64_t bytes);

  void free(std::int64_t number);
  void empty_cache();

  /// Whether anything could have been given up.
  [[nodiscard]] bool keeps_while_room() const;

  /// What was given up, until end().
  [[nodiscard]] Pressure pressure() const;

 private:
  std::int64_t allocate_anyway(std::int64_t bytes);

  AllocatorModel model_;
  std::int64_t capacity_;
  bool grows_;
  c10::DeviceType type_;
  c10::Device seen_;
  const void* mode_;
  bool goes_on_ = false;
};

/// Whether a tensor is one of a rehearsal, and this is its thread: it is fake, but its sizes,
/// strides and memory are those of the real one.
[[nodiscard]] BRIM_API bool is_rehearsed(const at::Tensor& tensor);

}  // namespace brim::nn
