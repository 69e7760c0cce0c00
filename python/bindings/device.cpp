#include <brim/memory/stats.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Device.h>

#include <limits>
#include <string>

#include "bindings.h"
#include "numbers.h"

namespace brim::python {
namespace {

c10::Device parse_device(const std::string& text) {
  try {
    return c10::Device(text);
  } catch (const c10::Error& error) {  // of parsing a text
    TORCH_CHECK_VALUE(false, "device must be a string such as \"cpu\" or \"cuda:0\", got \"", text,
                      "\"");
  }
}

c10::Device accelerator_number(std::int64_t index) {
  const c10::Device current = default_device();
  TORCH_CHECK_VALUE(!current.is_cpu(), "device is the number ", index,
                    ", but there is no accelerator here");
  TORCH_CHECK_VALUE(index >= 0 && index <= std::numeric_limits<c10::DeviceIndex>::max(),
                    "device must be the number of an accelerator, got ", index);
  return {current.type(), static_cast<c10::DeviceIndex>(index)};
}

}  // namespace

c10::Device device_argument(const py::object& device) {
  if (device.is_none()) {
    return default_device();
  }
  if (THPDevice_Check(device.ptr())) {
    return reinterpret_cast<THPDevice*>(device.ptr())
        ->device;  // NOLINT: how torch lays out its own type
  }
  if (py::isinstance<py::str>(device)) {
    return parse_device(text_of(device));
  }
  if (py::isinstance<py::int_>(device) && !py::isinstance<py::bool_>(device)) {
    return accelerator_number(integer_argument("device", device));
  }
  TORCH_CHECK_TYPE(
      false, "device must be None, a string, a torch.device or the number of an accelerator, got ",
      py::repr(device).cast<std::string>());
}

std::string text_of(const py::object& text) {
  Py_ssize_t size = 0;
  if (const char* const bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size)) {
    return {bytes, static_cast<std::size_t>(size)};
  }
  PyErr_Clear();  // it has a surrogate
  return text.attr("encode")("utf-8", "backslashreplace").cast<std::string>();
}

std::int64_t integer_argument(const char* name, const py::object& value) {
  return whole_number(value.ptr(), {name});
}

py::object to_python(c10::Device device) {
  return py::reinterpret_steal<py::object>(THPDevice_New(device));
}

}  // namespace brim::python
