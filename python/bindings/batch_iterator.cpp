#include <c10/core/TensorImpl.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "bindings.h"
#include "int_list.h"
#include "interpreter.h"
#include "python_error.h"
#include "sample_batching.h"
#include "tensors.h"

namespace brim::python {
namespace {

/// One iteration of a batch sampler: what it has given, and where it stands. The sampler holds it;
/// a BatchIterator, which it does not hold, is what loops read.
class BatchRun {
 public:
  BatchRun(std::shared_ptr<SampleBatching> batching, batching::BatchStream stream, bool as_tensors,
           py::dict description)
      : batching_(std::move(batching)),
        stream_(std::move(stream)),
        as_tensors_(as_tensors),
        description_(std::move(description)) {}
  BatchRun(const BatchRun&) = delete;
  BatchRun& operator=(const BatchRun&) = delete;

  /// A new reference; null at the end. Blocks are computed without the GIL.
  PyObject* next() {
    const Held held(*this);
    ++asked_;
    const auto batch = finished_                ? std::nullopt
                       : stream_.at_block_end() ? interruptibly([&] { return stream_.next(); })
                                                : stream_.next();
    if (!batch) {
      finished_ = true;
      return nullptr;
    }
    return as_tensors_ ? as_tensor(*batch) : as_list(*batch);
  }

  py::dict state_dict(const py::object& given) {
    const Held held(*this);
    const std::int64_t batches =
        given.is_none() ? stream_.given() : integer_argument("batches", given);
    const batching::Position position = stream_.position(batches);
    py::dict result(description_.attr("copy")());
    result["finished"] = finished_ && batches == stream_.given();
    write_position(position, result);
    return result;
  }

  bool begun() {
    const Held held(*this);
    return finished_ || stream_.given() > 0;
  }

  /// How often it was asked for a batch, and how many it has given.
  std::pair<std::int64_t, std::int64_t> asked() {
    const Held held(*this);
    return {asked_, stream_.given()};
  }

  /// Whether somebody holds an iterator over it.
  bool held() const { return iterators_ > 0; }

  bool ended() {
    const Held held(*this);
    return finished_ || stream_.at_end();
  }

 private:
  /// Holds an iterator for this thread. The GIL is not enough: it is released while a block is
  /// computed, and may be whenever an object is made.
  class Held {
   public:
    explicit Held(BatchRun& run) : run_(run) {
      const std::thread::id here = std::this_thread::get_id();
      // A finalizer that runs inside of next() would wait for itself.
      TORCH_CHECK_VALUE(run_.owner_ != here, "this iterator is already running in this thread");
      if (!run_.mutex_.try_lock()) {
        without_gil([this] { run_.mutex_.lock(); });
      }
      run_.owner_ = here;
    }
    ~Held() {
      run_.owner_ = std::thread::id();
      run_.mutex_.unlock();
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    BatchRun& run_;
  };

  /// A view of the block's indices: one allocation per block, and no dispatcher call per batch.
  PyObject* as_tensor(std::span<const std::int64_t> batch) {
    const std::vector<std::int64_t>& block = stream_.block().indices;
    if (block_ != stream_.blocks_opened()) {
      block_ = stream_.blocks_opened();
      indices_ = tensor_of(std::span<const std::int64_t>(block));
    }
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW,
                                                         c10::Storage(indices_.storage()),
                                                         indices_.key_set(), indices_.dtype());
    c10::TensorImpl* impl = view.unsafeGetTensorImpl();
    impl->set_storage_offset(batch.data() - block.data());
    impl->set_sizes_contiguous(static_cast<std::int64_t>(batch.size()));
    return THPVariable_Wrap(std::move(view));
  }

  std::shared_ptr<SampleBatching> batching_;
  batching::BatchStream stream_;
  bool as_tensors_;
  py::dict description_;
  bool finished_ = false;
  std::int64_t asked_ = 0;
  std::atomic<int> iterators_ = 0;
  std::int64_t block_ = 0;
  at::Tensor indices_;  // of the open block
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;  // the thread that holds the mutex

  friend class BatchIterator;
};

/// What a loop or a loader reads.
class BatchIterator {
 public:
  explicit BatchIterator(std::shared_ptr<BatchRun> run) : run_(std::move(run)) {
    ++run_->iterators_;
  }
  ~BatchIterator() { --run_->iterators_; }
  BatchIterator(const BatchIterator&) = delete;
  BatchIterator& operator=(const BatchIterator&) = delete;

  BatchRun& run() { return *run_; }

 private:
  std::shared_ptr<BatchRun> run_;
};

PyObject* next(PyObject* self) {
  // Not `cast`, which looks the type up: a sixth of the time of a small batch.
  auto* const held = reinterpret_cast<py::detail::instance*>(self);
  auto* const iterator = held->get_value_and_holder().value_ptr<BatchIterator>();
  return called_by_python([&] { return iterator->run().next(); });
}

}  // namespace

py::object make_batch_run(std::shared_ptr<SampleBatching> batching, batching::BatchStream stream,
                          bool as_tensors, py::dict description) {
  return py::cast(std::make_shared<BatchRun>(std::move(batching), std::move(stream), as_tensors,
                                             std::move(description)));
}

void register_batch_iterator(py::module_& m) {
  // Not a method `__next__`: a call through pybind11 may cost as much as a whole batch.
  const py::custom_type_setup iterates([](PyHeapTypeObject* type) {
    type->ht_type.tp_iter = &PyObject_SelfIter;
    type->ht_type.tp_iternext = &next;
    // One made by `__new__` alone would hold nothing, which `next` does not check.
    type->ht_type.tp_new = nullptr;
    type->ht_type.tp_flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
  });
  py::class_<BatchIterator>(m, "BatchIterator", iterates, py::is_final())
      .def(
          "state_dict",
          [](BatchIterator& self, const py::object& batches) {
            return self.run().state_dict(batches);
          },
          py::arg("batches") = py::none(), "The state of this iterator, to resume from.");
  py::class_<BatchRun, std::shared_ptr<BatchRun>>(m, "BatchRun", py::is_final())
      .def("state_dict", &BatchRun::state_dict, py::arg("batches") = py::none(),
           "The state of this iteration, to resume from.")
      .def(
          "iterator",
          [](std::shared_ptr<BatchRun> self) {
            return std::make_unique<BatchIterator>(std::move(self));
          },
          "An iterator over the batches that are left.")
      .def("begun", &BatchRun::begun, "Whether it has given a batch, or has none.")
      .def("asked", &BatchRun::asked, "How often it was asked for a batch, and how many it gave.")
      .def("held", &BatchRun::held, "Whether somebody holds an iterator over it.")
      .def("ended", &BatchRun::ended, "Whether it has given its last batch.");
}

}  // namespace brim::python
