// Batches of whatever an iterable gives, without looking ahead: for data that has no length, and
// for sizes that are asked for one by one.
#include <brim/batching/batch_fill.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "numbers.h"
#include "sample_batching.h"
#include "tensors.h"

namespace brim::python {
namespace {

class SampleStream {
 public:
  SampleStream(const py::iterable& samples, py::object sizeof_sample, const py::list& costs,
               const py::list& maxima, bool refuse_oversize, std::int64_t skip)
      : samples_(py::iter(samples)),
        sizeof_(std::move(sizeof_sample)),
        fill_(limits_argument(costs, within_exact(maxima))),
        sizes_(costs.size()),
        refuse_oversize_(refuse_oversize),
        begin_(skip) {}

  /// The next batch. As with a generator, what was raised before is the end.
  py::list next() {
    if (broken_) {
      PyErr_SetNone(PyExc_StopIteration);
      throw py::error_already_set();
    }
    broken_ = true;
    py::list batch = read_batch();
    broken_ = false;
    return batch;
  }

  /// COUNT of samples read, and of those in batches.
  std::int64_t read() const { return read_; }
  std::int64_t batched() const { return batched_; }
  std::int64_t batches() const { return batches_; }
  /// Place of the sample that the next batch begins with.
  std::int64_t begin() const { return begin_; }
  const py::list& left_out() const { return left_out_; }

 private:
  // Sizes are added up in double precision, where ints below 2^53 differ from the next.
  static py::list within_exact(const py::list& maxima) {
    py::list result;
    const py::int_ most((std::int64_t{1} << 53) - 1);
    for (const py::handle maximum : maxima) {
      const bool beyond = PyLong_Check(maximum.ptr()) && maximum > most;
      result.append(beyond ? py::object(most) : py::reinterpret_borrow<py::object>(maximum));
    }
    return result;
  }

  /// Nothing at the end.
  py::object read_sample() {
    auto sample = py::reinterpret_steal<py::object>(PyIter_Next(samples_.ptr()));
    if (!sample && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    return sample;
  }

  py::list read_batch() {
    // Not before the first batch is needed: an iterator may be asked for and never used.
    for (; read_ < begin_; ++read_) {
      TORCH_CHECK_VALUE(read_sample(), "the state is of other samples: it stands at sample ",
                        begin_, ", and there are only ", read_);
    }
    py::list batch;
    // The sample that did not fit the last batch opens this one.
    if (pending_) {
      fill_.add(sizes_);
      batch.append(std::exchange(pending_, {}));
    }
    while (true) {
      const std::int64_t place = read_;
      auto sample = read_sample();
      if (!sample) {
        begin_ = read_;
        return close(std::move(batch));
      }
      ++read_;
      measure(sample, place);
      if (!fill_.fits_alone(sizes_)) {
        leave_out(place);
      } else if (!batch.empty() && !fill_.fits(sizes_)) {
        pending_ = std::move(sample);
        begin_ = place;
        return close(std::move(batch));
      } else {
        fill_.add(sizes_);
        batch.append(std::move(sample));
      }
    }
  }

  py::list close(py::list batch) {
    fill_.clear();
    if (batch.empty()) {
      PyErr_SetNone(PyExc_StopIteration);
      throw py::error_already_set();
    }
    ++batches_;
    batched_ += static_cast<std::int64_t>(batch.size());
    return batch;
  }

  void measure(const py::object& sample, std::int64_t place) {
    const auto size =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(sizeof_.ptr(), sample.ptr()));
    if (!size) {
      throw py::error_already_set();
    }
    const NumberPlace at{"sizes", "sample", place};
    if (sizes_.size() == 1 && !PyTuple_Check(size.ptr()) && !PyList_Check(size.ptr())) {
      sizes_[0] = size_number(size.ptr(), at);
      return;
    }
    const auto several =
        py::reinterpret_steal<py::object>(PySequence_Fast(size.ptr(), "not a sequence"));
    PyErr_Clear();
    TORCH_CHECK_VALUE(several && PySequence_Fast_GET_SIZE(several.ptr()) ==
                                     static_cast<Py_ssize_t>(sizes_.size()),
                      "sizeof must give ", sizes_.size(),
                      " sizes, one for each max_total_size, got ", text_of(py::repr(size)),
                      " for sample ", place);
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      sizes_[i] =
          size_number(PySequence_Fast_GET_ITEM(several.ptr(), static_cast<Py_ssize_t>(i)), at);
    }
  }

  void leave_out(std::int64_t place) {
    py::list sizes;
    for (const double size : sizes_) {
      sizes.append(size);
    }
    TORCH_CHECK_VALUE(!refuse_oversize_, "sample ", place,
                      " exceeds the budget by itself: its size is ", text_of(py::repr(sizes)));
    left_out_.append(place);
  }

  py::iterator samples_;
  py::object sizeof_;
  batching::BatchFill fill_;
  std::vector<double> sizes_;  // of the sample that was measured last
  bool refuse_oversize_;
  bool broken_ = false;  // by an error, or at the end
  py::object pending_;
  std::int64_t read_ = 0;
  std::int64_t begin_ = 0;
  std::int64_t batched_ = 0;
  std::int64_t batches_ = 0;
  py::list left_out_;
};

/// Sizes in a sequence, as int64 where all are ints, else as float64. `name` goes into errors.
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
      .def(py::init<const py::iterable&, py::object, const py::list&, const py::list&, bool,
                    std::int64_t>(),
           py::arg("samples"), py::arg("sizeof"), py::arg("costs"), py::arg("maxima"),
           py::arg("refuse_oversize"), py::arg("skip"))
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &SampleStream::next)
      .def_property_readonly("read", &SampleStream::read)
      .def_property_readonly("batched", &SampleStream::batched)
      .def_property_readonly("batches", &SampleStream::batches)
      .def_property_readonly("begin", &SampleStream::begin)
      .def_property_readonly("left_out", &SampleStream::left_out);
  m.def(
      "check_limits",
      [](const py::list& costs, const py::list& maxima) { limits_argument(costs, maxima); },
      py::arg("costs"), py::arg("maxima"));
  m.def("sizes_tensor", &sizes_tensor, py::arg("sizes"), py::arg("name") = "sizes");
  m.def("indices_tensor", &indices_tensor, py::arg("indices"));
}

}  // namespace brim::python
