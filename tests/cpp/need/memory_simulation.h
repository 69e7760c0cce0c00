#pragma once

// What the tests of the size search share: random cases, and memory that is only arithmetic.

#include <brim/need/size_search.h>
#include <brim/need/trace.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "tensors.h"

namespace brim::simulation {

/// Bytes by size.
using Curve = std::function<std::int64_t(std::int64_t)>;

using tests::kMiB;
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  double real(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(engine_);
  }
  // Every order of magnitude is as likely as any other.
  double log_uniform(double low, double high) {
    return std::exp(real(std::log(low), std::log(high)));
  }
  std::int64_t magnitude(double low, double high) {
    return static_cast<std::int64_t>(log_uniform(low, high));
  }
  bool coin() { return integer(0, 1) == 1; }

 private:
  std::mt19937_64 engine_;
};

// The definition of what may be proposed, written apart from the implementation.
inline bool allowed(std::int64_t size, const SizeSearchOptions& o) {
  const bool inside = size >= o.lower && size <= o.upper;
  return inside &&
         (size <= o.quantum || size % o.quantum == 0 || size == o.upper || size == o.lower);
}

inline std::int64_t largest_allowed(std::int64_t most, const SizeSearchOptions& o) {
  std::int64_t size = std::min(most, o.upper);
  while (size >= o.lower && !allowed(size, o)) {
    --size;
  }
  return size >= o.lower ? size : 0;
}

inline SizeSearchOptions random_options(Random& random, Strategy strategy, Start start) {
  SizeSearchOptions o{.strategy = strategy, .start = start};
  o.upper = random.magnitude(1, 1e6);
  o.lower = random.coin() ? 1 : random.integer(1, o.upper);
  o.quantum = random.coin() ? 1 : random.magnitude(1, 300);
  return o;
}

inline OomKind outcome(bool fitted) { return fitted ? OomKind::none : OomKind::device_memory; }

// An attempt of which nothing but the outcome is known.
inline Attempt fit(std::int64_t size) { return {.values = {size}}; }
inline Attempt failure(std::int64_t size) { return {.values = {size}, .outcome = outcome(false)}; }
inline Attempt ended(std::int64_t size, bool fitted) { return fitted ? fit(size) : failure(size); }

/// Whether the requests of attempts are recorded, or only their bytes are known.
enum class Shows : std::uint8_t { trace, peak };

/// An attempt that holds `base` from the start on and asks for all the rest at once.
inline Attempt attempt(const Curve& need, std::int64_t size, std::int64_t available,
                       std::int64_t base = 0, Shows shows = Shows::trace) {
  const std::int64_t bytes = need(size);
  Attempt result = ended(size, bytes <= available);
  result.held = 12345;  // in use before every attempt: only what is above it may count
  result.available = available;
  result.peak = result.fitted() ? bytes : base;
  if (!result.fitted()) {
    result.requested = bytes - base;
  }
  if (shows == Shows::trace) {
    const std::vector<AllocationEvent> events{
        {.address = 1, .bytes = base, .operation = 0, .name = 1, .path = 1},
        {.address = 2,
         .bytes = bytes - base,
         .operation = 1,
         .name = 2,
         .path = 2,
         .refused = !result.fitted()},
        {.address = 1, .bytes = base, .freed = true}};
    result.trace = trace_of(events, result.fitted());
  }
  return result;
}

inline std::int64_t largest_fit(const Curve& need, std::int64_t available, std::int64_t upper) {
  std::int64_t fits = 0;
  std::int64_t fails = upper + 1;
  while (fails - fits > 1) {
    const std::int64_t middle = fits + (fails - fits) / 2;
    (need(middle) <= available ? fits : fails) = middle;
  }
  return fits;
}

struct Attempts {
  std::vector<Attempt> outcomes;
  int failures = 0;
};

inline Attempts until_fit(SizeSearch& search, const Curve& need, std::int64_t available,
                          std::int64_t base = 0, Shows shows = Shows::trace) {
  Attempts run;
  while (run.outcomes.empty() || (!run.outcomes.back().fitted() && !search.finished())) {
    run.outcomes.push_back(attempt(need, search.next(), available, base, shows));
    search.record(run.outcomes.back());
    run.failures += run.outcomes.back().fitted() ? 0 : 1;
  }
  return run;
}

inline Attempts until_finished(SizeSearch& search, const Curve& need, std::int64_t available,
                               std::int64_t base = 0, Shows shows = Shows::trace) {
  Attempts run;
  while (!search.finished() && run.outcomes.size() < 1000) {
    run.outcomes.push_back(attempt(need, search.next(), available, base, shows));
    search.record(run.outcomes.back());
    run.failures += run.outcomes.back().fitted() ? 0 : 1;
  }
  return run;
}

inline std::int64_t bound_of_attempts(const SizeSearchOptions& o) {
  return 16 + 6 * static_cast<std::int64_t>(std::log2(static_cast<double>(o.upper)) + 1);
}

// a + b s with a constant share of at most a half, in granules, whose largest fit is about `most`.
struct Affine {
  std::int64_t available, most, base;
  Curve need;
};

inline Affine random_affine(Random& random, std::int64_t granule, double smallest_available) {
  Affine f{};
  f.available = random.magnitude(smallest_available, 8e10);
  f.most = random.magnitude(256, 1e6);
  const double constant = random.real(0, 0.5) * static_cast<double>(f.available);
  const double slope = (static_cast<double>(f.available) - constant) / static_cast<double>(f.most);
  f.base = static_cast<std::int64_t>(constant);
  f.need = [=](std::int64_t size) {
    const auto bytes = static_cast<std::int64_t>(constant + slope * static_cast<double>(size));
    return (bytes + granule - 1) / granule * granule;
  };
  return f;
}

inline double share(std::int64_t size, std::int64_t most) {
  return static_cast<double>(size) / static_cast<double>(most);
}

}  // namespace brim::simulation
