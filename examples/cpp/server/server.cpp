// Answers requests of any size in parts that fit. One that cannot fit is refused, and the server
// lives on.
#include <ATen/ATen.h>
#include <brim/brim.h>

#include <exception>
#include <iostream>

at::Tensor answer(const at::Tensor& request, const at::Tensor& weight) {
  at::Tensor out = at::empty({request.size(0), weight.size(1)});
  // At most 4096 rows at a time, fewer if they do not fit. Finished rows are never repeated.
  brim::chunked(request, 4096, [&](const at::Tensor& rows, std::int64_t begin, std::int64_t end) {
    out.slice(0, begin, end).copy_(rows.matmul(weight).softmax(1));
  });
  return out;
}

int main() {
  const brim::Budget budget("64MiB", at::kCPU);  // in a real server "80%" of what there is
  const at::Tensor weight = at::rand({256, 1000});
  for (const std::int64_t rows : {1'000, 10'000, 100'000}) {
    const brim::PeakMeter meter(at::kCPU);
    try {
      answer(at::rand({rows, 256}), weight);
      std::cout << rows << " rows: peak " << brim::format_bytes(meter.peak()) << '\n';
    } catch (const std::exception& error) {
      if (!brim::is_out_of_memory(error)) {
        throw;
      }
      std::cout << rows << " rows: refused\n";
    }
  }
  return 0;
}
