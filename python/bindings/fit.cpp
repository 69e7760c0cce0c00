#include <brim/dist/group_channel.h>
#include <brim/fit/even_steps.h>
#include <brim/fit/fit_batching.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings.h"
#include "interpreter.h"
#include "python_error.h"
#include "sample_batching.h"
#include "tensors.h"

namespace brim::python {
namespace {

py::object model_of(const FittedLimit& fitted) {
  return fitted.need ? py::cast(*fitted.need) : py::cast(fitted.model);
}

/// @param work called with a list of indices.
/// @param make called with a maximum and the model of a padded batch, or None; gives a
///     SampleBatching.
/// @param columns the number of sizes of a sample, in each of which it is padded.
/// @return the maximum, the model (a PaddedNeed of several sizes) or None, and the error.
py::tuple fit(const py::object& sizes, const py::object& work, const py::object& make, bool padded,
              std::int64_t budget, const py::object& device, const py::object& probes,
              FitRanks* ranks, std::int64_t columns) {
  const at::Tensor tensor = column_of<std::int64_t>("sizes", sizes);
  const FitOptions options{
      .budget = budget,
      .cost = padded ? batching::Cost::Kind::padded : batching::Cost::Kind::sum,
      .device = device_argument(device),
      .probes = integer_argument("probes", probes),
      .columns = columns,
      .collect_garbage = &collect_garbage,
      .ranks = ranks};
  const BatchWork run = [&](std::span<const std::int64_t> batch) {
    call_python(work, std::vector<std::int64_t>(batch.begin(), batch.end()));
  };
  const MakeBatching make_batching = [&](const FittedLimit& fitted) {
    auto made = make(fitted.maximum, model_of(fitted)).cast<std::shared_ptr<SampleBatching>>();
    const batching::Batching* core = made->core.get();
    return std::shared_ptr<const batching::Batching>(std::move(made), core);
  };
  const FittedLimit fitted =
      fit_batching(values_of<std::int64_t>(tensor), run, make_batching, options);
  return py::make_tuple(fitted.maximum, model_of(fitted), fitted.error);
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
  py::class_<PaddedNeed>(
      m, "PaddedNeed",
      R"(About how many bytes a batch needs whose samples are padded in several sizes.

A sampler that `fit` made for such samples has one as its `model`. It may be the `cost` of any
sampler with as many sizes per sample, and a budget in bytes.

Example:
    >>> from brim.data import PaddedNeed
    >>> need = PaddedNeed(1, [1000, 0, 0, 8, 0, 0])
    >>> need(16, 100), print(need)
    peak = 1000 B + 8 B · n·a
    (13800.0, None)
)")
      .def(py::init<std::size_t, std::vector<double>>(), py::arg("sizes"), py::arg("weights"))
      .def_property_readonly("sizes", &PaddedNeed::sizes, "How many sizes a sample has.")
      .def_property_readonly("weights", &PaddedNeed::weights, "Bytes for each of `terms`.")
      .def_property_readonly(
          "terms", [](const PaddedNeed& self) { return PaddedNeed::term_names(self.sizes()); },
          "What need is a sum of: n is the number of samples, a to d are the longest sizes.")
      .def("__call__",
           [](const PaddedNeed& self, double n, const py::args& longest) {
             const auto sizes = longest.cast<std::vector<double>>();
             TORCH_CHECK_VALUE(sizes.size() == self.sizes(), "samples must have ", self.sizes(),
                               " sizes, got ", sizes.size());
             return self.at(n, sizes);
           })
      .def("__str__", &PaddedNeed::to_string)
      .def("__repr__",
           [](const PaddedNeed& self) { return "<PaddedNeed: " + self.to_string() + ">"; })
      .def("__eq__",
           [](const PaddedNeed& self, const PaddedNeed& other) {
             return self.sizes() == other.sizes() && self.weights() == other.weights();
           })
      .def(py::pickle(
          [](const PaddedNeed& self) { return py::make_tuple(self.sizes(), self.weights()); },
          [](const py::tuple& state) {
            return PaddedNeed(state[0].cast<std::size_t>(), state[1].cast<std::vector<double>>());
          }));
  py::class_<FitRanks>(m, "FitRanks")
      .def(py::init<std::shared_ptr<GroupChannel>, std::string>(), py::arg("channel"),
           py::arg("what") = "fit")
      .def("least", &FitRanks::least)
      .def("same", &FitRanks::same)
      .def("end_with_next", &FitRanks::end_with_next)
      .def("fail", &FitRanks::fail);
  py::class_<EvenSteps>(m, "EvenSteps")
      .def(py::init([](const std::shared_ptr<GroupChannel>& channel, const std::string& at_end,
                       std::int64_t ahead, std::int64_t done, std::optional<std::int64_t> total) {
        return std::make_unique<EvenSteps>(
            channel, EvenSteps::Options{.at_end = word_argument<EvenSteps::AtEnd>(
                                            "at_end", at_end, {"stop", "repeat"}),
                                        .ahead = ahead,
                                        .done = done,
                                        .total = total});
      }))
      .def_property_readonly("to_read", &EvenSteps::to_read)
      .def("read", &EvenSteps::read)
      .def("end", &EvenSteps::end)
      .def("compare", &EvenSteps::compare)
      .def_property_readonly("all_begin_alike", &EvenSteps::all_begin_alike)
      // The others may be slow, and this process has threads that load data.
      .def("step", [](EvenSteps& self) { return without_gil([&] { return self.step(); }); })
      .def("fail",
           [](EvenSteps& self, const std::string& why) { without_gil([&] { self.fail(why); }); })
      .def_property_readonly("steps", &EvenSteps::steps)
      .def_property_readonly("batches_read", &EvenSteps::batches_read)
      .def_property_readonly("total", &EvenSteps::total)
      .def_property_readonly("ended", &EvenSteps::ended)
      .def_property_readonly("agrees_next", &EvenSteps::agrees_next)
      .def_property_readonly("exchanges", &EvenSteps::exchanges);
  m.def("fit_weights", &weights);
  m.def("combined_sizes", [](const py::object& features, const std::vector<double>& weights) {
    const at::Tensor tensor = column_of<std::int64_t>("sizes", features);
    return combined_sizes(values_of<std::int64_t>(tensor), weights);
  });
  m.def("fit_batching", &fit);
}

}  // namespace brim::python
