#include <brim/batching/batching.h>
#include <brim/batching/even_work.h>
#include <brim/batching/plan.h>
#include <brim/batching/sample_index.h>
#include <brim/batching/stream.h>
#include <brim/fit/model_limit.h>
#include <brim/fit/padded_need.h>
#include <brim/predict/memory_model.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "interpreter.h"
#include "numbers.h"
#include "record.h"
#include "sample_batching.h"
#include "tensors.h"

namespace brim::python {
namespace {

using batching::AnyColumns;
using batching::Columns;
using batching::Cost;
using batching::Limit;

using SharedBatching = std::shared_ptr<SampleBatching>;

/// Sizes in the width that the tensor has, if it is one of these.
template <typename T, typename... Stored>
batching::SizeSpan<T> sizes_as(const at::Tensor& tensor) {
  batching::SizeSpan<T> sizes;
  const auto read = [&]<typename Number>(Number /*type*/) {
    const bool same = tensor.scalar_type() == c10::CppTypeToScalarType<Number>::value;
    if (same) {
      sizes = values_of<Number>(tensor);
    }
    return same;
  };
  TORCH_CHECK_VALUE((read(Stored()) || ...),
                    "sizes must be all ints of up to 64 bits with a sign, or all float32 or ",
                    "float64, got a tensor of ", tensor.scalar_type());
  return sizes;
}

/// Sizes for calculations in T.
template <typename T>
batching::SizeSpan<T> sizes_of(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<T, double>) {
    return sizes_as<T, double, float>(tensor);
  } else {
    return sizes_as<T, std::int64_t, std::int32_t, std::int16_t, std::int8_t, std::uint32_t,
                    std::uint16_t, std::uint8_t>(tensor);
  }
}

/// The limits of this many columns. The first one counts all that are more than limits.
std::vector<Limit> limits_of(std::size_t columns, const py::list& costs, const py::list& maxima) {
  std::vector<Limit> limits = limits_argument(costs, maxima);
  if (!limits.empty() && columns > limits.size()) {
    limits.insert(limits.begin() + 1, columns - limits.size(), Limit::joined());
  }
  return limits;
}

template <typename T>
Columns<T> columns_as(const std::vector<at::Tensor>& tensors, const std::vector<Limit>& limits) {
  Columns<T> columns;
  columns.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    columns.push_back({sizes_of<T>(tensors[i]), limits[i]});
  }
  return columns;
}

/// Tensors of sizes, all ints or all floats, each with its cost and its maximum.
AnyColumns columns_of(const std::vector<at::Tensor>& tensors, const py::list& costs,
                      const py::list& maxima, const at::Tensor& like) {
  const std::vector<Limit> limits = limits_of(tensors.size(), costs, maxima);
  return like.is_floating_point() ? AnyColumns(columns_as<double>(tensors, limits))
                                  : AnyColumns(columns_as<std::int64_t>(tensors, limits));
}

SharedBatching batching_of(const py::list& sizes) {
  auto result = std::make_shared<SampleBatching>();
  for (const py::handle tensor : sizes) {
    result->tensors.push_back(column_argument("sizes", py::reinterpret_borrow<py::object>(tensor)));
  }
  return result;
}

/// An index of sizes and the tensor that has them; null for none.
struct KeptIndex {
  at::Tensor sizes;
  std::shared_ptr<batching::SampleIndex> core;
};
using SharedIndex = std::shared_ptr<KeptIndex>;

SharedIndex open_index(const py::object& sizes, const std::string& folder,
                       const std::string& data) {
  auto index = std::make_shared<KeptIndex>();
  index->sizes = column_argument("sizes", sizes);
  index->core = interruptibly([&] {
    const batching::SampleIndex::Options options{folder, data, 0};
    return index->sizes.is_floating_point()
               ? std::make_shared<batching::SampleIndex>(sizes_of<double>(index->sizes), options)
               : std::make_shared<batching::SampleIndex>(sizes_of<std::int64_t>(index->sizes),
                                                         options);
  });
  return index;
}

std::shared_ptr<const batching::EpochIndex> epoch_index(const SampleBatching& batching,
                                                        const SharedIndex& index,
                                                        const std::string& settings,
                                                        std::uint64_t seed, std::int64_t world_size,
                                                        bool make) {
  return index == nullptr ? nullptr
                          : index->core->epoch(*batching.core, settings, seed, world_size, make);
}

void describe(const SharedIndex& index, AnyColumns& columns) {
  if (index != nullptr) {
    std::visit([&](auto& some) { index->core->describe(some); }, columns);
  }
}

/// Of samples in an order: `make(columns, order)`.
template <typename Make>
SharedBatching in_order(const py::list& sizes, const py::list& costs, const py::list& maxima,
                        const py::object& indices, bool shuffle, const SharedIndex& index,
                        const Make& make, const py::object& work = py::none()) {
  auto result = batching_of(sizes);
  AnyColumns columns = columns_of(result->tensors, costs, maxima, result->tensors.at(0));
  describe(index, columns);
  batching::Order order{.indices = std::nullopt, .shuffle = shuffle};
  if (!indices.is_none()) {
    result->tensors.push_back(column_of<std::int64_t>("indices", indices));
    order.indices = values_of<std::int64_t>(result->tensors.back());
  }
  if (work.is_none()) {
    result->core = interruptibly([&] { return make(std::move(columns), order); });
    return result;
  }
  result->tensors.push_back(column_of<double>("work", work));
  result->core = interruptibly([&] {
    return batching::even_work(make(columns, order), columns,
                               values_of<double>(result->tensors.back()));
  });
  return result;
}

SharedBatching ordered(const py::list& sizes, const py::list& costs, const py::list& maxima,
                       const py::object& indices, bool shuffle, const std::string& oversize,
                       std::int64_t batch_multiple, const SharedIndex& index) {
  const batching::Oversize what = oversize_argument(oversize);
  const auto make = [&](AnyColumns columns, auto order) {
    return batching::ordered_batching(std::move(columns), order, what, batch_multiple);
  };
  return in_order(sizes, costs, maxima, indices, shuffle, index, make);
}

SharedBatching packed(const py::list& sizes, const py::list& costs, const py::list& maxima,
                      const py::object& indices, bool shuffle, std::optional<std::int64_t> window,
                      const std::string& oversize, std::int64_t batch_multiple,
                      const SharedIndex& index, const py::object& work) {
  const batching::PackOptions options{
      .window = window, .oversize = oversize_argument(oversize), .batch_multiple = batch_multiple};
  const auto make = [&](AnyColumns columns, auto order) {
    return batching::packed_batching(std::move(columns), order, options);
  };
  return in_order(sizes, costs, maxima, indices, shuffle, index, make, work);
}

SharedBatching bucketed(const py::object& bucket_sizes, std::vector<double> boundaries,
                        std::vector<std::int64_t> batch_sizes, const py::list& sizes,
                        const py::list& costs, const py::list& maxima, bool drop_last, bool shuffle,
                        const std::string& oversize, std::int64_t batch_multiple,
                        const SharedIndex& index) {
  auto result = batching_of(sizes);
  const at::Tensor deciding = column_argument("sizes", bucket_sizes);
  AnyColumns columns = columns_of(result->tensors, costs, maxima, deciding);
  describe(index, columns);
  result->tensors.push_back(deciding);
  batching::BucketOptions options{.boundaries = std::move(boundaries),
                                  .batch_sizes = std::move(batch_sizes),
                                  .drop_last = drop_last,
                                  .shuffle = shuffle,
                                  .oversize = oversize_argument(oversize),
                                  .batch_multiple = batch_multiple};
  options.index = index == nullptr ? nullptr : index->core;
  result->core = interruptibly([&] {
    return deciding.is_floating_point()
               ? batching::bucket_batching(sizes_of<double>(deciding), std::move(columns),
                                           std::move(options))
               : batching::bucket_batching(sizes_of<std::int64_t>(deciding), std::move(columns),
                                           std::move(options));
  });
  return result;
}

/// A stream of this rank's batches, from a position of state_dict() on if there is one.
batching::BatchStream stream_of(const SampleBatching& batching, std::uint64_t seed,
                                std::int64_t rank, std::int64_t world_size,
                                const py::object& cursor, const py::object& segments) {
  const batching::Position position = position_argument(cursor, segments);
  return interruptibly([&] {
    batching::BatchStream stream(*batching.core, seed, {rank, world_size});
    if (!position.cursor.empty()) {
      stream.seek(position);
    }
    return stream;
  });
}

py::object iterate(const SharedBatching& batching, std::uint64_t seed, std::int64_t rank,
                   std::int64_t world_size, const py::object& cursor, const py::object& segments,
                   bool as_tensors, py::dict description) {
  return make_batch_run(batching, stream_of(*batching, seed, rank, world_size, cursor, segments),
                        as_tensors, std::move(description));
}

std::int64_t count(const SampleBatching& batching, std::uint64_t seed, std::int64_t rank,
                   std::int64_t world_size, const py::object& cursor, const py::object& segments,
                   const SharedIndex& index, const std::string& settings) {
  auto stream = stream_of(batching, seed, rank, world_size, cursor, segments);
  return interruptibly([&] {
    const auto epoch = epoch_index(batching, index, settings, seed, world_size, true);
    return stream.count_rest(epoch.get());
  });
}

/// Of batches `first` up to, but not including, `end`.
py::tuple plan(const SampleBatching& batching, std::uint64_t seed, std::int64_t rank,
               std::int64_t world_size, const py::object& cursor, const py::object& segments,
               const SharedIndex& index, const std::string& settings, std::int64_t first,
               std::optional<std::int64_t> end) {
  auto stream = stream_of(batching, seed, rank, world_size, cursor, segments);
  batching::Batches batches;
  interruptibly([&] {
    if (first > 0) {
      const auto epoch = epoch_index(batching, index, settings, seed, world_size, false);
      stream.skip(first, epoch.get());
    }
    if (!end) {
      if (first == 0) {
        batches.indices.reserve(static_cast<std::size_t>(batching.core->samples() /
                                                         std::max<std::int64_t>(world_size, 1)));
      }
      stream.read_rest(batches);
      return;
    }
    for (std::int64_t b = first; b < *end; ++b) {
      const auto batch = stream.next();
      if (!batch) {
        break;
      }
      batches.indices.insert(batches.indices.end(), batch->begin(), batch->end());
      batches.close(0.0);
    }
  });
  return py::make_tuple(to_tensor(std::move(batches.offsets)),
                        to_tensor(std::move(batches.indices)));
}

/// An int, rounded. @throws pybind11::error_already_set if it exceeds every double.
double as_double(const py::object& value) {
  const double result = PyLong_AsDouble(value.ptr());
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return result;
}

/// What a Python function says that n samples padded to the longest cost, or to the longest of each
/// size. Batches are made without the GIL.
Cost python_cost(const py::object& function) {
  const auto release_with_gil = [](py::object* last) {
    const py::gil_scoped_acquire gil;
    delete last;
  };
  const std::shared_ptr<py::object> kept(new py::object(function), release_with_gil);
  return Cost::joint([kept](std::int64_t count, std::span<const double> longest) {
    const py::gil_scoped_acquire gil;
    py::tuple arguments(1 + longest.size());
    arguments[0] = py::int_(count);
    for (std::size_t i = 0; i < longest.size(); ++i) {
      const bool whole = longest[i] == std::floor(longest[i]) && longest[i] < 0x1p53;
      arguments[1 + i] = whole ? py::object(py::int_(static_cast<std::int64_t>(longest[i])))
                               : py::object(py::float_(longest[i]));
    }
    try {
      const py::object price = new_reference(PyObject_CallObject(kept->ptr(), arguments.ptr()));
      return PyLong_CheckExact(price.ptr()) ? as_double(price)
                                            : real_number(price.ptr(), {"what cost returns"});
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_OverflowError)) {
        throw;
      }
    }
    return std::numeric_limits<double>::infinity();  // what no number can hold exceeds the budget
  });
}

/// A budget from what Python code writes: the name of a cost, a function or a memory model, and a
/// number.
Limit limit_argument(const py::object& cost, const py::object& maximum) {
  const bool named = py::isinstance<py::str>(cost);
  const bool model = py::isinstance<MemoryModel>(cost);
  const bool need = py::isinstance<PaddedNeed>(cost);
  TORCH_CHECK_TYPE(named || model || PyCallable_Check(cost.ptr()) != 0, "cost must be ",
                   Cost::names(), ", a fitted MemoryModel or a function of the number of samples ",
                   "and the longest, got ", text_of(py::repr(cost)));
  TORCH_CHECK_TYPE(PyNumber_Check(maximum.ptr()) != 0 && !PyComplex_Check(maximum.ptr()) &&
                       !py::isinstance<py::bool_>(maximum),
                   "max_total_size must be a positive number, got ", text_of(py::repr(maximum)));
  const Cost kind = named           ? Cost::named(text_of(cost))
                    : model || need ? Cost::sum()
                                    : python_cost(cost);
  const Limit limit = PyIndex_Check(maximum.ptr()) != 0
                          ? Limit(kind, integer_argument("max_total_size", maximum))
                          : Limit(kind, py::float_(maximum).cast<double>());
  return model  ? model_limit(cost.cast<const MemoryModel&>(), limit.whole())
         : need ? cost.cast<const PaddedNeed&>().limit(limit.whole())
                : limit;
}

}  // namespace

std::vector<Limit> limits_argument(const py::list& costs, const py::list& maxima) {
  std::vector<Limit> result;
  result.reserve(costs.size());
  for (std::size_t i = 0; i < costs.size(); ++i) {
    result.push_back(limit_argument(costs[i], maxima[i]));
  }
  return result;
}

batching::Oversize oversize_argument(const std::string& oversize) {
  return word_argument<batching::Oversize>("oversize", oversize,
                                           {"leave_out", "error", "alone", "truncate", "split"});
}

batching::Position position_argument(const py::object& cursor, const py::object& segments) {
  batching::Position position;
  for (const py::handle word : cursor) {
    position.cursor.push_back(integer_argument("cursor", py::reinterpret_borrow<py::object>(word)));
  }
  for (const py::handle entry : segments) {
    TORCH_CHECK_VALUE(py::isinstance<py::sequence>(entry) && py::len(entry) == 3,
                      "a segment of a position has 3 numbers, got ", text_of(py::repr(entry)));
    const auto segment = py::reinterpret_borrow<py::sequence>(entry);
    position.segments.push_back({integer_argument("world_size", segment[0]),
                                 integer_argument("step_offset", segment[1]),
                                 integer_argument("done", segment[2])});
  }
  return position;
}

void write_position(const batching::Position& position, py::dict& state) {
  state["cursor"] = position.cursor;
  py::list segments;
  for (const auto& [world_size, step_offset, done] : position.segments) {
    segments.append(std::vector<std::int64_t>{world_size, step_offset, done});
  }
  state["segments"] = std::move(segments);
}

py::dict left_out_of(const std::vector<batching::LeftOut>& left_out) {
  py::dict result;
  for (const auto reason :
       {batching::LeftOutReason::over_budget, batching::LeftOutReason::outside_buckets,
        batching::LeftOutReason::dropped_last, batching::LeftOutReason::too_few_for_ranks}) {
    std::vector<std::int64_t> indices;
    for (const batching::LeftOut& sample : left_out) {
      if (sample.reason == reason) {
        indices.push_back(sample.index);
      }
    }
    if (!indices.empty()) {
      result[batching::to_string(reason)] = to_tensor(std::move(indices));
    }
  }
  return result;
}

void register_batching(py::module_& m) {
  using Report = batching::PlanReport;
  using LeftOut = batching::LeftOut;
  record<LeftOut>(m, "LeftOut", "", field(nullptr, &LeftOut::index),
                  field(nullptr, &LeftOut::reason));
  record<Report>(
      m, "PlanReport",
      R"(What becomes of the samples in one epoch, over all ranks.

`report()` of a sampler returns it; `print` shows a few lines.

Example:
    >>> from brim.data import PackedBatchSampler
    >>> report = PackedBatchSampler([5, 2, 8, 3], max_total_size=16).report()
    >>> report.batches, report.fill
    (2, 0.6875)
)",
      field("samples", &Report::samples, "How many samples there are."),
      field("batched", &Report::batched, "How many of them are in a batch."),
      field("batches", &Report::batches, "How many batches, of all ranks together."),
      field("world_size", &Report::world_size, "How many ranks."),
      field("fill", &Report::fill, "The mean share of the budget that a batch uses, 0 to 1."),
      field("padding", &Report::padding, "The share of n × longest that is padding, 0 to 1."),
      field("imbalance", &Report::imbalance,
            "By how much the costliest batch of a step exceeds the mean, averaged over "
            "steps; 0 for one rank."),
      field("fill_histogram", &Report::fill_histogram,
            "How many batches have such a fill, in equal steps from 0 to 1."),
      field("padding_histogram", &Report::padding_histogram,
            "How many batches have such a share of padding, in equal steps from 0 to 1."),
      field(nullptr, &Report::left_out))
      .def(
          "plot",
          [](const py::object& self, const py::object& where) {
            return provided("draw")("plan", self, where);
          },
          py::arg("where") = py::none(),
          "Draw how full the batches are and how much of them is padding; see `brim.plot.plan`.")
      .def_property_readonly(
          "left_out", [](const Report& self) { return left_out_of(self.left_out); },
          "The samples that are in no batch, by reason.")
      .def("__str__", [](const Report& self) { return batching::to_string(self); })
      .def("__repr__",
           [](const Report& self) { return "<PlanReport: " + batching::to_string(self) + ">"; });

  py::class_<SampleBatching, std::shared_ptr<SampleBatching>>(m, "SampleBatching")
      .def_property_readonly("samples",
                             [](const SampleBatching& self) { return self.core->samples(); })
      .def_property_readonly(
          "left_out", [](const SampleBatching& self) { return left_out_of(self.core->left_out()); })
      .def("iterate", &iterate)
      .def("count", &count)
      .def("plan", &plan)
      .def("report", [](const SampleBatching& self, std::uint64_t seed, std::int64_t world_size,
                        const py::object& cursor, const py::object& segments) {
        const batching::Position from = position_argument(cursor, segments);
        return interruptibly([&] { return batching::report(*self.core, seed, world_size, from); });
      });

  py::class_<KeptIndex, SharedIndex>(m, "SampleIndex")
      .def(py::init(&open_index), py::arg("sizes"), py::arg("folder"), py::arg("data"))
      .def_property_readonly("fingerprint",
                             [](const KeptIndex& self) { return self.core->fingerprint(); })
      .def_property_readonly("made", [](const KeptIndex& self) { return self.core->made(); })
      .def("take_notes", [](const KeptIndex& self) { return self.core->take_notes(); })
      .def("make_epoch", [](const SharedIndex& self, const SampleBatching& batching,
                            const std::string& settings, std::uint64_t seed,
                            std::int64_t world_size) {
        interruptibly([&] { (void)epoch_index(batching, self, settings, seed, world_size, true); });
      });
  m.def("data_file_state", [](const std::string& file) { return batching::data_file_state(file); });
  m.def("ordered_batching", &ordered);
  m.def("packed_batching", &packed, py::arg("sizes"), py::arg("costs"), py::arg("maxima"),
        py::arg("indices"), py::arg("shuffle"), py::arg("window"), py::arg("oversize"),
        py::arg("batch_multiple"), py::arg("index"), py::arg("work") = py::none());
  m.def("bucket_batching", &bucketed);
  m.def("epoch_seed", &batching::epoch_seed);
  m.def("fingerprint", [](const py::object& sizes) {
    const at::Tensor tensor = column_argument("sizes", sizes);
    return without_gil([&] {
      return tensor.is_floating_point() ? batching::fingerprint(sizes_of<double>(tensor))
                                        : batching::fingerprint(sizes_of<std::int64_t>(tensor));
    });
  });
  register_batch_iterator(m);
  register_sample_stream(m);
}

}  // namespace brim::python
