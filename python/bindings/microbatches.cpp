#include <brim/adapt/detail/batch_pass.h>
#include <brim/adapt/detail/gradient_reduction.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "interpreter.h"
#include "tensor_argument.h"
#include "tensors.h"

namespace brim::python {
namespace {

double count_argument(const py::object& value) {
  const double count = entering_python([&] { return PyFloat_AsDouble(value.ptr()); });
  if (count == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    const py::object shown = attribute(py::module_::import("brim._arguments"), "shown");
    TORCH_CHECK_TYPE(
        false, "loss_fn must return the loss, or (loss, count): a count must be a number, got ",
        text_of(invoke(shown, value)));
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
/// @param all (parts, unit, same_items, mean) of detail::BatchPass::AllRanks, or None
py::object run(detail::BatchPass& pass, std::int64_t items, std::int64_t size,
               const py::object& loss_fn, const py::object& cut, const py::object& scale,
               const std::optional<std::tuple<std::int64_t, double, bool, py::object>>& all) {
  std::optional<detail::BatchPass::AllRanks> ranks;
  if (all) {
    const py::object& mean = std::get<3>(*all);
    ranks = {.parts = std::get<0>(*all),
             .unit = std::get<1>(*all),
             .same_items = std::get<2>(*all),
             .mean = [&](double count) { return invoke(mean, count).cast<double>(); }};
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

}  // namespace

void register_microbatches(py::module_& m) {
  py::class_<detail::BatchPass>(m, "BatchPass")
      .def(py::init([](const std::string& reduction) {
        return std::make_unique<detail::BatchPass>(reduction_argument(reduction));
      }))
      .def("run", &run)
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
      .def_property_readonly("count", &detail::BatchPass::count);
  py::class_<detail::GradientReduction>(m, "GradientReduction")
      .def(py::init([](const std::string& reduction) {
        return std::make_unique<detail::GradientReduction>(reduction_argument(reduction),
                                                           std::vector<at::Tensor>());
      }))
      .def("name", [](detail::GradientReduction& self,
                      const py::sequence& parameters) { self.name(tensors_argument(parameters)); })
      .def_property_readonly("is_planned", &detail::GradientReduction::is_planned)
      .def("vote",
           [](detail::GradientReduction& self, bool ready, const py::object& sum) {
             return self.vote(
                 ready, [&](const at::Tensor& tensor) { release(invoke(sum, to_python(tensor))); });
           })
      .def("prepare", [](detail::GradientReduction& self, const py::object& loss,
                         double count) { self.prepare(THPVariable_Unpack(loss.ptr()), count); })
      .def("run", [](detail::GradientReduction& self, const py::object& sum) {
        return to_python(
            self.run([&](const at::Tensor& tensor) { release(invoke(sum, to_python(tensor))); }));
      });
}

}  // namespace brim::python
