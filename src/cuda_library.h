#pragma once

namespace brim {

/// Loads libbrim_cuda, once: libbrim itself links to no CUDA library, so that one build serves
/// machines with and without. Its initialisers register what it brings. Does nothing in a build
/// without CUDA.
void load_cuda_library();

}  // namespace brim
