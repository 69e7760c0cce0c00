#include <brim/memory/bytes.h>
#include <brim/predict/collect_peaks.h>
#include <brim/predict/least_kept.h>
#include <brim/predict/memory_model.h>
#include <brim/predict/polynomial_regression.h>
#include <brim/predict/probe.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "python_error.h"
#include "record.h"

namespace brim::python {
namespace {

using Numbers = std::vector<double>;

/// A PeakSample whose feature is any Python object.
struct PyPeakSample : PeakSample {
  py::object feature;
};

void check_callable(const char* name, const py::object& value) {
  TORCH_CHECK_TYPE(PyCallable_Check(value.ptr()) != 0, name, " must be callable, got ",
                   py::repr(value).cast<std::string>());
}

std::function<void()> cleanup_argument(const py::object& cleanup) {
  if (cleanup.is_none()) {
    return {};
  }
  check_callable("cleanup", cleanup);
  return [cleanup] { cleanup(); };
}

py::list collect(const py::object& work, const py::iterable& inputs, const py::object& device,
                 const py::object& cleanup) {
  check_callable("work", work);
  const CollectOptions options{device_argument(device), cleanup_argument(cleanup),
                               &collect_garbage};
  py::list result;
  // One at a time: an iterable that makes its inputs as it goes never has two of them alive here.
  for (py::iterator input = py::iter(inputs); input != py::iterator::sentinel(); ++input) {
    py::object feature = py::none();
    const std::function<double(std::size_t)> call = [&](std::size_t) {
      feature = call_python(work, *input);
      return 0.0;
    };
    const PeakSample sample = collect_peaks(call, 1, options).front();
    result.append(PyPeakSample{sample, std::move(feature)});
  }
  return result;
}

std::vector<bool> kept(
    const std::vector<std::pair<std::int64_t, std::optional<std::vector<std::size_t>>>>& values,
    const std::vector<std::size_t>& needed) {
  std::vector<ComputedValue> computed;
  computed.reserve(values.size());
  for (const auto& [bytes, made_from] : values) {
    computed.push_back({bytes, made_from});
  }
  return least_kept(computed, needed);
}

MemoryModel probe(const py::object& function,
                  const std::vector<std::pair<std::int64_t, std::int64_t>>& sizes, bool batch,
                  const py::object& device, const std::optional<std::int64_t>& budget,
                  const py::object& probes, const py::object& near_budget,
                  const py::object& cleanup) {
  check_callable("fn", function);
  const ProbeOptions options{.device = device_argument(device),
                             .budget = budget,
                             .probes = integer_argument("probes", probes),
                             .near_budget = integer_argument("near_budget", near_budget),
                             .cleanup = cleanup_argument(cleanup),
                             .collect_garbage = &collect_garbage};
  if (batch) {
    return probe_memory(
        [&](std::int64_t n, std::int64_t length) { call_python(function, n, length); }, sizes,
        options);
  }
  std::vector<std::int64_t> numbers;
  numbers.reserve(sizes.size());
  for (const auto& size : sizes) {
    numbers.push_back(size.first);
  }
  return probe_memory([&](std::int64_t size) { call_python(function, size); }, numbers, options);
}

void register_regression(py::module_& m) {
  using Model = PolynomialRegression;
  py::class_<Model>(m, "PolynomialRegression")
      .def(py::init(
               [](const py::object& degree) { return Model(integer_argument("degree", degree)); }),
           py::arg("degree"))
      .def("_fit", [](Model& self, const Numbers& x, const Numbers& y,
                      std::size_t features) { self.fit(x, y, features); })
      .def("_predict",
           [](const Model& self, const Numbers& x, std::size_t features) {
             Numbers result;
             result.reserve(x.size() / features);
             for (std::size_t i = 0; i < x.size(); i += features) {
               result.push_back(self.predict(std::span(x).subspan(i, features)));
             }
             return result;
           })
      .def("_inverse",
           [](const Model& self, double budget, const Numbers& point, std::size_t feature,
              const py::object& lower, const py::object& upper) {
             return self.inverse(budget, point, feature, integer_argument("lower", lower),
                                 integer_argument("upper", upper));
           })
      .def_property_readonly("degree", &Model::degree, "The degree of the polynomial.")
      .def_property_readonly("features", &Model::features,
                             "How many numbers a point has; 0 before `fit`.")
      .def_property_readonly("fitted", &Model::fitted, "Whether it was fitted.")
      .def_property_readonly(
          "exponents",
          [](const Model& self) {
            py::list result;
            for (const std::vector<int>& powers : self.exponents()) {
              result.append(py::tuple(py::cast(powers)));
            }
            return result;
          },
          "The powers of the features in each monomial.")
      .def_property_readonly("coefficients", &Model::coefficients,
                             "The coefficient of each monomial, as in `exponents`.");
}

void register_samples(py::module_& m) {
  record<PyPeakSample>(
      m, "PeakSample", R"(What one piece of work held at its peak, in bytes.

`collect_peaks` returns them.

Example:
    >>> import brim, torch
    >>> sample, = brim.collect_peaks(lambda n: torch.zeros(n).sum().item(), [256], device="cpu")
    >>> sample.peak - sample.start >= 1024, sample.feature
    (True, 0.0)
)",
      field("feature", &PyPeakSample::feature,
            "What the work returned; None if it ran out of memory."),
      field("peak", &PyPeakSample::peak,
            "The most held on the device, older tensors included; of work that ran out of "
            "memory, a lower bound of its need."),
      field("start", &PyPeakSample::start, "Held before the work began."),
      field("out_of_memory", &PyPeakSample::out_of_memory, "Whether it ran out of memory."),
      field("requested", &PyPeakSample::requested, "Asked for when it ran out, if the error says."))
      .def("__repr__", [](const PyPeakSample& s) {
        return py::str("PeakSample(feature={!r}, peak={}, start={}, out_of_memory={})")
            .format(s.feature, s.peak, s.start, s.out_of_memory);
      });
  record<MemorySample>(
      m, "MemorySample",
      R"(What one size needed; `MemoryModel.samples` has them.

Example:
    >>> import brim
    >>> brim.MemoryModel().fit([1, 2], [100, 200]).samples[0]
    MemorySample(n=1.0, length=0.0, peak=100.0, out_of_memory=False)
)",
      field("n", &MemorySample::n, "How many samples, or the size itself."),
      field("length", &MemorySample::length, "Of the longest sample; 0 for a size."),
      field("peak", &MemorySample::peak,
            "Bytes held at most; if it ran out of memory, a lower bound of the need."),
      field("out_of_memory", &MemorySample::out_of_memory, "Whether it ran out of memory."),
      field("base", &MemorySample::base,
            "Bytes that were held before the work and all the time; 0 if not known."))
      .def(py::init([](double n, double length, double peak, bool out_of_memory) {
        return MemorySample{n, length, peak, out_of_memory};
      }))
      .def("__repr__", [](const MemorySample& s) {
        return py::str("MemorySample(n={}, length={}, peak={}, out_of_memory={})")
            .format(s.n, s.length, s.peak, s.out_of_memory);
      });
  record<ModelError>(
      m, "ModelError",
      R"(How far a model is off for sizes that it has not seen.

Shares of the measured peaks: each measured size is predicted by a model fitted without it.

Example:
    >>> import brim
    >>> model = brim.MemoryModel().fit([1, 2, 3, 4, 5], [100, 200, 300, 400, 500])
    >>> round(model.error.worst, 6)
    0.0
)",
      field("median", &ModelError::median, "The median of the errors, without their sign."),
      field("worst", &ModelError::worst, "The largest of them."),
      field("each", &ModelError::each, "Predicted / measured - 1, of each sample."))
      .def("__repr__", [](const ModelError& self) {
        return py::str("ModelError(median={}, worst={})").format(self.median, self.worst);
      });
  m.def("collect_peaks", &collect);
}

py::dict state_of(const MemoryModel& self) {
  py::dict result;
  const MemoryModelState& state = self.state();
  py::list samples;
  for (const MemorySample& sample : state.samples) {
    samples.append(
        py::make_tuple(sample.n, sample.length, sample.peak, sample.out_of_memory, sample.base));
  }
  result["kind"] = self.kind() == SizeKind::batch ? "batch" : "size";
  result["floor"] = state.floor;
  result["phases"] = state.phases;
  result["margin"] = state.margin;
  result["errors"] = state.error.each;
  result["median_error"] = state.error.median;
  result["worst_error"] = state.error.worst;
  result["samples"] = samples;
  return result;
}

MemoryModel model_of(const py::dict& given) {
  const auto entry = [&](const char* name) {
    TORCH_CHECK_VALUE(given.contains(name), "state_dict has no \"", name,
                      "\": it is not that of a MemoryModel");
    return given[name].cast<py::object>();
  };
  MemoryModelState state;
  try {
    const auto kind = entry("kind").cast<std::string>();
    TORCH_CHECK_VALUE(kind == "batch" || kind == "size",
                      "state_dict's \"kind\" must be \"batch\" or \"size\", got \"", kind, "\"");
    state.kind = kind == "batch" ? SizeKind::batch : SizeKind::size;
    state.floor = entry("floor").cast<double>();
    state.phases = entry("phases").cast<std::vector<Numbers>>();
    if (state.phases.empty()) {
      return {};  // saved before it was fitted
    }
    state.margin = entry("margin").cast<double>();
    state.error = {entry("median_error").cast<double>(), entry("worst_error").cast<double>(),
                   entry("errors").cast<Numbers>()};
    for (const py::handle sample : entry("samples")) {
      using Old = std::tuple<double, double, double, bool>;  // saved before there was a base
      using New = std::tuple<double, double, double, bool, double>;
      const auto [n, length, peak, out_of_memory, base] =
          py::len(sample) == std::tuple_size_v<Old>
              ? std::tuple_cat(sample.cast<Old>(), std::tuple(0.0))
              : sample.cast<New>();
      state.samples.push_back({n, length, peak, out_of_memory, base});
    }
  } catch (const py::cast_error&) {
    TORCH_CHECK_TYPE(
        false, "state_dict holds a value of the wrong type: ", py::repr(given).cast<std::string>());
  }
  return MemoryModel::from_state(std::move(state));
}

void register_model(py::module_& m) {
  using Model = MemoryModel;
  py::class_<Model>(m, "MemoryModel")
      .def(py::init<>())
      .def("_assign", [](Model& self, const Model& other) { self = other; })
      .def("_fit", [](Model& self, const std::vector<MemorySample>& samples,
                      bool batch) { self.fit(samples, batch ? SizeKind::batch : SizeKind::size); })
      .def("_state", &state_of)
      .def("_load", [](Model& self, const py::dict& state) { self = model_of(state); })
      .def("_peak", &Model::peak)
      .def("_safe_peak", &Model::safe_peak)
      .def("_peak_of", [](const Model& self, const Numbers& it) { return self.peak_of(it); })
      .def("_largest_batch", &Model::largest_batch)
      .def("_largest_size", &Model::largest_size)
      .def_property_readonly("fitted", &Model::fitted, "Whether it was fitted.")
      .def_property_readonly(
          "kind",
          [](const Model& self) { return self.kind() == SizeKind::batch ? "batch" : "size"; },
          "\"size\", or \"batch\" for pairs (n, length).")
      .def_property_readonly("error", &Model::error, "How far it is off, a `ModelError`.")
      .def_property_readonly("margin", &Model::margin, "The share that `safe_peak` adds.")
      .def_property_readonly(
          "floor", [](const Model& self) { return self.state().floor; },
          "Bytes that every size needs at least.")
      .def_property_readonly(
          "phases",
          [](const Model& self) {
            const auto names = Model::term_names(self.kind());
            py::list result;
            for (const Numbers& phase : self.state().phases) {
              py::dict terms;
              for (std::size_t j = 0; j < phase.size(); ++j) {
                if (phase[j] > 0) {
                  terms[py::str(names[j])] = phase[j];
                }
              }
              result.append(terms);
            }
            return result;
          },
          "Bytes per term of each phase; the peak is the largest phase, or the floor.")
      .def_property_readonly("samples", &Model::samples, "What was measured.")
      .def("__str__", &Model::to_string);
  m.def("probe_memory", &probe);
}

}  // namespace

void register_predict(py::module_& m) {
  register_regression(m);
  register_samples(m);
  register_model(m);
  m.def("least_kept", &kept);
}

}  // namespace brim::python
