// The promise of the size search, over many kinds of need: a first call fails at most once more
// than halving and ends no lower; from the second call on none fails; from the third on at least
// 97 % of the largest size that fits is used, on CUDA 92 %. What falls short is in the table of
// kinds.

#include <brim/adapt/size_memory.h>
#include <brim/need/size_search.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adapt/detail/attempt_monitor.h"
#include "adapt/detail/recollection.h"
#include "adapt/memory_simulation.h"
#include "adapt/simulated_works.h"

namespace brim {
namespace {

using namespace simulation;

/// What the promise does not cover.
struct Allowed {
  double failures = 0;  // per call from the second on
  double below = 0;     // share of the cases that are below the goal from the third call on
};

struct Kind {
  std::string name;
  std::function<Program(Random&)> make;
  Allowed cpu{};
  Allowed cuda{};
  double smallest = 300;  // largest size that fits, at least
};

// One or two cases of a hundred.
constexpr Allowed kRarely{0, 0.02};
// On CUDA. What outlives a call keeps segments of another size than the next call needs: of 240
// cases 1 to 9 % were below, with an optimizer's state up to 15 %.
constexpr Allowed kKept{0, 0.125};
constexpr Allowed kMuchKept{0, 0.35};

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  const auto add = [&](std::string name, std::function<Program(Random&)> make, Allowed cpu = {},
                       Allowed cuda = {}, double smallest = 300) {
    all.push_back({std::move(name), std::move(make), cpu, cuda, smallest});
  };
  for (const int k : {1, 2, 3, 4, 5, 7, 10, 20, 35, 50}) {
    add("equal_" + std::to_string(k), [=](Random&) { return held(k, [](int) { return 1.0; }); });
  }
  for (const int k : {2, 5, 20}) {
    add("random_" + std::to_string(k),
        [=](Random& random) { return held(k, [&](int) { return random.real(0.02, 1); }); });
    add("freed_" + std::to_string(k + 1), [=](Random& random) { return freed(k + 1, random); });
  }
  for (const int k : {2, 5}) {
    // Results, which the caller drops: softmax, sort, attention.
    add("results_of_" + std::to_string(k), [=](Random& random) {
      Program program = held(k, [&](int) { return random.real(0.2, 1); });
      for (int i = 0; i < k; ++i) {
        program.push_back({.linear = random.real(0.2, 2), .life = Life::result});
      }
      return program;
    });
  }
  add("growing", [](Random&) { return held(8, [](int i) { return std::exp2(i); }); });
  add("shrinking", [](Random&) { return held(8, [](int i) { return std::exp2(-i); }); });
  for (const int percent : {10, 25, 50, 75, 90, 95}) {
    for (const int k : {1, 6}) {
      add("constant_" + std::to_string(percent) + "_of_" + std::to_string(k), [=](Random& random) {
        return held(k, [&](int) { return random.real(0.2, 1); }, percent / 100.0);
      });
    }
  }
  add("square_1", [](Random&) { return Program{square(1)}; });
  add("cube", [](Random&) { return Program{{.cube = 1}}; });
  add("square_3", [](Random&) { return Program{square(1), square(1), square(0.4)}; });
  add("linear_and_square", [](Random& random) {
    return Program{grows(random.real(0.1, 1)), square(random.real(0.1, 1)), grows(0.1)};
  });
  for (const int percent : {25, 50, 75}) {
    add("constant_" + std::to_string(percent) + "_and_square",
        [=](Random&) { return Program{constant(percent / 100.0), square(1), square(1)}; },
        {0, percent > 50 ? 0.02 : 0.0});
  }
  for (const int k : {1, 6}) {
    add(
        "padded_" + std::to_string(k),
        [=](Random& random) {
          Program program = held(k, [&](int) { return random.real(0.2, 1); });
          for (Step& step : program) {
            step.padding = 64;
          }
          return program;
        },
        {}, {}, 6400);
  }
  for (const int layers : {3, 6, 20, 50}) {
    const std::string name = "training_" + std::to_string(layers);
    const auto with = [=](const Training& options) {
      return [=](Random& random) { return training(random_widths(layers, random), options); };
    };
    add(name, with({}));
    add(name + "_gradients", with({.gradients = 0.15, .temporaries = 0.15}));
    add(name + "_large_optimizer_step", with({.gradients = 0.45, .temporaries = 0.45}), {},
        {0.2, 0.1});
    // zero_grad() at the start: each call frees the gradients that the last one left.
    const Life kept = Life::replaced;
    for (const int percent : {2, 15}) {
      const double share = percent / 100.0;
      const std::string start = name + "_zero_grad_first_" + std::to_string(percent);
      add(start, with({.gradients = share, .gradients_live = kept}), kRarely, kKept);
      add(start + "_new_adam",
          with({.gradients = share, .state = 2 * share, .gradients_live = kept}), kRarely,
          layers == 3 && percent == 15 ? kMuchKept : kKept);
    }
  }
  for (const int percent : {0, 2}) {
    const double workspace = percent / 100.0;
    const auto with = [=](const Training& options) {
      return [=](Random&) { return training(resnet_widths(), options); };
    };
    const std::string name = "resnet_workspace_" + std::to_string(percent);
    add(name, with({.gradients = 0.016, .workspace = workspace}));
    add(name + "_zero_grad_first",
        with({.gradients = 0.016,
              .state = 0.016,
              .workspace = workspace,
              .gradients_live = Life::replaced}),
        kRarely);
  }
  add("floor",
      [](Random& random) {
        return Program{constant(random.real(0.2, 0.9)), frees(0), grows(1), grows(1)};
      },
      {}, {0.03, 0.05});
  // cuDNN takes other kernels where a workspace is refused.
  add("optional_workspaces",
      [](Random& random) {
        Program program;
        for (const double width : random_widths(8, random)) {
          program.push_back(grows(width));
          program.push_back({.linear = random.real(1, 3), .optional = true});
          program.push_back(frees(std::ssize(program) - 1));
        }
        return program;
      },
      {0.01, 0.95}, {0.02, 0.25});  // the CPU has no such libraries
  add("workspace", [](Random&) { return Program{grows(1), constant(0.3)}; });
  return all;
}

struct Call {
  int failures = 0;
  std::int64_t size = 0;
};

/// A call as the driver makes it.
Call call(Work& work, SizeSearchOptions options, std::vector<Attempt>& memory) {
  work.begin_call();
  if (!memory.empty()) {
    options.available = work.available(memory);
    options.allocator = [&] {
      const AllocatorModel& device = work.device();
      return AllocatorModel(device.options(), device.segments());
    };
  }
  std::vector<Attempt> known = memory;
  if (!options.packs) {
    detail::raise_to_level_of_last_fit(known);
  }
  SizeSearch search(options);
  search.remember(known);
  const Attempt* last = detail::last_fit(known);
  std::int64_t cached = last == nullptr ? search.next() : last->size();
  std::optional<Attempt> needed_release;
  for (Call result;; ++result.failures) {
    bool released = needed_release.has_value();
    if (search.next() != cached) {
      work.empty_cache();
      released = true;
    }
    const Attempt attempt = work.run(search.next(), released || detail::still_moving(known));
    if (attempt.fitted()) {
      add_attempt(memory, attempt);
      if (needed_release) {
        add_attempt(memory, *needed_release);
      }
      result.size = attempt.size();
      return result;
    }
    needed_release.reset();
    if (!released &&
        should_have_fitted({.requested = attempt.requested, .in_use = attempt.held + *attempt.peak},
                           work.capacity())) {
      work.empty_cache();
      needed_release = attempt;
      continue;
    }
    add_attempt(memory, attempt);
    search.record(attempt);
    cached = 0;
    EXPECT_TRUE(!search.finished() || search.best());
  }
}

struct Device {
  AllocatorKind kind;
  SizeSearchOptions options;
  int cases;
  std::function<std::int64_t(Random&, int)> bytes;
  double goal;
  bool few_items = false;  // 1.1 to 100 times the memory of one, instead of the sizes of the kind
};

void hold_promise(const Kind& kind, const Device& device, const Allowed& allowed) {
  constexpr int kCalls = 5;
  Random random(31);
  int later_failures = 0;
  int below = 0;
  for (int i = 0; i < device.cases; ++i) {
    const double size =
        device.few_items ? random.log_uniform(1.1, 100) : random.log_uniform(kind.smallest, 1e5);
    Work work(kind.make(random), size, device.bytes(random, i), device.kind);
    std::int64_t largest = work.largest();
    if (largest == 0 && device.few_items) {
      continue;  // more than its bytes, since blocks are rounded
    }
    ASSERT_GT(largest, 0);
    const double times = random.log_uniform(1.2, 100);
    SizeSearchOptions options = device.options;
    options.upper = static_cast<std::int64_t>(static_cast<double>(largest) * times);
    std::vector<Attempt> unused;
    Work same = work;
    const Call halving =
        call(same, {.strategy = Strategy::halving, .upper = options.upper}, unused);
    std::vector<Attempt> memory;
    bool far = false;
    for (int c = 0; c < kCalls; ++c) {
      const Call ours = call(work, options, memory);
      if (c == 0) {
        ASSERT_LE(ours.failures, halving.failures + 1) << options.upper << " of " << largest;
        ASSERT_GE(ours.size, halving.size) << options.upper << " of " << largest;
        largest = work.largest();  // what the first call made for good may lie between blocks
      } else {
        later_failures += ours.failures;
      }
      far |= c >= 2 && share(ours.size, largest) < device.goal;
    }
    below += far ? 1 : 0;
  }
  EXPECT_LE(later_failures, allowed.failures * device.cases * (kCalls - 1));
  EXPECT_LE(below, allowed.below * device.cases);
}

class NeverWorseThanHalving : public ::testing::TestWithParam<Kind> {};

const Device& cpu() {
  static const Device device{AllocatorKind::exact,
                             {.packs = true},
                             100,
                             [](Random& random, int) { return random.magnitude(1e8, 8e10); },
                             0.97};
  return device;
}

Device cuda(int cases) {
  const auto bytes = [](Random&, int i) {
    constexpr std::array<std::int64_t, 4> kHalfGiB{1, 4, 12, 32};
    return 512 * kMiB * kHalfGiB[static_cast<std::size_t>(i) % 4];
  };
  return {AllocatorKind::caching, {.margin = 0.02, .packs = false}, cases, bytes, 0.92};
}

TEST_P(NeverWorseThanHalving, AndNearTheLargestSizeFromTheThirdCallOn) {
  hold_promise(GetParam(), cpu(), GetParam().cpu);
}

/// One or two items of which most is constant do not show that one more would fit, and nothing
/// smaller is tried.
void hold_promise_with_few_items(Device device, Allowed Kind::* allowed, const Allowed& few) {
  device.few_items = true;
  for (const Kind& kind : kinds()) {
    if (kind.name.starts_with("padded")) {
      continue;  // the steps are larger than the goal
    }
    SCOPED_TRACE(kind.name);
    const auto [failures, below] = kind.*allowed;
    hold_promise(kind, device, {std::max(failures, few.failures), std::max(below, few.below)});
  }
}

TEST(NeverWorseThanHalving, WithFewItemsToo) {
  hold_promise_with_few_items(cpu(), &Kind::cpu, {0, 0.1});
}

TEST(NeverWorseThanHalving, OnCudaWithFewItemsToo) {
  hold_promise_with_few_items(cuda(48), &Kind::cuda, {0.01, 0.15});
}

// Records of 15 and 16 items show a need that hardly grows, but 17 are padded to 32.
TEST(SizeSearch, FollowsNoRecordsThatAFailureContradicts) {
  constexpr std::int64_t kAvailable = 80 * kMiB;
  const auto attempt = [&](std::int64_t size) {
    const std::int64_t padded = (size + 15) / 16 * 64 * kMiB;
    const std::vector<AllocationEvent> events{{.address = 1, .bytes = padded},
                                              {.address = 2, .bytes = size * kMiB / 8},
                                              {.address = 2, .freed = true},
                                              {.address = 1, .freed = true}};
    Attempt result = ended(size, padded + size * kMiB / 8 <= kAvailable);
    result.available = kAvailable;
    result.peak = result.fitted() ? padded + size * kMiB / 8 : 0;
    result.record = result.fitted() ? record_of(events) : nullptr;
    if (!result.fitted()) {
      result.requested = padded;
    }
    return result;
  };
  std::vector<Attempt> known{attempt(32), attempt(16), attempt(15)};
  int failures = 0;
  for (int i = 0; i < 8; ++i) {
    SizeSearch search({.upper = 32, .available = kAvailable});
    search.remember(known);
    for (known.push_back(attempt(search.next())); !known.back().fitted(); ++failures) {
      search.record(known.back());
      known.push_back(attempt(search.next()));
    }
  }
  EXPECT_LE(failures, 2);
}

TEST(TrainingStep, WhoseOptimizerNeedsNearlyAllMemoryIsNearTheLargestSizeToo) {
  for (const int layers : {3, 6, 20, 50}) {
    SCOPED_TRACE(layers);
    const auto make = [=](Random& random) {
      return training(random_widths(layers, random), {.gradients = 0.5, .temporaries = 0.48});
    };
    hold_promise({.name = "", .make = make}, cpu(), kRarely);
  }
}

TEST_P(NeverWorseThanHalving, OnCuda) { hold_promise(GetParam(), cuda(24), GetParam().cuda); }

INSTANTIATE_TEST_SUITE_P(SizeSearch, NeverWorseThanHalving, ::testing::ValuesIn(kinds()),
                         [](const auto& setting) { return setting.param.name; });

}  // namespace
}  // namespace brim
