#include <brim/adapt/size_memory.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <ranges>
#include <system_error>
#include <utility>

#include "adapt/size_file.h"
#include "fork.h"

namespace brim {
namespace {

constexpr std::ptrdiff_t kKeysWithRecords = 16;
constexpr std::size_t kMostFiles = 16384;           // 64 MiB, where each takes a block of 4 KiB
constexpr std::size_t kWritesBetweenPrunes = 1024;  // other processes write there too

/// One for all memories, because a fork must wait until no thread is inside one: a mutex that is
/// held then must live as long as the process.
struct AllMemories {
  std::mutex mutex;
};

/// Runs `work(warnings)` inside the lock. Warnings are told outside: their handler may wait for a
/// thread that forks.
template <class Work>
void alone(const Work& work) {
  std::vector<std::string> warnings;
  {
    const std::lock_guard lock(shared_object<AllMemories>().mutex);
    work(warnings);
  }
  for (const std::string& warning : warnings) {
    TORCH_WARN(warning);
  }
}

void drop_records(std::vector<Attempt>& attempts) {
  std::ranges::for_each(attempts, [](Attempt& each) { each.trace.reset(); });
}

bool has_files(const std::filesystem::path& directory) {
  std::error_code error;
  const bool is_empty = std::filesystem::is_empty(directory, error);
  return !error && !is_empty;
}

auto find_same(std::vector<Attempt>& attempts, const Attempt& attempt) {
  return std::find_if(attempts.begin(), attempts.end(), [&](const Attempt& old) {
    return old.values == attempt.values && old.fitted() == attempt.fitted();
  });
}

/// Whether `attempt` tells a later process nothing that `old` does not. Free memory and times vary
/// from call to call.
bool alike(const Attempt& old, const Attempt& attempt) {
  constexpr double kSame = 0.05;
  const auto near = [](double a, double b) {
    return std::abs(a - b) <= kSame * std::max(std::abs(a), std::abs(b));
  };
  const auto bytes = [&](const std::optional<std::int64_t>& a,
                         const std::optional<std::int64_t>& b) {
    return a.has_value() == b.has_value() &&
           (!a || near(static_cast<double>(*a), static_cast<double>(*b)));
  };
  return old.device == attempt.device && near(old.rate, attempt.rate) &&
         bytes(old.peak, attempt.peak) && bytes(old.requested, attempt.requested) &&
         bytes(old.available, attempt.available);
}

}  // namespace

void add_attempt(std::vector<Attempt>& attempts, Attempt attempt) {
  const auto same = find_same(attempts, attempt);
  if (same == attempts.end() || same->seconds == 0) {
    attempt.rate = same == attempts.end() ? 0.0 : same->rate;
  }
  if (same != attempts.end()) {
    attempt.calls = same->calls + 1;
    if (!attempt.trace) {
      attempt.trace = std::move(same->trace);
    }
    attempts.erase(same);
  } else {
    const auto is_kin = [&](const Attempt& old) { return old.fitted() == attempt.fitted(); };
    const auto kin =
        static_cast<std::size_t>(std::count_if(attempts.begin(), attempts.end(), is_kin));
    if (kin >= SizeMemory::kAttemptsPerKey / 2) {
      attempts.erase(std::find_if(attempts.begin(), attempts.end(), is_kin));
    }
  }
  attempts.push_back(std::move(attempt));
}

SizeMemory::SizeMemory(std::size_t capacity, std::optional<std::filesystem::path> directory)
    : capacity_(capacity),
      directory_(std::move(directory)),
      had_files_(directory_ && has_files(*directory_)) {
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

SizeMemory::Entry& SizeMemory::entry(std::uint64_t key, std::vector<std::string>& warnings) {
  const auto found = by_key_.find(key);
  if (found != by_key_.end()) {
    entries_.splice(entries_.begin(), entries_, found->second);
    return entries_.front();
  }
  if (entries_.size() == capacity_) {
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  auto kept = directory_ ? size_file::read(file_of(key), key) : std::vector<Attempt>();
  if (!kept) {
    warnings.push_back("ignored " + file_of(key).string() +
                       ": it is damaged or was not written by this version of brim");
    kept.emplace();
  }
  entries_.push_front({key, *kept, *kept});
  by_key_[key] = entries_.begin();
  count_.store(entries_.size(), std::memory_order_release);
  return entries_.front();
}

void SizeMemory::keep(Entry& entry, std::vector<std::string>& warnings) {
  if (!directory_ || cannot_write_) {
    return;
  }
  entry.kept = entry.attempts;
  drop_records(entry.kept);
  if (const std::error_code error = size_file::write(file_of(entry.key), entry.key, entry.kept)) {
    cannot_write_ = true;
    warnings.push_back("sizes could not be kept in " + directory_->string() + ": " +
                       error.message());
  } else if (writes_++ % kWritesBetweenPrunes == 0) {
    size_file::prune(*directory_, kMostFiles);
  }
}

std::vector<Attempt> SizeMemory::recall(std::uint64_t key) {
  std::vector<Attempt> attempts;
  alone([&](auto& warnings) {
    if (directory_ || by_key_.contains(key)) {
      attempts = entry(key, warnings).attempts;
    }
  });
  return attempts;
}

void SizeMemory::learn(std::uint64_t key, const Attempt& attempt) {
  alone([&](auto& warnings) {
    Entry& known = entry(key, warnings);
    add_attempt(known.attempts, attempt);
    // Records are large, and help only until a size has settled.
    for (Entry& old : entries_ | std::views::drop(kKeysWithRecords) | std::views::take(1)) {
      drop_records(old.attempts);
    }
    const auto kept = find_same(known.kept, attempt);
    if (kept == known.kept.end() || !alike(*kept, known.attempts.back())) {
      keep(known, warnings);
    }
  });
}

void SizeMemory::forget(std::uint64_t key) {
  alone([&](auto&) {
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      entries_.erase(found->second);
      by_key_.erase(found);
      count_.store(entries_.size(), std::memory_order_release);
    }
    if (directory_) {
      std::error_code ignored;
      std::filesystem::remove(file_of(key), ignored);
    }
  });
}

void SizeMemory::clear() {
  alone([&](auto&) {
    entries_.clear();
    by_key_.clear();
    count_.store(0, std::memory_order_release);
    if (directory_) {
      size_file::prune(*directory_, 0);
    }
  });
}

}  // namespace brim
