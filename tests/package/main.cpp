// A user's program: the installed headers compile, the library links, loads and runs.
#include <ATen/ops/ones.h>
#include <brim/brim.h>
#include <brim/version.h>

#include <iostream>

int main() {
  const at::Tensor x = at::ones({4});
  std::cout << "brim " << BRIM_VERSION_STRING << ", built with torch " << BRIM_TORCH_VERSION
            << '\n';
  return x.sum().item<float>() == 4.0F ? 0 : 1;
}
