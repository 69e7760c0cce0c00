#include <brim/batching/batching.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "batching/batch_fill.h"
#include "batching/permutation.h"
#include "batching/sample_table.h"
#include "batching/table_batching.h"

namespace brim::batching {
namespace {

using detail::SampleTable;

// The first block is small, for a quick first batch; the last ones large, for speed.
constexpr std::int64_t kFirstChunk = 1024;
constexpr std::int64_t kLargestChunk = 16384;

/// What is left open at the end of a chunk is read again with the next one: so the cursor is a
/// place among the samples, and nothing else.
template <class T>
class OrderedSource : public BatchSource {
 public:
  OrderedSource(const SampleTable<T>& table, std::uint64_t seed)
      : table_(table), permutation_(table.permutation(seed)) {}

  bool fill(Batches& block, std::int64_t /*world_size*/) override {
    const std::size_t before = block.count();
    while (true) {
      // The last chunk takes what would be too little for one of its own.
      const std::int64_t count = rest() - chunk_ <= chunk_ ? rest() : chunk_;
      const bool last = count == rest();
      read(count);
      const std::int64_t used = batch(block, last);
      position_ += used;
      if (chunk_ < kLargestChunk) {
        chunk_ = std::min(2 * chunk_, kLargestChunk);
      }
      if (last) {
        return false;
      }
      if (block.count() > before) {
        return true;
      }
      chunk_ *= 2;  // one batch takes more than a chunk
    }
  }

  [[nodiscard]] std::int64_t rest() const override { return table_.size() - position_; }

  [[nodiscard]] Cursor cursor() const override { return {position_, chunk_}; }

  void seek(const Cursor& cursor) override {
    if (cursor.size() != 2 || cursor[0] < 0 || cursor[0] > table_.size() || cursor[1] < 1) {
      throw std::invalid_argument("the position is not one of these samples in order");
    }
    position_ = cursor[0];
    chunk_ = cursor[1];
  }

 private:
  void read(std::int64_t count) {
    samples_.resize(static_cast<std::size_t>(count));
    table_.read(permutation_, position_, samples_);
    sizes_ = table_.in_a_row(position_);
    if (sizes_ == nullptr) {
      table_.gather(samples_, gathered_);
      sizes_ = gathered_.data();
    }
  }

  // Returns how many samples of the chunk are in closed batches.
  std::int64_t batch(Batches& block, bool last) {
    const Columns<T>& columns = table_.columns();
    if (columns.size() > 1) {
      return batch(block, last, detail::MultiFill<T>(columns),
                   [&](std::size_t i) { return sizes_ + i * columns.size(); });
    }
    const auto size_of = [sizes = sizes_](std::size_t i) { return sizes[i]; };
    return columns[0].limit.cost().kind() == Cost::Kind::sum
               ? batch(block, last, detail::SumFill<T>(columns[0].limit), size_of)
               : batch(block, last, detail::PaddedFill<T>(columns[0].limit), size_of);
  }

  template <class Fill, class SizeOf>
  std::int64_t batch(Batches& block, bool last, Fill fill, SizeOf size_of) {
    std::size_t begin = 0;
    const auto close = [&](std::size_t end) {
      block.indices.insert(block.indices.end(),
                           samples_.begin() + static_cast<std::ptrdiff_t>(begin),
                           samples_.begin() + static_cast<std::ptrdiff_t>(end));
      block.close(fill.load());
      begin = end;
    };
    const std::size_t count = samples_.size();
    for (std::size_t i = 0; i < count; ++i) {
      const auto size = size_of(i);
      if (i > begin && !fill.fits(size)) {
        close(i);
        fill.clear();
      }
      fill.add(size);
    }
    if (last && begin < samples_.size()) {
      close(samples_.size());
    }
    return static_cast<std::int64_t>(begin);
  }

  const SampleTable<T>& table_;
  detail::Permutation permutation_;
  std::int64_t chunk_ = kFirstChunk;
  std::int64_t position_ = 0;
  std::vector<std::int64_t> samples_;
  std::vector<T> gathered_;
  const T* sizes_ = nullptr;  // of samples_
};

template <class T>
class OrderedBatching : public detail::TableBatching<T> {
 public:
  using detail::TableBatching<T>::TableBatching;

  [[nodiscard]] std::unique_ptr<BatchSource> epoch(std::uint64_t seed) const override {
    return std::make_unique<OrderedSource<T>>(this->table(), seed);
  }
};

}  // namespace

std::shared_ptr<const Batching> ordered_batching(AnyColumns columns, Order order,
                                                 Oversize oversize) {
  return std::visit(
      [&]<class T>(Columns<T>& some) -> std::shared_ptr<const Batching> {
        return std::make_shared<OrderedBatching<T>>(std::move(some), order, oversize);
      },
      columns);
}

}  // namespace brim::batching
