#include <brim/adapt/detail/driver.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <span>
#include <utility>

#include "adapt/detail/attempt_monitor.h"
#include "adapt/detail/meeting.h"
#include "adapt/detail/searching.h"

namespace brim::detail {
namespace {

using Values = Meeting::Values;

/// What the attempt that fitted at these values showed. It is remembered.
Attempt learn_fit(const MaximizeCall& call, const AdaptOptions& options, const Recollection& known,
                  AttemptMonitor& monitor, std::span<const std::int64_t> values) {
  Attempt fit = monitor.fitted(values);
  fit.rate = rate(options, fit, call.counts_items);
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
  Recollection known = failure ? Recollection{} : recall(options);
  ParameterSearch search = make_search(call, options, known, checkpoint.device());
  AttemptMonitor monitor(options, std::move(checkpoint));
  for (bool repeats = false;; repeats = true) {
    if (!failure) {
      if (repeats) {
        monitor.checkpoint().restore_random_state();
      }
      monitor.begin(repeats ? !monitor.needed_release() : known.moves_to(search.next()));
      failure = attempt(search.next());
    }
    if (!failure) {
      learn_fit(call, options, known, monitor, search.next());
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
      known = recall(options);
      search = make_search(call, options, known, failed->device);
    }
  }
}

/// The values that a rank would begin its next call with, as far as it can tell now.
Values next_time(const MaximizeCall& call, const AdaptOptions& options, const Attempt& fit) {
  Recollection known = recall(options);
  if (known.device == fit.device) {
    known.available = fit.available;  // as before the attempt: its result may still be there
  }
  const ParameterSearch search = make_search(call, options, known, fit.device);
  return {search.next().begin(), search.next().end()};
}

/// The attempts of one rank. After each the ranks learn whether all have fitted at the same values.
/// If not, all take the least of what they propose, and what was done at other values is undone.
void until_all_fit(const MaximizeCall& call, const AdaptOptions& options, Checkpoint&& checkpoint,
                   Meeting& meeting, TryValues attempt) {
  const auto saved = save_state(options);
  if (saved) {
    checkpoint = Checkpoint(options);  // the copies are not the attempt's
  }
  Recollection known = recall(options);
  ParameterSearch search = make_search(call, options, known, checkpoint.device());
  AttemptMonitor monitor(options, std::move(checkpoint));
  Values values = meeting.agreed();
  const bool agreed_before = values.size() == call.maxima.size();
  if (agreed_before) {
    std::ranges::transform(values, call.maxima, values.begin(), std::ranges::min);
  } else {
    values = meeting.exchange({.next = search.next()}).next;
  }
  std::optional<Attempt> fit;  // at `values`
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
    while (!fit) {
      meeting.trying(values);
      if (repeats) {
        monitor.checkpoint().restore_random_state();
      }
      monitor.begin(repeats ? !monitor.needed_release() : known.moves_to(values));
      repeats = true;
      const std::optional<Failure> failure = attempt(values);
      if (!failure) {
        fit = learn_fit(call, options, known, monitor, values);
        later = next_time(call, options, *fit);
        break;
      }
      undo();
      auto failed = monitor.failed(values, *failure);
      if (!failed) {
        continue;
      }
      learn(options, known, *failed);
      known.drop_foreign_bytes(*failed);
      if (cannot_repeat(options)) {
        give_up_inside(*failure);
      }
      if (!search.record_elsewhere(*failed)) {
        // Agreed on when the maxima were others: go on from there.
        MaximizeCall lowered = call;
        lowered.maxima = values;
        search = make_search(lowered, options, known, failed->device);
        search.record_elsewhere(*failed);
      }
      if (search.finished() && !search.best()) {
        monitor.wait_for_others_or_give_up();
        known = recall(options);
        search = make_search(call, options, known, failed->device);
      }
      break;
    }
    Meeting::Answer answer;
    try {
      answer = meeting.exchange(
          {.done = fit.has_value(), .next = fit ? fit->values : search.next(), .later = later});
    } catch (const RankError&) {
      undo();
      throw;
    }
    if (answer.done && answer.same) {
      meeting.end(answer, first && agreed_before);
      return;
    }
    if (fit && answer.next != fit->values) {
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
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    text = known.what_without_backtrace();
  } catch (const std::exception& other) {
    text = other.what();
  }
  return make_failure(cause, std::move(text));  // `error` was the last reference: it ends here
}

std::int64_t chunk_dim(std::int64_t rank, std::int64_t dim) {
  TORCH_CHECK_VALUE(rank > 0, "tensor has no dimension to cut: it is a scalar, and dim is ", dim);
  TORCH_CHECK_VALUE(dim >= -rank && dim < rank, "dim must be from ", -rank, " to ", rank - 1,
                    " for a tensor of ", rank, " dimension(s), got ", dim);
  return dim < 0 ? dim + rank : dim;
}

}  // namespace brim::detail
