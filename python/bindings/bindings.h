#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace brim::python {

namespace py = pybind11;

// One function a module, called by module.cpp.
void register_adapt(py::module_& m);
void register_allocator_model(py::module_& m);
void register_batching(py::module_& m);
void register_blocks(py::module_& m);
void register_buckets(py::module_& m);
void register_dist(py::module_& m);
void register_explain(py::module_& m);
void register_live_graphs(py::module_& m);
void register_fake_results(py::module_& m);
void register_fake_tensor(py::module_& m);
void register_fit(py::module_& m);
void register_memory(py::module_& m);
void register_microbatches(py::module_& m);
void register_mixture(py::module_& m);
void register_nn(py::module_& m);
void register_packed_row(py::module_& m);
void register_predict(py::module_& m);
void register_regions(py::module_& m);
void register_rehearsal(py::module_& m);
void register_testing(py::module_& m);
void register_undoing(py::module_& m);

/// A device as Python code writes it: None (the current accelerator, else the CPU), `"cuda:1"`, a
/// torch.device, or the index of an accelerator. @throws c10::ValueError / c10::TypeError naming
/// the argument.
c10::Device device_argument(const py::object& device);

py::object to_python(c10::Device device);

/// A str as UTF-8. What UTF-8 cannot hold (stray bytes of file names) is escaped: an error message
/// must not fail over it.
std::string text_of(const py::object& text);

/// An int, or what stands for one (numpy's), as 64 bits. @throws c10::TypeError for anything else,
/// bools included, c10::ValueError for one that does not fit; both name the argument.
std::int64_t integer_argument(const char* name, const py::object& value);

/// The value that a word stands for.
/// @param words of all values of the enum, in their order.
/// @throws c10::ValueError naming the argument and the words.
template <class Enum>
Enum word_argument(const char* name, const std::string& given,
                   std::initializer_list<const char*> words) {
  const auto* const found = std::find(words.begin(), words.end(), given);
  TORCH_CHECK_VALUE(found != words.end(), name, " must be '", c10::Join("' or '", words),
                    "', got '", given, "'");
  return static_cast<Enum>(found - words.begin());
}

}  // namespace brim::python
