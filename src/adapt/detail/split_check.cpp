#include <brim/adapt/detail/split_check.h>
#include <brim/memory/out_of_memory.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <exception>
#include <optional>

namespace brim::detail {

SplitCheck::Result SplitCheck::run(PartWeights& weights, std::int64_t items, std::int64_t size,
                                   std::vector<std::int64_t> places, PartWeights::Forward forward,
                                   PartWeights::Gradients gradients) {
  if (is_random_ || items < 2) {
    return Result::right;
  }
  if (places.empty()) {
    if (!is_open()) {
      return Result::right;
    }
    places = {0, items / 2, items - 2};
  }
  for (std::int64_t& place : places) {
    place = std::clamp<std::int64_t>(place, 0, items - 2);
  }
  std::ranges::sort(places);
  places.erase(std::ranges::unique(places).begin(), places.end());
  auto best = Result::failed;
  for (const std::int64_t place : places) {
    const Result result = compare(weights, items, size, place, forward, gradients);
    if (result == Result::random || result == Result::unknown) {
      is_random_ = true;
      return result;
    }
    best = std::min(best, result);
  }
  left_ = best == Result::right ? 0 : left_ - 1;
  return best;
}

SplitCheck::Result SplitCheck::compare(PartWeights& weights, std::int64_t items, std::int64_t size,
                                       std::int64_t place, PartWeights::Forward forward,
                                       PartWeights::Gradients gradients) {
  std::optional<PartWeights::Verdict> verdict;
  // Some models cannot take one item.
  for (const std::int64_t width : {std::int64_t{1}, std::int64_t{2}}) {
    if (verdict || 2 * width > items) {
      break;
    }
    const std::int64_t at = std::clamp<std::int64_t>(place + 1 - width, 0, items - 2 * width);
    try {
      verdict = weights.compare(at, width, forward, gradients);
    } catch (const std::exception& error) {
      // Two items may be more than fits, if the parts are of one.
      if (is_out_of_memory(error)) {
        if (size > 1) {
          throw;
        }
        return Result::undecided;
      }
    }
  }
  if (!verdict) {
    return Result::failed;
  }
  TORCH_CHECK_VALUE(verdict->error.empty(), verdict->error);
  if (verdict->is_random) {
    return verdict->is_shown ? Result::random : Result::unknown;
  }
  return verdict->tells ? Result::right : Result::undecided;
}

std::vector<at::Tensor> gradients_by(const at::Tensor& loss,
                                     const std::vector<at::Tensor>& leaves) {
  try {
    return torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/false,
                                 /*allow_unused=*/true);
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) {
      throw;
    }
    return {};  // a reentrant checkpoint, which knows backward() only
  }
}

}  // namespace brim::detail
