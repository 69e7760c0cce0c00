#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace brim::python {

/// A one-dimensional tensor in this machine's memory.
inline at::Tensor column_argument(const char* name, const pybind11::object& value) {
  TORCH_CHECK_TYPE(THPVariable_Check(value.ptr()), name, " must be a tensor, got ",
                   pybind11::str(pybind11::type::of(value)).cast<std::string>());
  const at::Tensor tensor = THPVariable_Unpack(value.ptr());
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.dim() == 1, name,
                    " must be a one-dimensional tensor on the CPU, got shape ", tensor.sizes(),
                    " on ", tensor.device());
  return tensor.contiguous();
}

/// The same of this type.
template <typename T>
at::Tensor column_of(const char* name, const pybind11::object& value) {
  at::Tensor tensor = column_argument(name, value);
  constexpr at::ScalarType kType = at::CppTypeToScalarType<T>::value;
  TORCH_CHECK_VALUE(tensor.scalar_type() == kType, name, " must be a tensor of ", kType, ", got ",
                    tensor.scalar_type());
  return tensor;
}

/// The same of 64-bit numbers of either type.
inline at::Tensor numbers_argument(const char* name, const pybind11::object& value) {
  at::Tensor tensor = column_argument(name, value);
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kDouble, name,
                    " must be an int64 or float64 tensor on the CPU, got ", tensor.scalar_type());
  return tensor;
}

template <typename T>
std::span<const T> values_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

/// Calls `work` with the values of a numbers_argument.
template <typename Work>
auto with_values(const at::Tensor& numbers, const Work& work) {
  return numbers.scalar_type() == at::kLong ? work(values_of<std::int64_t>(numbers))
                                            : work(values_of<double>(numbers));
}

template <typename T>
at::Tensor tensor_of(std::span<const T> values) {
  const at::Tensor result =
      at::empty({static_cast<std::int64_t>(values.size())}, at::CppTypeToScalarType<T>::value);
  std::copy(values.begin(), values.end(), result.mutable_data_ptr<T>());
  return result;
}

inline pybind11::object to_python(const at::Tensor& tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
}

/// Takes the values over: a copy of 10 million would cost as much as making them.
template <typename T>
pybind11::object to_tensor(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  return to_python(at::from_blob(
      kept->data(), {static_cast<std::int64_t>(kept->size())}, [kept](void*) { delete kept; },
      at::CppTypeToScalarType<T>::value));
}

}  // namespace brim::python
