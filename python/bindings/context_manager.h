#pragma once

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <tuple>
#include <utility>

namespace brim::python {

/// Python's `with` around a C++ object that works from its construction to its `close()`. The
/// arguments are kept, so that they can be checked early and the block entered again; the object
/// stays readable after the block.
template <class Object, class... Arguments>
class ContextManager {
 public:
  /// @param what the object, for errors.
  explicit ContextManager(const char* what, Arguments... arguments)
      : what_(what), arguments_(std::move(arguments)...) {}

  void enter() {
    TORCH_CHECK(!open_, "this ", what_, " is open already: use a second one to nest");
    std::apply([&](const Arguments&... arguments) { object_.emplace(arguments...); }, arguments_);
    open_ = true;
  }

  void exit() {
    TORCH_CHECK(open_, "this ", what_, " is not open");
    object_->close();
    open_ = false;
  }

  const std::tuple<Arguments...>& arguments() const { return arguments_; }
  bool entered() const { return object_.has_value(); }
  const Object& object() const {
    TORCH_CHECK(entered(), "this ", what_, " has not been opened: write `with` first");
    return *object_;
  }
  Object& object() { return const_cast<Object&>(std::as_const(*this).object()); }

  /// Its Python class, to which the rest is added.
  /// @param must_be_open whether `__exit__` of one that is not open is an error.
  /// @param seeing called with an exception that ends the block, while that is still open.
  static pybind11::class_<ContextManager> bind(pybind11::module_& m, const char* name,
                                               const char* doc, bool must_be_open = true,
                                               void (*seeing)(const ContextManager&,
                                                              pybind11::handle) = nullptr) {
    return pybind11::class_<ContextManager>(m, name, doc)
        .def_property_readonly(
            "is_open", [](const ContextManager& self) { return self.open_; },
            "Whether the block has begun and not ended.")
        .def("__enter__",
             [](const pybind11::object& self) {
               self.cast<ContextManager&>().enter();
               return self;
             })
        .def("__exit__", [must_be_open, seeing](ContextManager& self, const pybind11::args& error) {
          if (seeing != nullptr && error.size() > 1 && !error[1].is_none()) {
            seeing(self, error[1]);
          }
          if (must_be_open || self.open_) {
            self.exit();
          }
        });
  }

 private:
  const char* what_;
  std::tuple<Arguments...> arguments_;
  std::optional<Object> object_;
  bool open_ = false;
};

}  // namespace brim::python
