#pragma once

#include <brim/adapt/options.h>
#include <brim/adapt/scalar_arguments.h>
#include <brim/adapt/size_memory.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace brim::python {

/// An argument of the decorated function, found without binding a signature: its place is known
/// from the decoration.
struct ArgumentSlot {
  pybind11::object name;           // interned, so that comparing addresses nearly always decides
  Py_ssize_t position = -1;        // among positional arguments; -1: keyword only
  pybind11::object default_value;  // null where there is none
};

enum class AdaptKind : std::uint8_t { maximize, batch, range, chunked };
inline constexpr std::initializer_list<const char*> kAdaptKinds{"maximize", "batch", "range",
                                                                "chunked"};

/// What a function in a class is bound to: what was decorated may be a class or a static method.
enum class Binding : std::uint8_t { instance, owner, none };

/// What calls of one function have learned.
class FunctionMemory : public SizeMemory {
 public:
  using SizeMemory::SizeMemory;

  void forget_all() {
    clear();
    scalars_.clear();
  }
  ScalarArguments& scalars() { return scalars_; }

 private:
  ScalarArguments scalars_;
};

/// What a decoration fixed, worked out once; only read after it was made.
struct AdaptiveConfig {
  AdaptKind kind = AdaptKind::maximize;
  Binding binding = Binding::instance;
  bool has_receiver = false;  // the function's first parameter is `self` or `cls`
  pybind11::object recipe;    // () -> the same function made anew, for pickling by value
  AdaptOptions options;       // `key`, `attempts` and the log are added for each call

  // maximize
  std::vector<ArgumentSlot> parameters;
  std::vector<std::int64_t> quanta;
  std::vector<std::vector<std::size_t>> groups;
  std::optional<ArgumentSlot> infer;    // its length is the maximum where none is passed
  std::optional<std::int64_t> cut_dim;  // the first argument is a batch, cut along this dimension
  std::optional<ArgumentSlot> items;    // how many items are run in parts of the size
  // (key, size, function, args, kwargs) -> the size to start from; or null
  pybind11::object foresee;

  // batch, range, chunked
  std::int64_t initial = 0;
  std::int64_t dim = 0;       // chunked
  pybind11::object progress;  // total -> an object with update(n) and close(); null: none
  bool collect = false;       // range, chunked: return what the parts returned, as a list
  mutable std::atomic<bool> warned_of_result = false;  // that was not collected

  // remembering
  std::shared_ptr<FunctionMemory> memory;  // null: nothing is remembered
  bool per_call_site = false;
  /// The arguments that the user named; empty: all of them, each as far as it tells calls apart.
  std::optional<std::vector<ArgumentSlot>> key_arguments;
  pybind11::object hasher;  // mapping of the key arguments -> int; null: brim's own
  std::uint64_t salt = 0;   // tells functions apart in a memory that is kept in files

  // undoing
  pybind11::object restore;  // a list of what is put back after a failed attempt; null: nothing
  std::vector<ArgumentSlot> restore_arguments;            // arguments that are put back too
  bool restores_chunk = false;                            // chunked: the chunk is put back
  std::vector<std::string> argument_names;                // by position, for messages
  mutable std::atomic<bool> warned_of_iterators = false;  // that a failed attempt was given
  mutable std::atomic<bool> warned_of_changes = false;    // that a failed attempt left
  mutable std::atomic<bool> warned_of_helpers = false;    // scalers, schedulers: not put back

  // ranks
  pybind11::object ranks;           // () -> the Agreement with other ranks, or None; null: none
  bool maxima_may_differ = false;   // between ranks
  bool maxima_are_lengths = false;  // of a rank's own arguments

  pybind11::object observer;  // told of every attempt; null: nobody
  std::string log_name;       // what the log calls the function
};

/// The arguments of a vectorcall, as they came.
struct CallArguments {
  PyObject* const* values;
  Py_ssize_t positional;
  PyObject* names;  // a tuple, or null
  // 1 where the first value is the instance or class of a method, before which nothing may be put.
  // `maximize`, which puts nothing anywhere, need not know.
  Py_ssize_t receivers = 0;

  Py_ssize_t count() const { return positional + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)); }

  /// Where the argument is among `values`, or -1 where it was not passed.
  Py_ssize_t find(const ArgumentSlot& slot) const;

  /// The argument or its default, borrowed; null where there is neither.
  PyObject* get(const ArgumentSlot& slot) const;
};

/// Whether an argument is a tensor on an accelerator.
bool has_accelerator_tensor(const CallArguments& arguments);

/// The kind of a call, and wider ones to learn from as long as nothing is known of that: with any
/// settings, and with tensors of any lengths.
struct CallKeys {
  std::uint64_t key = 0;
  std::optional<std::uint64_t> wider{};
  std::optional<std::uint64_t> kind{};
};

/// Identifies the kind of call for SizeMemory by what the user named. Else by the shapes, dtypes
/// and devices of its tensors, which make the wider kind, and by its numbers, texts and objects.
/// @param skip_dim a dimension of the first argument (after a receiver) whose length does not
/// matter (chunked), or empty.
/// @param by_identity objects are told apart by their address, not by what they hold: for what is
/// not kept for long and too costly to repeat whenever an attribute counts something.
CallKeys call_keys(const AdaptiveConfig& config, const CallArguments& arguments,
                   std::optional<std::int64_t> skip_dim, bool by_identity = false);

}  // namespace brim::python
