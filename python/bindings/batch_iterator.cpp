// The iterator of a batch sampler. A CPython type, because a call through pybind11 may cost as much
// as a whole batch.
#include <c10/core/TensorImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "bindings.h"
#include "int_list.h"
#include "interpreter.h"
#include "sample_batching.h"
#include "tensors.h"

namespace brim::python {
namespace {

struct BatchIterator {
  PyObject_HEAD struct State* state;
};

struct State {
  std::shared_ptr<SampleBatching> batching;
  batching::BatchStream stream;
  bool as_tensors;
  py::dict description;
  bool finished = false;
  std::int64_t block = 0;
  at::Tensor indices = {};  // of the open block
  std::mutex mutex = {};
  std::atomic<std::thread::id> owner = {};  // the thread that holds the mutex
};

/// Holds an iterator for this thread. The GIL is not enough: it is released while a block is
/// computed, and may be whenever an object is made.
class Held {
 public:
  explicit Held(PyObject* self) : state_(*reinterpret_cast<BatchIterator*>(self)->state) {
    const std::thread::id here = std::this_thread::get_id();
    // A finalizer that runs inside of next() would wait for itself.
    TORCH_CHECK_VALUE(state_.owner != here, "this iterator is already running in this thread");
    if (!state_.mutex.try_lock()) {
      const py::gil_scoped_release release;
      state_.mutex.lock();
    }
    state_.owner = here;
  }
  ~Held() {
    state_.owner = std::thread::id();
    state_.mutex.unlock();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  State& operator*() const { return state_; }

 private:
  State& state_;
};

/// Runs `work`; what pure code finds wrong becomes a ValueError. Elsewhere the module's translator
/// does that, which does not see functions that are not pybind11's.
template <typename Work>
auto checked(const Work& work) {
  try {
    return work();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

/// The next batch, or nothing at the end. Blocks are computed without the GIL.
std::optional<std::span<const std::int64_t>> next_batch(State& state) {
  return state.stream.at_block_end()
             ? without_gil([&] { return checked([&] { return state.stream.next(); }); })
             : state.stream.next();
}

/// A view of the block's indices: one allocation per block, and no dispatcher call per batch.
PyObject* as_tensor(State& state, std::span<const std::int64_t> batch) {
  const std::vector<std::int64_t>& block = state.stream.block().indices;
  if (state.block != state.stream.blocks_opened()) {
    state.block = state.stream.blocks_opened();
    state.indices = tensor_of(std::span<const std::int64_t>(block));
  }
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(state.indices.storage()), state.indices.key_set(),
      state.indices.dtype());
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(batch.data() - block.data());
  impl->set_sizes_contiguous(static_cast<std::int64_t>(batch.size()));
  return THPVariable_Wrap(std::move(view));
}

PyObject* next(PyObject* self) {
  HANDLE_TH_ERRORS
  const Held held(self);
  State& state = *held;
  const auto batch = state.finished ? std::nullopt : next_batch(state);
  if (!batch) {
    state.finished = true;
    return nullptr;  // the end, without an exception
  }
  return state.as_tensors ? as_tensor(state, *batch) : as_list(*batch);
  END_HANDLE_TH_ERRORS
}

PyObject* state_dict(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  const Held held(self);
  const State& state = *held;
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  TORCH_CHECK_TYPE(count + named <= 1, "state_dict() takes at most 1 argument, batches");
  if (named == 1) {
    const auto name = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(names, 0));
    TORCH_CHECK_TYPE(text_of(name) == "batches", "state_dict() has no argument ", text_of(name));
  }
  std::int64_t batches = state.stream.given();
  if (count + named == 1 && values[0] != Py_None) {
    batches = integer_argument("batches", py::reinterpret_borrow<py::object>(values[0]));
  }
  const batching::Position position = checked([&] { return state.stream.position(batches); });
  py::dict result(state.description.attr("copy")());
  result["finished"] = state.finished && batches == state.stream.given();
  write_position(position, result);
  return result.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* begun(PyObject* self, PyObject* /*no arguments*/) {
  HANDLE_TH_ERRORS
  const Held held(self);
  return PyBool_FromLong((*held).finished || (*held).stream.given() > 0);
  END_HANDLE_TH_ERRORS
}

void dealloc_iterator(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<BatchIterator*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* iterator_type() {
  static PyMethodDef methods[] = {
      {"state_dict", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&state_dict)),
       METH_FASTCALL | METH_KEYWORDS, "The state of this iterator, to resume from."},
      {"begun", &begun, METH_NOARGS, "Whether it was asked for a batch."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_iter, reinterpret_cast<void*>(&PyObject_SelfIter)},
                                {Py_tp_iternext, reinterpret_cast<void*>(&next)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_iterator)},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {"brim._C.BatchIterator", sizeof(BatchIterator), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

py::object make_batch_iterator(std::shared_ptr<SampleBatching> batching, IteratorOptions options) {
  batching::BatchStream stream(*batching->core, options.seed, options.ranks);
  if (!options.position.cursor.empty()) {
    stream.seek(options.position);
  }
  // NOLINTNEXTLINE(modernize-make-unique): an aggregate that cannot be moved
  std::unique_ptr<State> state(new State{std::move(batching), std::move(stream), options.as_tensors,
                                         std::move(options.description)});
  PyTypeObject* type = iterator_type();
  auto* self = reinterpret_cast<BatchIterator*>(type->tp_alloc(type, 0));
  if (self == nullptr) {
    throw py::error_already_set();
  }
  self->state = state.release();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

py::object batch_iterator_type() {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(iterator_type()));
}

}  // namespace brim::python
