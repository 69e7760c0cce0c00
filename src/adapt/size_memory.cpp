#include <brim/adapt/size_memory.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "adapt/size_file.h"

namespace brim {
namespace {

/// Adds a fact and drops the oldest that it makes superfluous: the one of the same size and
/// outcome, else the oldest of its own kind, so that many fits do not push out the failures, nor
/// the other way round.
void add_fact(std::vector<SizeFact>& facts, const SizeFact& fact) {
  const auto same = std::find_if(facts.begin(), facts.end(), [&](const SizeFact& old) {
    return old.values == fact.values && old.outcome.fitted == fact.outcome.fitted;
  });
  if (same != facts.end()) {
    facts.erase(same);
  } else {
    const auto is_kin = [&](const SizeFact& old) {
      return old.outcome.fitted == fact.outcome.fitted;
    };
    const auto kin = static_cast<std::size_t>(std::count_if(facts.begin(), facts.end(), is_kin));
    if (kin >= SizeMemory::kFactsPerKey / 2) {
      facts.erase(std::find_if(facts.begin(), facts.end(), is_kin));
    }
  }
  facts.push_back(fact);
}

}  // namespace

SizeMemory::SizeMemory(std::size_t capacity, std::optional<std::filesystem::path> directory)
    : capacity_(capacity), directory_(std::move(directory)) {
  TORCH_CHECK_VALUE(capacity >= 1, "capacity must be 1 or more, got ", capacity);
}

std::filesystem::path SizeMemory::default_directory() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return std::filesystem::path(cache) / "brim" / "sizes";
  }
  const char* home = std::getenv("HOME");
  TORCH_CHECK(home != nullptr && *home != '\0',
              "sizes cannot be kept: neither XDG_CACHE_HOME nor HOME is set");
  return std::filesystem::path(home) / ".cache" / "brim" / "sizes";
}

std::filesystem::path SizeMemory::file_of(std::uint64_t key) const {
  return *directory_ / size_file::name(key);
}

std::vector<SizeFact>& SizeMemory::entry(std::uint64_t key) {
  const auto found = by_key_.find(key);
  if (found != by_key_.end()) {
    entries_.splice(entries_.begin(), entries_, found->second);
    return entries_.front().second;
  }
  if (entries_.size() == capacity_) {
    by_key_.erase(entries_.back().first);
    entries_.pop_back();
  }
  entries_.emplace_front(key,
                         directory_ ? size_file::read(file_of(key), key) : std::vector<SizeFact>{});
  by_key_[key] = entries_.begin();
  count_.store(entries_.size(), std::memory_order_release);
  return entries_.front().second;
}

std::vector<SizeFact> SizeMemory::recall(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  if (!directory_ && by_key_.find(key) == by_key_.end()) {
    return {};
  }
  return entry(key);
}

void SizeMemory::learn(std::uint64_t key, const SizeFact& fact) {
  const std::lock_guard lock(mutex_);
  std::vector<SizeFact>& facts = entry(key);
  add_fact(facts, fact);
  if (directory_) {
    size_file::write(file_of(key), key, facts);
  }
}

void SizeMemory::forget(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  if (const auto found = by_key_.find(key); found != by_key_.end()) {
    entries_.erase(found->second);
    by_key_.erase(found);
    count_.store(entries_.size(), std::memory_order_release);
  }
  if (directory_) {
    size_file::remove(file_of(key));
  }
}

void SizeMemory::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
  by_key_.clear();
  count_.store(0, std::memory_order_release);
  if (directory_) {
    size_file::remove_all(*directory_);
  }
}

}  // namespace brim
