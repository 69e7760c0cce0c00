// Packed batches: the tokens of documents in one row, and what attention must know about it.
#include <ATen/ops/empty.h>
#include <brim/batching/document_parts.h>
#include <brim/batching/packed_row.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "numbers.h"
#include "tensor_argument.h"
#include "tensors.h"

namespace brim::python {
namespace {

using batching::DocumentParts;
using batching::PackedRow;
using Ints = std::vector<std::int64_t>;

std::span<std::int64_t> places_of(const char* name, const py::object& values) {
  const at::Tensor* const tensor = tensor_in(values.ptr());
  TORCH_CHECK_TYPE(tensor != nullptr && tensor->device().is_cpu() && tensor->dim() == 1 &&
                       tensor->scalar_type() == at::kLong && tensor->is_contiguous(),
                   name, " must be an int64 tensor with one dimension on the CPU");
  return {tensor->mutable_data_ptr<std::int64_t>(), static_cast<std::size_t>(tensor->numel())};
}

template <class T>
void copy_strided(const Py_buffer& from, std::int64_t begin, std::span<std::int64_t> to) {
  const Py_ssize_t stride = from.strides[0];
  const char* at = static_cast<const char*>(from.buf) + begin * stride;
  for (std::int64_t& value : to) {
    T own;
    std::memcpy(&own, at, sizeof(T));
    value = static_cast<std::int64_t>(own);  // NOLINT(bugprone-signed-char-misuse): a number
    at += stride;
  }
}

/// Copies from an array of whole numbers. False where it is none.
bool copy_array(const Py_buffer& from, std::int64_t begin, std::span<std::int64_t> to) {
  std::string_view format = from.format == nullptr ? "B" : from.format;
  if (!format.empty() && (format[0] == '@' || format[0] == '=')) {
    format.remove_prefix(1);
  }
  if (from.ndim != 1 || format.size() != 1) {
    return false;
  }
  const bool with_sign = std::string_view("bhilq").find(format[0]) != std::string_view::npos;
  if (!with_sign && std::string_view("BHILQ").find(format[0]) == std::string_view::npos) {
    return false;
  }
  switch (from.itemsize) {
    case 1:
      with_sign ? copy_strided<std::int8_t>(from, begin, to)
                : copy_strided<std::uint8_t>(from, begin, to);
      return true;
    case 2:
      with_sign ? copy_strided<std::int16_t>(from, begin, to)
                : copy_strided<std::uint16_t>(from, begin, to);
      return true;
    case 4:
      with_sign ? copy_strided<std::int32_t>(from, begin, to)
                : copy_strided<std::uint32_t>(from, begin, to);
      return true;
    case 8:
      copy_strided<std::int64_t>(from, begin, to);
      return with_sign || std::none_of(to.begin(), to.end(), [](auto value) { return value < 0; });
    default:
      return false;
  }
}

/// Copies some of the values of one document, out of a list, a tensor or an array.
void copy_values(PyObject* values, const char* name, std::int64_t document, std::int64_t begin,
                 std::span<std::int64_t> to) {
  const auto refuse = [&](const char* got) {
    TORCH_CHECK_TYPE(false, name, " must be whole numbers in one dimension, got ", got,
                     " for sample ", document, " of the batch");
  };
  const auto check_length = [&](std::int64_t length) {
    TORCH_CHECK_VALUE(begin + std::ssize(to) <= length, name, " of sample ", document,
                      " of the batch must have ", begin + std::ssize(to), " values, got ", length);
  };
  if (PyList_CheckExact(values) || PyTuple_CheckExact(values)) {
    check_length(PySequence_Fast_GET_SIZE(values));
    PyObject* const* const items = PySequence_Fast_ITEMS(values) + begin;
    for (std::size_t i = 0; i < to.size(); ++i) {
      to[i] = whole_number(items[i], {name, "sample", document});
    }
    return;
  }
  if (const at::Tensor* const tensor = tensor_in(values)) {
    if (tensor->dim() != 1 || !at::isIntegralType(tensor->scalar_type(), false)) {
      refuse("a tensor of another kind");
    }
    check_length(tensor->size(0));
    const at::Tensor own =
        tensor->slice(0, begin, begin + std::ssize(to)).to(at::kCPU, at::kLong).contiguous();
    std::copy_n(own.const_data_ptr<std::int64_t>(), to.size(), to.begin());
    return;
  }
  if (PyObject_CheckBuffer(values) != 0) {
    Py_buffer view;
    if (PyObject_GetBuffer(values, &view, PyBUF_STRIDED_RO | PyBUF_FORMAT) == 0) {
      const auto release = [](Py_buffer* held) { PyBuffer_Release(held); };
      const std::unique_ptr<Py_buffer, decltype(release)> held(&view, release);
      if (view.ndim == 1) {
        check_length(view.shape[0]);
      }
      if (!copy_array(view, begin, to)) {
        refuse("an array of another kind");
      }
      return;
    }
    PyErr_Clear();
  }
  const auto sequence =
      py::reinterpret_steal<py::object>(PySequence_Fast(values, "not a sequence"));
  if (!sequence || PyUnicode_Check(values) != 0) {
    PyErr_Clear();
    refuse(Py_TYPE(values)->tp_name);
  }
  copy_values(sequence.ptr(), name, document, begin, to);
}

/// The values of all documents in a row, with `pad` between and after them.
py::object gather(const PackedRow& row, const py::list& values, const char* name,
                  const Ints& begins, std::int64_t pad) {
  TORCH_CHECK_VALUE(values.size() == row.documents() && begins.size() == row.documents(), name,
                    " must be those of ", row.documents(), " documents, got ", values.size());
  const at::Tensor result = at::empty({row.size()}, at::kLong);
  const std::span<std::int64_t> places(result.mutable_data_ptr<std::int64_t>(),
                                       static_cast<std::size_t>(row.size()));
  std::size_t end = 0;
  for (std::size_t i = 0; i < row.documents(); ++i) {
    const auto begin = static_cast<std::size_t>(row.offsets()[i]);
    const auto length = static_cast<std::size_t>(row.length(i));
    std::fill(places.begin() + static_cast<std::ptrdiff_t>(end),
              places.begin() + static_cast<std::ptrdiff_t>(begin), pad);
    copy_values(values[i].ptr(), name, static_cast<std::int64_t>(i), begins[i],
                places.subspan(begin, length));
    end = begin + length;
  }
  std::fill(places.begin() + static_cast<std::ptrdiff_t>(end), places.end(), pad);
  return to_python(result);
}

template <class T, class Write>
py::object written(const PackedRow& row, const Write& write) {
  const at::Tensor result = at::empty({row.size()}, at::CppTypeToScalarType<T>::value);
  write(std::span<T>(result.mutable_data_ptr<T>(), static_cast<std::size_t>(row.size())));
  return to_python(result);
}

py::tuple blocks(const PackedRow& row, std::int64_t block, bool causal) {
  batching::BlockLists lists = row.blocks(block, causal);
  const auto shaped = [&](std::vector<std::int32_t> values, bool table) {
    const auto tensor = THPVariable_Unpack(to_tensor(std::move(values)).ptr());
    return to_python(table ? tensor.view({1, 1, lists.rows, lists.columns})
                           : tensor.view({1, 1, lists.rows}));
  };
  return py::make_tuple(
      shaped(std::move(lists.counts), false), shaped(std::move(lists.indices), true),
      shaped(std::move(lists.full_counts), false), shaped(std::move(lists.full_indices), true));
}

}  // namespace

void register_packed_row(py::module_& m) {
  py::class_<PackedRow>(m, "PackedRow")
      .def(py::init([](const Ints& lengths, std::int64_t document_multiple,
                       std::int64_t row_multiple, std::int64_t row_length) {
             return PackedRow(lengths, {.document_multiple = document_multiple,
                                        .row_multiple = row_multiple,
                                        .row_length = row_length});
           }),
           py::arg("lengths"), py::arg("document_multiple") = 1, py::arg("row_multiple") = 1,
           py::arg("row_length") = 0)
      .def_property_readonly("documents", &PackedRow::documents)
      .def_property_readonly("size", &PackedRow::size)
      .def_property_readonly("longest", &PackedRow::longest)
      .def("length",
           [](const PackedRow& row, std::size_t document) {
             TORCH_CHECK_INDEX(document < row.documents(), "there is no document ", document);
             return row.length(document);
           })
      .def("offsets", [](const PackedRow& row) { return to_python(tensor_of(row.offsets())); })
      .def("token_offsets", [](const PackedRow& row) { return to_tensor(row.token_offsets()); })
      .def("positions",
           [](const PackedRow& row, const Ints& begins) {
             return written<std::int64_t>(row, [&](auto out) { row.write_positions(begins, out); });
           })
      .def("document_ids",
           [](const PackedRow& row) {
             return written<std::int32_t>(row, [&](auto out) { row.write_documents(out); });
           })
      .def("gather", &gather)
      .def("shift", [](const PackedRow& row, const py::object& values, const Ints& next,
                       std::int64_t none) { row.shift(places_of("values", values), next, none); })
      .def("mask_first",
           [](const PackedRow& row, const py::object& values, std::int64_t none) {
             row.mask_first(places_of("values", values), none);
           })
      .def("blocks", &blocks);
  py::class_<DocumentParts>(m, "DocumentParts")
      .def(py::init([](const py::object& lengths, std::int64_t largest) {
        return DocumentParts(values_of<std::int64_t>(column_of<std::int64_t>("sizes", lengths)),
                             largest);
      }))
      .def("__len__", &DocumentParts::size)
      .def("__getitem__",
           [](const DocumentParts& self, std::int64_t part) {
             const auto [document, begin, end] = self[part];
             return py::make_tuple(document, begin, end);
           })
      .def("sizes", [](const DocumentParts& self) { return to_tensor(self.sizes()); });
}

}  // namespace brim::python
