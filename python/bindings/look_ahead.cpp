// Packed or bucketed batches of whatever an iterable gives, with a bounded look-ahead.
#include <brim/batching/look_ahead.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "sample_batching.h"
#include "sample_reader.h"

namespace brim::python {
namespace {

class LookAheadStream {
 public:
  LookAheadStream(const py::iterable& samples, py::object sizeof_sample, const py::list& costs,
                  const py::list& maxima, std::size_t measured,
                  const batching::LookAheadOptions& options, batching::Ranks ranks)
      : reader_(samples, std::move(sizeof_sample), measured),
        stream_([this] { return reader_.read(); },
                [this](const py::object& sample, std::span<double> sizes) {
                  reader_.measure(sample, sizes, stream_.samples_read());
                },
                limits_argument(costs, SampleReader::within_exact(maxima)), options, ranks) {}
  LookAheadStream(const LookAheadStream&) = delete;
  LookAheadStream& operator=(const LookAheadStream&) = delete;

  std::vector<py::object> next() { return SampleReader::batch_or_stop(stream_.next()); }
  batching::LookAheadStream<py::object>& core() { return stream_; }

 private:
  SampleReader reader_;
  batching::LookAheadStream<py::object> stream_;
};

std::unique_ptr<LookAheadStream> make(const py::iterable& samples, py::object sizeof_sample,
                                      const py::list& costs, const py::list& maxima,
                                      std::size_t measured, std::int64_t lookahead,
                                      std::vector<double> boundaries, bool shuffle,
                                      std::uint64_t seed, const std::string& oversize,
                                      std::int64_t batch_multiple, std::int64_t rank,
                                      std::int64_t world_size) {
  const batching::LookAheadOptions options{.samples = lookahead,
                                           .boundaries = std::move(boundaries),
                                           .shuffle = shuffle,
                                           .seed = seed,
                                           .oversize = oversize_argument(oversize),
                                           .batch_multiple = batch_multiple};
  return std::make_unique<LookAheadStream>(samples, std::move(sizeof_sample), costs, maxima,
                                           measured, options, batching::Ranks{rank, world_size});
}

}  // namespace

void register_look_ahead(py::module_& m) {
  py::class_<LookAheadStream>(m, "LookAheadStream")
      .def(py::init(&make), py::arg("samples"), py::arg("sizeof"), py::arg("costs"),
           py::arg("maxima"), py::arg("measured"), py::arg("lookahead"), py::arg("boundaries"),
           py::arg("shuffle"), py::arg("seed"), py::arg("oversize"), py::arg("batch_multiple"),
           py::arg("rank"), py::arg("world_size"))
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &LookAheadStream::next)
      .def("skip", [](LookAheadStream& self) { return self.core().skip(); })
      .def(
          "seek",
          [](LookAheadStream& self, const py::object& cursor, const py::object& segments) {
            self.core().seek(position_argument(cursor, segments));
          },
          py::arg("cursor"), py::arg("segments"))
      .def(
          "position",
          [](LookAheadStream& self, std::int64_t batches) {
            py::dict state;
            write_position(self.core().position(batches), state);
            return state;
          },
          py::arg("batches"))
      .def_property_readonly("read",
                             [](LookAheadStream& self) { return self.core().samples_read(); })
      .def_property_readonly(
          "left_out", [](LookAheadStream& self) { return left_out_of(self.core().left_out()); });
}

}  // namespace brim::python
