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

namespace brim::python {

/// Reads samples from a Python iterable and asks a Python function for their sizes.
class SampleReader {
 public:
  /// @param measured COUNT of sizes that the function gives. Further ones, of limits that do not
  ///     depend on a size, are 0.
  SampleReader(const pybind11::iterable& samples, pybind11::object sizeof_sample,
               std::size_t measured)
      : samples_(pybind11::iter(samples)), sizeof_(std::move(sizeof_sample)), measured_(measured) {}

  /// Sizes are added up in double precision, which tells ints below 2^53 from the next.
  static pybind11::list within_exact(const pybind11::list& maxima) {
    pybind11::list result;
    const pybind11::int_ most((std::int64_t{1} << 53) - 1);
    for (const pybind11::handle maximum : maxima) {
      const bool beyond = PyLong_Check(maximum.ptr()) && maximum > most;
      result.append(beyond ? pybind11::object(most)
                           : pybind11::reinterpret_borrow<pybind11::object>(maximum));
    }
    return result;
  }

  /// The batch, or the end of a Python iteration.
  static std::vector<pybind11::object> batch_or_stop(
      std::optional<std::vector<pybind11::object>> batch) {
    if (!batch) {
      PyErr_SetNone(PyExc_StopIteration);
      throw pybind11::error_already_set();
    }
    return std::move(*batch);
  }

  std::optional<pybind11::object> read() {
    auto sample = pybind11::reinterpret_steal<pybind11::object>(PyIter_Next(samples_.ptr()));
    if (!sample && PyErr_Occurred() != nullptr) {
      throw pybind11::error_already_set();
    }
    return sample ? std::optional(std::move(sample)) : std::nullopt;
  }

  /// @param number of the sample, for errors.
  void measure(const pybind11::object& sample, std::span<double> all, std::int64_t number) const {
    std::fill(all.begin(), all.end(), 0.0);
    const std::span<double> sizes = all.first(measured_);
    const auto size = pybind11::reinterpret_steal<pybind11::object>(
        PyObject_CallOneArg(sizeof_.ptr(), sample.ptr()));
    if (!size) {
      throw pybind11::error_already_set();
    }
    const NumberPlace at{"sizes", "sample", number};
    if (sizes.size() == 1 && !PyTuple_Check(size.ptr()) && !PyList_Check(size.ptr())) {
      sizes[0] = size_number(size.ptr(), at);
      return;
    }
    const auto several = pybind11::reinterpret_steal<pybind11::object>(
        PySequence_Fast(size.ptr(), "not a sequence"));
    PyErr_Clear();
    TORCH_CHECK_VALUE(
        several && PySequence_Fast_GET_SIZE(several.ptr()) == static_cast<Py_ssize_t>(sizes.size()),
        "sizeof must give ", sizes.size(), " sizes, one for each max_total_size, got ",
        text_of(pybind11::repr(size)), " for sample ", at.index);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] =
          size_number(PySequence_Fast_GET_ITEM(several.ptr(), static_cast<Py_ssize_t>(i)), at);
    }
  }

 private:
  pybind11::iterator samples_;
  pybind11::object sizeof_;
  std::size_t measured_;
};

}  // namespace brim::python
