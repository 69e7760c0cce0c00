#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"

namespace brim::python {
namespace {

void collect_tensors(PyObject* tree, std::vector<py::object>& found) {
  if (THPVariable_Check(tree)) {
    found.push_back(py::reinterpret_borrow<py::object>(tree));
  } else if (PyTuple_Check(tree) || PyList_Check(tree)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tree); ++i) {
      collect_tensors(PySequence_Fast_GET_ITEM(tree, i), found);
    }
  } else if (PyDict_Check(tree)) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(tree, &i, &name, &value) != 0;) {
      collect_tensors(value, found);
    }
  }
}

py::list list_of(std::vector<py::object>&& objects) {
  py::list result(objects.size());
  for (std::size_t i = 0; i < objects.size(); ++i) {
    result[i] = std::move(objects[i]);
  }
  return result;
}

/// The tensors of an operator's arguments or results, in order.
py::list tensors_of(const py::object& tree) {
  std::vector<py::object> found;
  collect_tensors(tree.ptr(), found);
  return list_of(std::move(found));
}

const c10::StorageImpl* storage_of(const py::object& tensor) {
  return THPVariable_Unpack(tensor.ptr())
      .unsafeGetTensorImpl()
      ->unsafe_storage()
      .unsafeGetStorageImpl();
}

/// Everything that the result of an operator on fake tensors depends on, as bytes. The tensors'
/// values are not among it.
class Key {
 public:
  /// @param fake the class of fake tensors.
  Key(const py::object& func, py::handle fake) : fake_(fake) {
    add(func.ptr());
    add(c10::typeMetaToScalarType(c10::get_default_dtype()));
    add(c10::GradMode::is_enabled());  // recurrent layers keep something for backward
    // Layers choose their library by these.
    const at::Context& context = at::globalContext();
    add(context.userEnabledCuDNN());
    add(context.userEnabledMkldnn());
    add(context.deterministicCuDNN());
    add(context.deterministicAlgorithms());
  }

  /// @returns false if it is not known what the result depends on.
  bool add_argument(PyObject* value) {
    if (THPVariable_Check(value)) {
      return add_tensor(value);
    }
    add(Py_TYPE(value));  // 1 and 1.0 give other types
    if (value == Py_None || PyBool_Check(value) || THPDtype_Check(value) ||
        THPLayout_Check(value) || THPMemoryFormat_Check(value)) {
      add(value);  // there is one object for each value
    } else if (PyLong_CheckExact(value)) {
      int overflow = 0;
      add(PyLong_AsLongLongAndOverflow(value, &overflow));
      return overflow == 0;
    } else if (PyFloat_CheckExact(value)) {
      add(PyFloat_AS_DOUBLE(value));
    } else if (PyUnicode_CheckExact(value)) {
      add_text(value);
    } else if (THPDevice_Check(value)) {
      add_device(value);
    } else if (PyTuple_Check(value) || PyList_Check(value)) {
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
      add(size);
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (!add_argument(PySequence_Fast_GET_ITEM(value, i))) {
          return false;
        }
      }
    } else if (PyDict_CheckExact(value)) {
      PyObject* name = nullptr;
      PyObject* argument = nullptr;
      for (Py_ssize_t i = 0; PyDict_Next(value, &i, &name, &argument) != 0;) {
        add_text(name);
        if (!add_argument(argument)) {
          return false;
        }
      }
    } else {
      return false;
    }
    return true;
  }

  /// The tensors among the arguments, each once.
  [[nodiscard]] const std::vector<py::object>& tensors() const { return tensors_; }
  [[nodiscard]] const std::string& bytes() const { return bytes_; }

  /// Whether there are tensors, all on one device, whose elements are as they are stored.
  [[nodiscard]] bool has_one_device() const {
    return std::all_of(
               tensors_.begin(), tensors_.end(),
               [&](const py::object& each) {
                 const at::Tensor& tensor = THPVariable_Unpack(each.ptr());
                 return !tensor.is_conj() && !tensor.is_neg() &&
                        each.attr("fake_device").equal(tensors_.front().attr("fake_device"));
               }) &&
           !tensors_.empty();
  }

 private:
  template <class T>
  void add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }

  template <class T>
  void add_all(c10::ArrayRef<T> values) {
    add(values.size());
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }

  void add_text(PyObject* text) {
    Py_ssize_t size = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == nullptr) {
      throw py::error_already_set();
    }
    add(size);
    bytes_.append(data, static_cast<std::size_t>(size));
  }

  void add_device(PyObject* device) {
    const c10::Device where = reinterpret_cast<THPDevice*>(device)->device;
    add(where.type());
    add(where.index());
  }

  bool add_tensor(PyObject* object) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != fake_.ptr()) {
      return false;
    }
    const at::Tensor& tensor = THPVariable_Unpack(object);
    const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage() || impl->has_symbolic_sizes_strides() || impl->is_sparse()) {
      return false;
    }
    const int next = static_cast<int>(tensors_.size());
    const auto [same, is_new] = numbers_.emplace(impl, next);
    add(same->second);
    if (!is_new) {
      return true;
    }
    tensors_.push_back(py::reinterpret_borrow<py::object>(object));
    add(numbers_.emplace(storage_of(tensors_.back()), next).first->second);
    const py::object device = tensors_.back().attr("fake_device");
    add_device(device.ptr());
    add(impl->key_set().raw_repr());
    add(impl->requires_grad());
    add(tensor.scalar_type());
    add(impl->storage_offset());
    add_all(impl->sizes());
    add_all(impl->strides());
    return true;
  }

  py::handle fake_;
  std::string bytes_;
  std::vector<py::object> tensors_;
  std::unordered_map<const void*, int> numbers_;  // of tensors and of their storages
};

/// One tensor that an operator returned, or None.
struct Result {
  bool is_tensor = true;
  int argument = -1;      ///< the tensor of the arguments that it is
  int in_argument = -1;   ///< the one whose storage it has
  int in_result = -1;     ///< the earlier result whose storage it has
  std::size_t bytes = 0;  ///< of its own storage, if neither
  std::int64_t offset = 0;
  caffe2::TypeMeta dtype;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  py::object device;
};

/// Operators run without the modes of the trace as long as it lives.
struct NoModes {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

/// Made without the dispatcher, in which the modes of the trace are on.
at::Tensor meta_tensor(c10::Storage storage, caffe2::TypeMeta dtype, c10::IntArrayRef sizes,
                       c10::IntArrayRef strides, std::int64_t offset) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Meta), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

/// What operators on fake tensors returned, so that the same ones need not run again. Torch works
/// a result out in Python, in up to some milliseconds. Its own cache spends a third of a
/// millisecond on a result that it has, most of it on the key, and takes no results that consist of
/// several tensors.
class FakeResults {
 public:
  /// @param fake the class of fake tensors.
  /// @param hides whether C++ code is not to see the devices of new tensors; see show_fake_device.
  FakeResults(py::object fake, bool hides)
      : fake_(std::move(fake)),
        make_(py::module_::import("torch").attr("Tensor").attr("_make_subclass")),
        hides_(hides) {}

  /// The result of an operator.
  /// @param mode of the fake tensors.
  /// @param on_meta works it out for tensors of the meta device, if all are on the same device and
  ///     that gives the same; else None.
  /// @param run works it out.
  py::object get(const py::object& mode, const py::object& func, const py::tuple& args,
                 const py::dict& kwargs, const py::object& on_meta, const py::object& run) {
    Key key(func, fake_);
    if (!key.add_argument(args.ptr()) || !key.add_argument(kwargs.ptr())) {
      return run(func, args, kwargs);
    }
    if (const auto found = known_.find(key.bytes()); found != known_.end()) {
      const std::shared_ptr<const Entry> entry = found->second;  // Python code may run meanwhile
      return made(*entry, key, mode);
    }
    if (!on_meta.is_none() && key.has_one_device()) {
      if (std::optional<Entry> entry = described_on_meta(on_meta, key, args, kwargs)) {
        py::object result = made(*entry, key, mode);
        add(key, std::move(*entry));
        return result;
      }
    }
    py::object result = run(func, args, kwargs);
    Key after(func, fake_);
    // An operator that changed the shape of an argument does more than return a result.
    if (after.add_argument(args.ptr()) && after.add_argument(kwargs.ptr()) &&
        after.bytes() == key.bytes()) {
      if (std::optional<Entry> entry = described(result, key.tensors())) {
        add(key, std::move(*entry));
      }
    }
    return result;
  }

 private:
  struct Entry {
    bool is_one = true;  ///< not a container
    bool is_list = false;
    std::vector<Result> results;
  };
  // A network has some thousand, at half a KiB each.
  static constexpr std::size_t kMost = 1 << 15;

  void add(const Key& key, Entry entry) {
    if (known_.size() >= kMost) {
      known_.clear();
    }
    known_.emplace(key.bytes(), std::make_shared<const Entry>(std::move(entry)));
  }

  /// @param arguments the tensors among the operator's arguments.
  /// @returns nothing if another result cannot be made like this one.
  [[nodiscard]] static std::optional<Entry> described(const py::object& result,
                                                      const std::vector<py::object>& arguments) {
    Entry entry;
    std::vector<py::object> results{result};
    entry.is_list = PyList_CheckExact(result.ptr());
    if (entry.is_list || PyTuple_CheckExact(result.ptr())) {
      entry.is_one = false;
      results.clear();
      for (const py::handle& each : result) {
        results.push_back(py::reinterpret_borrow<py::object>(each));
      }
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      std::optional<Result> one = described(results, i, arguments);
      if (!one) {
        return std::nullopt;
      }
      entry.results.push_back(std::move(*one));
    }
    return entry;
  }

  [[nodiscard]] static std::optional<Result> described(const std::vector<py::object>& results,
                                                       std::size_t i,
                                                       const std::vector<py::object>& arguments) {
    const py::object& object = results[i];
    Result result;
    if (object.is_none()) {
      result.is_tensor = false;
      return result;
    }
    if (!THPVariable_Check(object.ptr())) {
      return std::nullopt;
    }
    const c10::StorageImpl* const storage = storage_of(object);
    for (std::size_t k = arguments.size(); k-- > 0;) {
      if (arguments[k].is(object)) {
        result.argument = static_cast<int>(k);
        return result;
      }
      if (storage_of(arguments[k]) == storage) {
        result.in_argument = static_cast<int>(k);  // of several the first
      }
    }
    for (std::size_t k = i; k-- > 0;) {
      if (object.is(results[k])) {
        return std::nullopt;  // twice the same
      }
      if (!results[k].is_none() && storage_of(results[k]) == storage) {
        result.in_result = static_cast<int>(k);
      }
    }
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    if (storage == nullptr || impl->has_symbolic_sizes_strides() || impl->requires_grad() ||
        tensor.is_conj() || tensor.is_neg()) {
      return std::nullopt;
    }
    result.bytes = storage->nbytes();
    result.offset = impl->storage_offset();
    result.dtype = impl->dtype();
    result.sizes = impl->sizes().vec();
    result.strides = impl->strides().vec();
    if (py::hasattr(object, "fake_device")) {
      result.device = object.attr("fake_device");
    }
    return result;
  }

  /// Works a result out on the meta device, without the modes of the trace.
  /// @returns nothing if that fails: the error is left to torch's own way.
  [[nodiscard]] std::optional<Entry> described_on_meta(const py::object& func, const Key& key,
                                                       const py::tuple& args,
                                                       const py::dict& kwargs) const {
    std::vector<py::object> twins;
    std::unordered_map<PyObject*, PyObject*> twin_of;
    for (const py::object& argument : key.tensors()) {
      const at::Tensor& tensor = THPVariable_Unpack(argument.ptr());
      twins.push_back(py::cast(meta_tensor(tensor.storage(), tensor.dtype(), tensor.sizes(),
                                           tensor.strides(), tensor.storage_offset())));
      twin_of.emplace(argument.ptr(), twins.back().ptr());
    }
    const auto replaced = [&](auto&& self, PyObject* value) -> py::object {
      if (const auto twin = twin_of.find(value); twin != twin_of.end()) {
        return py::reinterpret_borrow<py::object>(twin->second);
      }
      if (!PyTuple_Check(value) && !PyList_Check(value)) {
        return py::reinterpret_borrow<py::object>(value);
      }
      py::list items;
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
        items.append(self(self, PySequence_Fast_GET_ITEM(value, i)));
      }
      return PyTuple_Check(value) ? py::object(py::tuple(items)) : py::object(items);
    };
    const py::tuple given = replaced(replaced, args.ptr());
    const NoModes no_modes;
    const at::AutoDispatchBelowADInplaceOrView no_graph;
    std::optional<Entry> entry;
    try {
      entry = described(func(*given, **kwargs), twins);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {  // an interrupt
        throw;
      }
    }
    if (entry) {
      for (Result& each : entry->results) {
        each.device = key.tensors().front().attr("fake_device");
      }
    }
    return entry;
  }

  [[nodiscard]] py::object made(const Entry& entry, const Key& key, const py::object& mode) const {
    std::vector<py::object> made;
    for (const Result& result : entry.results) {
      if (!result.is_tensor) {
        made.push_back(py::none());
      } else if (result.argument >= 0) {
        made.push_back(key.tensors()[static_cast<std::size_t>(result.argument)]);
      } else {
        made.push_back(made_tensor(result, storage_for(result, key, made), mode));
      }
    }
    if (entry.is_one) {
      return made.front();
    }
    py::list all = list_of(std::move(made));
    return entry.is_list ? py::object(std::move(all)) : py::object(py::tuple(std::move(all)));
  }

  static c10::Storage storage_for(const Result& result, const Key& key,
                                  const std::vector<py::object>& before) {
    const auto of = [](const std::vector<py::object>& tensors, int i) {
      return THPVariable_Unpack(tensors[static_cast<std::size_t>(i)].ptr()).storage();
    };
    if (result.in_argument >= 0) {
      return of(key.tensors(), result.in_argument);
    }
    if (result.in_result >= 0) {
      return of(before, result.in_result);
    }
    return new_storage(result.bytes);
  }

  static c10::Storage new_storage(std::size_t bytes) {
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes),
        c10::DataPtr(nullptr, c10::kMeta), c10::GetAllocator(c10::kMeta), /*resizable=*/true);
    storage->set_throw_on_mutable_data_ptr();  // as torch does
    return c10::Storage(std::move(storage));
  }

  [[nodiscard]] py::object made_tensor(const Result& result, c10::Storage storage,
                                       const py::object& mode) const {
    const at::Tensor element =
        meta_tensor(std::move(storage), result.dtype, result.sizes, result.strides, result.offset);
    py::object tensor = make_(fake_, element, false, py::arg("dispatch_device") = true,
                              py::arg("device_for_backend_keys") = result.device);
    const py::object attributes = tensor.attr("__dict__");
    if (PyDict_Update(attributes.ptr(), attributes_of(mode, result.device).ptr()) != 0) {
      throw py::error_already_set();
    }
    attributes["fake_mode"] = mode;
    if (hides_ && !reinterpret_cast<THPDevice*>(result.device.ptr())->device.is_cpu()) {
      THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl()->set_python_custom_device(false);
    }
    return tensor;
  }

  /// The attributes of a new fake tensor, other than its mode: versions of torch differ in them.
  [[nodiscard]] py::dict attributes_of(const py::object& mode, const py::object& device) const {
    const c10::Device where = reinterpret_cast<THPDevice*>(device.ptr())->device;
    const auto found = attributes_.find(where);
    if (found != attributes_.end()) {
      return found->second;
    }
    const at::Tensor empty =
        meta_tensor(new_storage(0), caffe2::TypeMeta::Make<float>(), {0}, {1}, 0);
    const NoModes no_modes;
    py::dict made = fake_(mode, empty, device).attr("__dict__").attr("copy")();
    made.attr("pop")("fake_mode");
    attributes_.emplace(where, made);
    return made;
  }

  py::object fake_;
  py::object make_;
  bool hides_;
  mutable std::unordered_map<c10::Device, py::dict> attributes_;
  std::unordered_map<std::string, std::shared_ptr<const Entry>> known_;
};

}  // namespace

void register_fake_results(py::module_& m) {
  m.def("tensors_of", &tensors_of);
  py::class_<FakeResults>(m, "FakeResults")
      .def(py::init<py::object, bool>(), py::arg("fake"), py::arg("hides"))
      .def("get", &FakeResults::get);
}

}  // namespace brim::python
