#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "nn/autograd/time_again.h"

namespace brim::nn {

struct Slot;

/// A value that can be computed again in backward, kept for as long as there is room. If memory
/// runs out, in whatever thread, it is dropped (see pressure.h); whoever holds it finds nothing
/// then, and computes it again.
class KeptWhileRoom {
 public:
  KeptWhileRoom() noexcept;
  KeptWhileRoom(KeptWhileRoom&&) noexcept;
  KeptWhileRoom& operator=(KeptWhileRoom&&) noexcept;
  ~KeptWhileRoom();

  /// At forward. Not of values that are traced, but in a rehearsal: they are computed again.
  /// @param work arithmetic operations that give one element again; 0 for a few passes over memory
  void set(const at::Tensor& value, double work);

  /// Without a place in the graph. Undefined if it was dropped, or written to since.
  [[nodiscard]] at::Tensor get() const;

  /// For the scope in which it is computed again, where get() found that it was dropped.
  [[nodiscard]] TimedAgain timed() const noexcept;

  void reset() noexcept;

 private:
  std::unique_ptr<Slot> slot_;
};

}  // namespace brim::nn
