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
#include "interpreter.h"
#include "python_error.h"
#include "regions.h"
#include "snapshot.h"

namespace brim::python {
namespace {

using nn::Block;

constexpr const char* kSaved = "brim.saved_in_block";

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
    at::Tensor value = saved->get_if_there();
    if (!value.defined()) {  // its block runs again, and other threads may wait for the same one
      value = without_gil([saved] { return saved->get(); });
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

// -- What a call is given ------------------------------------------------------------------------

class Given {
 public:
  Given(PyObject* const* values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; ++i) {
      look_into(values[i]);
    }
  }

  /// Whether nothing else is in it than tensors, values that cannot change, and lists and dicts of
  /// these.
  [[nodiscard]] bool is_plain() const { return is_plain_; }

  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  void look_into(PyObject* value) {
    if (THPVariable_Check(value)) {
      tensors_.push_back(THPVariable_Unpack(value));
    } else if (PyList_CheckExact(value)) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
        look_into(PyList_GET_ITEM(value, i));
      }
    } else if (PyTuple_Check(value)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
        look_into(PyTuple_GET_ITEM(value, i));
      }
    } else if (PyDict_CheckExact(value)) {
      PyObject* name = nullptr;
      PyObject* each = nullptr;
      Py_ssize_t place = 0;
      while (PyDict_Next(value, &place, &name, &each) != 0) {
        look_into(each);
      }
    } else {
      is_plain_ = is_plain_ && (value == Py_None || PyBool_Check(value) || PyLong_Check(value) ||
                                PyFloat_Check(value) || PyUnicode_Check(value) ||
                                THPDtype_Check(value) || THPDevice_Check(value));
    }
  }

  bool is_plain_ = true;
  std::vector<at::Tensor> tensors_;
};

// -- The call ------------------------------------------------------------------------------------

/// What makes the call once more, and with what.
struct Call {
  py::object again;
  py::object function;
  Snapshot snapshot;
};

/// May end in any thread.
std::shared_ptr<Call> make_call(PyObject* again, PyObject* function) {
  return {new Call{py::reinterpret_borrow<py::object>(again),
                   py::reinterpret_borrow<py::object>(function),
                   {}},
          [](const Call* call) {
            const py::gil_scoped_acquire locked;
            delete call;
          }};
}

/// For the block that runs again. Where all is there, an exception ends the call.
void run_again(const Call& call) {
  const py::gil_scoped_acquire locked;
  Snapshot::Copies copies = call.snapshot.copies();
  try {
    const WithHooks with_hooks;
    call_python(call.again, call.function, copies.modules.front(), copies.args, copies.kwargs);
  } catch (...) {
    if (!Block::has_all()) {
      throw;
    }
  }
  call.snapshot.end(std::move(copies));
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
    const Given given(values + 4, count - 4 + (names != nullptr ? PyTuple_GET_SIZE(names) : 0));
    if (!given.is_plain() || !Block::can_begin(given.tensors()) ||
        !Block::may_run_short(module, given.tensors())) {
      return call();
    }
    const std::shared_ptr<Call> once_more = make_call(again, function);
    Snapshot& snapshot = once_more->snapshot;
    if (!snapshot.add_module(module)) {
      return call();
    }
    snapshot.add_arguments(values + 4, count - 4);
    snapshot.add_named(names, values + count);
    Running running(given.tensors(), module);
    py::object result;
    {
      const WithHooks with_hooks;
      result = py::reinterpret_steal<py::object>(call());
    }
    if (!result) {
      return nullptr;
    }
    if (const auto reads = snapshot.take_unchanged()) {
      running.end(*reads, [once_more] { run_again(*once_more); });
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
     "region of a module that can run again: by again(function, module, args, kwargs), with copies "
     "of these."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void register_blocks(py::module_& m) {
  Snapshot::set_up();
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
