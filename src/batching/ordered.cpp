#include <brim/batching/batching.h>
#include <brim/batching/interruption.h>

#include <algorithm>
#include <utility>

#include "batching/batch_fill.h"
#include "batching/permutation.h"
#include "batching/sample_table.h"

namespace brim::batching {
namespace {

using detail::SampleTable;

// The first chunk is small, for a quick first batch; later ones are large, for speed.
constexpr std::int64_t kFirstChunk = 1024;
constexpr std::int64_t kLargestChunk = 16384;

/// The batch that is open at the end of a chunk is read again with the next one, so the cursor
/// holds a place among the samples and the size of a chunk, and nothing else.
template <class T>
class OrderedSource : public BatchSource {
 public:
  OrderedSource(const SampleTable<T>& table, std::uint64_t seed, std::size_t batch_multiple)
      : table_(table), permutation_(table.permutation(seed)), multiple_(batch_multiple) {}

  bool fill(Batches& block, std::int64_t /*world_size*/) override {
    const std::size_t before = block.count();
    while (true) {
      check_interruption();
      // The last chunk takes a remainder that is too small for a chunk of its own.
      const std::int64_t count = rest() - chunk_ <= chunk_ ? rest() : chunk_;
      const bool last = count == rest();
      read(count);
      position_ += batch(block, last);
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
    detail::check_argument(
        cursor.size() == 2 && cursor[0] >= 0 && cursor[0] <= table_.size() && cursor[1] >= 1,
        "the position is not one of these samples in order");
    position_ = cursor[0];
    chunk_ = cursor[1];
  }

 private:
  void read(std::int64_t count) {
    samples_.resize(static_cast<std::size_t>(count));
    table_.read(permutation_, position_, samples_);
    sizes_ = table_.contiguous(position_);
    if (sizes_ == nullptr) {
      table_.gather(samples_, gathered_);
      sizes_ = gathered_.data();
    }
  }

  // Returns how many samples of the chunk are in closed batches.
  std::int64_t batch(Batches& block, bool last) {
    return detail::with_fill(table_.columns(), [&, sizes = sizes_](auto fill, auto at) {
      const std::size_t count = samples_.size();
      const auto size_of = [=](std::size_t i) { return at(sizes, i); };
      std::size_t begin = 0;
      while (begin < count) {
        fill.clear();
        const std::size_t end = detail::add_what_fits(fill, begin, begin, count, size_of);
        if (end == count && !last) {
          break;
        }
        const std::size_t taken = detail::keep_multiple(fill, begin, end, multiple_, size_of);
        block.indices.insert(block.indices.end(),
                             samples_.begin() + static_cast<std::ptrdiff_t>(begin),
                             samples_.begin() + static_cast<std::ptrdiff_t>(taken));
        block.close(fill.load());
        begin = taken;
      }
      return static_cast<std::int64_t>(begin);
    });
  }

  const SampleTable<T>& table_;
  detail::Permutation permutation_;
  std::int64_t chunk_ = kFirstChunk;
  std::int64_t position_ = 0;
  std::vector<std::int64_t> samples_;
  std::vector<T> gathered_;
  const T* sizes_ = nullptr;  // of samples_
  std::size_t multiple_;      // divides the number of samples in a batch
};

template <class T>
class OrderedBatching : public detail::TableBatching<T> {
 public:
  OrderedBatching(Columns<T> columns, const Order& order, Oversize oversize,
                  std::int64_t batch_multiple)
      : detail::TableBatching<T>(std::move(columns), order, oversize),
        batch_multiple_(detail::multiple_argument(batch_multiple, this->table().columns())) {}

  [[nodiscard]] std::unique_ptr<BatchSource> epoch(std::uint64_t seed) const override {
    return std::make_unique<OrderedSource<T>>(this->table(), seed, batch_multiple_);
  }

 private:
  std::size_t batch_multiple_;
};

}  // namespace

std::shared_ptr<const Batching> ordered_batching(AnyColumns columns, Order order, Oversize oversize,
                                                 std::int64_t batch_multiple) {
  return std::visit(
      [&]<class T>(Columns<T>& some) -> std::shared_ptr<const Batching> {
        return std::make_shared<OrderedBatching<T>>(std::move(some), order, oversize,
                                                    batch_multiple);
      },
      columns);
}

}  // namespace brim::batching
