#pragma once

// Operators of the dispatcher as Python functions without pybind11 and without torch's argument
// parser, which together cost as much as a small layer. Positional arguments only, in the order of
// the operator's schema.
//
// Tensor subclasses, modes, symbolic values (torch.fx) and traced programs take the way through
// `brim.nn._elsewhere`, which decides between `torch.ops.brim` and torch's own functions.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "interpreter.h"

namespace brim::python {

/// What the argument is not, and what the other way may know.
struct NotPlain final : std::exception {};

inline void check_plain(bool plain) {
  if (!plain) [[unlikely]] {
    throw NotPlain();
  }
}

/// A tensor, no subclass but Parameter. @throws NotPlain
const at::Tensor& plain_tensor(PyObject* value);

/// Where a mode or torch.jit.trace watches, everything takes the other way.
[[nodiscard]] bool is_watched();

/// Calls `brim.nn._elsewhere.via_dispatcher` with this name and these arguments.
PyObject* call_via_dispatcher(const char* name, PyObject* const* values, Py_ssize_t count);

template <class T>
struct Read;

template <>
struct Read<const at::Tensor&> {
  static constexpr const char* kType = "Tensor";
  const at::Tensor& value;
  explicit Read(PyObject* from) : value(plain_tensor(from)) {}
};

template <>
struct Read<const std::optional<at::Tensor>&> {
  static constexpr const char* kType = "Tensor?";
  std::optional<at::Tensor> value;
  explicit Read(PyObject* from) {
    if (from != Py_None) {
      value = plain_tensor(from);
    }
  }
};

template <>
struct Read<at::Tensor&> {
  static constexpr const char* kType = "Tensor!";
  at::Tensor value;
  explicit Read(PyObject* from) : value(plain_tensor(from)) {}
};

template <>
struct Read<bool> {
  static constexpr const char* kType = "bool";
  bool value;
  explicit Read(PyObject* from) : value(from == Py_True) { check_plain(PyBool_Check(from)); }
};

template <>
struct Read<std::int64_t> {
  static constexpr const char* kType = "int";
  std::int64_t value;
  explicit Read(PyObject* from) {
    check_plain(PyLong_CheckExact(from) || PyBool_Check(from));
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(from, &overflow);
    check_plain(overflow == 0);
  }
};

template <>
struct Read<double> {
  static constexpr const char* kType = "float";
  double value;
  explicit Read(PyObject* from)
      : value(PyFloat_CheckExact(from) ? PyFloat_AS_DOUBLE(from)
                                       : static_cast<double>(Read<std::int64_t>(from).value)) {}
};

template <>
struct Read<std::string_view> {
  static constexpr const char* kType = "str";
  std::string_view value;  // into the Python object, which the caller holds
  explicit Read(PyObject* from) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_Check(from) ? PyUnicode_AsUTF8AndSize(from, &size) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      throw NotPlain();
    }
    value = std::string_view(text, static_cast<std::size_t>(size));
  }
};

template <class T>
struct Read<std::optional<T>> {
  static inline const std::string kType = std::string(Read<T>::kType) + "?";
  std::optional<T> value;
  explicit Read(PyObject* from) {
    if (from != Py_None) {
      value = Read<T>(from).value;
    }
  }
};

template <>
struct Read<at::IntArrayRef> {
  static constexpr const char* kType = "int[]";
  c10::DimVector numbers;
  at::IntArrayRef value;
  explicit Read(PyObject* from) {
    const bool is_tuple = PyTuple_CheckExact(from);
    if (!is_tuple && !PyList_CheckExact(from)) {
      numbers.push_back(Read<std::int64_t>(from).value);
    } else {
      const Py_ssize_t size = is_tuple ? PyTuple_GET_SIZE(from) : PyList_GET_SIZE(from);
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* const item = is_tuple ? PyTuple_GET_ITEM(from, i) : PyList_GET_ITEM(from, i);
        numbers.push_back(Read<std::int64_t>(item).value);
      }
    }
    value = numbers;
  }
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;
};

inline std::size_t how_many(const at::Tensor* /*result*/) { return 1; }

template <class... Tensors>
std::size_t how_many(const std::tuple<Tensors...>* /*result*/) {
  return sizeof...(Tensors);
}

inline PyObject* give(at::Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }

template <class... Tensors>
PyObject* give(std::tuple<Tensors...> tensors) {
  return std::apply(
      [](auto&... each) {
        const pybind11::tuple result = pybind11::make_tuple(
            pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(each)))...);
        return result.inc_ref().ptr();
      },
      tensors);
}

/// The type of an argument as a schema writes it; "Tensor!" for one that is written to.
inline std::string schema_type(const c10::Argument& argument) {
  const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  return argument.type()->str() + (is_written ? "!" : "");
}

template <class Signature>
struct FastCall;

/// An operator as a METH_FASTCALL function of Python.
template <class Result, class... Args>
struct FastCall<Result(Args...)> {
  /// @returns null where the operator has another signature. Lives as long as the process.
  static PyObject* make(const c10::OperatorHandle& op) {
    const auto& arguments = op.schema().arguments();
    const std::vector<std::string> expected{Read<Args>::kType...};
    const bool is_same = std::equal(
        arguments.begin(), arguments.end(), expected.begin(), expected.end(),
        [](const auto& argument, const auto& type) { return schema_type(argument) == type; });
    if (!is_same || op.schema().returns().size() !=
                        how_many(static_cast<std::remove_reference_t<Result>*>(nullptr))) {
      return nullptr;
    }
    const std::string name = op.schema().name().substr(std::string_view("brim::").size());
    auto* const self = new FastCall{name, op.typed<Result(Args...)>(), {}};  // NOLINT: see above
    self->method = {self->name.c_str(),
                    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                    METH_FASTCALL, nullptr};
    const pybind11::capsule holder(self);
    return PyCFunction_NewEx(&self->method, holder.ptr(), nullptr);
  }

  std::string name;
  c10::TypedOperatorHandle<Result(Args...)> op;
  PyMethodDef method;

 private:
  static PyObject* call(PyObject* holder, PyObject* const* values, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    auto& self = *static_cast<FastCall*>(PyCapsule_GetPointer(holder, nullptr));
    if (std::cmp_equal(count, sizeof...(Args)) && !is_watched()) {
      try {
        return self.run(values, std::index_sequence_for<Args...>());
      } catch (const NotPlain&) {
      }
    }
    return call_via_dispatcher(self.name.c_str(), values, count);
    END_HANDLE_TH_ERRORS
  }

  template <std::size_t... I>
  PyObject* run(PyObject* const* values, std::index_sequence<I...> /*places*/) {
    std::tuple<Read<Args>...> read(values[I]...);
    return give(without_gil([&] { return op.call(std::get<I>(read).value...); }));
  }
};

}  // namespace brim::python
