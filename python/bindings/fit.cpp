#include <brim/dist/group_channel.h>
#include <brim/fit/fit_batching.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings.h"
#include "python_error.h"
#include "sample_batching.h"
#include "tensors.h"

namespace brim::python {
namespace {

/// @param work called with a list of indices.
/// @param make called with a maximum and the model of a padded batch, or None; gives a
///     SampleBatching.
/// @return the maximum, the model or None, and the error.
py::tuple fit(const py::object& sizes, const py::object& work, const py::object& make, bool padded,
              std::int64_t budget, const py::object& device, const py::object& probes,
              FitRanks* ranks) {
  const at::Tensor tensor = column_of<std::int64_t>("sizes", sizes);
  const FitOptions options{
      .budget = budget,
      .cost = padded ? batching::Cost::Kind::padded : batching::Cost::Kind::sum,
      .device = device_argument(device),
      .probes = integer_argument("probes", probes),
      .collect_garbage = &collect_garbage,
      .ranks = ranks};
  const BatchWork run = [&](std::span<const std::int64_t> batch) {
    call_python(work, std::vector<std::int64_t>(batch.begin(), batch.end()));
  };
  const MakeBatching make_batching = [&](const FittedLimit& fitted) {
    auto made = make(fitted.maximum, fitted.model).cast<std::shared_ptr<SampleBatching>>();
    const batching::Batching* core = made->core.get();
    return std::shared_ptr<const batching::Batching>(std::move(made), core);
  };
  const FittedLimit fitted =
      fit_batching(values_of<std::int64_t>(tensor), run, make_batching, options);
  return py::make_tuple(fitted.maximum, fitted.model, fitted.error);
}

py::object weights(const py::object& features, std::size_t columns, const py::object& work,
                   std::int64_t budget, const py::object& device, FitRanks* ranks) {
  const at::Tensor tensor = column_of<std::int64_t>("sizes", features);
  const FitOptions options{.budget = budget,
                           .device = device_argument(device),
                           .collect_garbage = &collect_garbage,
                           .ranks = ranks};
  const BatchWork run = [&](std::span<const std::int64_t> batch) {
    call_python(work, std::vector<std::int64_t>(batch.begin(), batch.end()));
  };
  return py::cast(fit_weights(values_of<std::int64_t>(tensor), columns, run, options));
}

}  // namespace

void register_fit(py::module_& m) {
  py::class_<FitRanks>(m, "FitRanks")
      .def(py::init<std::shared_ptr<GroupChannel>>())
      .def("least", &FitRanks::least)
      .def("same", &FitRanks::same)
      .def("fail", &FitRanks::fail);
  m.def("fit_weights", &weights);
  m.def("combined_sizes", [](const py::object& features, const std::vector<double>& weights) {
    const at::Tensor tensor = column_of<std::int64_t>("sizes", features);
    return combined_sizes(values_of<std::int64_t>(tensor), weights);
  });
  m.def("fit_batching", &fit);
}

}  // namespace brim::python
