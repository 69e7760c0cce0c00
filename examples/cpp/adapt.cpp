// A server that must not die of one large request: rows are answered as many at a time as fit the
// budget, and none twice. Prints the sizes of the parts that it took.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cdist.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <brim/brim.h>

#include <cstdio>
#include <vector>

namespace {

at::Tensor answer(const at::Tensor& requests, const at::Tensor& points,
                  std::vector<brim::Attempt>& attempts) {
  at::Tensor out = at::empty({requests.size(0)});
  brim::AdaptOptions options;
  options.attempts = &attempts;
  brim::chunked(
      requests, requests.size(0),
      [&](const at::Tensor& rows, std::int64_t begin, std::int64_t end) {
        out.slice(0, begin, end).copy_(at::cdist(rows, points).amin({1}));
      },
      0, options);
  return out;
}

}  // namespace

int main() {
  brim::install_cpu_allocator();
  const at::Tensor points = at::rand({2048, 32});
  const brim::Budget budget("32MiB", at::kCPU);
  for (const std::int64_t rows : {512, 16384}) {
    std::vector<brim::Attempt> attempts;
    const at::Tensor result = answer(at::rand({rows, 32}), points, attempts);
    std::printf("%lld rows:", static_cast<long long>(result.size(0)));
    for (const brim::Attempt& attempt : attempts) {
      std::printf(" %lld%s", static_cast<long long>(attempt.values.front()),
                  attempt.fitted() ? "" : " (out of memory)");
    }
    std::printf("\n");
  }
  return 0;
}
