// What live tensors tell of graphs and gradients. A backward in another thread frees what its nodes
// saved and writes gradients while it holds no GIL, and asks nobody who reads them. So while there
// is one, they are not read, nor in a process that was forked in the middle of one. None can begin
// while one of these functions runs: they keep the GIL.

#include <pthread.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <ranges>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bindings.h"
#include "interpreter.h"

namespace brim::python {
namespace {

using torch::autograd::Node;
using NodePtr = decltype(torch::autograd::Edge::function);

constexpr std::size_t kMostNodes = 200'000;  // of graphs: a fraction of a second

/// Whether it is torch's only way from Python into a backward.
bool runs_backward(PyFrameObject* frame) {
  const py::object code(new_reference(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame))));
  PyObject* const name = reinterpret_cast<PyCodeObject*>(code.ptr())->co_name;
  return PyUnicode_CompareWithASCIIString(name, "_engine_run_backward") == 0;
}

py::object frame_or_none(PyFrameObject* frame) {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(frame));
}

/// To make objects may collect garbage, whose finalizers let other threads go on.
class NoCollection {
 public:
  NoCollection() = default;
  ~NoCollection() {
    if (was_on_ != 0) {
      PyGC_Enable();
    }
  }
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;

 private:
  int was_on_ = PyGC_Disable();
};

// Of this process since it was forked.
bool was_forked_in_backward = false;

bool another_thread_is_in_backward() {
  if (was_forked_in_backward) {
    return true;
  }
  // Not sys._current_frames(): from Python 3.13 on it waits for a lock that whoever forks holds.
  PyThreadState* const here = PyThreadState_Get();
  PyThreadState* thread = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(here));
  for (; thread != nullptr; thread = PyThreadState_Next(thread)) {
    if (thread == here) {
      continue;
    }
    auto frame = frame_or_none(PyThreadState_GetFrame(thread));
    while (frame) {
      auto* const each = reinterpret_cast<PyFrameObject*>(frame.ptr());
      if (runs_backward(each)) {
        return true;
      }
      frame = frame_or_none(PyFrame_GetBack(each));
    }
  }
  return false;
}

/// Just before a fork: no code of Python runs any more until then.
void note_backward() noexcept {
  if (PyGILState_Check() == 0) {
    was_forked_in_backward = true;
    return;
  }
  const NoCollection no_collection;
  try {
    was_forked_in_backward = another_thread_is_in_backward();
  } catch (...) {  // while frames were read, which has to do with no tensor
    PyErr_Clear();
    was_forked_in_backward = true;
  }
}

/// Whether a node still has what it saved; those that save nothing do.
bool still_holds(const NodePtr& node) {
  const py::object object(new_reference(torch::autograd::functionToPyObject(node)));
  const PyGetSetDef* each = Py_TYPE(object.ptr())->tp_getset;
  for (; each != nullptr && each->name != nullptr; ++each) {
    const std::string_view name(each->name);
    if (!name.starts_with("_saved_") || name.starts_with("_saved_self_sym")) {
      continue;
    }
    if (PyObject* const value = each->get(object.ptr(), each->closure); value != nullptr) {
      Py_DECREF(value);
    } else {  // freed by its backward
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

/// How often a weight is used in graphs that still hold what backward needs; the median.
double uses_of_weights(const py::list& tensors) {
  const NoCollection no_collection;
  if (another_thread_is_in_backward()) {
    return 0;
  }
  std::vector<NodePtr> todo;
  std::unordered_set<const Node*> seen;
  const auto add = [&](const NodePtr& node) {
    if (node && seen.size() < kMostNodes && seen.insert(node.get()).second) {
      todo.push_back(node);
    }
  };
  for (const py::handle each : tensors) {
    if (const at::Tensor& tensor = THPVariable_Unpack(each.ptr()); tensor.defined()) {
      add(tensor.grad_fn());
    }
  }
  std::unordered_map<const Node*, std::size_t> uses;
  while (!todo.empty()) {
    const NodePtr node = todo.back();
    todo.pop_back();
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get()) == nullptr) {
        add(edge.function);
      } else {
        uses[edge.function.get()] += still_holds(node) ? 1 : 0;
      }
    }
  }
  std::vector<std::size_t> counts(uses.size());
  std::ranges::copy(std::views::values(uses), counts.begin());
  std::ranges::sort(counts);
  const std::size_t middle = counts.size() / 2;
  return counts.empty()           ? 0
         : counts.size() % 2 == 1 ? static_cast<double>(counts[middle])
                                  : static_cast<double>(counts[middle - 1] + counts[middle]) / 2;
}

/// The gradients that these have.
py::list gradients_of(const py::iterable& tensors) {
  const py::list all(tensors);
  py::list found;
  const NoCollection no_collection;
  if (another_thread_is_in_backward()) {
    return found;
  }
  for (const py::handle each : all) {
    const at::Tensor& gradient = THPVariable_Unpack(each.ptr()).grad();
    if (gradient.defined()) {
      found.append(new_reference(THPVariable_Wrap(gradient)));
    }
  }
  return found;
}

}  // namespace

void register_live_graphs(py::module_& m) {
  static bool was_before = false;
  pthread_atfork(
      [] {
        was_before = was_forked_in_backward;
        note_backward();
      },
      [] { was_forked_in_backward = was_before; }, nullptr);
  m.def("uses_of_weights", &uses_of_weights);
  m.def("gradients_of", &gradients_of);
}

}  // namespace brim::python
