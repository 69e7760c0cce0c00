// Texts that come from outside, read by what libFuzzer makes up: never a crash, a hang or a wrong
// byte of memory, and what is accepted can be written and read again. prove_fuzz.py compiles this
// once per target, together with the sources that read, which are then instrumented.

#include <brim/batching/batching.h>
#include <brim/batching/stream.h>
#include <brim/memory/bytes.h>
#include <brim/memory/out_of_memory.h>
#include <brim/predict/allocator_settings.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "adapt/size_file.h"

namespace {

void expect(bool holds) {
  if (!holds) {
    std::abort();
  }
}

/// Strings such as "1.5 GiB".
[[maybe_unused]] void size_string(std::string_view text) {
  try {
    const brim::ByteLimit limit = brim::ByteLimit::parse(text);
    expect(limit.resolve(std::int64_t{1} << 40) > 0);
  } catch (const c10::ValueError&) {
    return;
  }
}

/// The text of an error: any may be asked about.
[[maybe_unused]] void error_message(std::string_view text) {
  const brim::OomCause cause = brim::classify_message(text);
  expect(cause.requested.value_or(0) >= 0 && cause.in_use.value_or(0) >= 0);
}

/// Where a sampler stopped.
[[maybe_unused]] void position(std::string_view text) {
  using namespace brim::batching;
  try {
    const Position read = parse_position(text);
    expect(parse_position(to_string(read)) == read);
    static const std::vector<std::int64_t> sizes{5, 9, 2, 7, 7, 1, 4, 8, 3, 6, 2, 2};
    static const auto batching = [] {
      Columns<std::int64_t> columns;
      columns.push_back({.sizes = sizes, .limit = Limit(Cost::sum(), std::int64_t{12})});
      return packed_batching(columns, {.shuffle = true});
    }();
    BatchStream stream(*batching, 0);
    stream.seek(read);
    for (int batches = 0; stream.next() && batches < 20; ++batches) {
    }
  } catch (const std::invalid_argument&) {
    return;
  } catch (const c10::Error&) {
    return;
  }
}

/// A file of remembered sizes.
[[maybe_unused]] void size_file(std::string_view text) {
  constexpr std::uint64_t kKey = 7;
  static const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("brim-fuzz-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const std::filesystem::path file = folder / brim::size_file::name(kKey);
  std::ofstream(file, std::ios::binary) << text;
  if (const auto read = brim::size_file::read(file, kKey); read && !read->empty()) {
    expect(!brim::size_file::write(file, kKey, *read));
    expect(brim::size_file::read(file, kKey).has_value());
  }
}

/// PYTORCH_CUDA_ALLOC_CONF.
[[maybe_unused]] void allocator_settings(std::string_view text) {
  try {
    (void)brim::parse_allocator_settings(text);
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  BRIM_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
