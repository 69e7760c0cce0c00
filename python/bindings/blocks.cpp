// Modules that run as blocks (brim/nn/block.h): saved-tensor hooks hold what autograd keeps in
// them. Without pybind11 where each tensor passes.

#include <ATen/SavedTensorHooks.h>
#include <brim/nn/block.h>
#include <brim/nn/watching.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "python_error.h"
#include "regions.h"

namespace brim::python {
namespace {

using nn::Block;

constexpr const char* kSaved = "brim.saved_in_block";

/// An object that may end in any thread.
using Shared = std::shared_ptr<PyObject>;

Shared shared(PyObject* object) {
  return {Py_NewRef(object), [](PyObject* held) {
            const py::gil_scoped_acquire locked;
            Py_DECREF(held);
          }};
}

// -- Hooks ---------------------------------------------------------------------------------------

PyObject* ran_again = nullptr;  // an exception: a block has run as far as it must

void end_saved(PyObject* capsule) {
  delete static_cast<Block::Saved*>(PyCapsule_GetPointer(capsule, kSaved));
}

extern "C" PyObject* pack(PyObject* /*self*/, PyObject* tensor) {
  return called_by_python([&]() -> PyObject* {
    auto saved = std::make_unique<Block::Saved>(Block::save(THPVariable_Unpack(tensor)));
    if (Block::has_all()) {
      PyErr_SetNone(ran_again);
      return nullptr;
    }
    Block::Saved* const held = saved.release();
    PyObject* const capsule = PyCapsule_New(held, kSaved, end_saved);
    if (capsule == nullptr) {
      delete held;
    }
    return capsule;
  });
}

extern "C" PyObject* unpack(PyObject* /*self*/, PyObject* capsule) {
  return called_by_python([&]() -> PyObject* {
    const auto* const saved = static_cast<Block::Saved*>(PyCapsule_GetPointer(capsule, kSaved));
    if (saved == nullptr) {
      return nullptr;
    }
    at::Tensor value;
    if (saved->is_there()) {
      value = saved->get();
    } else {  // its block runs again, and other threads may wait for the same one
      const py::gil_scoped_release unlocked;
      value = saved->get();
    }
    return THPVariable_Wrap(std::move(value));
  });
}

std::array<PyMethodDef, 2> hook_methods{
    {{"pack", pack, METH_O, "Hold a tensor that autograd saves in a block."},
     {"unpack", unpack, METH_O, "Give it back."}}};
std::array<PyObject*, 2> hooks{};  // the functions

bool is_ours(const torch::autograd::SavedVariable& saved) {
  const py::gil_scoped_acquire locked;
  const auto held = saved.retrieve_unpack_hook_data();
  return held && held->first.ptr(getPyInterpreter()) == hooks[1];
}

/// In force while this lives. Layers act as without.
class WithHooks {
 public:
  WithHooks() {
    const auto safe = [](PyObject* object) {
      return c10::SafePyObject(Py_NewRef(object), getPyInterpreter());
    };
    at::SavedTensorDefaultHooks::lazy_initialize();
    at::SavedTensorDefaultHooks::push_hooks(safe(hooks[0]), safe(hooks[1]));
    nn::set_hooks_that_watch({.unpack = hooks[1], .below = nullptr, .holds = is_ours});
  }
  WithHooks(const WithHooks&) = delete;
  WithHooks& operator=(const WithHooks&) = delete;
  ~WithHooks() {
    nn::set_hooks_that_watch(before_);
    at::SavedTensorDefaultHooks::pop_hooks();
  }

 private:
  nn::HooksThatWatch before_ = nn::hooks_that_watch();
};

// -- What a call is given, and what it reads -----------------------------------------------------

/// What a call is given, as it is before the call: lists and dicts in copies of their own.
class Given {
 public:
  /// @param names of the last values, as a call gets them
  Given(PyObject* const* values, Py_ssize_t count, PyObject* names) : args_(count) {
    for (Py_ssize_t i = 0; i < count; ++i) {
      args_[static_cast<std::size_t>(i)] = copy(values[i]);
    }
    for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
      kwargs_[py::handle(PyTuple_GET_ITEM(names, i))] = copy(values[count + i]);
    }
  }

  /// Whether nothing else is in it than tensors and values that cannot change.
  [[nodiscard]] bool is_plain() const { return is_plain_; }

  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return tensors_; }
  [[nodiscard]] const py::tuple& args() const { return args_; }
  [[nodiscard]] const py::dict& kwargs() const { return kwargs_; }

 private:
  py::object copy(PyObject* value) {
    if (PyList_CheckExact(value)) {
      py::list copies;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
        copies.append(copy(PyList_GET_ITEM(value, i)));
      }
      return copies;
    }
    if (PyDict_CheckExact(value)) {
      py::dict copies;
      PyObject* name = nullptr;
      PyObject* each = nullptr;
      Py_ssize_t place = 0;
      while (PyDict_Next(value, &place, &name, &each) != 0) {
        copies[py::handle(name)] = copy(each);
      }
      return copies;
    }
    look_into(value);
    return py::reinterpret_borrow<py::object>(value);
  }

  void look_into(PyObject* value) {
    if (THPVariable_Check(value)) {
      tensors_.push_back(THPVariable_Unpack(value));
    } else if (PyTuple_Check(value)) {  // with a list in it, it could change
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
        look_into(PyTuple_GET_ITEM(value, i));
      }
    } else {
      is_plain_ = is_plain_ && (value == Py_None || PyBool_Check(value) || PyLong_Check(value) ||
                                PyFloat_Check(value) || PyUnicode_Check(value) ||
                                THPDtype_Check(value) || THPDevice_Check(value));
    }
  }

  bool is_plain_ = true;
  std::vector<at::Tensor> tensors_;
  py::tuple args_;
  py::dict kwargs_;
};

/// What a module and those inside of it consist of, at the time of a call.
class Parts {
 public:
  explicit Parts(PyObject* module) { add(module); }

  /// What the call read; empty if it wrote to any of it. Not the statistics of batch norms, to
  /// which a call in training writes, also without autograd's knowledge: its values do not depend
  /// on them.
  [[nodiscard]] std::optional<std::vector<at::Tensor>> reads() const {
    std::vector<at::Tensor> found;
    for (const Part& part : parts_) {
      if (part.tensor._version() != part.version) {
        return std::nullopt;
      }
      found.push_back(part.tensor);
    }
    return found;
  }

  /// Pairs of a module and its training flag.
  [[nodiscard]] const py::list& modes() const { return modes_; }

  /// Pairs of a table of buffers and a name.
  [[nodiscard]] const py::list& statistics() const { return statistics_; }

 private:
  struct Part {
    at::Tensor tensor;
    std::int64_t version = 0;
  };

  static bool is_statistic(PyObject* name) {
    const auto is = [&](const char* other) {
      return PyUnicode_Check(name) != 0 && PyUnicode_CompareWithASCIIString(name, other) == 0;
    };
    return is("running_mean") || is("running_var") || is("num_batches_tracked");
  }

  void add(PyObject* module) {
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) {
      throw py::error_already_set();
    }
    const auto table = [&](const char* name) {
      return PyDict_GetItemString(attributes.ptr(), name);
    };
    PyObject* const training = table("training");
    modes_.append(
        py::make_tuple(py::handle(module), py::handle(training != nullptr ? training : Py_False)));
    for (const char* const kind : {"_parameters", "_buffers"}) {
      each(table(kind), [&](PyObject* of, PyObject* name, PyObject* value) {
        if (!THPVariable_Check(value)) {
          return;
        }
        const at::Tensor& tensor = THPVariable_Unpack(value);
        if (training == Py_True && is_statistic(name)) {
          statistics_.append(py::make_tuple(py::handle(of), py::handle(name)));
        } else if (!tensor.is_inference()) {
          parts_.push_back({tensor, tensor._version()});
        }
      });
    }
    each(table("_modules"), [&](PyObject*, PyObject*, PyObject* child) {
      if (child != Py_None) {
        add(child);
      }
    });
  }

  template <class Visit>
  static void each(PyObject* table, const Visit& visit) {
    if (table == nullptr || !PyDict_Check(table)) {
      return;
    }
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t place = 0;
    while (PyDict_Next(table, &place, &name, &value) != 0) {
      visit(table, name, value);
    }
  }

  std::vector<Part> parts_;
  py::list modes_;
  py::list statistics_;
};

// -- The call ------------------------------------------------------------------------------------

/// The call once more, for the block that runs again. Ends where all is there, by an exception.
void run_again(const Shared& call) {
  const py::gil_scoped_acquire locked;
  const WithHooks with_hooks;
  call_python(py::reinterpret_borrow<py::object>(call.get()));
}

/// The block that was begun ends, also where the call fails.
class Running {
 public:
  Running(const std::vector<at::Tensor>& inputs, PyObject* module)
      : block_(Block::begin(module, inputs, Py_TYPE(module)->tp_name)) {}
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() {
    if (block_ != nullptr) {
      block_->end({}, nullptr);
    }
  }

  void end(const std::vector<at::Tensor>& reads, std::function<void()> again) {
    std::exchange(block_, nullptr)->end(reads, std::move(again));
  }

 private:
  std::shared_ptr<Block> block_;
};

/// within_block(recompute, again, function, module, *args, **kwargs)
extern "C" PyObject* within_block(PyObject* /*self*/, PyObject* const* values, Py_ssize_t count,
                                  PyObject* names) {
  return called_by_python([&]() -> PyObject* {
    TORCH_CHECK_TYPE(count >= 4,
                     "within_block takes a level, what runs it again, a function, a "
                     "module and its arguments");
    const InModuleRegion in_region(values[0]);
    PyObject* const again = values[1];
    PyObject* const function = values[2];
    PyObject* const module = values[3];
    const auto call = [&] {
      return PyObject_Vectorcall(function, values + 3, static_cast<std::size_t>(count - 3), names);
    };
    const Given given(values + 4, count - 4, names);
    if (!given.is_plain() || !Block::can_begin(given.tensors()) ||
        !Block::may_run_short(module, given.tensors())) {
      return call();
    }
    const Parts parts(module);
    Running running(given.tensors(), module);
    py::object result;
    {
      const WithHooks with_hooks;
      result = py::reinterpret_steal<py::object>(call());
    }
    if (!result) {
      return nullptr;
    }
    if (const auto reads = parts.reads()) {
      const py::object partial = attribute(py::module_::import("functools"), "partial");
      running.end(*reads,
                  [once_more = shared(partial(py::handle(again), py::handle(function),
                                              py::handle(module), parts.modes(), parts.statistics(),
                                              given.args(), given.kwargs())
                                          .ptr())] { run_again(once_more); });
    }
    return result.release().ptr();
  });
}

PyMethodDef methods[] = {
    {"within_block",
     reinterpret_cast<PyCFunction>(
         reinterpret_cast<void (*)()>(&within_block)),  // its flags say so
     METH_FASTCALL | METH_KEYWORDS,
     "within_block(recompute, again, function, module, *args, **kwargs): call the function in a "
     "region of a module that can run again: by again(function, module, modes, statistics, args, "
     "kwargs)."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void register_blocks(py::module_& m) {
  ran_again = PyErr_NewException("brim._C.RanAgain", PyExc_BaseException, nullptr);
  for (std::size_t i = 0; i < hooks.size(); ++i) {
    hooks[i] = PyCFunction_New(&hook_methods[i], nullptr);
  }
  if (ran_again == nullptr || hooks[0] == nullptr || hooks[1] == nullptr ||
      PyModule_AddFunctions(m.ptr(), methods) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace brim::python
