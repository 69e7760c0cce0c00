#pragma once

#include <torch/library.h>

#include "only_copy.h"

namespace torch::detail {

/// As torch's own class of a similar name, but in a second copy of libbrim it registers nothing:
/// torch would throw from that library's initialisers, which ends the process.
class BrimLibraryInit {
 public:
  BrimLibraryInit(Library::Kind kind, void (*fill)(Library&), const char* ns,
                  std::optional<c10::DispatchKey> key, const char* file, std::uint32_t line)
      : library_(kind, ns, key, file, line) {
    if (brim::is_first_copy()) {
      fill(library_);
    }
  }

 private:
  Library library_;
};

}  // namespace torch::detail

// Read by torch's macros TORCH_LIBRARY_FRAGMENT and TORCH_LIBRARY_IMPL.
#define TorchLibraryInit BrimLibraryInit
