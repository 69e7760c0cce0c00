#include "adapt/detail/loss_terms.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "compat.h"
#include "mean_count.h"

namespace brim::detail {
namespace {

namespace torchs = torch::autograd::generated;
using torch::autograd::Edge;
using torch::autograd::Node;

constexpr std::size_t kMostTerms = 256;  // a loss of more is a loop over items, and shows nothing

/// Elements of what an edge leads to; nothing if that has no fixed shape.
std::optional<std::int64_t> elements_of(const Edge& edge) {
  if (!edge.function) {
    return std::nullopt;
  }
  const auto& made = edge.function->input_metadata(edge.input_nr);
  if (made.is_nested_tensor()) {
    return std::nullopt;
  }
  std::int64_t product = 1;
  for (const c10::SymInt& size : made.shape_as_dim_vector()) {
    const std::optional<std::int64_t> known = size.maybe_as_int();
    if (!known) {
      return std::nullopt;
    }
    product *= *known;
  }
  return product;
}

/// Nodes of one element that pass on what they get, or add it up.
bool is_linear(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "AddBackward0",      "AddBackward1",       "SubBackward0",
      "SubBackward1",      "RsubBackward0",      "RsubBackward1",
      "NegBackward0",      "ViewBackward0",      "UnsafeViewBackward0",
      "AliasBackward0",    "SqueezeBackward0",   "SqueezeBackward1",
      "SqueezeBackward2",  "UnsqueezeBackward0", "ReshapeAliasBackward0",
      "ToCopyBackward0",   "CloneBackward0",     "ExpandBackward0",
      "NanToNumBackward0", "StackBackward0",     "CatBackward0",
      "MulBackward1",      "DivBackward1",       "LiftFreshCopyBackward0"};
  return names.contains(name);
}

/// Nodes with as many outputs as inputs, each of which is passed on.
bool is_identity(std::string_view name) {
  return name == "BackwardHookFunctionBackward" || name == "_DDPSinkBackward";
}

template <class Loss>
std::optional<std::int64_t> reduction_in(const Node& node) {
  const auto* loss = dynamic_cast<const Loss*>(&node);
  return loss == nullptr ? std::nullopt : std::optional<std::int64_t>(loss->reduction);
}

/// How a loss of torch over elements was reduced.
std::optional<std::int64_t> reduction_of(const Node& node) {
  std::optional<std::int64_t> found;
  const auto look = [&]<class Loss>(const Loss*) {
    if (!found) {
      found = reduction_in<Loss>(node);
    }
  };
  look(static_cast<const torchs::MseLossBackward0*>(nullptr));
  look(static_cast<const torchs::SmoothL1LossBackward0*>(nullptr));
  look(static_cast<const torchs::HuberLossBackward0*>(nullptr));
  look(static_cast<const torchs::SoftMarginLossBackward0*>(nullptr));
  look(static_cast<const torchs::BinaryCrossEntropyBackward0*>(nullptr));
  look(static_cast<const torchs::BinaryCrossEntropyWithLogitsBackward0*>(nullptr));
  look(static_cast<const torchs::MultiMarginLossBackward0*>(nullptr));
  look(static_cast<const torchs::MultilabelMarginLossBackward0*>(nullptr));
  return found;
}

/// The total weight of torch's nll_loss; nothing if it is a sum.
template <class Nll>
std::optional<double> total_weight(Nll& node) {
  if (node.reduction != at::Reduction::Mean) {
    return std::nullopt;
  }
  const at::Tensor total = node.total_weight_.unpack(compat::pointer_to(node));
  if (total.element_size() >= 4) {
    return total.item<double>();
  }
  // In 16 bits it is rounded, or infinite.
  return labels_counted(node.target_.unpack(), node.weight_.unpack(),
                        node.ignore_index.expect_int());
}

/// What a loss is divided by on the way from its root to a reduction. Tensors are read only if a
/// count depends on them: that waits for an accelerator. A tensor that a loss is multiplied by is
/// left out: it is rarely the inverse of a count.
struct Divisor {
  double number = 1;
  std::vector<at::Tensor> tensors{};

  [[nodiscard]] double value() const { return number * value_of_tensors(); }
  [[nodiscard]] double value_of_tensors() const {
    double product = 1;
    for (const at::Tensor& tensor : tensors) {
      product *= tensor.item<double>();
    }
    return product;
  }
  [[nodiscard]] Divisor by(double factor) const {
    Divisor divisor = *this;
    divisor.number *= factor;
    return divisor;
  }
  [[nodiscard]] Divisor by(const at::Tensor& tensor) const {
    Divisor divisor = *this;
    divisor.tensors.push_back(tensor);
    return divisor;
  }
};

bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

class Reader {
 public:
  void read(const Edge& edge, const Divisor& divisor) {
    if (!edge.function) {
      return;
    }
    Node& node = *edge.function;
    const bool is_full = result.terms.size() >= kMostTerms;
    if (!is_full && dynamic_cast<torch::autograd::AccumulateGrad*>(&node) != nullptr) {
      return;  // a parameter: the same in all parts
    }
    if (is_full || (!read_reduction(node, divisor) && !pass_on(node, edge.input_nr, divisor))) {
      result.is_complete = false;
    }
  }

  LossTerms result;
  bool may_be_empty = false;  // a sum is divided by a tensor that is 1

 private:
  /// Whether the node is a reduction that is known.
  bool read_reduction(Node& node, const Divisor& divisor) {
    const std::string name = node.name();
    const bool is_mean = name == "MeanBackward0" || name == "MeanBackward1";
    if (is_mean || name == "SumBackward0" || name == "SumBackward1") {
      return read_sum(node, is_mean, divisor);
    }
    if (auto* counted = dynamic_cast<CountedMean*>(&node)) {
      return add(node, counted->mean_count(), divisor);
    }
    if (auto* nll = dynamic_cast<torchs::NllLossBackward0*>(&node)) {
      return add(node, total_weight(*nll), divisor);
    }
    if (auto* nll = dynamic_cast<torchs::NllLoss2DBackward0*>(&node)) {
      return add(node, total_weight(*nll), divisor);
    }
    if (const std::optional<std::int64_t> reduction = reduction_of(node)) {
      const std::optional<std::int64_t> elements = elements_of(input_of(node));
      if (!elements || *reduction == at::Reduction::None) {
        return false;
      }
      const bool divides = *reduction == at::Reduction::Mean;
      return add(node, divides ? std::optional<double>(*elements) : std::nullopt, divisor);
    }
    return false;
  }

  bool read_sum(Node& node, bool is_mean, const Divisor& divisor) {
    const Edge& input = node.next_edge(0);
    const std::optional<std::int64_t> elements = elements_of(input);
    if (!elements) {
      return false;
    }
    // Not of any single element: that may be all of a part of one item.
    const bool is_scalar =
        input.function->input_metadata(input.input_nr).shape_as_dim_vector().empty();
    if (is_scalar || joins_terms(*input.function)) {
      const double joined = is_mean ? static_cast<double>(*elements) : 1.0;
      for (const Edge& each :
           is_scalar ? torch::autograd::edge_list{input} : input.function->next_edges()) {
        read(each, divisor.by(joined));
      }
      return true;
    }
    return add(node, is_mean ? std::optional<double>(*elements) : std::nullopt, divisor);
  }

  /// Whether the node puts terms of one element into a row.
  static bool joins_terms(const Node& node) {
    const std::string name = node.name();
    return (name == "StackBackward0" || name == "CatBackward0") &&
           std::ranges::all_of(node.next_edges(), [](const Edge& edge) {
             return !edge.function || elements_of(edge) == 1;
           });
  }

  /// @param count nothing: a sum, which counts what it is divided by
  bool add(Node& node, std::optional<double> count, const Divisor& divisor) {
    const bool is_sum = !count;
    if (is_sum) {
      count = std::abs(divisor.value());
      may_be_empty |= *count == 1 && !divisor.tensors.empty();
    } else {  // as (losses * weights).mean() / weights.mean(); numbers are the same in all parts
      *count *= std::abs(divisor.value_of_tensors());
    }
    result.terms.push_back({*count, elements_of(input_of(node)).value_or(0), is_sum,
                            Edge(compat::pointer_to(node), 0)});
    return true;
  }

  static Edge input_of(const Node& node) {
    const auto& edges = node.next_edges();
    const auto found = std::ranges::find_if(
        edges, [](const Edge& edge) { return static_cast<bool>(edge.function); });
    return found == edges.end() ? Edge() : *found;
  }

  /// Goes on to the inputs of a node, if it is linear in them.
  bool pass_on(Node& node, std::uint32_t output, const Divisor& divisor) {
    const std::string name = node.name();
    const auto& edges = node.next_edges();
    if (is_identity(name) && output < edges.size()) {
      read(edges[output], divisor);
      return true;
    }
    for (const Edge& edge : edges) {
      if (edge.function && elements_of(edge) != 1) {
        return false;
      }
    }
    if (auto* product = dynamic_cast<torchs::MulBackward0*>(&node)) {
      return read_product(*product, divisor);
    }
    if (const auto* quotient = dynamic_cast<torchs::DivBackward0*>(&node)) {
      if (edges[1].function) {
        return false;
      }
      const at::Tensor by = quotient->other_.unpack();
      read(edges[0], is_number(by) ? divisor.by(by.item<double>()) : divisor.by(by));
      return true;
    }
    if (!is_linear(name)) {
      return false;
    }
    Divisor inner = divisor;
    if (const auto* scaled = dynamic_cast<torchs::MulBackward1*>(&node)) {
      inner.number /= scaled->other.toDouble();
    } else if (const auto* divided = dynamic_cast<torchs::DivBackward1*>(&node)) {
      inner.number *= divided->other.toDouble();
    }
    for (const Edge& edge : edges) {
      read(edge, inner);
    }
    return true;
  }

  bool read_product(torchs::MulBackward0& product, const Divisor& divisor) {
    const Edge& first = product.next_edge(0);
    const Edge& second = product.next_edge(1);
    if (first.function && second.function) {  // one of them may be a learned factor
      read(first, divisor);
      read(second, divisor);
      return true;
    }
    const at::Tensor by = first.function ? product.other_.unpack() : product.self_.unpack();
    read(first.function ? first : second,
         is_number(by) ? divisor.by(1 / by.item<double>()) : divisor);
    return true;
  }
};

}  // namespace

LossTerms loss_terms(const at::Tensor& loss) {
  const at::NoGradGuard no_grad;
  Reader reader;
  if (loss.grad_fn()) {
    reader.read(torch::autograd::impl::gradient_edge(loss), {});
  }
  // `sum / count.clamp(min=1)`: a part in which nothing counts.
  if (reader.may_be_empty && loss.item<double>() == 0) {
    for (LossTerm& term : reader.result.terms) {
      term.count = term.is_sum && term.count == 1 ? 0.0 : term.count;
    }
  }
  return std::move(reader.result);
}

}  // namespace brim::detail
