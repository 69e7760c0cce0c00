#pragma once

#include <ATen/core/Tensor.h>
#include <brim/batching/batching.h>
#include <brim/batching/stream.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace brim::python {

/// A Batching and the tensors that its spans refer to.
struct SampleBatching {
  std::vector<at::Tensor> tensors;
  std::shared_ptr<const batching::Batching> core;
};

/// Budgets from what Python code writes, equally many of both: the names of costs ("sum", "count",
/// "padded", "padded_squared"), memory models or functions, and numbers.
/// @throws c10::ValueError / c10::TypeError naming the argument.
std::vector<batching::Limit> limits_argument(const pybind11::list& costs,
                                             const pybind11::list& maxima);

/// "leave_out", "error", "alone", "truncate" or "split". @throws c10::ValueError for others.
batching::Oversize oversize_argument(const std::string& oversize);

/// A position of a BatchStream as state_dict() writes it.
batching::Position position_argument(const pybind11::object& cursor,
                                     const pybind11::object& segments);
/// And back: `cursor` and `segments` of a state.
void write_position(const batching::Position& position, pybind11::dict& state);

/// Indices by reason.
pybind11::dict left_out_of(const std::vector<batching::LeftOut>& left_out);

/// An iterator over batches, each a list of int or a tensor; with `state_dict(batches=None)`.
/// @param stream of this batching.
/// @param description further entries of state_dict().
pybind11::object make_batch_run(std::shared_ptr<SampleBatching> batching,
                                batching::BatchStream stream, bool as_tensors,
                                pybind11::dict description);

void register_batch_iterator(pybind11::module_& m);
void register_sample_stream(pybind11::module_& m);

}  // namespace brim::python
