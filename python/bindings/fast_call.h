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

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace brim::python {

/// What the argument is not, and what the other way may know.
struct NotPlain final : std::exception {};

/// A tensor, no subclass but Parameter. @throws NotPlain
const at::Tensor& plain_tensor(PyObject* value);

/// Where a mode or torch.jit.trace watches, everything takes the other way.
[[nodiscard]] bool is_watched();

/// Calls `brim.nn._elsewhere.elsewhere` with this name and these arguments.
PyObject* call_elsewhere(const char* name, PyObject* const* values, Py_ssize_t count);

template <class T>
struct Read;

template <>
struct Read<const at::Tensor&> {
  const at::Tensor& value;
  explicit Read(PyObject* from) : value(plain_tensor(from)) {}
};

template <>
struct Read<const std::optional<at::Tensor>&> {
  std::optional<at::Tensor> value;
  explicit Read(PyObject* from) {
    if (from != Py_None) {
      value = plain_tensor(from);
    }
  }
};

template <>
struct Read<at::Tensor&> {
  at::Tensor value;
  explicit Read(PyObject* from) : value(plain_tensor(from)) {}
};

template <>
struct Read<bool> {
  bool value;
  explicit Read(PyObject* from) : value(from == Py_True) {
    if (!PyBool_Check(from)) {
      throw NotPlain();
    }
  }
};

template <>
struct Read<std::int64_t> {
  std::int64_t value;
  explicit Read(PyObject* from) : value(PyLong_CheckExact(from) ? PyLong_AsLongLong(from) : -1) {
    if (value == -1 && (!PyLong_CheckExact(from) || PyErr_Occurred() != nullptr)) {
      PyErr_Clear();
      throw NotPlain();
    }
  }
};

template <>
struct Read<double> {
  double value;
  explicit Read(PyObject* from) {
    if (PyFloat_CheckExact(from)) {
      value = PyFloat_AS_DOUBLE(from);
    } else {
      value = static_cast<double>(Read<std::int64_t>(from).value);
    }
  }
};

template <>
struct Read<std::string_view> {
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
  std::optional<T> value;
  explicit Read(PyObject* from) {
    if (from != Py_None) {
      value = Read<T>(from).value;
    }
  }
};

template <>
struct Read<at::IntArrayRef> {
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

template <const char* Name, class Signature>
struct FastCall;

/// `&FastCall<Name, Signature>::call` is a METH_FASTCALL function for the operator brim::Name.
template <const char* Name, class Result, class... Args>
struct FastCall<Name, Result(Args...)> {
  static PyObject* call(PyObject* /*module*/, PyObject* const* values, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (std::cmp_equal(count, sizeof...(Args)) && !is_watched()) {
      try {
        return run(values, std::index_sequence_for<Args...>());
      } catch (const NotPlain&) {
      }
    }
    return call_elsewhere(Name, values, count);
    END_HANDLE_TH_ERRORS
  }

 private:
  template <std::size_t... I>
  static PyObject* run(PyObject* const* values, std::index_sequence<I...> /*places*/) {
    static const auto op = [] {
      return c10::Dispatcher::singleton()
          .findSchemaOrThrow((std::string("brim::") + Name).c_str(), "")
          .template typed<Result(Args...)>();
    }();
    std::tuple<Read<Args>...> read(values[I]...);
    auto result = [&] {
      const pybind11::gil_scoped_release unlocked;
      return op.call(std::get<I>(read).value...);
    }();
    return give(std::move(result));
  }
};

}  // namespace brim::python
