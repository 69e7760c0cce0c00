// Batches of whatever an iterable gives, without looking ahead: for data that has no length, and
// for sizes that are asked for one by one.
#include <brim/batching/sample_stream.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "numbers.h"
#include "sample_batching.h"
#include "sample_reader.h"
#include "tensors.h"

namespace brim::python {
namespace {

class SampleStream {
 public:
  SampleStream(const py::iterable& samples, py::object sizeof_sample, const py::list& costs,
               const py::list& maxima, std::size_t measured, const std::string& oversize,
               std::int64_t skip)
      : reader_(samples, std::move(sizeof_sample), measured),
        stream_([this] { return reader_.read(); },
                [this](const py::object& sample, std::span<double> sizes) {
                  reader_.measure(sample, sizes, stream_.samples_read() - 1);
                },
                limits_argument(costs, SampleReader::within_exact(maxima)),
                oversize_argument(oversize), skip) {}
  SampleStream(const SampleStream&) = delete;
  SampleStream& operator=(const SampleStream&) = delete;

  /// The next batch. As with a generator, an error is the end.
  std::vector<py::object> next() { return SampleReader::batch_or_stop(stream_.next()); }

  const batching::SampleStream<py::object>& core() const { return stream_; }

 private:
  SampleReader reader_;
  batching::SampleStream<py::object> stream_;
};

/// Sizes in a sequence, as int64 if all are ints, else as float64. `name` goes into errors.
py::object sizes_tensor(const py::object& sizes, const std::string& name) {
  const auto sequence = py::reinterpret_steal<py::object>(
      PySequence_Fast(sizes.ptr(), "sizes must be a sequence of numbers"));
  if (!sequence) {
    throw py::error_already_set();
  }
  PyObject* const* const items = PySequence_Fast_ITEMS(sequence.ptr());
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.ptr());
  std::vector<std::int64_t> ints;
  ints.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto whole = whole_if_any(items[i], {name.c_str(), "index", i});
    if (!whole) {
      break;
    }
    ints.push_back(*whole);
  }
  if (ints.size() == static_cast<std::size_t>(count)) {
    return to_tensor(std::move(ints));
  }
  std::vector<double> reals(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    reals[static_cast<std::size_t>(i)] = real_number(items[i], {name.c_str(), "index", i});
  }
  return to_tensor(std::move(reals));
}

/// Indices out of any iterable of ints.
py::object indices_tensor(const py::iterable& indices) {
  std::vector<std::int64_t> result;
  for (const py::handle index : indices) {
    result.push_back(
        whole_number(index.ptr(), {"indices", "place", static_cast<std::int64_t>(result.size())}));
  }
  return to_tensor(std::move(result));
}

}  // namespace

void register_sample_stream(py::module_& m) {
  py::class_<SampleStream>(m, "SampleStream")
      .def(py::init<const py::iterable&, py::object, const py::list&, const py::list&, std::size_t,
                    const std::string&, std::int64_t>(),
           py::arg("samples"), py::arg("sizeof"), py::arg("costs"), py::arg("maxima"),
           py::arg("measured"), py::arg("oversize"), py::arg("skip"))
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &SampleStream::next)
      .def_property_readonly("read",
                             [](const SampleStream& self) { return self.core().samples_read(); })
      .def_property_readonly("batched",
                             [](const SampleStream& self) { return self.core().batched(); })
      .def_property_readonly("batches",
                             [](const SampleStream& self) { return self.core().batches(); })
      .def_property_readonly("begin", [](const SampleStream& self) { return self.core().begin(); })
      .def_property_readonly("left_out",
                             [](const SampleStream& self) { return self.core().left_out(); });
  m.def(
      "check_limits",
      [](const py::list& costs, const py::list& maxima) { limits_argument(costs, maxima); },
      py::arg("costs"), py::arg("maxima"));
  m.def(
      "largest_sizes",
      [](const py::list& costs, const py::list& maxima, bool whole) {
        py::list result;
        for (const batching::Limit& limit : limits_argument(costs, maxima)) {
          result.append(whole ? py::object(py::int_(limit.largest_whole_size()))
                              : py::object(py::float_(limit.largest_real_size())));
        }
        return result;
      },
      py::arg("costs"), py::arg("maxima"), py::arg("whole"));
  m.def("sizes_tensor", &sizes_tensor, py::arg("sizes"), py::arg("name") = "sizes");
  m.def("indices_tensor", &indices_tensor, py::arg("indices"));
}

}  // namespace brim::python
