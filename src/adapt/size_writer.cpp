#include "adapt/size_writer.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
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
constexpr int kWritesBetweenLooks = 1024;  // other processes write there too

struct Queued {
  std::uint64_t key;
  std::vector<Attempt> attempts;
  std::uint64_t version;
};

struct Directory {
  bool usable = false;
  bool failed = false;
  std::int64_t bytes = 0;  // at most, since the last look
  int writes_until_look = 0;
};

struct Writer {
  std::mutex files;  // held while files are written or removed; taken before `queue`
  std::mutex queue;  // never held while a disk is waited for; of all below
  std::map<fs::path, Queued> queued;
  std::map<fs::path, Directory> directories;
  std::uint64_t version = 0;
  Clock::time_point next{};           // not before
  bool running = false;               // there is a thread that writes
  std::vector<std::string> failures;  // of the thread, to be told by whoever comes next
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

void note_failure(Writer& writer, const fs::path& directory, std::error_code error) {
  const std::lock_guard lock(writer.queue);
  if (!std::exchange(writer.directories[directory].failed, true)) {
    writer.failures.push_back(directory.string() + ": " + error.message());
  }
}

/// Writes one file, if it is still queued.
void write_one(Writer& writer, const fs::path& file) {
  const std::lock_guard files(writer.files);
  Queued item;
  {
    const std::lock_guard lock(writer.queue);
    const auto found = writer.queued.find(file);
    if (found == writer.queued.end()) {
      return;
    }
    item = found->second;  // it stays until it is written, for `read`
  }
  const fs::path parent = file.parent_path();
  if (const std::error_code error = size_file::write(file, item.key, item.attempts)) {
    note_failure(writer, parent, error);
  }
  bool look = false;
  {
    const std::lock_guard lock(writer.queue);
    if (const auto found = writer.queued.find(file);
        found != writer.queued.end() && found->second.version == item.version) {
      writer.queued.erase(found);
    }
    Directory& directory = writer.directories[parent];
    directory.bytes += size_file::bytes_on_disk(1);
    look = directory.writes_until_look-- == 0 || directory.bytes > kMostBytes;
  }
  if (look) {
    const std::int64_t bytes = size_file::prune(parent, kMostBytes);
    const std::lock_guard lock(writer.queue);
    writer.directories[parent].bytes = bytes;
    writer.directories[parent].writes_until_look = kWritesBetweenLooks;
  }
}

/// Writes what is queued now, and not what comes meanwhile: that may never end.
void write_queued(Writer& writer) {
  std::vector<fs::path> files;
  {
    const std::lock_guard lock(writer.queue);
    for (const auto& [file, item] : writer.queued) {
      files.push_back(file);
    }
  }
  for (const fs::path& file : files) {
    write_one(writer, file);
  }
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
    const std::lock_guard lock(writer->queue);
    writer->next = Clock::now() + kPause;
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
    writer->running = false;  // no thread to be had: the next news tries again, else the exit
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

bool can_be_written(const fs::path& directory, std::error_code& error) {
  fs::create_directories(directory, error);
  if (!error && ::access(directory.c_str(), W_OK | X_OK) != 0) {
    error = {errno, std::generic_category()};
  }
  return !error;
}

}  // namespace

void put(const fs::path& file, std::uint64_t key, std::vector<Attempt> attempts) {
  Writer& writer = *current().load();
  const fs::path parent = file.parent_path();
  bool known = false;
  {
    const std::lock_guard lock(writer.queue);
    known = writer.directories.contains(parent);
  }
  if (!known) {
    std::error_code error;
    const bool usable = can_be_written(parent, error);
    if (!usable) {
      note_failure(writer, parent, error);
    }
    const std::lock_guard lock(writer.queue);
    writer.directories[parent].usable = usable;
  }
  bool start = false;
  {
    const std::lock_guard lock(writer.queue);
    if (writer.directories[parent].usable) {
      writer.queued.insert_or_assign(file, Queued{key, std::move(attempts), ++writer.version});
      start = !std::exchange(writer.running, true);
    }
  }
  if (start) {
    start_thread(&writer);
  }
  tell_failures(writer);
}

std::vector<Attempt> read(const fs::path& file, std::uint64_t key) {
  Writer& writer = *current().load();
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
  size_file::remove(file);
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
