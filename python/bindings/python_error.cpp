#include "python_error.h"

#include <brim/adapt/agreement.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings.h"

namespace brim::python {
namespace py = pybind11;

namespace {

/// A RuntimeError. Held for the life of the process, on purpose.
py::handle rank_error;

/// Types that have no exported C++ name. Held for the life of the process, on purpose.
struct ErrorTypes {
  py::handle out_of_memory =
      py::object(py::module_::import("torch").attr("OutOfMemoryError")).release();
  py::handle accelerator =
      py::object(py::module_::import("torch").attr("AcceleratorError")).release();
  py::handle group =  // None before Python 3.11
      py::object(py::getattr(py::module_::import("builtins"), "BaseExceptionGroup", py::none()))
          .release();
};

const ErrorTypes& error_types() {
  static const ErrorTypes errors;
  return errors;
}

bool is_a(py::handle object, py::handle type) {
  return PyErr_GivenExceptionMatches(object.ptr(), type.ptr()) != 0;
}

/// Whether it is a RuntimeError that no size would cure.
bool blames_the_program(py::handle exception) {
  return is_a(exception, PyExc_NotImplementedError) || is_a(exception, PyExc_RecursionError) ||
         is_a(exception, rank_error);
}

OomCause from_text(py::handle exception, OomKind otherwise) {
  return classify_message(error_text(exception), otherwise);
}

/// The int that the attribute is; -1 where it is none.
std::int64_t number_of(py::handle exception, const char* name) {
  try {
    const py::object value = attribute(exception, name);
    return py::isinstance<py::int_>(value) ? PyLong_AsLongLong(value.ptr()) : -1;
  } catch (const py::error_already_set&) {
    return -1;
  }
}

/// cudaErrorMemoryAllocation and hipErrorOutOfMemory.
constexpr std::int64_t kRuntimeOutOfMemory = 2;

/// What the exception says by itself, by its type and its text.
OomCause said_by(py::handle exception) {
  const ErrorTypes& types = error_types();
  if (is_a(exception, types.out_of_memory)) {
    return from_text(exception, OomKind::device_memory);
  }
  if (is_a(exception, PyExc_MemoryError)) {
    return from_text(exception, OomKind::host_memory);
  }
  if (is_a(exception, types.accelerator)) {
    const bool out = number_of(exception, "error_code") == kRuntimeOutOfMemory;
    return from_text(exception, out ? OomKind::device_memory : OomKind::none);
  }
  if (is_a(exception, PyExc_OSError)) {
    return number_of(exception, "errno") == ENOMEM ? from_text(exception, OomKind::host_memory)
                                                   : OomCause{};
  }
  return is_a(exception, PyExc_RuntimeError) && !blames_the_program(exception)
             ? from_text(exception, OomKind::none)
             : OomCause{};
}

/// An exception that says something about memory, and what it says.
struct Told {
  py::object exception;
  OomCause cause;
};

/// The exception that this one reports; empty where it means what it says.
///
/// Frameworks raise a RuntimeError `from` what failed inside them. The interpreter itself raises a
/// SystemError where a function of C returned a result with an exception set, such as torch where
/// it warns of what failed: no program chose that, so what the exception was then (`__cause__`, or
/// `__context__`) decides. A RuntimeError that merely happened while another was handled is the
/// program's own: its plan for little memory may have a bug, which no smaller size would cure.
py::object reported_by(py::handle exception) {
  const bool is_interpreters = is_a(exception, PyExc_SystemError);
  if (!is_interpreters && (!is_a(exception, PyExc_RuntimeError) || blames_the_program(exception))) {
    return {};
  }
  auto reason = py::reinterpret_steal<py::object>(PyException_GetCause(exception.ptr()));
  if (!reason && is_interpreters) {
    reason = py::reinterpret_steal<py::object>(PyException_GetContext(exception.ptr()));
  }
  return reason;
}

/// Finds it in the exception, in what that reports, and in a group whose members all have one: then
/// no part of the group is about anything else.
Told told_by(py::handle exception, int depth) {
  constexpr int kDeepest = 32;  // a chain can be a circle
  if (const OomCause cause = said_by(exception); cause || depth == kDeepest) {
    return {py::reinterpret_borrow<py::object>(exception), cause};
  }
  if (const py::object reason = reported_by(exception)) {
    return told_by(reason, depth + 1);
  }
  if (is_a(exception, error_types().group)) {
    Told first;
    for (const py::handle member : py::tuple(attribute(exception, "exceptions"))) {
      Told told = told_by(member, depth + 1);
      if (!told.cause) {
        return {};
      }
      if (!first.cause) {
        first = std::move(told);
      }
    }
    return first;
  }
  return {};
}

std::optional<OomCause> classify_foreign(const std::exception& error) noexcept {
  const auto* python_error = dynamic_cast<const py::error_already_set*>(&error);
  if (python_error == nullptr) {
    return std::nullopt;
  }
  try {
    std::optional<py::gil_scoped_acquire> gil;
    entering_python([&] { gil.emplace(); });
    return classify_python(python_error->value());
  } catch (...) {
    return OomCause{};  // an exception whose __str__ fails is none of ours
  }
}

}  // namespace

std::string error_text(py::handle exception) {
  try {
    return text_of(new_reference(entering_python([&] { return PyObject_Str(exception.ptr()); })));
  } catch (const py::error_already_set&) {
    return "";
  }
}

OomCause classify_python(py::handle exception) { return told_by(exception, 0).cause; }

detail::Failure release_pending_error() {
  std::optional<py::error_already_set> pending(std::in_place);  // takes it
  std::optional<Told> told(told_by(pending->value(), 0));
  if (!told->cause) {
    throw py::error_already_set(*pending);
  }
  std::string text = error_text(pending->value());
  if (!told->exception.is(pending->value())) {
    text += ": " + error_text(told->exception);
  }
  detail::Failure failure = detail::make_failure(told->cause, text);
  told.reset();
  // Back to the interpreter, so that the last reference, and with it finalisers, does not end in a
  // destructor.
  pending->restore();
  pending.reset();
  entering_python([] { PyErr_Clear(); });
  without_gil([] { detail::release_failed_backward(); });
  return failure;
}

void throw_out_of_memory(const detail::Failure& failure) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, failure.message);
}

void register_rank_error(py::module_& m) {
  rank_error =
      new_reference(PyErr_NewExceptionWithDoc(
                        "brim.RankError",
                        R"(Another rank failed or is gone, or the ranks do different things.

Raised by adaptive calls with `ranks=`, on every rank that is left.

Example:
    >>> import brim
    >>> issubclass(brim.RankError, RuntimeError)
    True
)",
                        PyExc_RuntimeError, nullptr))
          .release();
  m.attr("RankError") = rank_error;
}

void set_python_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::invalid_argument& wrong) {
    PyErr_SetString(PyExc_ValueError, wrong.what());
  } catch (const RankError& other) {
    // A text of another rank may be cut in the middle of a character.
    const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
        other.what(), static_cast<Py_ssize_t>(std::strlen(other.what())), "replace"));
    if (text) {
      PyErr_SetObject(rank_error.ptr(), text.ptr());
    }
  } catch (...) {
    torch::translate_exception_to_python(error);
  }
}

void install_python_classifier() {
  error_types();  // imported now, not in the middle of a failure
  set_exception_classifier(&classify_foreign);
}

}  // namespace brim::python
