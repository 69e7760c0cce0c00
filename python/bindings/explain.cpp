#include <brim/explain/shortage.h>
#include <brim/memory/host_memory.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"
#include "context_manager.h"
#include "interpreter.h"
#include "record.h"

namespace brim::python {
namespace {

/// What is known of a code object of Python.
struct KnownCode {
  std::string file;  // "" where it is not the user's
  std::string name;
  std::unordered_map<int, std::int32_t> places;  // by line
};

/// Asks Python once per code object. The GIL is held.
KnownCode& known_code(PyCodeObject* code) {
  // Held for the life of the process, as the code is: an address must not come to mean another.
  static auto* const all = new std::unordered_map<PyCodeObject*, KnownCode>();
  if (const auto found = all->find(code); found != all->end()) {
    return found->second;
  }
  KnownCode known;
  const auto object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code));
  const py::object file = invoke(provided("users_file"), attribute(object, "co_filename"));
  if (!file.is_none()) {
    known.file = text_of(file);
    known.name = text_of(py::getattr(object, "co_qualname", attribute(object, "co_name")));
  }
  Py_INCREF(code);
  return all->emplace(code, std::move(known)).first->second;
}

/// The innermost line of the user's that this thread runs.
std::int32_t place_of(PyThreadState* thread) {
  auto frame = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(thread)));
  while (frame) {
    auto* const here = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
    KnownCode& known = known_code(reinterpret_cast<PyCodeObject*>(code.ptr()));
    if (!known.file.empty()) {
      const int line = PyFrame_GetLineNumber(here);
      const auto [entry, is_new] = known.places.try_emplace(line, -1);
      if (is_new) {
        entry->second = place_number(known.file + ":" + std::to_string(line) + " " + known.name);
      }
      return entry->second;
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  }
  return -1;
}

/// Runs inside an allocation, with an error of Python's perhaps pending, and leaves that as it is.
std::int32_t find_place() noexcept {
  PyThreadState* const thread = Py_IsInitialized() != 0 ? PyGILState_GetThisThreadState() : nullptr;
  if (thread == nullptr) {  // a thread that runs no Python
    return -1;
  }
  PyGILState_STATE gil{};
  entering_python([&] { gil = PyGILState_Ensure(); });
  std::int32_t place = -1;
  try {
    const py::error_scope pending;
    place = place_of(thread);
  } catch (...) {
    // The code object could not be asked: its place is not known.
  }
  PyGILState_Release(gil);
  return place;
}

/// Whether a tensor's memory is among that which brim counts: on the CPU, from its own allocator.
bool is_counted(const at::Tensor& tensor) {
  return !tensor.is_cpu() || tensor.storage().data_ptr().get_deleter() ==
                                 c10::GetAllocator(c10::DeviceType::CPU)->raw_deleter();
}

/// Those that something in Python refers to beside the list. Torch keeps the Python object of a
/// tensor that C++ alone holds, such as one that is saved for backward, by a reference of its own.
py::list held_by_python(const py::list& tensors) {
  py::list held;  // NOLINT(misc-const-correctness): it is filled below
  for (const py::handle each : tensors) {
    const bool is_shared = THPVariable_Unpack(each.ptr()).use_count() > 1;
    if (Py_REFCNT(each.ptr()) > (is_shared ? 2 : 1)) {
      held.append(each);
    }
  }
  return held;
}

/// The objects of these types that Python's garbage collector knows. Nothing of Python runs between
/// its list and the end of ours: among all objects are tuples that other threads have not filled
/// yet, which they cannot go on with while the list holds them.
py::list live_objects(const py::args& types) {
  py::list found;  // NOLINT(misc-const-correctness): it is filled below
  const py::object list_all = py::module_::import("gc").attr("get_objects");
  const py::list all(new_reference(PyObject_CallNoArgs(list_all.ptr())));
  for (const py::handle each : all) {
    const bool is_one = std::any_of(types.begin(), types.end(), [&](py::handle type) {
      return PyType_IsSubtype(Py_TYPE(each.ptr()), reinterpret_cast<PyTypeObject*>(type.ptr())) !=
             0;
    });
    if (is_one) {
      found.append(each);
    }
  }
  return found;
}

using PyBlockWatch = ContextManager<BlockWatch, c10::Device, std::int64_t>;

/// A block of brim.explain, from `enter` to `leave`. C++ opens and ends it, since an interrupt
/// between two lines of Python would leave it open. The GIL is held.
class ExplainedBlock {
 public:
  ExplainedBlock() = default;
  ~ExplainedBlock() { leave(); }
  ExplainedBlock(const ExplainedBlock&) = delete;
  ExplainedBlock& operator=(const ExplainedBlock&) = delete;

  void enter() {
    thread_ = this_thread();
    all().push_back(this);
  }
  void leave() { std::erase(all(), this); }
  bool is_here() const { return thread_ == this_thread(); }

  /// The one of this thread that was entered last, or null.
  static ExplainedBlock* innermost() {
    const auto found = std::ranges::find_if(all().rbegin(), all().rend(), &ExplainedBlock::is_here);
    return found == all().rend() ? nullptr : *found;
  }

 private:
  static std::vector<ExplainedBlock*>& all() {
    static auto* const open = new std::vector<ExplainedBlock*>();
    return *open;
  }
  /// A number that no later thread gets, in contrast to its id.
  static std::uint64_t this_thread() {
    static std::uint64_t threads = 0;  // under the GIL
    thread_local const std::uint64_t number = ++threads;
    return number;
  }

  std::uint64_t thread_ = 0;
};

/// Ends a block, and before that has it explain the error, if there is one.
void end_block(const py::object& block, const py::object& error) {
  struct Leaving {
    ExplainedBlock& block;
    ~Leaving() { block.leave(); }
  };
  const Leaving leaving{block.cast<ExplainedBlock&>()};
  if (!error.is_none()) {
    invoke(attribute(block, "tell"), error);
  }
}

/// What `with brim.explain()` enters, several times if need be: a watch and a block for each.
class ExplainingBlocks {
 public:
  explicit ExplainingBlocks(c10::Device device) : device_(device) {}

  c10::Device device() const { return device_; }

  void enter(const py::object& self) {
    auto opened = std::make_unique<PyBlockWatch>("watch", device_, 0);
    opened->enter();  // closed with the last reference, whatever follows
    const py::object watch = py::cast(std::move(opened));
    const py::object block = invoke(attribute(self, "_block"), watch);
    py::list(attribute(self, "_open")).append(py::make_tuple(block, watch));
    block.cast<ExplainedBlock&>().enter();
  }

  static void exit(const py::object& self, const py::object& error) {
    const py::list open(attribute(self, "_open"));
    TORCH_CHECK(!open.empty(), "this explain block is not open");
    // Several threads may be in blocks of one object.
    std::size_t last = open.size() - 1;
    for (std::size_t i = 0; i < open.size(); ++i) {
      last = py::tuple(open[i])[0].cast<ExplainedBlock&>().is_here() ? i : last;
    }
    const py::tuple ended(open[last]);
    open.attr("pop")(last);
    struct Closing {
      PyBlockWatch& watch;
      ~Closing() { watch.exit(); }
    };
    const Closing closing{ended[1].cast<PyBlockWatch&>()};
    end_block(ended[0], error);
  }

 private:
  c10::Device device_;
};

}  // namespace

void register_explain(py::module_& m) {
  set_place_finder(&find_place);
  PyBlockWatch::bind(m, "BlockWatch", "Notes large blocks and where they are made.")
      .def(py::init([](const py::object& device, std::int64_t least) {
             return std::make_unique<PyBlockWatch>("watch", resolve_device(device_argument(device)),
                                                   least);
           }),
           py::arg("device") = py::none(), py::arg("least") = 0)
      .def_property_readonly("device",
                             [](const PyBlockWatch& self) {
                               return to_python(std::get<c10::Device>(self.arguments()));
                             })
      .def_property_readonly("least",
                             [](const PyBlockWatch& self) { return self.object().least(); })
      .def_property_readonly("in_use",
                             [](const PyBlockWatch& self) { return self.object().in_use(); })
      .def_property_readonly("clock",
                             [](const PyBlockWatch& self) { return self.object().clock(); })
      .def("blocks",
           [](const PyBlockWatch& self) {
             py::list found;
             for (const LiveBlock& block : self.object().blocks()) {
               found.append(py::make_tuple(block.address, block.bytes, block.made_at,
                                           place_text(block.place)));
             }
             return found;
           })
      .def("open", [](PyBlockWatch& self) {  // for good, at the first of several calls
        if (!self.entered()) {
          self.enter();
        }
      });
  py::class_<ExplainedBlock>(m, "ExplainedBlock")
      .def(py::init<>())
      .def("__enter__",
           [](const py::object& self) {
             self.cast<ExplainedBlock&>().enter();
             return self;
           })
      .def("__exit__", [](const py::object& self, const py::object&, const py::object& error,
                          const py::object&) { end_block(self, error); });
  m.def(
      "explained_block", [] { return ExplainedBlock::innermost(); },
      py::return_value_policy::reference);
  py::class_<ExplainingBlocks>(m, "ExplainingBlocks")
      .def(py::init([](const py::object& device) {
             return std::make_unique<ExplainingBlocks>(resolve_device(device_argument(device)));
           }),
           py::arg("device"))
      .def_property_readonly("_device",
                             [](const ExplainingBlocks& self) { return to_python(self.device()); })
      .def("__enter__",
           [](const py::object& self) {
             self.cast<ExplainingBlocks&>().enter(self);
             return self;
           })
      .def("__exit__", [](const py::object& self, const py::object&, const py::object& error,
                          const py::object&) { ExplainingBlocks::exit(self, error); });
  m.def("is_counted", &is_counted);
  m.def("held_by_python", &held_by_python);
  m.def("live_objects", &live_objects);
  record<Holder>(m, "Holder", "", field("kind", &Holder::kind), field("where", &Holder::where),
                 field("bytes", &Holder::bytes), field("count", &Holder::count),
                 field("grows", &Holder::grows));
  py::class_<HeldBlock>(m, "HeldBlock")
      .def(py::init([](std::int64_t bytes, std::int64_t made_at, MemoryKind kind, std::string where,
                       bool has_reason) {
             return HeldBlock{.bytes = bytes,
                              .made_at = made_at,
                              .kind = kind,
                              .where = std::move(where),
                              .has_reason = has_reason};
           }),
           py::arg("size"), py::arg("made_at"), py::arg("kind"), py::arg("where"),
           py::arg("has_reason"));
  m.def("holders_of", [](const std::vector<HeldBlock>& blocks, std::int64_t clock) {
    return holders_of(blocks, clock);
  });
  m.def("left_by_calls", [](const std::vector<std::int64_t>& held) { return left_by_calls(held); });
  m.def(
      "holders_text",
      [](const std::vector<Holder>& holders, std::size_t most) { return to_string(holders, most); },
      py::arg("holders"), py::arg("most") = 10);
  record<Shortage>(m, "Shortage", "", field(nullptr, &Shortage::cause),
                   field("reason", &Shortage::reason), field("requested", &Shortage::requested),
                   field("in_use", &Shortage::in_use), field("limit", &Shortage::limit),
                   field("missing", &Shortage::missing), field("others", &Shortage::others),
                   field("grown", &Shortage::grown), field("scattered", &Shortage::scattered))
      .def_property_readonly("cause", [](const Shortage& self) { return to_string(self.cause); })
      .def("__str__", [](const Shortage& self) { return to_string(self); });
  m.def(
      "diagnose",
      [](const OomCause& error, const MemoryStats& stats, std::int64_t resident,
         std::vector<Holder> held, std::int64_t grown) {
        return diagnose({.error = error,
                         .stats = stats,
                         .resident = resident,
                         .held = std::move(held),
                         .grown = grown});
      },
      py::arg("error"), py::arg("stats"), py::arg("resident"), py::arg("held"), py::arg("grown"));
}

}  // namespace brim::python
