#include <ATen/NestedTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include "adaptive_config.h"

namespace brim::python {
namespace py = pybind11;

namespace {

/// FNV-1a over 64-bit words: short, and the same in every process, as a key that is kept in files
/// must be.
class Hash {
 public:
  explicit Hash(std::uint64_t salt) : value_(salt ^ kOffset) {}

  void add(std::uint64_t word) {
    for (int byte = 0; byte < 8; ++byte) {
      value_ = (value_ ^ ((word >> (8 * byte)) & 0xffU)) * kPrime;
    }
  }

  /// By content: Python's own hash of a string differs between processes.
  void add_text(PyObject* text) {
    Py_ssize_t length = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text, &length);
    py::object encoded;
    if (bytes == nullptr) {  // it has surrogates, as names of files may
      PyErr_Clear();
      encoded = py::reinterpret_steal<py::object>(
          PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass"));
      if (!encoded) {
        throw py::error_already_set();
      }
      bytes = PyBytes_AS_STRING(encoded.ptr());
      length = PyBytes_GET_SIZE(encoded.ptr());
    }
    for (Py_ssize_t i = 0; i < length; ++i) {
      value_ = (value_ ^ static_cast<unsigned char>(bytes[i])) * kPrime;
    }
    add(static_cast<std::uint64_t>(length));
  }

  std::uint64_t value() const { return value_; }

 private:
  static constexpr std::uint64_t kOffset = 0xcbf29ce484222325U;
  static constexpr std::uint64_t kPrime = 0x100000001b3U;
  std::uint64_t value_;
};

/// THPVariable_Check asks Python's isinstance, which takes longer than all the rest of a call.
bool is_tensor(PyObject* value) {
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

/// The lengths of a tensor. What has none counts as one of a kind: the ragged dimension of a nested
/// tensor, a symbol of a traced one.
void add_sizes(Hash& hash, const at::Tensor& tensor, std::int64_t skip_dim) {
  constexpr auto kNone = ~std::uint64_t{0};
  const auto add = [&](std::int64_t dim, std::optional<std::int64_t> size) {
    hash.add(dim == skip_dim ? 0 : size ? static_cast<std::uint64_t>(*size) : kNone);
  };
  const auto* nested =
      dynamic_cast<const at::native::NestedTensorImpl*>(tensor.unsafeGetTensorImpl());
  if (nested != nullptr) {
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      add(dim, nested->opt_size(dim));
    }
    return;
  }
  std::int64_t dim = 0;
  for (const c10::SymInt& size : tensor.sym_sizes()) {
    add(dim++, size.maybe_as_int());
  }
}

void add_tensor(Hash& hash, const at::Tensor& tensor, std::int64_t skip_dim) {
  try {
    hash.add(static_cast<std::uint64_t>(tensor.scalar_type()));
    hash.add(static_cast<std::uint64_t>(tensor.device().type()));
    hash.add(static_cast<std::uint64_t>(tensor.device().index()));
    hash.add(static_cast<std::uint64_t>(tensor.layout()));
    hash.add(static_cast<std::uint64_t>(tensor.dim()));
    add_sizes(hash, tensor, skip_dim);
  } catch (const std::exception&) {
    // A subclass that does not tell: it must not take the place of the error that a call is
    // repeated for. What it did tell counts.
    PyErr_Clear();
  }
}

constexpr std::int64_t kNoDim = -1;
constexpr int kDeepest =
    4;  // containers inside containers further down do not decide how much memory a call takes

/// Adds the tensors in `value`, also those inside lists, tuples and dictionaries.
void add_tensors(Hash& hash, PyObject* value, int depth, std::int64_t skip_dim = kNoDim) {
  if (is_tensor(value)) {
    add_tensor(hash, THPVariable_Unpack(value), skip_dim);
  } else if (depth < kDeepest && (PyList_Check(value) || PyTuple_Check(value))) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    for (Py_ssize_t i = 0; i < size; ++i) {
      add_tensors(hash, PySequence_Fast_GET_ITEM(value, i), depth + 1);
    }
  } else if (depth < kDeepest && PyDict_Check(value)) {
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    Py_ssize_t at = 0;
    while (PyDict_Next(value, &at, &key, &item) != 0) {
      add_tensors(hash, item, depth + 1);
    }
  }
}

// Told apart before their content: None is not 0, and True is not 1.
enum class Kind : std::uint8_t { none, integer, number, text, bytes, sequence, tensor, other };

void add_kind(Hash& hash, Kind kind) { hash.add(static_cast<std::uint64_t>(kind)); }

Py_hash_t own_hash(PyObject* value, const py::object& name) {
  const Py_hash_t own = PyObject_Hash(value);
  if (own == -1) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "keys names ", name.cast<std::string>(), ", whose value ",
                     py::repr(value).cast<std::string>(),
                     " cannot be told from others: it has no hash");
  }
  return own;
}

/// Calls `visit(item)` for the items of a list or tuple. @throws RecursionError where one holds
/// itself.
template <class Visit>
void visit_items(PyObject* sequence, const Visit& visit) {
  if (Py_EnterRecursiveCall(" in a value that keys names") != 0) {
    throw py::error_already_set();
  }
  struct Leave {
    ~Leave() { Py_LeaveRecursiveCall(); }
  } const leave;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    visit(PySequence_Fast_GET_ITEM(sequence, i));
  }
}

/// Adds a value that the user named, by its content where that is the same in every process.
void add_value(Hash& hash, PyObject* value, const py::object& name) {
  if (value == nullptr || value == Py_None) {
    add_kind(hash, Kind::none);
  } else if (is_tensor(value)) {
    add_kind(hash, Kind::tensor);
    add_tensor(hash, THPVariable_Unpack(value), kNoDim);
  } else if (PyLong_CheckExact(value) || PyBool_Check(value)) {
    add_kind(hash, PyBool_Check(value) ? Kind::other : Kind::integer);
    // In decimal, Python refuses long ones.
    hash.add_text(py::reinterpret_steal<py::object>(PyNumber_ToBase(value, 16)).ptr());
  } else if (PyFloat_CheckExact(value)) {
    add_kind(hash, Kind::number);
    hash.add_text(py::repr(value).ptr());
  } else if (PyUnicode_Check(value)) {
    add_kind(hash, Kind::text);
    hash.add_text(value);
  } else if (PyBytes_Check(value)) {
    add_kind(hash, Kind::bytes);
    hash.add_text(py::repr(value).ptr());
  } else if (PyTuple_Check(value) || PyList_Check(value)) {
    add_kind(hash, Kind::sequence);
    hash.add(static_cast<std::uint64_t>(PySequence_Fast_GET_SIZE(value)));
    visit_items(value, [&](PyObject* item) { add_value(hash, item, name); });
  } else {
    add_kind(hash, Kind::other);
    hash.add(static_cast<std::uint64_t>(own_hash(value, name)));
  }
}

/// What `add_value` would throw, without the work.
void check_value(PyObject* value, const py::object& name) {
  if (value == nullptr || value == Py_None || PyLong_CheckExact(value) || PyUnicode_Check(value) ||
      PyFloat_CheckExact(value) || is_tensor(value)) {
    return;
  }
  if (PyTuple_Check(value) || PyList_Check(value)) {
    visit_items(value, [&](PyObject* item) { check_value(item, name); });
    return;
  }
  own_hash(value, name);
}

std::uint64_t ask_hasher(const AdaptiveConfig& config, const CallArguments& arguments) {
  py::dict mapping;  // NOLINT(misc-const-correctness): it is filled below
  for (const ArgumentSlot& slot : config.key_arguments) {
    PyObject* value = arguments.get(slot);
    if (value != nullptr) {
      mapping[slot.name] = py::reinterpret_borrow<py::object>(value);
    }
  }
  const py::object key = config.hasher(mapping);
  TORCH_CHECK_TYPE(PyLong_Check(key.ptr()), "hasher must return an int, got ",
                   py::repr(key).cast<std::string>());
  return static_cast<std::uint64_t>(py::hash(key));
}

/// Where the decorated function was called from: the caller's code and the place in it.
void add_call_site(Hash& hash) {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return;
  }
  const auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  hash.add_text(py::object(code.attr("co_filename")).ptr());
  hash.add_text(py::object(code.attr("co_name")).ptr());
  hash.add(static_cast<std::uint64_t>(PyFrame_GetLineNumber(frame)));
}

}  // namespace

Py_ssize_t CallArguments::find(const ArgumentSlot& slot) const {
  if (slot.position >= 0 && slot.position < positional) {
    return slot.position;
  }
  const Py_ssize_t keywords = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    if (PyTuple_GET_ITEM(names, i) == slot.name.ptr()) {
      return positional + i;
    }
  }
  for (Py_ssize_t i = 0; i < keywords; ++i) {  // a name that was made at run time is not interned
    if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), slot.name.ptr()) == 0) {
      return positional + i;
    }
  }
  return -1;
}

PyObject* CallArguments::get(const ArgumentSlot& slot) const {
  const Py_ssize_t at = find(slot);
  return at >= 0 ? values[at] : slot.otherwise.ptr();
}

bool has_accelerator_tensor(const CallArguments& arguments) {
  for (Py_ssize_t i = 0; i < arguments.count(); ++i) {
    PyObject* value = arguments.values[i];
    if (is_tensor(value) && !THPVariable_Unpack(value).device().is_cpu()) {
      return true;
    }
  }
  return false;
}

void check_key(const AdaptiveConfig& config, const CallArguments& arguments) {
  if (config.hasher) {
    ask_hasher(config, arguments);
  } else if (config.key_by_names) {
    for (const ArgumentSlot& slot : config.key_arguments) {
      check_value(arguments.get(slot), slot.name);
    }
  }
}

std::uint64_t call_key(const AdaptiveConfig& config, const CallArguments& arguments,
                       std::optional<std::int64_t> skip_dim) {
  Hash hash(config.salt);
  if (config.per_call_site) {
    add_call_site(hash);
  }
  if (config.hasher) {
    hash.add(ask_hasher(config, arguments));
  } else if (config.key_by_names) {
    for (const ArgumentSlot& slot : config.key_arguments) {
      add_value(hash, arguments.get(slot), slot.name);
    }
  } else {
    const Py_ssize_t first = arguments.receivers;
    for (Py_ssize_t i = first; i < arguments.positional; ++i) {
      hash.add(static_cast<std::uint64_t>(i));
      add_tensors(hash, arguments.values[i], 0, i == first ? skip_dim.value_or(kNoDim) : kNoDim);
    }
    // The order in which keywords are written does not matter: their hashes are added up.
    std::uint64_t keywords = 0;
    for (Py_ssize_t i = arguments.positional; i < arguments.count(); ++i) {
      Hash one(config.salt);
      one.add_text(PyTuple_GET_ITEM(arguments.names, i - arguments.positional));
      add_tensors(one, arguments.values[i], 0);
      keywords += one.value();
    }
    hash.add(keywords);
  }
  return hash.value();
}

}  // namespace brim::python
