// Batches of whatever an iterable gives, for data that has no length, and sizes that are asked for
// one by one.
#include <brim/batching/look_ahead.h>
#include <brim/batching/sample_stream.h>
#include <pybind11/stl.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "block_stream.h"
#include "numbers.h"
#include "python_stream.h"
#include "sample_batching.h"
#include "tensor_argument.h"
#include "tensors.h"

namespace brim::python {
namespace {

using SampleStream = PythonStream<batching::SampleStream>;
using LookAheadStream = PythonStream<batching::LookAheadStream>;

std::unique_ptr<SampleStream> sample_stream(const py::iterable& samples, py::object sizeof_sample,
                                            const py::list& costs, const py::list& maxima,
                                            std::size_t measured, const std::string& oversize,
                                            std::int64_t skip) {
  return std::make_unique<SampleStream>(samples, std::move(sizeof_sample), costs, maxima, measured,
                                        oversize_argument(oversize), skip);
}

batching::LookAheadOptions look_ahead_options(const py::dict& given) {
  return {.samples = given["lookahead"].cast<std::int64_t>(),
          .boundaries = given["boundaries"].cast<std::vector<double>>(),
          .shuffle = given["shuffle"].cast<bool>(),
          .seed = given["seed"].cast<std::uint64_t>(),
          .oversize = oversize_argument(given["oversize"].cast<std::string>()),
          .batch_multiple = given["batch_multiple"].cast<std::int64_t>(),
          .size_multiple = given["size_multiple"].cast<std::int64_t>()};
}

std::unique_ptr<LookAheadStream> look_ahead_stream(const py::iterable& samples,
                                                   py::object sizeof_sample, const py::list& costs,
                                                   const py::list& maxima, std::size_t measured,
                                                   const py::dict& options, const py::object& cut,
                                                   std::int64_t rank, std::int64_t world_size) {
  const auto part = [cut](const py::object& sample, std::int64_t begin, std::int64_t end,
                          std::int64_t size) { return py::object(cut(sample, begin, end, size)); };
  return std::make_unique<LookAheadStream>(samples, std::move(sizeof_sample), costs, maxima,
                                           measured, look_ahead_options(options),
                                           batching::Ranks{rank, world_size}, part);
}

std::unique_ptr<BlockStream> block_stream(const py::iterable& blocks, py::object sizes_of,
                                          const py::list& costs, const py::list& maxima,
                                          std::size_t measured, const py::dict& options,
                                          const py::object& /*cut*/, std::int64_t rank,
                                          std::int64_t world_size) {
  return std::make_unique<BlockStream>(blocks, std::move(sizes_of), costs, maxima, measured,
                                       look_ahead_options(options),
                                       batching::Ranks{rank, world_size});
}

/// What streams have whose samples are read ahead.
template <class Stream>
void bind_look_ahead(py::class_<Stream>& type) {
  type.def("seek",
           [](Stream& self, const py::object& cursor, const py::object& segments) {
             self.core().seek(position_argument(cursor, segments));
           })
      .def("position",
           [](Stream& self, std::int64_t batches) {
             py::dict state;
             write_position(self.core().position(batches), state);
             return state;
           })
      .def_property_readonly("fingerprints",
                             [](Stream& self) { return self.core().fingerprints(); })
      .def_property_readonly("sizes_differ",
                             [](Stream& self) { return self.core().sizes_differ(); })
      .def_property_readonly("left_out",
                             [](Stream& self) { return left_out_of(self.core().left_out()); });
}

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

/// Replace a word of memory that processes share, if it is the expected one.
bool compare_exchange(const py::object& words, std::int64_t place, std::int64_t expected,
                      std::int64_t desired) {
  const at::Tensor* const tensor = tensor_in(words.ptr());
  TORCH_CHECK_TYPE(tensor != nullptr && tensor->scalar_type() == at::kLong,
                   "words must be an int64 tensor");
  TORCH_CHECK_VALUE(place >= 0 && place < tensor->numel(), "place must be one of the ",
                    tensor->numel(), " words, got ", place);
  return std::atomic_ref(tensor->mutable_data_ptr<std::int64_t>()[place])
      .compare_exchange_strong(expected, desired);
}

}  // namespace

void register_sample_stream(py::module_& m) {
  SampleStream::bind(m, "SampleStream")
      .def(py::init(&sample_stream))
      .def_property_readonly("batched", [](SampleStream& self) { return self.core().batched(); })
      .def_property_readonly("batches", [](SampleStream& self) { return self.core().batches(); })
      .def_property_readonly("begin", [](SampleStream& self) { return self.core().begin(); })
      .def_property_readonly("left_out", [](SampleStream& self) { return self.core().left_out(); });
  auto samples = LookAheadStream::bind(m, "LookAheadStream");
  samples.def(py::init(&look_ahead_stream)).def("skip", [](LookAheadStream& self) {
    return self.core().skip();
  });
  bind_look_ahead(samples);
  py::class_<BlockStream> blocks(m, "BlockStream");
  blocks.def(py::init(&block_stream))
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &BlockStream::next)
      .def("skip", &BlockStream::skip)
      .def_property_readonly("read", [](BlockStream& self) { return self.core().samples_read(); });
  bind_look_ahead(blocks);
  m.def("compare_exchange", &compare_exchange);
  m.def("check_limits",
        [](const py::list& costs, const py::list& maxima) { limits_argument(costs, maxima); });
  m.def("largest_sizes", [](const py::list& costs, const py::list& maxima, bool whole) {
    py::list result;
    for (const batching::Limit& limit : limits_argument(costs, maxima)) {
      result.append(whole ? py::object(py::int_(limit.largest_whole_size()))
                          : py::object(py::float_(limit.largest_real_size())));
    }
    return result;
  });
  m.def("sizes_tensor", &sizes_tensor, py::arg("sizes"), py::arg("name") = "sizes");
  m.def("indices_tensor", &indices_tensor);
}

}  // namespace brim::python
