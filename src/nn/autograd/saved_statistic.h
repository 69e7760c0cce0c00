#pragma once

#include <ATen/core/Tensor.h>

#include <map>

#include "nn/autograd/saved_tensor.h"

namespace brim::nn {

/// A running statistic that a forward in eval mode used and that its backward needs. In training
/// torch's kernels write to it without a new version. Such a forward calls copy_for_readers()
/// first, which gives a copy to the nodes that still need the old values; no copy is made before.
/// Used under the lock of its node; copies may come from any thread.
class KeptStatistic {
 public:
  using Readers = std::multimap<const void*, KeptStatistic*>;

  KeptStatistic() = default;
  KeptStatistic(const KeptStatistic&) = delete;
  KeptStatistic& operator=(const KeptStatistic&) = delete;
  ~KeptStatistic() { stop_reading(); }

  /// At forward, once.
  void keep(const at::Tensor& statistic);

  [[nodiscard]] bool freeze(const c10::SymInt& most) { return saved_.freeze(most); }

  [[nodiscard]] at::Tensor lend() {
    const at::Tensor old = copy();
    return old.defined() ? old : saved_.lend();
  }

  [[nodiscard]] at::Tensor take() {
    const at::Tensor old = copy();
    return old.defined() ? old : saved_.take();
  }

  void release() {
    stop_reading();
    saved_.release();
  }

 private:
  friend void copy_for_readers(const at::Tensor& statistic);

  [[nodiscard]] at::Tensor copy() const;
  void stop_reading();

  Kept saved_;
  // The rest under the lock of all readers.
  at::Tensor copy_;
  c10::Storage memory_;  // no other tensor takes its address meanwhile
  bool is_reading_ = false;
  Readers::iterator place_;
};

/// Before a kernel writes to `statistic`.
void copy_for_readers(const at::Tensor& statistic);

}  // namespace brim::nn
