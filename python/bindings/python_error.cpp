#include "python_error.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstdint>

#include "bindings.h"

namespace brim::python {
namespace py = pybind11;

namespace {

/// Types of torch's that have no exported C++ name. Held for the life of the process, on purpose.
struct TorchErrors {
  py::handle out_of_memory =
      py::object(py::module_::import("torch").attr("OutOfMemoryError")).release();
  py::handle accelerator =
      py::object(py::module_::import("torch").attr("AcceleratorError")).release();
};

const TorchErrors& torch_errors() {
  static const TorchErrors errors;
  return errors;
}

bool is_a(py::handle object, py::handle type) {
  return PyObject_IsInstance(object.ptr(), type.ptr()) == 1;
}

OomCause from_text(py::handle exception, OomKind otherwise) {
  return classify_message(error_text(exception), otherwise);
}

/// cudaErrorMemoryAllocation and hipErrorOutOfMemory.
constexpr std::int64_t kRuntimeOutOfMemory = 2;

std::optional<OomCause> classify_foreign(const std::exception& error) noexcept {
  const auto* python_error = dynamic_cast<const py::error_already_set*>(&error);
  if (python_error == nullptr) {
    return std::nullopt;
  }
  try {
    const py::gil_scoped_acquire gil;
    return classify_python(python_error->value());
  } catch (...) {
    return OomCause{};  // an exception whose __str__ fails is none of ours
  }
}

}  // namespace

std::string error_text(py::handle exception) {
  try {
    return text_of(py::str(exception));
  } catch (const py::error_already_set&) {
    return "";
  }
}

OomCause classify_python(py::handle exception) {
  const TorchErrors& torch = torch_errors();
  if (is_a(exception, torch.out_of_memory)) {
    return from_text(exception, OomKind::device_memory);
  }
  if (is_a(exception, PyExc_MemoryError)) {
    return from_text(exception, OomKind::host_memory);
  }
  if (is_a(exception, torch.accelerator)) {
    const py::object code = py::getattr(exception, "error_code", py::none());
    const bool out = py::isinstance<py::int_>(code) && code.equal(py::int_(kRuntimeOutOfMemory));
    return from_text(exception, out ? OomKind::device_memory : OomKind::none);
  }
  if (is_a(exception, PyExc_OSError)) {
    const py::object number = py::getattr(exception, "errno", py::none());
    const bool exhausted = py::isinstance<py::int_>(number) && number.equal(py::int_(ENOMEM));
    return exhausted ? from_text(exception, OomKind::host_memory) : OomCause{};
  }
  // Subclasses of RuntimeError that blame the program, not its memory.
  if (is_a(exception, PyExc_NotImplementedError) || is_a(exception, PyExc_RecursionError)) {
    return {};
  }
  return is_a(exception, PyExc_RuntimeError) ? from_text(exception, OomKind::none) : OomCause{};
}

detail::Failure release_pending_error() {
  const py::error_already_set pending;  // takes it
  const OomCause cause = classify_python(pending.value());
  if (!cause) {
    throw py::error_already_set(pending);
  }
  return detail::make_failure(cause, error_text(pending.value()));
}

void throw_out_of_memory(const detail::Failure& failure) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, failure.message);
}

void install_python_classifier() {
  torch_errors();  // imported now, not in the middle of a failure
  set_exception_classifier(&classify_foreign);
}

}  // namespace brim::python
