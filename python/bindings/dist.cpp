#include <brim/adapt/agreement.h>
#include <brim/adapt/detail/gradient_reduction.h>
#include <brim/dist/group_channel.h>
#include <brim/dist/sum_over.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "bindings.h"
#include "group_sum.h"

namespace brim::python {
namespace {

/// The C++ object in one of torch.distributed's. By its address: which holder torch keeps it in is
/// torch's business. Null for None.
template <class T>
c10::intrusive_ptr<T> shared(const py::object& object) {
  return object.is_none() ? c10::intrusive_ptr<T>()
                          : c10::intrusive_ptr<T>::unsafe_reclaim_from_nonowning(object.cast<T*>());
}

}  // namespace

void register_dist(py::module_& m) {
  py::class_<GroupChannel, std::shared_ptr<GroupChannel>>(m, "GroupChannel")
      .def(py::init(
          [](const py::object& messages, const py::object& store, const py::object& program) {
            return std::make_shared<GroupChannel>(shared<c10d::Backend>(messages),
                                                  shared<c10d::Store>(store),
                                                  shared<c10d::ProcessGroup>(program));
          }))
      .def("close", &GroupChannel::close)
      .def_property_readonly("rank", &GroupChannel::rank)
      .def_property_readonly("ranks", &GroupChannel::ranks);
  py::class_<GroupSum>(m, "GroupSum")
      .def(py::init([](const py::object& group) {
        return GroupSum{sum_over(shared<c10d::ProcessGroup>(group))};
      }))
      .def("__call__", [](const GroupSum& self, const py::object& tensor) {
        self.add(THPVariable_Unpack(tensor.ptr()));
      });
  py::class_<AgreementOptions>(m, "AgreementOptions")
      .def(py::init([](bool per_rank, const std::string& sync, const std::string& collectives) {
        const AgreementOptions options{
            .per_rank = per_rank,
            .sync = word_argument<Sync>("sync", sync, {"always", "settled"}),
            .collectives =
                word_argument<Collectives>("collectives", collectives, {"between", "inside"})};
        options.check();
        return options;
      }));
  py::class_<Agreement, std::shared_ptr<Agreement>>(m, "Agreement")
      .def(py::init<std::shared_ptr<GroupChannel>, const AgreementOptions&, std::string>())
      .def("refuse_call", &Agreement::refuse_call)
      .def("end_with",
           [](Agreement& self, const std::shared_ptr<detail::GradientReduction>& reduction,
              const GroupSum& sum) {
             self.end_with({.vote = [=](bool done) { return reduction->vote(done, sum.add); },
                            .run = [=] { reduction->run(sum.add); }});
           })
      .def_property(
          "length", [](const Agreement& self) { return self.lengths.own; },
          [](Agreement& self, std::int64_t items) { self.lengths.own = items; })
      .def_property_readonly("longest", [](const Agreement& self) { return self.lengths.longest; })
      .def_property_readonly("parts", [](const Agreement& self) { return self.lengths.parts; })
      .def("meet_in_attempts", &Agreement::meet_in_attempts)
      .def("unsettle", [](Agreement& self) { self.count_exchange(false); });
}

}  // namespace brim::python
