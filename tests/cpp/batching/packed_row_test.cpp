#include <brim/batching/document_parts.h>
#include <brim/batching/packed_row.h>

#include <numeric>
#include <set>
#include <utility>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

struct Case {
  Ints lengths;
  PackedRowOptions options;

  static Case random(Random& random) {
    Case made{random_ints(random, any_int(random, 1, 12), 1, 40), {}};
    made.options.document_multiple = any_int(random, 1, 3) == 1 ? any_int(random, 1, 9) : 1;
    made.options.row_multiple = any_int(random, 1, 3) == 1 ? any_int(random, 1, 16) : 1;
    if (any_int(random, 1, 3) == 1) {
      made.options.row_length = made.options.row_multiple * 1000;
    }
    return made;
  }
};

TEST(PackedRow, EveryPlaceIsOneTokenOfOneDocumentOrPadding) {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    const auto [lengths, options] = Case::random(random);
    const PackedRow row(lengths, options);
    const auto size = static_cast<std::size_t>(row.size());
    ASSERT_EQ(row.documents(), lengths.size());
    EXPECT_EQ(row.size() % options.row_multiple, 0);
    EXPECT_TRUE(options.row_length == 0 || row.size() == options.row_length);
    Ints begins = random_ints(random, std::ssize(lengths), 0, 99);
    Ints positions(size);
    std::vector<std::int32_t> documents(size);
    row.write_positions(begins, positions);
    row.write_documents(documents);
    Ints values(size);
    std::iota(values.begin(), values.end(), 1);  // its own number for each place
    Ints masked = values;
    row.mask_first(masked, -100);
    Ints shifted = values;
    const Ints next = random_ints(random, std::ssize(lengths), -9, -1);
    row.shift(shifted, next, -100);
    std::size_t place = 0;
    std::int64_t longest = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      EXPECT_EQ(row.offsets()[i], static_cast<std::int64_t>(place));
      std::int64_t token = 0;
      for (; token < lengths[i] || token % options.document_multiple != 0; ++token, ++place) {
        EXPECT_EQ(positions[place], begins[i] + token);
        EXPECT_EQ(documents[place], static_cast<std::int32_t>(i));
        const bool padding = token >= lengths[i];
        EXPECT_EQ(masked[place], token == 0 || padding ? -100 : values[place]);
        EXPECT_EQ(shifted[place], padding                   ? -100
                                  : token + 1 == lengths[i] ? next[i]
                                                            : values[place + 1]);
      }
      longest = std::max(longest, token);
    }
    for (std::int64_t token = 0; place < size; ++token, ++place) {  // the padding at the end
      EXPECT_EQ(positions[place], token);
      EXPECT_EQ(documents[place], static_cast<std::int32_t>(lengths.size()));
      EXPECT_EQ(masked[place], -100);
      EXPECT_EQ(shifted[place], -100);
      longest = std::max(longest, token + 1);
    }
    EXPECT_EQ(row.longest(), longest);
    EXPECT_EQ(row.offsets().back(), row.size());
    EXPECT_EQ(row.token_offsets().size(), row.offsets().size());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      EXPECT_EQ(row.token_offsets()[i + 1] - row.token_offsets()[i], lengths[i]);
    }
  }
}

TEST(PackedRow, BlocksAreThoseOfTheMask) {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    const auto made = Case::random(random);
    PackedRowOptions options = made.options;
    options.row_length = 0;
    const PackedRow row(made.lengths, options);
    std::vector<std::int32_t> documents(static_cast<std::size_t>(row.size()));
    row.write_documents(documents);
    const std::int64_t block = any_int(random, 1, 33);
    const bool causal = round % 2 == 0;
    const BlockLists lists = row.blocks(block, causal);
    ASSERT_EQ(lists.rows, (row.size() + block - 1) / block);
    for (std::int64_t i = 0; i < lists.rows; ++i) {
      std::set<std::int64_t> partial;
      std::set<std::int64_t> whole;
      for (std::int64_t j = 0; j < lists.columns; ++j) {
        std::int64_t allowed = 0;
        for (std::int64_t q = i * block; q < std::min((i + 1) * block, row.size()); ++q) {
          for (std::int64_t k = j * block; k < std::min((j + 1) * block, row.size()); ++k) {
            const bool same =
                documents[static_cast<std::size_t>(q)] == documents[static_cast<std::size_t>(k)];
            allowed += same && (!causal || k <= q) ? 1 : 0;
          }
        }
        if (allowed == block * block) {
          whole.insert(j);
        } else if (allowed > 0) {
          partial.insert(j);
        }
      }
      const auto listed = [&](const auto& counts, const auto& indices) {
        const auto first = indices.begin() + i * lists.columns;
        return std::set<std::int64_t>(first, first + counts[static_cast<std::size_t>(i)]);
      };
      EXPECT_EQ(listed(lists.counts, lists.indices), partial);
      EXPECT_EQ(listed(lists.full_counts, lists.full_indices), whole);
    }
  }
}

TEST(PackedRow, WrongArgumentsAreRefused) {
  const auto of = [](Ints lengths, PackedRowOptions options = {}) {
    return message([&] { PackedRow(lengths, options); });
  };
  EXPECT_EQ(of({}), "a packed row needs at least one document");
  EXPECT_EQ(of({3, 0}), "documents must have at least one token, got 0 for document 1");
  EXPECT_EQ(of({3, 4}, {.row_length = 6}), "documents take 7 places, but row_length is 6");
  EXPECT_EQ(of({3}, {.row_multiple = 4, .row_length = 6}),
            "row_length must be a multiple of row_multiple = 4, got 6");
  EXPECT_EQ(of({3}, {.document_multiple = 0}),
            "document_multiple must be from 1 to 2^31 - 1, got 0");
  EXPECT_EQ(of({1'500'000'000, 1'500'000'000}),
            "a packed row holds fewer than 2^31 tokens, got more with document 1");
  EXPECT_EQ(of({kLargest}), "a packed row holds fewer than 2^31 tokens, got more with document 0");
  const PackedRow row(Ints{3});
  Ints two(2);
  EXPECT_EQ(message([&] { row.write_positions({}, two); }),
            "there must be 3 values, one per place, got 2");
  EXPECT_EQ(message([&] { (void)row.blocks(0, true); }), "block must be positive, got 0");
}

TEST(DocumentParts, PartsAreTheDocuments) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    const Ints lengths = random_ints(random, any_int(random, 0, 20), 0, 50);
    const std::int64_t largest = any_int(random, 1, 30);
    const DocumentParts parts(lengths, largest);
    const Ints sizes = parts.sizes();
    ASSERT_EQ(std::ssize(sizes), parts.size());
    std::int64_t part = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      std::int64_t begin = 0;
      do {
        const auto [document, from, to] = parts[part];
        EXPECT_EQ(document, static_cast<std::int64_t>(i));
        EXPECT_EQ(from, begin);
        EXPECT_EQ(to, std::min(begin + largest, lengths[i]));
        EXPECT_EQ(sizes[static_cast<std::size_t>(part)], to - from);
        begin = to;
        ++part;
      } while (begin < lengths[i]);
    }
    EXPECT_EQ(part, parts.size());
  }
  EXPECT_EQ(message([] { (void)DocumentParts(Ints{3}, 2)[2]; }), "part must be from 0 to 1, got 2");
  EXPECT_EQ(message([] { DocumentParts(Ints{3}, 0); }), "largest must be positive, got 0");
  EXPECT_EQ(message([] { DocumentParts(Ints{3, -1}, 2); }),
            "sizes must not be negative, got -1 at index 1");
}

}  // namespace
}  // namespace brim::batching
