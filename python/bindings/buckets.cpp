#include <brim/batching/buckets.h>
#include <c10/util/Exception.h>

#include <span>
#include <vector>

#include "bindings.h"
#include "tensors.h"

namespace brim::python {
namespace {

py::tuple create_buckets(const py::object& sizes, const py::object& max_width,
                         const py::object& min_bucket_count) {
  const at::Tensor tensor = numbers_argument("sizes", sizes);
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kLong, "sizes must be an int64 tensor, got ",
                    tensor.scalar_type());
  const std::int64_t width = integer_argument("max_width", max_width);
  const std::int64_t count = integer_argument("min_bucket_count", min_bucket_count);
  batching::Buckets buckets = unlocked(
      [&] { return batching::create_buckets(values_of<std::int64_t>(tensor), width, count); });
  return py::make_tuple(to_tensor(std::move(buckets.boundaries)),
                        to_tensor(std::move(buckets.counts)));
}

template <typename T>
py::object least_padding(const at::Tensor& sizes, std::size_t buckets) {
  return to_tensor(
      unlocked([&] { return batching::least_padding_boundaries(values_of<T>(sizes), buckets); }));
}

py::object least_padding_boundaries(const py::object& sizes, const py::object& buckets) {
  const at::Tensor tensor = numbers_argument("sizes", sizes);
  const std::int64_t count = integer_argument("buckets", buckets);
  TORCH_CHECK_VALUE(count >= 1, "buckets=", count, " is not allowed; it must be at least 1");
  return tensor.scalar_type() == at::kLong
             ? least_padding<std::int64_t>(tensor, static_cast<std::size_t>(count))
             : least_padding<double>(tensor, static_cast<std::size_t>(count));
}

template <typename T>
py::tuple groups(const at::Tensor& sizes, const at::Tensor& boundaries) {
  batching::BucketGroups result = unlocked(
      [&] { return batching::group_by_bucket(values_of<T>(sizes), values_of<T>(boundaries)); });
  return py::make_tuple(to_tensor(std::move(result.indices)), to_tensor(std::move(result.offsets)));
}

py::tuple group_by_bucket(const py::object& sizes, const py::object& boundaries) {
  const at::Tensor size_tensor = numbers_argument("sizes", sizes);
  const at::Tensor boundary_tensor = numbers_argument("boundaries", boundaries);
  TORCH_CHECK_TYPE(size_tensor.scalar_type() == boundary_tensor.scalar_type(),
                   "sizes and boundaries must have one dtype, got ", size_tensor.scalar_type(),
                   " and ", boundary_tensor.scalar_type());
  return size_tensor.scalar_type() == at::kLong ? groups<std::int64_t>(size_tensor, boundary_tensor)
                                                : groups<double>(size_tensor, boundary_tensor);
}

}  // namespace

void register_buckets(py::module_& m) {
  m.def("create_buckets", &create_buckets, py::arg("sizes"), py::arg("max_width"),
        py::arg("min_bucket_count"));
  m.def("least_padding_boundaries", &least_padding_boundaries, py::arg("sizes"),
        py::arg("buckets"));
  m.def("group_by_bucket", &group_by_bucket, py::arg("sizes"), py::arg("boundaries"));
}

}  // namespace brim::python
