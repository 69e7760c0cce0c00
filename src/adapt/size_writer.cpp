#include "adapt/size_writer.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "adapt/size_file.h"

namespace brim::size_writer {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kPause = std::chrono::seconds(1);
constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;
constexpr int kWritesBetweenPrunes = 1024;  // other processes write there too

struct Queued {
  std::uint64_t key;
  std::vector<Attempt> attempts;
};

struct Directory {
  bool failed = false;
  int writes = 0;
};

struct Writer {
  std::mutex files;  // held while files are written, read or removed; taken before `queue`
  std::mutex queue;  // never held while a disk is waited for; guards all below
  std::map<fs::path, Queued> queued;
  std::map<fs::path, Directory> directories;
  Clock::time_point next{};           // not before
  bool running = false;               // there is a thread that writes
  std::vector<std::string> failures;  // of the thread; the next caller warns of them
};

/// Never destroyed: the thread may outlive everything else.
std::atomic<Writer*>& current() {
  static std::atomic<Writer*> writer{[] {
    std::atexit(&flush);
    // A child has no such thread, and its mutexes may be locked by threads that it has not either.
    pthread_atfork(nullptr, nullptr, [] { current().store(new Writer); });
    return new Writer;
  }()};
  return writer;
}

/// On the caller's thread, where a warning finds its handler.
void tell_failures(Writer& writer) {
  std::vector<std::string> failures;
  {
    const std::lock_guard lock(writer.queue);
    failures.swap(writer.failures);
  }
  for (const std::string& failure : failures) {
    TORCH_WARN("sizes could not be kept in ", failure);
  }
}

/// Writes what is queued now, and not what comes meanwhile: that may never end.
void write_queued(Writer& writer) {
  const std::lock_guard files(writer.files);
  std::map<fs::path, Queued> batch;
  {
    const std::lock_guard lock(writer.queue);
    batch.swap(writer.queued);
  }
  for (const auto& [file, item] : batch) {
    const std::error_code error = size_file::write(file, item.key, item.attempts);
    bool prune = false;
    {
      const std::lock_guard lock(writer.queue);
      Directory& directory = writer.directories[file.parent_path()];
      prune = directory.writes++ % kWritesBetweenPrunes == 0;
      if (error && !std::exchange(directory.failed, true)) {
        writer.failures.push_back(file.parent_path().string() + ": " + error.message());
      }
    }
    if (prune) {
      size_file::prune(file.parent_path(), kMostBytes);
    }
  }
  const std::lock_guard lock(writer.queue);
  writer.next = Clock::now() + kPause;
}

void work(Writer* writer) {
  for (;;) {
    Clock::time_point next;
    {
      const std::lock_guard lock(writer->queue);
      if (writer->queued.empty()) {
        writer->running = false;
        return;
      }
      next = writer->next;
    }
    std::this_thread::sleep_until(next);
    write_queued(*writer);
  }
}

/// Signals are for the program's own threads: Python's main thread must be woken by them.
void start_thread(Writer* writer) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(&work, writer).detach();
  } catch (const std::system_error&) {
    const std::lock_guard lock(writer->queue);
    writer->running = false;  // could not start: the next put tries again, or flush at exit
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void put(const fs::path& file, std::uint64_t key, std::vector<Attempt> attempts) {
  Writer& writer = *current().load();
  bool first = false;
  bool start = false;
  {
    const std::lock_guard lock(writer.queue);
    const Directory& directory = writer.directories[file.parent_path()];
    if (!directory.failed) {
      writer.queued.insert_or_assign(file, Queued{key, std::move(attempts)});
      first = directory.writes == 0;
      start = !first && !std::exchange(writer.running, true);
    }
  }
  if (first) {  // here, so that the warning for a directory that cannot be written comes at once
    write_queued(writer);
  } else if (start) {
    start_thread(&writer);
  }
  tell_failures(writer);
}

std::vector<Attempt> read(const fs::path& file, std::uint64_t key) {
  Writer& writer = *current().load();
  const std::lock_guard files(writer.files);  // what is being written is neither queued nor there
  {
    const std::lock_guard lock(writer.queue);
    if (const auto found = writer.queued.find(file); found != writer.queued.end()) {
      return found->second.attempts;
    }
  }
  return size_file::read(file, key);
}

bool any(const fs::path& directory) {
  Writer& writer = *current().load();
  const std::lock_guard files(writer.files);
  {
    const std::lock_guard lock(writer.queue);
    const auto found = writer.queued.lower_bound(directory / "");
    if (found != writer.queued.end() && found->first.parent_path() == directory) {
      return true;
    }
  }
  return size_file::any(directory);
}

void remove(const fs::path& file) {
  Writer& writer = *current().load();
  const std::lock_guard files(writer.files);
  {
    const std::lock_guard lock(writer.queue);
    writer.queued.erase(file);
  }
  std::error_code ignored;
  fs::remove(file, ignored);
}

void remove_all(const fs::path& directory) {
  Writer& writer = *current().load();
  const std::lock_guard files(writer.files);
  {
    const std::lock_guard lock(writer.queue);
    std::erase_if(writer.queued,
                  [&](const auto& item) { return item.first.parent_path() == directory; });
  }
  size_file::remove_all(directory);
}

void flush() {
  Writer& writer = *current().load();
  write_queued(writer);
  tell_failures(writer);
}

}  // namespace brim::size_writer
