#include <ATen/EmptyTensor.h>
#include <brim/adapt/detail/driver.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "adapt/detail/attempt_monitor.h"
#include "adapt/detail/meeting.h"
#include "adapt/detail/part_trials.h"
#include "adapt/detail/searching.h"
#include "compat.h"
#include "memory/reclaim.h"

namespace brim::detail {
namespace {

using Values = Meeting::Values;

/// Before and after an attempt, where its time is to be known: it is that of all its work, and of
/// no other.
void wait_if_timed(const PartTrials& trials, const AttemptMonitor& monitor,
                   std::span<const std::int64_t> values) {
  if (trials.is_timed(values.front())) {
    wait_for(monitor.checkpoint().device());
  }
}

/// What the attempt that fitted at these values showed. It is remembered.
Attempt learn_fit(const MaximizeCall& call, const AdaptOptions& options,
                  const AttemptHistory& known, AttemptMonitor& monitor, PartTrials& trials,
                  std::span<const std::int64_t> values) {
  wait_if_timed(trials, monitor, values);
  Attempt fit = monitor.fitted(values);
  trials.learn(fit);
  fit.rate = rate(options, fit, call);
  learn(options, known, fit);
  if (monitor.needed_release()) {
    learn(options, known, *monitor.needed_release());
  }
  return fit;
}

/// The attempts of a call that is alone.
/// @param failure of a first attempt that was made unwatched.
void until_it_fits(const MaximizeCall& call, const AdaptOptions& options, Checkpoint&& checkpoint,
                   std::optional<Failure>&& failure, TryValues attempt) {
  const auto saved = save_state(options);  // first: the copies count as memory that is not free
  if (saved) {
    checkpoint = Checkpoint(options);  // the copies are not the attempt's
  }
  // A first attempt was made at the maxima. What other calls have learned since would say that it
  // had been at their size.
  const bool observed = !failure && call.foreseen.empty() &&
                        begins_at_maxima(options);  // only: as one without a watcher
  AttemptHistory known =
      failure || observed ? AttemptHistory{} : recall(options, call.maxima.size(), true);
  PartTrials trials(options, call.items, checkpoint.device());
  ParameterSearch search = make_search(call, options, known, trials, checkpoint.device());
  AttemptMonitor monitor(options, std::move(checkpoint));
  for (bool repeats = false;; repeats = true) {
    if (!failure) {
      if (repeats) {
        monitor.checkpoint().restore_random_state();
      }
      wait_if_timed(trials, monitor, search.next());
      if (observed && !repeats) {
        monitor.begin_observed();
      } else {
        monitor.begin(repeats ? !monitor.needed_release() : known.moves_to(search.next()),
                      still_moving(known.attempts), last_trace(known.attempts), search.expected());
      }
      bool ends_trials = false;
      try {
        failure = attempt(search.next());
      } catch (const std::exception&) {
        ends_trials = trials.end_after_error(search.next().front());
        if (!ends_trials) {
          throw;
        }
      }
      if (failure && trials.end_after_error(search.next().front())) {
        monitor.failed(search.next(), *std::exchange(failure, std::nullopt));
        ends_trials = true;
      }
      if (ends_trials) {  // the error is gone, and what it kept alive
        if (saved) {
          saved->put_back();
        }
        search = make_search(call, options, known, trials, monitor.checkpoint().device());
        continue;
      }
    }
    if (!failure && observed && !repeats) {
      trials.learn(monitor.fitted(search.next()));
      return;
    }
    if (!failure) {
      learn_fit(call, options, known, monitor, trials, search.next());
      return;
    }
    if (saved) {
      saved->put_back();
    }
    auto failed = monitor.failed(search.next(), *std::exchange(failure, std::nullopt));
    if (!failed) {
      continue;
    }
    learn(options, known, *failed);
    known.drop_foreign_bytes(*failed);
    search.record(*failed);
    if (search.finished() && !search.best()) {
      monitor.wait_for_others_or_give_up();
      known = recall(options, call.maxima.size(), true);
      search = make_search(call, options, known, trials, failed->device);
    }
  }
}

/// What a rank asks the others for, where its own search is at these values. Where the maxima are
/// the lengths of its own arguments, they limit no other rank.
Values wish(const MaximizeCall& call, const AdaptOptions& options,
            std::span<const std::int64_t> values) {
  Values result(values.begin(), values.end());
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (call.maxima_are_lengths && !cannot_repeat(options) && result[i] == call.maxima[i]) {
      result[i] = Agreement::kNoLimit;
    }
  }
  return result;
}

/// The values that a rank would begin its next call with, as far as it can tell now.
Values next_time(const MaximizeCall& call, const AdaptOptions& options, const Attempt& fit) {
  AttemptHistory known = recall(options, call.maxima.size(), true);
  if (known.device == fit.device) {
    known.available = fit.available;  // as before the attempt: its result may still be there
  }
  MaximizeCall next = call;
  Values maxima(call.maxima.begin(), call.maxima.end());
  if (call.maxima_are_lengths) {  // the next argument may be as long as any before
    for (const Attempt& attempt : known.attempts) {
      std::ranges::transform(maxima, attempt.values, maxima.begin(), std::ranges::max);
    }
    next.maxima = maxima;
  }
  const PartTrials trials(options, call.items, fit.device);
  return wish(next, options, make_search(next, options, known, trials, fit.device).next());
}

/// The attempts of one rank. After each the ranks learn whether all have fitted at the same values.
/// If not, all take the least of what they propose, and what was done at other values is undone.
void until_all_fit(const MaximizeCall& call, const AdaptOptions& options, Checkpoint&& checkpoint,
                   Meeting& meeting, TryValues attempt) {
  const auto saved = save_state(options);
  if (saved) {
    checkpoint = Checkpoint(options);  // the copies are not the attempt's
  }
  AttemptHistory known = recall(options, call.maxima.size(), true);
  PartTrials trials(options, call.items, checkpoint.device());
  ParameterSearch search = make_search(call, options, known, trials, checkpoint.device());
  AttemptMonitor monitor(options, std::move(checkpoint));
  // The values of all ranks, and how far this one uses them.
  Values values = meeting.begins_with_lengths() ? Values() : meeting.agreed();
  const auto own = [&](Values common) {
    std::ranges::transform(common, call.maxima, common.begin(), std::ranges::min);
    if (meeting.begins_with_lengths()) {
      common.front() = meeting.cut(common.front());
    }
    return common;
  };
  const bool agreed_before = values.size() == call.maxima.size();
  const Values first_wish = wish(call, options, search.next());
  if (agreed_before) {
    std::ranges::transform(values, first_wish, values.begin(), [](auto agreed, auto wished) {
      return agreed == Agreement::kNoLimit ? wished : agreed;
    });
  } else {
    values = meeting.exchange({.next = first_wish}).next;
  }
  std::optional<Attempt> fit;  // at own(values)
  Values later;
  bool repeats = false;
  const auto undo = [&] {
    if (fit) {
      attempt({});  // its result
      fit.reset();
    }
    if (saved) {
      saved->put_back();
    }
  };
  for (bool first = true;; first = false) {
    Values wanted = values;
    while (!fit) {
      const Values trying = own(values);
      meeting.trying(trying);
      if (repeats) {
        monitor.checkpoint().restore_random_state();
      }
      wait_if_timed(trials, monitor, trying);
      monitor.begin(repeats ? !monitor.needed_release() : known.moves_to(trying),
                    still_moving(known.attempts), last_trace(known.attempts),
                    std::ranges::equal(trying, search.next()) ? search.expected() : std::nullopt);
      repeats = true;
      const std::optional<Failure> failure = attempt(trying);
      if (!failure && options.ranks->take_stopped()) {
        attempt({});  // its result
        undo();
        break;
      }
      if (!failure) {
        fit = learn_fit(call, options, known, monitor, trials, trying);
        if (meeting.begins_with_lengths()) {
          return;  // a rank that failed has told the others
        }
        later = next_time(call, options, *fit);
        break;
      }
      undo();
      auto failed = monitor.failed(trying, *failure);
      if (!failed) {
        if (options.ranks->meets_in_attempts()) {
          break;  // all make the same attempt again
        }
        continue;
      }
      if (cannot_repeat(options)) {
        learn(options, known, *failed);
        give_up_inside(*failure);
      }
      if (trials.end_after_error(trying.front())) {
        search = make_search(call, options, known, trials, failed->device);
        wanted = wish(call, options, search.next());
        break;
      }
      learn(options, known, *failed);
      known.drop_foreign_bytes(*failed);
      if (!search.record_elsewhere(*failed)) {
        // Agreed on when the maxima were others: go on from there.
        MaximizeCall lowered = call;
        lowered.maxima = trying;
        search = make_search(lowered, options, known, trials, failed->device);
        search.record_elsewhere(*failed);
      }
      if (search.finished() && !search.best()) {
        monitor.wait_for_others_or_give_up();
        known = recall(options, call.maxima.size(), true);
        search = make_search(call, options, known, trials, failed->device);
      }
      wanted = wish(call, options, search.next());
      break;
    }
    Meeting::Answer answer;
    try {
      answer = meeting.exchange({.done = fit.has_value(), .next = wanted, .later = later});
    } catch (const RankError&) {
      undo();
      throw;
    }
    if (answer.done && answer.same) {
      meeting.end(answer, first && agreed_before);
      return;
    }
    if (fit && (options.ranks->meets_in_attempts() || own(answer.next) != fit->values)) {
      undo();
    }
    values = std::move(answer.next);
  }
}

std::string description(const MaximizeCall& call, const AdaptOptions& options) {
  const std::string maxima = call.maxima_may_differ ? std::string("the length of an argument")
                                                    : c10::str(c10::Join(", ", call.maxima));
  return c10::str("from ", maxima, " down to ", options.lower, " in multiples of ",
                  c10::Join(", ", call.quanta));
}

}  // namespace

[[gnu::flatten]] BegunCall::BegunCall(const AdaptOptions& options, Checkpoint::Detail detail)
    : running(options), checkpoint(options, detail), given_up(bytes_given_up()) {}

void note_pressure(const MaximizeCall& call, const BegunCall& begun) {
  const std::int64_t given_up = bytes_given_up() - begun.given_up;
  if (given_up == 0) [[likely]] {
    return;
  }
  const AdaptOptions& options = call.all_options ? call.all_options() : call.options;
  PartTrials(options, call.items, begun.checkpoint.device())
      .learn({.values = {call.maxima.begin(), call.maxima.end()}, .given_up = given_up});
}

void maximize_watched(const MaximizeCall& call, Checkpoint&& checkpoint,
                      std::optional<Failure>&& failure, TryValues attempt) {
  const AdaptOptions& options = call.all_options ? call.all_options() : call.options;
  check_options(options);
  if (options.ranks == nullptr) {
    until_it_fits(call, options, std::move(checkpoint), std::move(failure), attempt);
    return;
  }
  Meeting meeting(options, description(call, options));
  meeting.run([&] { until_all_fit(call, options, std::move(checkpoint), meeting, attempt); });
  if (const auto& reduce = options.ranks->ending().run) {
    reduce();
  }
}

Failure make_failure(const OomCause& cause, std::string text) {
  const bool silent = cause.kind == OomKind::host_memory && !classify_message(text);
  return {.cause = cause, .message = (silent ? "CPU out of memory. " : "") + std::move(text)};
}

Failure release_error(std::exception_ptr error) {
  const OomCause cause = classify(error);
  if (!cause) {
    std::rethrow_exception(std::move(error));
  }
  return make_failure(cause, error_text(error));
}

void release_failed_backward() {
  struct Nothing final : torch::autograd::Node {
    torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
      return {};
    }
  };
  const compat::NodePtr node = compat::make_node<Nothing>();
  const at::Tensor nothing = at::detail::empty_cpu({0}, at::kFloat);
  node->add_input_metadata(nothing);
  try {
    torch::autograd::Engine::get_default_engine().execute({torch::autograd::Edge(node, 0)},
                                                          {nothing}, false, false, true);
  } catch (const c10::Error&) {
    // Forked from a process that had used autograd's threads: no backward pass can run here, so
    // none has failed.
  }
}

std::int64_t chunk_dim(std::int64_t rank, std::int64_t dim) {
  TORCH_CHECK_VALUE(rank > 0, "tensor has no dimension to cut: it is a scalar, and dim is ", dim);
  TORCH_CHECK_VALUE(dim >= -rank && dim < rank, "dim must be from ", -rank, " to ", rank - 1,
                    " for a tensor of ", rank, " dimension(s), got ", dim);
  return dim < 0 ? dim + rank : dim;
}

}  // namespace brim::detail
