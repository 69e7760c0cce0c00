#pragma once

#include <brim/adapt/saved_state.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace brim {

/// For `restoring`: what an optimizer changes. Its parameters with their gradients, its state and
/// the options of its groups.
///
///     const brim::RestoredOptimizer of_optimizer(optimizer);
///     brim::batch(512, step, {.restore = brim::restoring(model, of_optimizer)});
///
/// Refers to the optimizer. A header of its own, because torch's take seconds to compile.
class RestoredOptimizer {
 public:
  explicit RestoredOptimizer(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}

  void operator()(SavedState& state) const {
    for (auto& group : optimizer_->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        state.add(parameter);
      }
    }
    state.add([optimizer = optimizer_, before = std::make_shared<const Before>(*optimizer_)] {
      before->put_back(*optimizer);
    });
  }

 private:
  /// The state as text: only the state itself knows which tensors it has.
  struct Before {
    struct State {
      void* owner;
      std::unique_ptr<torch::optim::OptimizerParamState> kind;
      std::string content;
    };
    std::vector<State> states;
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;

    explicit Before(torch::optim::Optimizer& optimizer) {
      for (const auto& [owner, state] : optimizer.state()) {
        torch::serialize::OutputArchive archive;
        state->serialize(archive);
        std::ostringstream out;
        archive.save_to(out);
        states.push_back({owner, state->clone(), std::move(out).str()});
      }
      for (auto& group : optimizer.param_groups()) {
        options.push_back(group.options().clone());
      }
    }

    void put_back(torch::optim::Optimizer& optimizer) const {
      optimizer.state().clear();
      for (const State& before : states) {
        std::istringstream in(before.content);
        torch::serialize::InputArchive archive;
        archive.load_from(in);
        auto state = before.kind->clone();
        state->serialize(archive);
        optimizer.state()[before.owner] = std::move(state);
      }
      for (std::size_t i = 0; i < options.size(); ++i) {
        optimizer.param_groups()[i].set_options(options[i]->clone());
      }
    }
  };

  torch::optim::Optimizer* optimizer_;
};

}  // namespace brim
