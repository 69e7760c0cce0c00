#include <ATen/core/Tensor.h>
#include <brim/adapt/call_key.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "adaptive_config.h"
#include "interpreter.h"
#include "tensor_argument.h"

namespace brim::python {
namespace py = pybind11;

namespace {

/// By content: Python's own hash of a string differs between processes.
void add_text(CallKey& key, PyObject* text) {
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
  key.add(std::string_view(bytes, static_cast<std::size_t>(length)));
}

/// A number that may be of any length.
void add_integer(CallKey& key, PyObject* value) {
  int overflow = 0;
  key.add(PyLong_AsLongLongAndOverflow(value, &overflow));
  if (overflow != 0) {  // in decimal, Python refuses long ones
    add_text(key, py::reinterpret_steal<py::object>(PyNumber_ToBase(value, 16)).ptr());
  }
}

/// Ahead of what a value holds: None is not 0, and True is not 1.
void add_type(CallKey& key, PyObject* value) { key.add(std::string_view(Py_TYPE(value)->tp_name)); }

/// A subclass that does not tell must not replace the error for which a call is repeated. What it
/// did tell counts.
template <class Add>
void add_what_it_tells(const Add& add) {
  try {
    add();
  } catch (const std::exception&) {  // of an error that is about to be handled already
    PyErr_Clear();
  }
}

void add_tensor(CallKey& key, PyObject* tensor, std::int64_t skip_dim = CallKey::kNoDim) {
  add_what_it_tells([&] { key.add(THPVariable_Unpack(tensor), skip_dim); });
}

// What is nested deeper does not decide how much memory a call takes.
constexpr int kDeepest = 4;

/// How many items a list, tuple or dictionary has; -1 for anything else.
Py_ssize_t item_count(PyObject* value) {
  return PyList_Check(value) || PyTuple_Check(value) ? PySequence_Fast_GET_SIZE(value)
         : PyDict_Check(value)                       ? PyDict_Size(value)
                                                     : -1;
}

/// Calls `visit(name, item)` for these items, at most so many. Only those of a dictionary have a
/// name.
template <class Visit>
void visit_items(PyObject* value, const Visit& visit, Py_ssize_t most = PY_SSIZE_T_MAX) {
  PyObject* name = nullptr;
  PyObject* item = nullptr;
  Py_ssize_t at = 0;
  for (Py_ssize_t i = 0; i < std::min(item_count(value), most); ++i) {
    if (!PyDict_Check(value)) {
      item = PySequence_Fast_GET_ITEM(value, i);
    } else if (PyDict_Next(value, &at, &name, &item) == 0) {
      break;
    }
    visit(name, item);
  }
}

// More items are data rather than parts of a program.
constexpr Py_ssize_t kMany = 1000;
// As many of them at either end show what they are.
constexpr Py_ssize_t kEnd = 16;

/// Whether `value` may refer to others: numbers and texts do not, nor do containers that Python's
/// garbage collector found to hold only such.
bool refers(PyObject* value) {
  return PyType_IS_GC(Py_TYPE(value)) != 0 && PyObject_GC_IsTracked(value) != 0;
}

bool is_long_list(PyObject* value) {
  return (PyList_Check(value) || PyTuple_Check(value)) && item_count(value) > kMany;
}

/// Whether there are tensors in `value`; of a long list the items at both ends are asked.
bool shows_tensors(PyObject* value, int depth) {
  if (!refers(value) || is_tensor(value) || depth == kDeepest) {
    return is_tensor(value);
  }
  bool found = false;
  const auto look = [&](PyObject* /*name*/, PyObject* item) {
    found = found || shows_tensors(item, depth + 1);
  };
  if (!is_long_list(value)) {
    visit_items(value, look);
    return found;
  }
  for (Py_ssize_t i = 0; i < kEnd && !found; ++i) {
    look(nullptr, PySequence_Fast_GET_ITEM(value, i));
    look(nullptr, PySequence_Fast_GET_ITEM(value, item_count(value) - 1 - i));
  }
  return found;
}

/// Adds the tensors in `value`, also those inside lists, tuples and dictionaries. A key must not
/// take longer the more data there is: long lists without tensors are left out.
void add_tensors(CallKey& key, PyObject* value, std::int64_t skip_dim = CallKey::kNoDim,
                 int depth = 0) {
  if (is_tensor(value)) {
    add_tensor(key, value, skip_dim);
  } else if (depth < kDeepest && refers(value) &&
             (!is_long_list(value) || shows_tensors(value, depth))) {
    visit_items(value, [&](PyObject* /*name*/, PyObject* item) {
      add_tensors(key, item, CallKey::kNoDim, depth + 1);
    });
  }
}

/// Adds the tensors of a batch of which parts are taken, without their length along `dim`. With
/// `lengths` false no length counts: batches of longer sentences are of one kind with others.
void add_batch(CallKey& key, PyObject* value, std::int64_t dim, bool lengths, int depth = 0) {
  constexpr Py_ssize_t kMostMembers = 16;  // of a list; more are samples
  const at::Tensor* const tensor = tensor_in(value);
  if (tensor != nullptr && lengths) {
    add_tensor(key, value, dim < 0 ? dim + tensor->dim() : dim);
  } else if (tensor != nullptr) {
    key.add(static_cast<int>(tensor->scalar_type()));
    key.add(static_cast<int>(tensor->device().type()));
    key.add(tensor->dim());
  } else if (depth < kDeepest && item_count(value) >= 0) {
    const auto add = [&](PyObject* /*name*/, PyObject* item) {
      add_batch(key, item, dim, lengths, depth + 1);
    };
    visit_items(value, add, PyDict_Check(value) ? PY_SSIZE_T_MAX : kMostMembers);
  } else {
    add_type(key, value);
  }
}

// More than this is data, not a setting.
constexpr Py_ssize_t kMostItems = 16;

/// Adds what the first tensors in `value` have in common with those of other lengths. True where
/// there is one.
bool add_kinds(CallKey& key, PyObject* value, int depth = 0) {
  if (const at::Tensor* const tensor = tensor_in(value)) {
    add_what_it_tells([&] { key.add_kind(*tensor); });
    return true;
  }
  bool any = false;
  const auto add = [&](PyObject* /*name*/, PyObject* item) {
    any = add_kinds(key, item, depth + 1) || any;
  };
  if (depth < kDeepest) {
    visit_items(value, add, kMostItems);
  }
  return any;
}
constexpr Py_ssize_t kLongestText = 64;
constexpr Py_ssize_t kMostAttributes = 64;

/// Adds what a setting can be: None, a bool, an integer, a short text, a dtype, a function or class
/// by its name, a few of these in a list, tuple or dictionary. False where `value` is none of them.
/// Numbers with a fraction are mostly rates and weights, which change no size and change often.
bool add_setting(CallKey& key, PyObject* value, int depth = 0) {
  add_type(key, value);
  if (PyLong_Check(value)) {  // bools too
    add_integer(key, value);
  } else if (PyUnicode_Check(value) && PyUnicode_GET_LENGTH(value) <= kLongestText) {
    add_text(key, value);
  } else if (THPDtype_Check(value)) {
    key.add(static_cast<int>(reinterpret_cast<THPDtype*>(value)->scalar_type));
  } else if (PyType_Check(value)) {
    key.add(std::string_view(reinterpret_cast<PyTypeObject*>(value)->tp_name));
  } else if (PyFunction_Check(value)) {
    add_text(key, reinterpret_cast<PyFunctionObject*>(value)->func_qualname);
  } else if (depth < kDeepest && item_count(value) >= 0 && item_count(value) <= kMostItems) {
    bool any = false;
    visit_items(value, [&](PyObject* name, PyObject* item) {
      if (name != nullptr) {
        add_setting(key, name, depth + 1);
      }
      any = add_setting(key, item, depth + 1) || any;
    });
    return any;
  } else {
    return value == Py_None;
  }
  return true;
}

/// What tells calls with the same tensors apart: settings among the arguments and in the attributes
/// of objects, and the structure of modules. What keeps changing is left out.
class Settings {
 public:
  /// @param history null: all settings count.
  /// @param by_identity objects are told apart by their address, not by what they hold.
  Settings(ScalarArguments* history, bool by_identity)
      : history_(history), by_identity_(by_identity) {}

  /// @param argument a hash of its name or place.
  void add(std::uint64_t argument, PyObject* value) {
    if (tensor_in(value) != nullptr) {
      return;
    }
    CallKey setting;
    if (add_setting(setting, value)) {
      note(argument, setting.value());
    } else if (!PyFloat_Check(value) && item_count(value) < 0) {
      if (by_identity_) {
        CallKey address(argument);
        address.add(std::string_view("address"));
        note(address.value(), reinterpret_cast<std::uintptr_t>(value));
      } else {
        add_object(argument, value);
      }
    }
  }

  /// Empty where there is nothing. The order of what was added does not matter.
  [[nodiscard]] std::optional<std::uint64_t> value() const { return sum_; }

 private:
  void note(std::uint64_t argument, std::uint64_t value) {
    if (history_ == nullptr || history_->counts(argument, value)) {
      CallKey one(argument);
      one.add(value);
      sum_ = sum_.value_or(0) + one.value();
    }
  }

  void add_object(std::uint64_t argument, PyObject* object) {
    CallKey kind;
    add_type(kind, object);
    if (is_module(object)) {
      kind.add(structure_of(object));
    }
    note(argument, kind.value());
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
    if (!attributes) {
      PyErr_Clear();
      return;
    }
    if (item_count(attributes.ptr()) > kMostAttributes) {
      return;
    }
    visit_items(attributes.ptr(), [&](PyObject* name, PyObject* item) {
      CallKey setting;
      if (PyUnicode_Check(name) && add_setting(setting, item)) {
        CallKey attribute(argument);
        add_text(attribute, name);
        note(attribute.value(), setting.value());
      }
    });
  }

  static bool is_module(PyObject* object) {
    static const py::handle module = provided("Module");
    return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(module.ptr())) != 0;
  }

  static std::int64_t structure_of(PyObject* module) {
    try {
      return invoke(provided("structure"), py::handle(module)).cast<std::int64_t>();
    } catch (const py::error_already_set&) {
      return 0;  // its parameters have no shapes yet
    }
  }

  ScalarArguments* history_;
  bool by_identity_;
  std::optional<std::uint64_t> sum_;
};

/// Whether the argument at this place is a size that brim chooses, or bounds of a range.
bool is_size(const AdaptiveConfig& config, const CallArguments& arguments, Py_ssize_t place) {
  if (config.kind == AdaptKind::range) {
    return place == arguments.receivers || place == arguments.receivers + 1;
  }
  return std::any_of(config.parameters.begin(), config.parameters.end(),
                     [&](const ArgumentSlot& slot) { return arguments.find(slot) == place; });
}

std::optional<std::uint64_t> settings_of(const AdaptiveConfig& config,
                                         const CallArguments& arguments, bool by_identity) {
  Settings settings(config.memory ? &config.memory->scalars() : nullptr, by_identity);
  for (Py_ssize_t i = 0; i < arguments.count(); ++i) {
    if (is_size(config, arguments, i)) {
      continue;
    }
    CallKey argument;
    if (i < arguments.positional) {
      argument.add(i);
    } else {
      add_text(argument, PyTuple_GET_ITEM(arguments.names, i - arguments.positional));
    }
    settings.add(argument.value(), arguments.values[i]);
  }
  return settings.value();
}

/// Adds a value that the user named, by its content where that is the same in every process.
void add_value(CallKey& key, PyObject* value, const py::object& name) {
  if (is_tensor(value)) {
    add_tensor(key, value);
    return;
  }
  add_type(key, value);
  if (PyLong_CheckExact(value)) {
    add_integer(key, value);
  } else if (PyUnicode_Check(value)) {
    add_text(key, value);
  } else if (PyFloat_CheckExact(value) || PyBytes_Check(value)) {
    add_text(key, py::repr(value).ptr());
  } else if (PyTuple_Check(value) || PyList_Check(value)) {
    key.add(PySequence_Fast_GET_SIZE(value));
    if (Py_EnterRecursiveCall(" in a value that keys names") != 0) {  // it may hold itself
      throw py::error_already_set();
    }
    struct Leave {
      ~Leave() { Py_LeaveRecursiveCall(); }
    } const leave;
    visit_items(value, [&](PyObject* /*name*/, PyObject* item) { add_value(key, item, name); });
  } else if (value != Py_None) {
    const Py_hash_t own = entering_python([&] { return PyObject_Hash(value); });
    if (own == -1) {
      PyErr_Clear();
      TORCH_CHECK_TYPE(false, "keys names ", name.cast<std::string>(), ", whose value ",
                       py::repr(value).cast<std::string>(),
                       " cannot be told from others: it has no hash");
    }
    key.add(own);
  }
}

Py_hash_t ask_hasher(const AdaptiveConfig& config, const CallArguments& arguments) {
  py::dict mapping;  // NOLINT(misc-const-correctness): it is filled below
  for (const ArgumentSlot& slot : *config.key_arguments) {
    PyObject* value = arguments.get(slot);
    if (value != nullptr) {
      mapping[slot.name] = py::reinterpret_borrow<py::object>(value);
    }
  }
  const py::object key = invoke(config.hasher, mapping);
  TORCH_CHECK_TYPE(PyLong_Check(key.ptr()), "hasher must return an int, got ",
                   py::repr(key).cast<std::string>());
  return py::hash(key);
}

/// Where the decorated function was called from: the caller's code and the line in it.
void add_call_site(CallKey& key) {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return;
  }
  const auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  add_text(key, py::object(code.attr("co_filename")).ptr());
  add_text(key, py::object(code.attr("co_name")).ptr());
  key.add(PyFrame_GetLineNumber(frame));
}

}  // namespace

Py_ssize_t CallArguments::find(const ArgumentSlot& slot) const {
  if (slot.position >= 0 && slot.position < positional) {
    return slot.position;
  }
  const Py_ssize_t keywords = count() - positional;
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
  return at >= 0 ? values[at] : slot.default_value.ptr();
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

CallKeys call_keys(const AdaptiveConfig& config, const CallArguments& arguments,
                   std::optional<std::int64_t> skip_dim, bool by_identity) {
  CallKey key(config.salt);
  if (config.per_call_site) {
    add_call_site(key);
  }
  if (config.hasher) {
    key.add(ask_hasher(config, arguments));
  } else if (config.key_arguments) {
    for (const ArgumentSlot& slot : *config.key_arguments) {
      PyObject* const value = arguments.get(slot);
      add_value(key, value == nullptr ? Py_None : value, slot.name);
    }
  } else if (config.cut_dim) {
    CallKey wider = key;
    add_batch(key, arguments.values[0], *config.cut_dim, true);
    add_batch(wider, arguments.values[0], *config.cut_dim, false);
    return {.key = key.value(), .wider = wider.value()};
  } else {
    const Py_ssize_t first = arguments.receivers;
    CallKey kind = key;
    kind.add(std::string_view("kind"));
    bool has_tensors = false;
    for (Py_ssize_t i = first; i < arguments.positional; ++i) {
      key.add(i);
      add_tensors(key, arguments.values[i],
                  i == first ? skip_dim.value_or(CallKey::kNoDim) : CallKey::kNoDim);
      kind.add(i);
      has_tensors = add_kinds(kind, arguments.values[i]) || has_tensors;
    }
    // The order in which keywords are written does not matter: their keys are added up.
    std::uint64_t keywords = 0;
    std::uint64_t kinds = 0;
    for (Py_ssize_t i = arguments.positional; i < arguments.count(); ++i) {
      CallKey one(config.salt);
      add_text(one, PyTuple_GET_ITEM(arguments.names, i - arguments.positional));
      CallKey of_kind = one;
      add_tensors(one, arguments.values[i]);
      has_tensors = add_kinds(of_kind, arguments.values[i]) || has_tensors;
      keywords += one.value();
      kinds += of_kind.value();
    }
    key.add(keywords);
    kind.add(kinds);
    CallKeys result;
    if (const auto settings = settings_of(config, arguments, by_identity)) {
      result.wider = key.value();
      key.add(*settings);
      kind.add(*settings);
    }
    result.key = key.value();
    if (has_tensors) {
      result.kind = kind.value();
    }
    return result;
  }
  return {.key = key.value()};
}

}  // namespace brim::python
