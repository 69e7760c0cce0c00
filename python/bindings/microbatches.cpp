#include <brim/adapt/detail/batch_pass.h>
#include <brim/adapt/detail/gradient_reduction.h>
#include <brim/adapt/detail/item_contrast.h>
#include <brim/adapt/detail/joint_pass.h>
#include <brim/adapt/detail/split_check.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "group_sum.h"
#include "interpreter.h"
#include "python_error.h"
#include "tensor_argument.h"
#include "tensors.h"

namespace brim::python {
namespace {

double count_argument(const py::object& value) {
  const double count = entering_python([&] { return PyFloat_AsDouble(value.ptr()); });
  if (count == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(
        false, "loss_fn must return the loss, or (loss, count): a count must be a number, got ",
        text_of(invoke(provided("shown"), value)));
  }
  return count;
}

/// What `loss_fn` returned: a loss or (loss, count).
PartLoss part_loss(const py::object& result) {
  if (const at::Tensor* loss = tensor_in(result.ptr())) {
    return *loss;
  }
  const bool pair = PyTuple_Check(result.ptr()) && PyTuple_GET_SIZE(result.ptr()) == 2;
  const at::Tensor* loss = pair ? tensor_in(PyTuple_GET_ITEM(result.ptr(), 0)) : nullptr;
  TORCH_CHECK_TYPE(loss != nullptr, "loss_fn must return a tensor or (tensor, count), got ",
                   Py_TYPE(result.ptr())->tp_name);
  return {*loss, count_argument(result.cast<py::tuple>()[1])};
}

Reduction reduction_argument(const std::string& name) {
  return word_argument<Reduction>("reduction", name, {"mean", "sum"});
}

std::vector<at::Tensor> tensors_argument(const py::sequence& given) {
  std::vector<at::Tensor> tensors;
  for (const py::handle tensor : given) {
    tensors.push_back(THPVariable_Unpack(tensor.ptr()));
  }
  return tensors;
}

/// @param cut (start, stop) -> a part
/// @param scale a loss -> the loss to call backward on; None: itself
/// @param all (parts, unit, means) of detail::BatchPass::AllRanks, or None
py::object run(detail::BatchPass& pass, std::int64_t items, std::int64_t size,
               const py::object& loss_fn, const py::object& cut, const py::object& scale,
               const std::optional<std::tuple<std::int64_t, double, py::object>>& all) {
  std::optional<detail::BatchPass::AllRanks> ranks;
  if (all) {
    const py::object& means = std::get<2>(*all);
    ranks = {.parts = std::get<0>(*all),
             .unit = std::get<1>(*all),
             .means = [&](const std::vector<double>& own) {
               return invoke(means, own).cast<std::vector<double>>();
             }};
  }
  return to_python(pass.run(
      items, size,
      [&](std::int64_t begin, std::int64_t end) {
        py::object part = invoke(cut, begin, end);
        const py::object result = invoke(loss_fn, part);
        release(std::move(part));
        return part_loss(result);
      },
      [&](const at::Tensor& loss, const at::Tensor& weight) {
        const py::object own = to_python(loss);
        const py::object scaled = scale.is_none() ? own : invoke(scale, own);
        release(invoke(attribute(scaled, "backward"),
                       weight.defined() ? to_python(weight) : py::none()));
      },
      ranks ? &*ranks : nullptr));
}

py::list list_of(const std::vector<at::Tensor>& tensors) {
  py::list result;  // NOLINT(misc-const-correctness): it is filled below
  for (const at::Tensor& tensor : tensors) {
    result.append(to_python(tensor));
  }
  return result;
}

/// The functions of a pass whose loss needs all items, see detail::JointPass.
/// @param more (take, put_back) of random states that are Python's
/// @param buffers (names, tensors, those that may carry over)
/// @param ranks (agreement, GroupSum), or None
py::object run_joint(detail::BatchPass& pass, const std::vector<std::int64_t>& items,
                     std::int64_t size, const py::object& encode, const py::object& loss,
                     const py::object& backward, const py::object& device, const py::tuple& more,
                     const py::tuple& buffers, const py::object& ranks) {
  const py::object take = more[0];
  const py::object put_back = more[1];
  const detail::JointPass::Work work{
      .items = items,
      .encode =
          [&](std::size_t encoder, std::int64_t begin, std::int64_t end) {
            return tensors_argument(invoke(encode, encoder, begin, end));
          },
      .loss =
          [&](const std::vector<std::vector<at::Tensor>>& outputs) {
            py::list all;  // NOLINT(misc-const-correctness): it is filled below
            for (const std::vector<at::Tensor>& each : outputs) {
              all.append(list_of(each));
            }
            const py::object result = invoke(loss, all);
            const at::Tensor* value = tensor_in(result.ptr());
            TORCH_CHECK_TYPE(value != nullptr, "loss must return a tensor, got ",
                             Py_TYPE(result.ptr())->tp_name);
            return *value;
          },
      .backward =
          [&](const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients) {
            release(invoke(backward, list_of(roots),
                           gradients.empty() ? py::object(py::none()) : list_of(gradients)));
          },
      .device = device_argument(device),
      .more = {.take = [&] { return invoke(take).cast<std::int64_t>(); },
               .put_back = [&](std::int64_t number) { release(invoke(put_back, number)); }},
      .buffers = {.tensors = tensors_argument(buffers[1]),
                  .names = buffers[0].cast<std::vector<std::string>>()},
      .carried = tensors_argument(buffers[2])};
  std::optional<detail::JointPass::Ranks> all;
  if (!ranks.is_none()) {
    const auto both = ranks.cast<py::tuple>();
    all = {.agreement = both[0].cast<Agreement*>(), .sum = both[1].cast<const GroupSum&>().add};
  }
  const at::Tensor value = detail::JointPass::run(pass, work, size, all ? &*all : nullptr);
  return value.defined() ? to_python(value) : py::object(py::none());
}

/// detail::SplitCheck and the items that it compares.
class SplitCheck {
 public:
  [[nodiscard]] bool is_open() const { return check_.is_open(); }

  std::vector<std::int64_t> pairs(const py::sequence& tensors, std::int64_t dim) {
    return contrast_.pairs(tensors_argument(tensors), dim);
  }
  std::vector<std::int64_t> pairs_of(const std::vector<std::vector<double>>& traits) {
    return contrast_.pairs(traits);
  }

  /// @param loss_of (start, stop) -> what loss_fn returns for a part
  /// @param gradients (loss, leaves) -> as detail::PartWeights::Gradients
  const char* run(detail::BatchPass& pass, std::int64_t items, std::int64_t size,
                  std::vector<std::int64_t> places, const py::object& loss_of,
                  const py::object& gradients) {
    const auto forward = [&](std::int64_t begin, std::int64_t end) {
      return telling_interrupts([&] { return part_loss(invoke(loss_of, begin, end)); });
    };
    const auto by = [&](const at::Tensor& loss, const std::vector<at::Tensor>& leaves) {
      return telling_interrupts([&] {
        py::list given;  // NOLINT(misc-const-correctness): it is filled below
        for (const at::Tensor& leaf : leaves) {
          given.append(to_python(leaf));
        }
        std::vector<at::Tensor> found;
        for (const py::handle each : invoke(gradients, to_python(loss), given)) {
          found.push_back(each.is_none() ? at::Tensor() : THPVariable_Unpack(each.ptr()));
        }
        return found;
      });
    };
    try {
      const auto result = check_.run(pass.weights(), items, size, std::move(places), forward, by);
      contrast_.compared();
      switch (result) {
        case detail::SplitCheck::Result::right:
          return "right";
        case detail::SplitCheck::Result::undecided:
          return "undecided";
        case detail::SplitCheck::Result::failed:
          return "failed";
        case detail::SplitCheck::Result::random:
          return "random";
        case detail::SplitCheck::Result::unknown:
          return "unknown";
      }
    } catch (const Interrupted& interrupted) {
      std::rethrow_exception(interrupted.error);
    }
    return "";
  }

 private:
  detail::SplitCheck check_;
  detail::ItemContrast contrast_;
};

}  // namespace

void register_microbatches(py::module_& m) {
  py::class_<SplitCheck>(m, "SplitCheck")
      .def(py::init<>())
      .def("pairs", torch::wrap_pybind_function(&SplitCheck::pairs))
      .def("pairs_of", &SplitCheck::pairs_of)
      .def("run", torch::wrap_pybind_function(&SplitCheck::run))
      .def_property_readonly("is_open", &SplitCheck::is_open)
      .attr("UNKNOWN") = detail::kUnknownParts;
  py::class_<detail::BatchPass>(m, "BatchPass")
      .def(py::init([](const std::string& reduction) {
        return std::make_unique<detail::BatchPass>(reduction_argument(reduction));
      }))
      .def("run", &run)
      .def("run_joint", &run_joint)
      .def("name", [](detail::BatchPass& self,
                      const py::sequence& leaves) { self.name(tensors_argument(leaves)); })
      .def("not_named",
           [](const detail::BatchPass& self) {
             py::list leaves;  // NOLINT(misc-const-correctness): it is filled below
             for (const at::Tensor& leaf : self.not_named()) {
               leaves.append(to_python(leaf));
             }
             return leaves;
           })
      .def("finish", &detail::BatchPass::finish)
      .def("undo", &detail::BatchPass::undo)
      .def("pool", [](detail::BatchPass& self, const py::object& loss, double count,
                      double shape) { self.pool(THPVariable_Unpack(loss.ptr()), count, shape); })
      .def("finish_pool", [](detail::BatchPass& self) { return to_python(self.finish_pool()); })
      .def("undo_pool", &detail::BatchPass::undo_pool)
      .def("count_always", &detail::BatchPass::count_always)
      .def_property_readonly("shape", &detail::BatchPass::shape)
      .def_property_readonly("count", &detail::BatchPass::count);
  py::class_<detail::GradientReduction, std::shared_ptr<detail::GradientReduction>>(
      m, "GradientReduction")
      .def(py::init([](const std::string& reduction) {
        return std::make_shared<detail::GradientReduction>(reduction_argument(reduction),
                                                           std::vector<at::Tensor>());
      }))
      .def("name", [](detail::GradientReduction& self,
                      const py::sequence& parameters) { self.name(tensors_argument(parameters)); })
      .def_property_readonly("is_planned", &detail::GradientReduction::is_planned)
      .def("prepare",
           [](detail::GradientReduction& self, const py::object& loss, double count, double shape) {
             self.prepare(THPVariable_Unpack(loss.ptr()), count, shape);
           })
      .def_property_readonly("total", &detail::GradientReduction::total)
      .def_property_readonly("shape", &detail::GradientReduction::shape)
      .def_property_readonly(
          "loss", [](const detail::GradientReduction& self) { return to_python(self.loss()); });
}

}  // namespace brim::python
