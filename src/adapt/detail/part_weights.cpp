#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <brim/adapt/detail/part_weights.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <span>

#include "adapt/detail/graph_leaves.h"
#include "adapt/detail/loss_terms.h"

namespace brim::detail {
namespace {

constexpr std::int64_t kLarge = std::int64_t{1} << 16;  // elements of a leaf
constexpr std::size_t kMostLeaves = 6;
constexpr std::size_t kMostTermsApart = 8;
constexpr double kLeast = 1e-3;         // of the loss: a gradient that counts
constexpr double kInProportion = 1e-6;  // relative: counts are in proportion

/// By how much sums may differ, relative to their terms. Matrix products of other sizes round
/// otherwise: 16 bits and TF32 (on by default in cuDNN) by some 1e-3 per layer.
/// @param has_16_bits whether anything in the graph has no more
double tolerance_of(const at::Tensor& loss, std::span<const at::Tensor> leaves, bool has_16_bits) {
  const auto in = [&](const at::Tensor& tensor) {
    return has_16_bits || tensor.element_size() < 4 ? 5e-2
           : tensor.scalar_type() == at::kDouble    ? 1e-6
           : tensor.is_cpu()                        ? 1e-3
                                                    : 2e-2;
  };
  double most = in(loss);
  for (const at::Tensor& leaf : leaves) {
    most = std::max(most, in(leaf));
  }
  return most;
}

/// Leaves whose gradients are compared: near the loss, where backward ends soon, and none that is
/// large, or the smallest.
std::vector<at::Tensor> leaves_near(const at::Tensor& loss, bool& has_16_bits) {
  const std::vector<at::Tensor> all = leaves_of(loss, &has_16_bits);
  std::vector<at::Tensor> leaves;
  std::ranges::copy_if(all, std::back_inserter(leaves),
                       [](const at::Tensor& leaf) { return leaf.numel() <= kLarge; });
  if (leaves.empty() && !all.empty()) {
    leaves.push_back(
        *std::ranges::min_element(all, {}, [](const at::Tensor& leaf) { return leaf.numel(); }));
  }
  leaves.resize(std::min(leaves.size(), kMostLeaves));
  return leaves;
}

/// How far weighted terms are from their sum, relative to the largest of all.
double off(std::array<double, 2> shares, const at::Tensor& whole,
           std::array<const at::Tensor*, 2> terms) {
  at::Tensor sum = at::zeros_like(whole);
  auto most = whole.norm().item<double>();
  for (std::size_t i = 0; i < 2; ++i) {
    if (shares[i] != 0) {  // a mean over nothing is NaN, and does not count
      sum = sum + *terms[i] * shares[i];
      most = std::max(most, terms[i]->norm().item<double>());
    }
  }
  const auto distance = (sum - whole).norm().item<double>();
  if (!std::isfinite(distance)) {
    return std::numeric_limits<double>::infinity();
  }
  return most > 0 ? distance / most : 0.0;
}

}  // namespace

struct PartWeights::Measured {
  PartLoss loss{at::Tensor()};  // without a graph
  LossTerms read{};
  std::vector<at::Tensor> values{};  // the loss and all gradients, in double on the CPU
  std::vector<at::Tensor> terms{};   // the gradients of each term alone; undefined: unknown
  std::int64_t items = 0;

  [[nodiscard]] double value() const { return values.front().item<double>(); }
};

PartWeights::Count PartWeights::count(const PartLoss& part, std::int64_t items) const {
  if (part.count) {
    return {.value = *part.count, .is_own = true};
  }
  if (reduction_ == Reduction::sum) {
    return {.value = static_cast<double>(items)};
  }
  const LossTerms read = by_terms_ ? loss_terms(part.value) : LossTerms();
  const bool is_known = kinds_.size() == read.terms.size();
  std::optional<Count> found;
  double place = 0;
  for (std::size_t i = 0; i < read.terms.size(); ++i) {
    const Kind kind = is_known ? kinds_[i] : Kind::counted;
    if (kind == Kind::constant) {
      continue;
    }
    const double own = kind == Kind::items ? static_cast<double>(items) : read.terms[i].count;
    if (!found) {
      found = Count{.value = own, .is_own = true};
    } else if (found->value > 0) {
      place += 1;
      found->others += place * own / found->value;
    }
  }
  if (found) {
    return *found;
  }
  TORCH_CHECK_VALUE(
      by_items_,
      "the loss is no mean over items, and its graph does not show what it is a mean of (as of a "
      "compiled function): return (loss, count) from the loss function");
  return {.value = static_cast<double>(items)};
}

/// Runs items, and measures what their losses have to do with each other.
class PartWeights::Comparison {
 public:
  Comparison(Forward forward, Gradients gradients) : forward_(forward), gradients_(gradients) {}

  Measured measure(std::int64_t begin, std::int64_t end) {
    const PartLoss loss = forward_(begin, end);
    TORCH_CHECK_VALUE(loss.value.defined() && loss.value.numel() == 1 && loss.value.requires_grad(),
                      "the loss of a part must have one element, and a graph");
    Measured measured{.loss = loss, .read = loss_terms(loss.value), .items = end - begin};
    measured.loss.value = loss.value.detach();
    const at::NoGradGuard no_grad;
    measured.values.push_back(measured.loss.value.to(at::kCPU, at::kDouble).flatten());
    std::vector<at::Tensor> found = gradients_by_leaves(loss.value, 0);
    if (!found.empty()) {
      // Smaller gradients may be nothing but rounding.
      found.push_back(measured.values.front() * kLeast);
      measured.values.push_back(at::cat(found));
    }
    std::vector<LossTerm>& terms = measured.read.terms;
    for (std::size_t i = 0; terms.size() > 1 && i < std::min(terms.size(), kMostTermsApart); ++i) {
      found = gradients_by_leaves(tensor_at(terms[i].at), i + 1);
      // What divides a sum comes after it.
      const double divisor = terms[i].is_sum && terms[i].count > 0 ? terms[i].count : 1.0;
      measured.terms.push_back(found.empty() ? at::Tensor() : at::cat(found).div_(divisor));
    }
    for (LossTerm& term : terms) {
      term.at = {};  // the graph is not needed any more
    }
    return measured;
  }

  [[nodiscard]] double tolerance(const Measured& whole) const {
    return tolerance_of(whole.loss.value, leaves_.front(), has_16_bits_);
  }

 private:
  /// Of one element or so, with this place in the graph.
  static at::Tensor tensor_at(const torch::autograd::Edge& edge) {
    const auto& made = edge.function->input_metadata(edge.input_nr);
    at::Tensor tensor = at::zeros_symint(made.shape_as_dim_vector(), made.options());
    torch::autograd::impl::set_gradient_edge(tensor, edge);
    return tensor;
  }

  /// Together: one of them alone may be nothing but rounding, as that of a bias that cancels out.
  std::vector<at::Tensor> gradients_by_leaves(const at::Tensor& root, std::size_t place) {
    if (leaves_.size() <= place) {
      leaves_.resize(place + 1);
    }
    std::vector<at::Tensor>& leaves = leaves_[place];
    if (leaves.empty()) {
      leaves = leaves_near(root, has_16_bits_);
    }
    const std::vector<at::Tensor> found =
        leaves.empty() ? std::vector<at::Tensor>() : gradients_(root, leaves);
    std::vector<at::Tensor> flat;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const at::Tensor own = found[i].defined() ? found[i] : at::zeros_like(leaves[i]);
      const at::Tensor all = (own.layout() == at::kStrided ? own : own.to_dense()).flatten();
      flat.push_back(all.narrow(0, 0, std::min(all.numel(), kLarge)).to(at::kCPU, at::kDouble));
    }
    return flat;
  }

  Forward forward_;
  Gradients gradients_;
  std::vector<std::vector<at::Tensor>> leaves_;  // of the loss and of each term
  bool has_16_bits_ = false;
};

PartWeights::Verdict PartWeights::compare(std::int64_t at, std::int64_t width, Forward forward,
                                          Gradients gradients) {
  Comparison comparison(forward, gradients);
  const Measured whole = comparison.measure(at, at + 2 * width);
  const Measured first = comparison.measure(at, at + width);
  const Measured second = comparison.measure(at + width, at + 2 * width);
  const double tolerance = comparison.tolerance(whole);
  const std::size_t values =
      std::min({whole.values.size(), first.values.size(), second.values.size()});

  Verdict verdict;
  bool is_finite = true;
  bool is_zero = true;
  double apart = 0;
  for (std::size_t i = 0; i < values; ++i) {
    is_finite &= std::isfinite(whole.values[i].norm().item<double>());
    is_zero &= whole.values[i].norm().item<double>() == 0;
    apart = std::max(apart, off({1.0, -1.0}, at::zeros_like(whole.values[i]),
                                {&first.values[i], &second.values[i]}));
  }
  if (!is_finite || is_zero) {
    return verdict;
  }
  verdict.tells = apart > 4 * tolerance;

  const std::size_t terms = whole.read.terms.size();
  const bool same_terms = terms == first.read.terms.size() && terms == second.read.terms.size();
  /// Whether a term alone is so weighted; true where there is no way to know.
  const auto term_fits = [&](std::size_t i, double a, double b) {
    const auto has = [&](const Measured& measured) {
      return i < measured.terms.size() && measured.terms[i].defined();
    };
    return !same_terms || !has(whole) || !has(first) || !has(second) ||
           off({a, b}, whole.terms[i], {&first.terms[i], &second.terms[i]}) <= tolerance;
  };
  const auto looks_constant = [&](std::size_t i) {
    const LossTerm& one = first.read.terms[i];
    const LossTerm& other = second.read.terms[i];
    const LossTerm& both = whole.read.terms[i];
    return both.elements == one.elements && both.elements == other.elements &&
           both.count == one.count && both.count == other.count;
  };
  const auto values_fit = [&](double a, double b) {
    for (std::size_t i = 0; i < values; ++i) {
      if (off({a, b}, whole.values[i], {&first.values[i], &second.values[i]}) > tolerance) {
        return false;
      }
    }
    return true;
  };
  std::vector<Kind> kinds(same_terms ? terms : 0, Kind::counted);
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const double count = whole.read.terms[i].count;
    if (looks_constant(i)) {
      kinds[i] = term_fits(i, 1, 0) && term_fits(i, 0, 1) ? Kind::constant : Kind::items;
    } else if (count == first.read.terms[i].count && count == second.read.terms[i].count &&
               values_fit(0.5, 0.5) && term_fits(i, 0.5, 0.5)) {
      kinds[i] = Kind::items;  // it was divided before it was summed up
    }
  }
  const auto fits = [&](double a, double b) {
    if (!values_fit(a, b)) {
      return false;
    }
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      if (!(kinds[i] == Kind::constant && a + b == 1) && !term_fits(i, a, b)) {
        return false;
      }
    }
    return true;
  };
  const auto share = [](double a, double b) { return a + b > 0 ? a / (a + b) : 0.0; };

  bool holds = false;
  bool mixed = false;
  if (reduction_ == Reduction::sum) {
    holds = fits(1.0, 1.0);
  } else if (first.loss.count && second.loss.count) {
    const double a = share(*first.loss.count, *second.loss.count);
    holds = fits(a, 1 - a);
  } else {
    std::optional<double> a;
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      if (kinds[i] != Kind::constant) {
        const double own = kinds[i] == Kind::items
                               ? 0.5
                               : share(first.read.terms[i].count, second.read.terms[i].count);
        mixed |= a && std::abs(*a - own) > kInProportion;
        a = a.value_or(own);
      }
    }
    const bool terms_hold = a && !mixed && fits(*a, 1 - *a);
    const bool items_hold = fits(0.5, 0.5);
    kinds_ = kinds;
    holds = (by_terms_ && terms_hold) || (by_items_ && items_hold);
    if (holds) {
      by_terms_ &= terms_hold;
      by_items_ &= items_hold;
    }
  }
  if (holds) {
    return verdict;
  }
  const Measured again = comparison.measure(at, at + 2 * width);
  for (std::size_t i = 0; i < std::min(values, again.values.size()); ++i) {
    verdict.is_random |=
        off({1.0, 0.0}, whole.values[i], {&again.values[i], nullptr}) > kInProportion;
  }
  if (verdict.is_random) {
    verdict.is_shown =
        whole.read.is_complete && !whole.read.terms.empty() && !mixed &&
        (reduction_ == Reduction::mean || std::ranges::all_of(whole.read.terms, &LossTerm::is_sum));
    return verdict;
  }
  Looks looks = mixed ? Looks::mixed : Looks::other;
  if (reduction_ == Reduction::sum && fits(0.5, 0.5)) {
    looks = Looks::mean;
  } else if (reduction_ == Reduction::mean && !whole.loss.count && fits(1.0, 1.0)) {
    looks = Looks::sum;
  }
  verdict.error = refuse(whole, first, second, looks);
  return verdict;
}

std::string PartWeights::refuse(const Measured& whole, const Measured& first,
                                const Measured& second, Looks looks) const {
  const std::string losses = c10::str("that of ", whole.items, " items is ", whole.value(),
                                      ", those of ", first.items == 1 ? "each" : "their halves",
                                      " are ", first.value(), " and ", second.value());
  if (looks == Looks::sum) {
    return c10::str("the loss function returns a sum over the items of a batch (", losses,
                    "), but reduction is \"mean\": pass reduction=\"sum\", or return the mean");
  }
  if (looks == Looks::mean) {
    return c10::str("the loss function returns a mean over the items of a batch (", losses,
                    "), but reduction is \"sum\": pass reduction=\"mean\", or return the sum");
  }
  if (looks == Looks::mixed) {
    return c10::str(
        "the loss is a sum of means over different things (", losses,
        "), so that no part of a batch has one weight: pass reduction=\"sum\", and divide each sum "
        "in the loss function by what the whole batch counts");
  }
  return c10::str(
      "the loss cannot be computed in parts: it does not follow from the losses of parts, or its "
      "gradient does not (",
      losses, "), as it would if it were a ",
      whole.loss.count                ? "mean by the count that the loss function returns"
      : reduction_ == Reduction::mean ? "mean over the items"
                                      : "sum over the items",
      ". If it is a mean over something else, return (loss, count). A loss that compares items or "
      "takes roots, norms or maxima of the whole batch has no parts: use a smaller batch. If it is "
      "right, pass check=False");
}

}  // namespace brim::detail
