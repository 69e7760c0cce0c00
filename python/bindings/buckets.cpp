#include <brim/batching/balance.h>
#include <brim/batching/buckets.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "bindings.h"
#include "int_list.h"
#include "interpreter.h"
#include "tensors.h"

namespace brim::python {
namespace {

py::tuple create_buckets(const py::object& sizes, const py::object& max_width,
                         const py::object& min_bucket_count) {
  const at::Tensor tensor = column_of<std::int64_t>("sizes", sizes);
  const std::int64_t width = integer_argument("max_width", max_width);
  const std::int64_t count = integer_argument("min_bucket_count", min_bucket_count);
  batching::Buckets buckets = without_gil(
      [&] { return batching::create_buckets(values_of<std::int64_t>(tensor), width, count); });
  return py::make_tuple(to_tensor(std::move(buckets.boundaries)),
                        to_tensor(std::move(buckets.counts)));
}

py::object least_padding_boundaries(const py::object& sizes, const py::object& buckets) {
  const at::Tensor tensor = numbers_argument("sizes", sizes);
  const std::int64_t count = integer_argument("buckets", buckets);
  TORCH_CHECK_VALUE(count >= 1, "buckets=", count, " is not allowed; it must be at least 1");
  return with_values(tensor, [&](auto values) {
    return to_tensor(interruptibly([&] {
      return batching::least_padding_boundaries(values, static_cast<std::size_t>(count));
    }));
  });
}

py::tuple group_by_bucket(const py::object& sizes, const py::object& boundaries) {
  const at::Tensor size_tensor = numbers_argument("sizes", sizes);
  const at::Tensor boundary_tensor = numbers_argument("boundaries", boundaries);
  TORCH_CHECK_TYPE(size_tensor.scalar_type() == boundary_tensor.scalar_type(),
                   "sizes and boundaries must have one dtype, got ", size_tensor.scalar_type(),
                   " and ", boundary_tensor.scalar_type());
  batching::BucketGroups result = with_values(size_tensor, [&]<class T>(std::span<const T> values) {
    return without_gil(
        [&] { return batching::group_by_bucket(values, values_of<T>(boundary_tensor)); });
  });
  return py::make_tuple(to_tensor(std::move(result.indices)), to_tensor(std::move(result.offsets)));
}

/// @param sizes under `most`, if they are not None.
py::list balance(const py::object& costs, const py::object& parts, bool equal_count,
                 const py::object& sizes, double most) {
  const at::Tensor tensor = column_of<double>("costs", costs);
  const std::int64_t count = integer_argument("parts", parts);
  const at::Tensor capped = sizes.is_none() ? at::Tensor() : column_of<double>("sizes", sizes);
  const batching::Batches division = interruptibly([&] {
    return capped.defined() ? batching::balance(values_of<double>(tensor), count,
                                                {values_of<double>(capped), most}, equal_count)
                            : batching::balance(values_of<double>(tensor), count, equal_count);
  });
  py::list result(division.count());
  for (std::size_t part = 0; part < division.count(); ++part) {
    PyObject* const list = as_list(division[part]);
    if (list == nullptr) {
      throw py::error_already_set();
    }
    PyList_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(part), list);
  }
  return result;
}

std::int64_t fewest_parts(const py::object& sizes, double most, const py::object& multiple_of,
                          bool equal_count) {
  const at::Tensor tensor = column_of<double>("sizes", sizes);
  const std::int64_t multiple = integer_argument("multiple_of", multiple_of);
  return interruptibly([&] {
    return batching::fewest_parts({values_of<double>(tensor), most}, multiple, equal_count);
  });
}

py::object flops(const py::object& lengths, double linear, double squared) {
  return with_values(numbers_argument("lengths", lengths), [&](auto values) {
    std::vector<double> result(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto length = static_cast<double>(values[i]);
      TORCH_CHECK_VALUE(length >= 0 && std::isfinite(length),
                        "lengths must be finite and not negative, got ", length, " at index ", i);
      result[i] = batching::flops(length, linear, squared);
    }
    return to_tensor(std::move(result));
  });
}

}  // namespace

void register_buckets(py::module_& m) {
  m.def("create_buckets", &create_buckets);
  m.def("least_padding_boundaries", &least_padding_boundaries);
  m.def("balance", &balance, py::arg("costs"), py::arg("parts"), py::arg("equal_count"),
        py::arg("sizes") = py::none(), py::arg("cap") = 0.0);
  m.def("fewest_parts", &fewest_parts);
  m.def("flops", &flops);
  m.def("group_by_bucket", &group_by_bucket);
}

}  // namespace brim::python
