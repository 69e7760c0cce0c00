#pragma once

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings.h"
#include "numbers.h"
#include "sample_batching.h"

namespace brim::python {

/// Sizes are added up in double precision, which tells ints below 2^53 from the next.
inline py::list within_exact(const py::list& maxima) {
  py::list result;
  const py::int_ most((std::int64_t{1} << 53) - 1);
  for (const py::handle maximum : maxima) {
    const bool beyond = PyLong_Check(maximum.ptr()) && maximum > most;
    result.append(beyond ? most : maximum);
  }
  return result;
}

/// A stream of the core that reads samples from a Python iterable and asks a Python function for
/// their sizes.
template <template <class> class Stream>
class PythonStream {
 public:
  /// @param measured number of sizes that the function gives. Further ones, of limits that do not
  ///     depend on a size, are 0.
  /// @param options further arguments of the stream.
  template <class... Options>
  PythonStream(const py::iterable& samples, py::object sizeof_sample, const py::list& costs,
               const py::list& maxima, std::size_t measured, const Options&... options)
      : samples_(py::iter(samples)),
        sizeof_(std::move(sizeof_sample)),
        measured_(measured),
        core_([this] { return read(); },
              [this](const py::object& sample, std::span<double> sizes) { measure(sample, sizes); },
              limits_argument(costs, within_exact(maxima)), options...) {}
  PythonStream(const PythonStream&) = delete;
  PythonStream& operator=(const PythonStream&) = delete;

  /// @throws py::error_already_set with StopIteration at the end.
  std::vector<py::object> next() {
    std::optional<std::vector<py::object>> batch = core_.next();
    if (!batch) {
      PyErr_SetNone(PyExc_StopIteration);
      throw py::error_already_set();
    }
    return std::move(*batch);
  }

  Stream<py::object>& core() { return core_; }

  /// Its Python class, to which the rest is added.
  static py::class_<PythonStream> bind(py::module_& m, const char* name) {
    return py::class_<PythonStream>(m, name)
        .def("__iter__", [](py::object self) { return self; })
        .def("__next__", &PythonStream::next)
        .def_property_readonly("read",
                               [](PythonStream& self) { return self.core_.samples_read(); });
  }

 private:
  std::optional<py::object> read() {
    auto sample = py::reinterpret_steal<py::object>(PyIter_Next(samples_.ptr()));
    if (!sample && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    // An iterable and a function of C run no Python code, which would look for signals.
    if (++read_ % kBetweenSignals == 0 && PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    return sample ? std::optional(std::move(sample)) : std::nullopt;
  }

  void measure(const py::object& sample, std::span<double> all) const {
    std::fill(all.begin(), all.end(), 0.0);
    const std::span<double> sizes = all.first(measured_);
    const py::object size = new_reference(PyObject_CallOneArg(sizeof_.ptr(), sample.ptr()));
    const NumberPlace at{"sizes", "sample", read_ - 1};
    if (sizes.size() == 1 && !PyTuple_Check(size.ptr()) && !PyList_Check(size.ptr())) {
      sizes[0] = size_number(size.ptr(), at);
      return;
    }
    const auto several =
        py::reinterpret_steal<py::object>(PySequence_Fast(size.ptr(), "not a sequence"));
    PyErr_Clear();
    TORCH_CHECK_VALUE(
        several && PySequence_Fast_GET_SIZE(several.ptr()) == static_cast<Py_ssize_t>(sizes.size()),
        "sizeof must give ", sizes.size(), " sizes, one for each max_total_size, got ",
        text_of(py::repr(size)), " for sample ", at.index);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] =
          size_number(PySequence_Fast_GET_ITEM(several.ptr(), static_cast<Py_ssize_t>(i)), at);
    }
  }

  static constexpr std::int64_t kBetweenSignals = 4096;  // samples

  py::iterator samples_;
  py::object sizeof_;
  std::size_t measured_;
  std::int64_t read_ = 0;
  Stream<py::object> core_;
};

}  // namespace brim::python
