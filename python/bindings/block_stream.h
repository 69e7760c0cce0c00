#pragma once

#include <brim/batching/look_ahead.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "bindings.h"
#include "interpreter.h"
#include "python_stream.h"
#include "sample_batching.h"
#include "tensors.h"

namespace brim::python {

/// A LookAheadStream over samples that come in blocks: arrays, record batches. A sample is a row of
/// a block, known by its number, so that Python is asked once per block and per batch.
class BlockStream {
 public:
  /// @param sizes_of gives a block's sizes: a float64 tensor of one row per sample, one column per
  ///     limit that depends on a size.
  BlockStream(const py::iterable& blocks, py::object sizes_of, const py::list& costs,
              const py::list& maxima, std::size_t measured,
              const batching::LookAheadOptions& options, batching::Ranks ranks)
      : blocks_(py::iter(blocks)),
        sizes_of_(std::move(sizes_of)),
        measured_(measured),
        core_([this](std::span<double> sizes) { return read(sizes); },
              limits_argument(costs, within_exact(maxima)), options, ranks) {}
  BlockStream(const BlockStream&) = delete;
  BlockStream& operator=(const BlockStream&) = delete;

  /// Blocks and which of their rows: a list of tuples (block, int64 tensor).
  /// @throws py::error_already_set with StopIteration at the end.
  py::list next() {
    const auto numbers = core_.next();
    if (!numbers) {
      held_.clear();
      PyErr_SetNone(PyExc_StopIteration);
      throw py::error_already_set();
    }
    for (const std::int64_t number : *numbers) {  // of few blocks
      auto block = held_.end() - 1;
      while (number < block->begin) {
        --block;
      }
      block->rows.push_back(number - block->begin);
    }
    py::list result;
    for (Block& block : held_) {
      if (!block.rows.empty()) {
        const std::span<const std::int64_t> rows = block.rows;
        result.append(py::make_tuple(block.object, to_python(tensor_of(rows))));
        block.rows.clear();
      }
    }
    forget();
    return result;
  }

  bool skip() {
    const bool more = core_.next().has_value();
    forget();
    return more;
  }

  batching::LookAheadCore& core() { return core_; }

 private:
  struct Block {
    py::object object;
    std::int64_t begin;              // the number of its first row
    std::vector<std::int64_t> rows;  // in the batch that is being made
  };

  /// @param out empty where a sample is passed over.
  bool read(std::span<double> out) {
    while (next_ == count_) {
      if (!read_block()) {
        return false;
      }
    }
    if (!out.empty()) {
      std::copy_n(values_, measured_, out.begin());
      std::fill(out.begin() + static_cast<std::ptrdiff_t>(measured_), out.end(), 0.0);
    }
    values_ += measured_;
    ++next_;
    return true;
  }

  bool read_block() {
    auto block = py::reinterpret_steal<py::object>(
        entering_python([&] { return PyIter_Next(blocks_.ptr()); }));
    if ((!block && PyErr_Occurred() != nullptr) || PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    if (!block) {
      return false;
    }
    sizes_ = THPVariable_Unpack(invoke(sizes_of_, block).ptr()).contiguous();
    values_ = sizes_.const_data_ptr<double>();
    next_ = 0;
    count_ = sizes_.size(0);
    if (count_ > 0) {
      held_.push_back({std::move(block), rows_read_, {}});
      rows_read_ += count_;
    }
    return true;
  }

  /// Lets go of blocks all of whose rows have been given.
  void forget() {
    const std::int64_t needed = core_.first_needed();
    while (held_.size() > 1 && held_[1].begin <= needed) {
      release(std::move(held_.front().object));
      held_.pop_front();
    }
  }

  py::iterator blocks_;
  py::object sizes_of_;
  std::size_t measured_;
  std::deque<Block> held_;  // the last is the one that is read
  std::int64_t rows_read_ = 0;
  at::Tensor sizes_;  // of that block, and the place and number of its next row
  const double* values_ = nullptr;
  std::int64_t next_ = 0;
  std::int64_t count_ = 0;
  batching::LookAheadCore core_;
};

}  // namespace brim::python
