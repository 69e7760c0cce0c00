#include <brim/predict/least_kept.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace brim {
namespace {

// No cut contains it: every path leads through a value, which has a size. A sum of two still fits.
constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max() / 4;

/// The most that flows through a network, by Dinic's algorithm: shortest paths first.
class MaximumFlow {
 public:
  explicit MaximumFlow(std::size_t nodes) : edges_of_(nodes), level_(nodes), next_(nodes) {}

  void connect(std::size_t from, std::size_t to, std::int64_t capacity) {
    edges_of_[from].push_back(edges_.size());
    edges_.push_back({to, capacity});
    edges_of_[to].push_back(edges_.size());
    edges_.push_back({from, 0});
  }

  /// For each node whether more could flow from it to the sink, once as much as possible flows.
  std::vector<bool> run(std::size_t source, std::size_t sink) {
    while (set_levels(source, sink)) {
      std::fill(next_.begin(), next_.end(), 0);
      while (augment(source, sink)) {
      }
    }
    std::vector<bool> result(edges_of_.size());
    std::vector<std::size_t> queue{sink};
    result[sink] = true;
    for (std::size_t i = 0; i < queue.size(); ++i) {
      for (const std::size_t edge : edges_of_[queue[i]]) {
        const std::size_t before = edges_[edge].to;
        if (!result[before] && edges_[edge ^ 1].left > 0) {
          result[before] = true;
          queue.push_back(before);
        }
      }
    }
    return result;
  }

 private:
  struct Edge {
    std::size_t to;
    std::int64_t left;  // of its capacity
  };

  /// Distances from the source; false if the sink cannot be reached any more.
  bool set_levels(std::size_t source, std::size_t sink) {
    std::fill(level_.begin(), level_.end(), -1);
    std::vector<std::size_t> queue{source};
    level_[source] = 0;
    for (std::size_t i = 0; i < queue.size(); ++i) {
      for (const std::size_t edge : edges_of_[queue[i]]) {
        const auto& [to, left] = edges_[edge];
        if (left > 0 && level_[to] < 0) {
          level_[to] = level_[queue[i]] + 1;
          queue.push_back(to);
        }
      }
    }
    return level_[sink] >= 0;
  }

  /// Sends what it can along one path; false if there is none. A loop, since paths are as long as
  /// the program.
  bool augment(std::size_t source, std::size_t sink) {
    std::vector<std::size_t> path;  // edges
    std::size_t at = source;
    while (at != sink) {
      const std::vector<std::size_t>& edges = edges_of_[at];
      while (next_[at] < edges.size() && !leads_on(at, edges[next_[at]])) {
        ++next_[at];
      }
      if (next_[at] < edges.size()) {
        path.push_back(edges[next_[at]]);
        at = edges_[path.back()].to;
      } else if (path.empty()) {
        return false;
      } else {  // a dead end
        at = edges_[path.back() ^ 1].to;
        path.pop_back();
        ++next_[at];
      }
    }
    std::int64_t amount = kUnlimited;
    for (const std::size_t edge : path) {
      amount = std::min(amount, edges_[edge].left);
    }
    for (const std::size_t edge : path) {
      edges_[edge].left -= amount;
      edges_[edge ^ 1].left += amount;
    }
    return true;
  }

  [[nodiscard]] bool leads_on(std::size_t from, std::size_t edge) const {
    return edges_[edge].left > 0 && level_[edges_[edge].to] == level_[from] + 1;
  }

  std::vector<Edge> edges_;  // an edge and its opposite differ in the last bit of their places
  std::vector<std::vector<std::size_t>> edges_of_;
  std::vector<int> level_;
  std::vector<std::size_t> next_;  // the first edge of a node that may still lead on
};

void check(std::span<const ComputedValue> values, std::span<const std::size_t> needed) {
  const auto check_place = [&](const char* name, std::size_t place) {
    TORCH_CHECK_VALUE(place < values.size(), name, " must hold places below ", values.size(),
                      ", got ", place);
  };
  for (const ComputedValue& value : values) {
    TORCH_CHECK_VALUE(value.bytes >= 0, "bytes must not be negative, got ", value.bytes);
    for (const std::size_t place : value.made_from.value_or(std::vector<std::size_t>())) {
      check_place("made_from", place);
    }
  }
  for (const std::size_t place : needed) {
    check_place("needed", place);
  }
}

}  // namespace

std::vector<bool> least_kept(std::span<const ComputedValue> values,
                             std::span<const std::size_t> needed) {
  check(values, needed);
  // Each value is an edge with its bytes as capacity. A needed value that is not kept is missing if
  // a path without kept values leads to it from one that cannot be recomputed.
  const auto before = [](std::size_t value) { return 2 * value; };
  const auto after = [](std::size_t value) { return 2 * value + 1; };
  const std::size_t source = 2 * values.size();
  const std::size_t sink = source + 1;
  MaximumFlow flow(sink + 1);
  for (std::size_t i = 0; i < values.size(); ++i) {
    flow.connect(before(i), after(i), values[i].bytes);
    if (!values[i].made_from) {
      flow.connect(source, before(i), kUnlimited);
      continue;
    }
    for (const std::size_t input : *values[i].made_from) {
      flow.connect(after(input), before(i), kUnlimited);
    }
  }
  for (const std::size_t value : needed) {
    flow.connect(after(value), sink, kUnlimited);
  }
  const std::vector<bool> leads_to_need = flow.run(source, sink);
  std::vector<bool> kept(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    kept[i] = leads_to_need[after(i)] && !leads_to_need[before(i)];
  }
  return kept;
}

}  // namespace brim
