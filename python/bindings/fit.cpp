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
              std::int64_t budget, const py::object& device, const py::object& probes) {
  const at::Tensor tensor = numbers_argument("sizes", sizes);
  const FitOptions options{
      .budget = budget,
      .cost = padded ? batching::Cost::Kind::padded : batching::Cost::Kind::sum,
      .device = device_argument(device),
      .probes = integer_argument("probes", probes),
      .collect_garbage = &collect_garbage};
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
                   std::int64_t budget, const py::object& device) {
  const at::Tensor tensor = numbers_argument("sizes", features);
  const FitOptions options{
      .budget = budget, .device = device_argument(device), .collect_garbage = &collect_garbage};
  const BatchWork run = [&](std::span<const std::int64_t> batch) {
    call_python(work, std::vector<std::int64_t>(batch.begin(), batch.end()));
  };
  return py::cast(fit_weights(values_of<std::int64_t>(tensor), columns, run, options));
}

}  // namespace

void register_fit(py::module_& m) {
  m.def("fit_weights", &weights, py::arg("features"), py::arg("columns"), py::arg("work"),
        py::arg("budget"), py::arg("device"));
  m.def(
      "combined_sizes",
      [](const py::object& features, const std::vector<double>& weights) {
        const at::Tensor tensor = numbers_argument("sizes", features);
        return combined_sizes(values_of<std::int64_t>(tensor), weights);
      },
      py::arg("features"), py::arg("weights"));
  m.def("fit_batching", &fit, py::arg("sizes"), py::arg("work"), py::arg("make"), py::arg("padded"),
        py::arg("budget"), py::arg("device"), py::arg("probes"));
}

}  // namespace brim::python
