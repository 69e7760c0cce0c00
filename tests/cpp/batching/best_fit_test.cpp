#include "batching/best_fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace brim::batching::detail {
namespace {

constexpr std::int64_t kLargestInt = std::numeric_limits<std::int64_t>::max();

template <class T>
std::vector<std::uint32_t> reference_order(const std::vector<T>& sizes) {
  std::vector<std::uint32_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return sizes[a] > sizes[b]; });
  return order;
}

// Best fit decreasing as the books have it: every bin is looked at for every sample. Gives the
// bins' sums, ascending: which of two equally full bins is taken makes no difference to them.
template <class T>
std::vector<T> reference_totals(const std::vector<T>& sizes, T capacity) {
  std::vector<T> totals;
  for (const std::uint32_t position : reference_order(sizes)) {
    T* best = nullptr;
    for (T& total : totals) {
      if (sizes[position] <= capacity - total && (best == nullptr || total > *best)) {
        best = &total;
      }
    }
    if (best == nullptr) {
      best = &totals.emplace_back(T{0});
    }
    *best += sizes[position];
  }
  std::sort(totals.begin(), totals.end());
  return totals;
}

template <class T>
std::vector<T> sorted_totals(const BestFitPacker<T>& packer) {
  std::vector<T> totals(packer.totals().begin(), packer.totals().end());
  std::sort(totals.begin(), totals.end());
  return totals;
}

template <class T>
void expect_valid(const BestFitPacker<T>& packer, const std::vector<T>& sizes, T capacity) {
  ASSERT_EQ(packer.members().size(), sizes.size());
  ASSERT_EQ(packer.ends().size(), packer.totals().size());
  std::vector<bool> seen(sizes.size(), false);
  std::uint32_t begin = 0;
  for (std::size_t bin = 0; bin < packer.ends().size(); ++bin) {
    const std::uint32_t end = packer.ends()[bin];
    ASSERT_LT(begin, end) << "bin " << bin << " is empty";
    ASSERT_LE(end, sizes.size());
    T total{0};
    for (; begin < end; ++begin) {
      const std::uint32_t position = packer.members()[begin];
      ASSERT_LT(position, sizes.size());
      ASSERT_FALSE(seen[position]) << "position " << position << " twice";
      seen[position] = true;
      ASSERT_LE(sizes[position], capacity - total) << "bin " << bin;  // first: it cannot overflow
      total += sizes[position];
      ASSERT_LE(total, capacity) << "bin " << bin;
    }
    ASSERT_EQ(total, packer.totals()[bin]) << "bin " << bin;
  }
  ASSERT_EQ(begin, sizes.size());
}

template <class T>
std::pair<std::vector<std::uint32_t>, std::vector<std::uint32_t>> result(
    const BestFitPacker<T>& packer) {
  return {{packer.members().begin(), packer.members().end()},
          {packer.ends().begin(), packer.ends().end()}};
}

using Random = std::mt19937_64;

std::vector<std::int64_t> random_ints(Random& random, std::size_t count, std::int64_t low,
                                      std::int64_t high) {
  std::uniform_int_distribution<std::int64_t> any(low, high);
  std::vector<std::int64_t> sizes(count);
  std::generate(sizes.begin(), sizes.end(), [&] { return any(random); });
  return sizes;
}

std::vector<double> random_doubles(Random& random, std::size_t count, double low, double high) {
  std::uniform_real_distribution<double> any(low, high);
  std::vector<double> sizes(count);
  std::generate(sizes.begin(), sizes.end(), [&] { return any(random); });
  return sizes;
}

// Sizes as of a protein data set: log-normal, a few hundred, none over two thousand.
std::vector<double> protein_like(Random& random, std::size_t count) {
  std::lognormal_distribution<double> any(std::log(300.0), 0.6);
  std::vector<double> sizes(count);
  std::generate(sizes.begin(), sizes.end(), [&] { return std::clamp(any(random), 30.0, 2000.0); });
  return sizes;
}

std::vector<std::int64_t> whole(const std::vector<double>& sizes) {
  return {sizes.begin(), sizes.end()};
}

// ---------------------------------------------------------------- DescendingSort

template <class T>
void expect_sorted(const std::vector<T>& sizes) {
  std::vector<std::uint32_t> order(3, 7);  // what was there before does not matter
  DescendingSort()(std::span<const T>(sizes), order);
  EXPECT_EQ(order, reference_order(sizes)) << sizes.size() << " sizes";
}

TEST(DescendingSort, IsStableForEveryNumberAndRangeOfInts) {
  Random random(1);
  for (const std::size_t count : {0, 1, 2, 63, 64, 65, 100, 3000, 40000}) {
    for (const int bits : {0, 1, 5, 11, 12, 16, 17, 22, 23, 32, 33, 34, 45, 63}) {
      const std::int64_t high = bits == 0 ? 0 : kLargestInt >> (63 - bits);
      expect_sorted(random_ints(random, count, 0, high));
    }
  }
}

TEST(DescendingSort, TellsLargeIntsApartThatDifferInTheirLastBit) {
  Random random(2);
  std::vector<std::int64_t> sizes = random_ints(random, 5000, kLargestInt - 3, kLargestInt);
  expect_sorted(sizes);
  sizes.push_back(0);  // now the range is too wide for the radix, which sees them as equal
  expect_sorted(sizes);
}

TEST(DescendingSort, SortsMultiplesOfAPage) {
  Random random(3);
  std::vector<std::int64_t> sizes = random_ints(random, 5000, 0, std::int64_t{1} << 40);
  for (std::int64_t& size : sizes) {
    size = size / 4096 * 4096;
  }
  expect_sorted(sizes);
}

TEST(DescendingSort, SortsDoublesOfEveryKind) {
  Random random(4);
  for (const std::size_t count : {1, 64, 65, 3000, 40000}) {
    expect_sorted(random_doubles(random, count, 0.0, 1.0));
    expect_sorted(random_doubles(random, count, 1e-320, 1e-310));
    expect_sorted(random_doubles(random, count, 0.0, 1.7e308));
    std::vector<double> sizes = random_doubles(random, count, 0.0, 2000.0);
    for (double& size : sizes) {
      size = std::floor(size);
    }
    expect_sorted(sizes);
    for (double& size : sizes) {
      size = 1e9 + size * 1e-6;
    }
    sizes.front() = 0.0;
    expect_sorted(sizes);
  }
}

TEST(DescendingSort, NegativeZeroIsEqualToZero) {
  std::vector<double> sizes(100, 0.0);
  for (std::size_t i = 0; i < sizes.size(); i += 3) {
    sizes[i] = -0.0;
  }
  expect_sorted(sizes);
  sizes[50] = 1.0;
  expect_sorted(sizes);
}

// ---------------------------------------------------------------- CellSet

TEST(CellSet, FindsTheNextMemberAsAnOrderedSetDoes) {
  Random random(5);
  CellSet cells;
  std::set<std::uint32_t> reference;
  for (const std::uint32_t spread : {64U, 4096U, CellSet::kSize}) {
    std::uniform_int_distribution<std::uint32_t> any(CellSet::kSize - spread, CellSet::kSize - 1);
    for (int i = 0; i < 20000; ++i) {
      const std::uint32_t cell = any(random);
      // Few members, so that every level of the tree is searched.
      if (reference.size() < 8 && !reference.contains(cell)) {
        cells.insert(cell);
        reference.insert(cell);
      } else if (!reference.empty()) {
        const auto victim = reference.lower_bound(cell);
        const std::uint32_t gone = victim == reference.end() ? *reference.begin() : *victim;
        cells.erase(gone);
        reference.erase(gone);
      }
      const std::uint32_t from = any(random);
      const auto next = reference.lower_bound(from);
      ASSERT_EQ(cells.find(from), next == reference.end() ? CellSet::kSize : *next);
      ASSERT_EQ(cells.contains(from), reference.contains(from));
    }
  }
  EXPECT_EQ(cells.find(CellSet::kSize), CellSet::kSize);
  cells.clear();
  EXPECT_EQ(cells.find(0), CellSet::kSize);
}

// ---------------------------------------------------------------- BestFitPacker

TEST(BestFitPacker, TakesTheFullestBinWithRoom) {
  BestFitPacker<std::int64_t> packer;
  // 7 and 6 open a bin each; 3 fills the first to the full, 4 the second; the 2 needs a third.
  const std::vector<std::int64_t> sizes{2, 4, 3, 6, 7};
  packer.pack(sizes, 10);
  EXPECT_EQ(result(packer), (std::pair<std::vector<std::uint32_t>, std::vector<std::uint32_t>>{
                                {4, 2, 3, 1, 0}, {2, 4, 5}}));
  EXPECT_EQ(sorted_totals(packer), (std::vector<std::int64_t>{2, 10, 10}));
}

TEST(BestFitPacker, IsBestFitToTheLetterForSmallCapacities) {
  Random random(6);
  BestFitPacker<std::int64_t> packer;
  for (int round = 0; round < 400; ++round) {
    const std::int64_t capacity = random_ints(random, 1, 1, round % 2 == 0 ? 60 : 65535)[0];
    const std::int64_t high = std::max<std::int64_t>(1, capacity / (1 + round % 7));
    const auto count = static_cast<std::size_t>(random_ints(random, 1, 1, 400)[0]);
    const std::int64_t low = std::min<std::int64_t>(round % 3, high);
    const std::vector<std::int64_t> sizes = random_ints(random, count, low, high);
    packer.pack(sizes, capacity);
    expect_valid(packer, sizes, capacity);
    ASSERT_EQ(sorted_totals(packer), reference_totals(sizes, capacity)) << "round " << round;
  }
}

TEST(BestFitPacker, IsBestFitToTheLetterAtTheLargestExactCapacity) {
  Random random(7);
  const std::vector<std::int64_t> sizes = random_ints(random, 4000, 1, 65535);
  BestFitPacker<std::int64_t> packer;
  packer.pack(sizes, 65535);
  expect_valid(packer, sizes, std::int64_t{65535});
  EXPECT_EQ(sorted_totals(packer), reference_totals(sizes, std::int64_t{65535}));
}

// Twelve samples of up to a quarter open three bins at the most: none is overlooked.
TEST(BestFitPacker, IsBestFitToTheLetterWhileBinsAreFew) {
  Random random(8);
  BestFitPacker<std::int64_t> ints;
  BestFitPacker<double> doubles;
  for (int round = 0; round < 300; ++round) {
    const std::int64_t capacity = kLargestInt >> (round % 46);
    const std::vector<std::int64_t> sizes = random_ints(random, 12, 1, capacity / 4);
    ints.pack(sizes, capacity);
    expect_valid(ints, sizes, capacity);
    ASSERT_EQ(sorted_totals(ints), reference_totals(sizes, capacity)) << "round " << round;

    const double scale = std::ldexp(1.0, 20 * (round % 100) - 1000);
    const std::vector<double> sizes_d = random_doubles(random, 12, 0.0, scale / 4);
    doubles.pack(sizes_d, scale);
    expect_valid(doubles, sizes_d, scale);
    ASSERT_EQ(sorted_totals(doubles), reference_totals(sizes_d, scale)) << "round " << round;
  }
}

TEST(BestFitPacker, ComparesBinsWhoseRoomIsAlmostTheSame) {
  Random random(16);
  BestFitPacker<std::int64_t> packer;
  constexpr std::int64_t kCapacity = std::int64_t{1} << 40;
  constexpr std::int64_t kRoom = std::int64_t{1} << 20;
  for (int round = 0; round < 200; ++round) {
    // Four bins left with about kRoom each, to 1 part in 1024, and samples of just that size.
    std::vector<std::int64_t> sizes = random_ints(random, 7, kRoom, kRoom + 1000);
    for (std::size_t i = 0; i < 4; ++i) {
      sizes[i] = kCapacity - sizes[i];
    }
    packer.pack(sizes, kCapacity);
    expect_valid(packer, sizes, kCapacity);
    ASSERT_EQ(sorted_totals(packer), reference_totals(sizes, kCapacity)) << "round " << round;
  }
}

TEST(BestFitPacker, StaysCloseToBestFitForLargeCapacitiesAndDoubles) {
  Random random(9);
  BestFitPacker<std::int64_t> ints;
  BestFitPacker<double> doubles;
  for (const double parts : {1.0, 2.5, 40.0}) {
    // 4000 bins where parts is 1: far more than are compared.
    const std::vector<double> sizes = random_doubles(random, 8000, 0.0, 1.0 / parts);
    doubles.pack(sizes, 1.0);
    expect_valid(doubles, sizes, 1.0);
    const auto bins = static_cast<double>(reference_totals(sizes, 1.0).size());
    EXPECT_LE(static_cast<double>(doubles.ends().size()), bins * 1.002 + 1) << parts;

    const std::int64_t capacity = std::int64_t{1} << 40;
    std::vector<std::int64_t> bytes(sizes.size());
    std::transform(sizes.begin(), sizes.end(), bytes.begin(),
                   [](double size) { return static_cast<std::int64_t>(std::ldexp(size, 40)); });
    ints.pack(bytes, capacity);
    expect_valid(ints, bytes, capacity);
    EXPECT_LE(static_cast<double>(ints.ends().size()), bins * 1.002 + 1) << parts;
  }
}

TEST(BestFitPacker, SumsOfHugeIntsDoNotOverflow) {
  BestFitPacker<std::int64_t> packer;
  const std::vector<std::int64_t> sizes{kLargestInt, 1,           kLargestInt / 2, kLargestInt - 1,
                                        0,           kLargestInt, kLargestInt / 2, 1};
  packer.pack(sizes, kLargestInt);
  expect_valid(packer, sizes, kLargestInt);
  // The halves leave room for one 1, and so does kLargestInt - 1.
  EXPECT_EQ(sorted_totals(packer), std::vector<std::int64_t>(4, kLargestInt));

  Random random(10);
  const std::vector<std::int64_t> more = random_ints(random, 5000, kLargestInt / 9, kLargestInt);
  packer.pack(more, kLargestInt);
  expect_valid(packer, more, kLargestInt);
}

TEST(BestFitPacker, RoundedSumsOfDoublesStayWithinTheCapacity) {
  BestFitPacker<double> packer;
  // 0.2 + 0.1 is more than 0.3 in double.
  packer.pack(std::vector<double>{0.1, 0.2}, 0.3);
  EXPECT_EQ(packer.ends().size(), 2U);

  Random random(11);
  for (int round = 0; round < 200; ++round) {
    // Tenths and thirds: most sums come out a little over or a little under a round capacity.
    std::vector<double> sizes = random_doubles(random, 200, 0.0, 9.0);
    for (double& size : sizes) {
      size = std::ceil(size) / (round % 2 == 0 ? 10.0 : 3.0);
    }
    const double capacity = 3.0 + 0.1 * round;
    packer.pack(sizes, capacity);
    expect_valid(packer, sizes, capacity);
  }
}

TEST(BestFitPacker, PacksTheSmallestAndTheLargestDoubles) {
  BestFitPacker<double> packer;
  Random random(12);
  for (const double capacity : {5e-324, 1e-315, 1e-300, 1.0, 1.7e308}) {
    const std::vector<double> sizes = random_doubles(random, 500, 0.0, capacity);
    packer.pack(sizes, capacity);
    expect_valid(packer, sizes, capacity);
  }
}

TEST(BestFitPacker, EqualSizesFillBinAfterBinInOrder) {
  BestFitPacker<std::int64_t> packer;
  const std::vector<std::int64_t> sizes(1000, 7);
  packer.pack(sizes, 50);  // seven a bin
  expect_valid(packer, sizes, std::int64_t{50});
  ASSERT_EQ(packer.ends().size(), 143U);
  EXPECT_EQ(packer.ends().front(), 7U);
  EXPECT_TRUE(std::is_sorted(packer.members().begin(), packer.members().end()));

  BestFitPacker<double> doubles;
  const std::vector<double> tenths(1000, 0.1);
  doubles.pack(tenths, 1.0);  // ten times 0.1 is a little less than 1 in double
  EXPECT_EQ(doubles.ends().size(), 100U);
}

TEST(BestFitPacker, FewDistinctSizesGiveTheSameBinsAsOneByOne) {
  Random random(13);
  BestFitPacker<std::int64_t> packer;
  for (int round = 0; round < 50; ++round) {
    const std::vector<std::int64_t> kinds = random_ints(random, 4, 1, 500);
    std::vector<std::int64_t> sizes = random_ints(random, 1500, 0, 3);
    for (std::int64_t& size : sizes) {
      size = kinds[static_cast<std::size_t>(size)];
    }
    packer.pack(sizes, 1024);
    expect_valid(packer, sizes, std::int64_t{1024});
    ASSERT_EQ(sorted_totals(packer), reference_totals(sizes, std::int64_t{1024}));
  }
}

TEST(BestFitPacker, ZeroSizesNeedNoBinOfTheirOwn) {
  BestFitPacker<std::int64_t> ints;
  const std::vector<std::int64_t> sizes{0, 10, 0, 10, 0};
  ints.pack(sizes, 10);
  expect_valid(ints, sizes, std::int64_t{10});
  EXPECT_EQ(ints.ends().size(), 2U);

  const std::vector<std::int64_t> zeros(100, 0);
  for (const std::int64_t capacity : {std::int64_t{0}, std::int64_t{5}, kLargestInt}) {
    ints.pack(zeros, capacity);
    expect_valid(ints, zeros, capacity);
    EXPECT_EQ(ints.ends().size(), 1U);
  }

  BestFitPacker<double> doubles;
  for (const double capacity : {0.0, 2.5}) {
    const std::vector<double> none{0.0, -0.0, 0.0};
    doubles.pack(none, capacity);
    expect_valid(doubles, none, capacity);
    EXPECT_EQ(doubles.ends().size(), 1U);
  }
  const std::vector<double> full{2.5, 0.0, 2.5, -0.0};
  doubles.pack(full, 2.5);
  expect_valid(doubles, full, 2.5);
  EXPECT_EQ(doubles.ends().size(), 2U);
}

TEST(BestFitPacker, NoSizesGiveNoBins) {
  BestFitPacker<std::int64_t> packer;
  packer.pack(std::vector<std::int64_t>{3, 4}, 5);
  packer.pack({}, 5);
  EXPECT_TRUE(packer.members().empty());
  EXPECT_TRUE(packer.ends().empty());
  EXPECT_TRUE(packer.totals().empty());
}

TEST(BestFitPacker, ResultDoesNotDependOnEarlierCalls) {
  Random random(14);
  BestFitPacker<std::int64_t> used;
  const std::uint32_t* place = nullptr;
  for (int round = 0; round < 60; ++round) {
    const std::int64_t capacity = std::int64_t{1} << (6 + round % 30);
    const auto count = static_cast<std::size_t>(1 + 3000 / (1 + round % 5));
    const std::vector<std::int64_t> sizes = random_ints(random, count, 0, capacity / 2);
    used.pack(sizes, capacity);
    BestFitPacker<std::int64_t> fresh;
    fresh.pack(sizes, capacity);
    ASSERT_EQ(result(used), result(fresh)) << "round " << round;
    // The first round is the longest: no later one needs more memory.
    place = round == 0 ? used.members().data() : place;
    ASSERT_EQ(used.members().data(), place);
  }
}

TEST(BestFitPacker, FillsWindowsOfProteinsToThePromisedDegree) {
  Random random(15);
  const auto fill_but_last = [](const auto& packer) {
    double sum = 0.0;
    for (const auto total : packer.totals().first(packer.totals().size() - 1)) {
      sum += static_cast<double>(total);
    }
    return sum / (16384.0 * static_cast<double>(packer.totals().size() - 1));
  };
  BestFitPacker<std::int64_t> ints;
  BestFitPacker<double> doubles;
  for (int window = 0; window < 10; ++window) {
    const std::vector<double> sizes = protein_like(random, 10000);
    doubles.pack(sizes, 16384.0);
    expect_valid(doubles, sizes, 16384.0);
    EXPECT_GE(fill_but_last(doubles), 0.997);
    const std::vector<std::int64_t> lengths = whole(sizes);
    ints.pack(lengths, 16384);
    expect_valid(ints, lengths, std::int64_t{16384});
    EXPECT_GE(fill_but_last(ints), 0.997);
  }
}

}  // namespace
}  // namespace brim::batching::detail
