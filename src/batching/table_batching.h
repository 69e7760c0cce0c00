#pragma once

#include <brim/batching/batching.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "batching/sample_table.h"

namespace brim::batching::detail {

/// What a Batching over a table of samples tells of it.
template <class T>
class TableBatching : public Batching {
 public:
  TableBatching(Columns<T> columns, const Order& order, Oversize oversize)
      : table_(std::move(columns), order, oversize) {}

  [[nodiscard]] std::int64_t samples() const override { return table_.given(); }
  [[nodiscard]] const std::vector<LeftOut>& left_out() const override { return table_.left_out(); }
  [[nodiscard]] BatchFigures figures(std::span<const std::int64_t> batch) const override {
    return table_.figures(batch);
  }

 protected:
  [[nodiscard]] const SampleTable<T>& table() const { return table_; }

 private:
  SampleTable<T> table_;
};

}  // namespace brim::batching::detail
