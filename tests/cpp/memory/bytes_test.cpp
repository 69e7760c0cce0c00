#include <brim/memory/bytes.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

std::int64_t parsed(std::string_view text) { return ByteLimit::parse(text).resolve(0); }

TEST(ByteLimit, ReadsNumbersWithUnits) {
  const std::vector<std::pair<std::string, std::int64_t>> cases{
      {"1", 1},
      {"1048576", 1048576},
      {"64B", 64},
      {"64 b", 64},
      {"1kB", 1000},
      {"1KB", 1000},
      {"1KiB", 1024},
      {"1kib", 1024},
      {"512MiB", 512LL << 20},
      {"512 MiB", 512LL << 20},
      {"512mib", 512LL << 20},
      {"8GB", 8'000'000'000},
      {"8GiB", 8LL << 30},
      {"1.5GiB", 3LL << 29},
      {".5MiB", 1LL << 19},
      {"0.001KB", 1},
      {"2TB", 2'000'000'000'000},
      {"2TiB", 2LL << 40},
      {"3PB", 3'000'000'000'000'000},
      {"3PiB", 3LL << 50},
      {"1EB", 1'000'000'000'000'000'000},
      {"1EiB", 1LL << 60},
      {"  7MB\t", 7'000'000},
      {"007", 7},
      {"1.9B", 1},
      {"9223372036854775807", kMost},
      {"9007199254740993", 9007199254740993},  // not a double
  };
  for (const auto& [text, bytes] : cases) {
    EXPECT_EQ(parsed(text), bytes) << text;
    EXPECT_FALSE(ByteLimit::parse(text).is_percentage()) << text;
  }
}

TEST(ByteLimit, RefusesWhatItDoesNotUnderstandAndSaysWhatIsAllowed) {
  const std::vector<std::string> cases{
      "",      " ",    "MiB",    "abc",   "8G",     "8M",     "8k",     "8 GiBs",  "8Gibit",
      "8Mbps", "8Mbb", "1,5GiB", "1 000", "1_000",  "0x10",   "1e3",    "1e3MiB",  "+5",
      "++5",   "5-",   "5..0",   "1.2.3", "5%%",    "%",      "% 5",    "5 % MiB", "nan",
      "NaN",   "-nan", "inf",    "-inf",  "infGiB", "nanMiB", "1/2GiB", "５MiB",   "5 µB",
      "~5GB",  "5GB!", "5;",     "GiB 5", "five",   ".",      "-",      "-."};
  for (const std::string& text : cases) {
    const std::string message = tests::message_of<c10::ValueError>([&] { ByteLimit::parse(text); });
    EXPECT_CONTAINS(message, "limit \"" + text + "\"");
    EXPECT_CONTAINS(message, "512MiB");
  }
}

TEST(ByteLimit, RefusesANulInTheMiddle) {
  EXPECT_THROW(ByteLimit::parse(std::string_view("5\0MiB", 5)), c10::ValueError);
}

TEST(ByteLimit, RefusesZeroAndNegative) {
  for (const char* text :
       {"0", "-0", "0B", "0.0GiB", "0%", "-1", "-1MiB", "-0.5GB", "-50%", "-9223372036854775808"}) {
    EXPECT_CONTAINS(tests::message_of<c10::ValueError>([&] { ByteLimit::parse(text); }),
                    "not positive");
  }
  for (const std::int64_t bytes :
       {std::int64_t{0}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::min()}) {
    EXPECT_CONTAINS(tests::message_of<c10::ValueError>([&] { ByteLimit::of_bytes(bytes); }),
                    std::to_string(bytes));
  }
}

TEST(ByteLimit, RefusesLessThanOneByte) {
  for (const char* text : {"0.5", "0.9B", "0.0001KiB"}) {
    EXPECT_CONTAINS(tests::message_of<c10::ValueError>([&] { ByteLimit::parse(text); }),
                    "less than one byte");
  }
}

TEST(ByteLimit, RefusesWhatDoesNotFit63Bits) {
  for (const char* text : {"9223372036854775808", "8192PiB", "8EiB", "9223373PB",
                           "1000000000000000000000000GiB", "99999999999999999999999999"}) {
    EXPECT_CONTAINS(tests::message_of<c10::ValueError>([&] { ByteLimit::parse(text); }), "2^63");
  }
  // Over the range of double itself.
  EXPECT_THROW(ByteLimit::parse(std::string(400, '9')), c10::ValueError);
  EXPECT_EQ(parsed("8191PiB"), 8191LL << 50);
}

TEST(ByteLimit, PercentageIsAShareOfTheWhole) {
  EXPECT_EQ(ByteLimit::parse("50%").resolve(1000), 500);
  EXPECT_EQ(ByteLimit::parse("50 %").resolve(1001), 500);
  EXPECT_EQ(ByteLimit::parse("12.5%").resolve(8), 1);
  EXPECT_EQ(ByteLimit::parse("100%").resolve(kMost), kMost);
  EXPECT_EQ(ByteLimit::parse("0.000001%").resolve(10), 1)
      << "never rounded down to no memory at all";
  EXPECT_TRUE(ByteLimit::parse("50%").is_percentage());
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { ByteLimit::parse("100.1%"); }),
                  "over 100 %");
}

TEST(ByteLimit, ABytesLimitDoesNotDependOnTheWhole) {
  EXPECT_EQ(ByteLimit::of_bytes(5).resolve(1), 5);
  EXPECT_EQ(ByteLimit::of_bytes(kMost).resolve(1), kMost);
}

TEST(ByteLimit, EveryIntegerIsReadBackExactly) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 2000; ++i) {
    const auto bytes = static_cast<std::int64_t>(random() >> (1 + random() % 62)) + 1;
    ASSERT_EQ(parsed(std::to_string(bytes)), bytes);
    ASSERT_EQ(ByteLimit::of_bytes(bytes).resolve(0), bytes);
  }
}

TEST(FormatBytes, UsesBinaryUnitsAndThreeDigits) {
  const std::vector<std::pair<std::int64_t, std::string>> cases{
      {0, "0 B"},
      {1, "1 B"},
      {1023, "1023 B"},
      {1024, "1.00 KiB"},
      {1536, "1.50 KiB"},
      {1LL << 20, "1.00 MiB"},
      {(1LL << 20) - 1, "1.00 MiB"},  // never "1024.00 KiB"
      {3LL << 29, "1.50 GiB"},
      {1LL << 40, "1.00 TiB"},
      {1LL << 50, "1.00 PiB"},
      {1LL << 60, "1.00 EiB"},
      {kMost, "8.00 EiB"},
      {-512, "-512 B"},
      {-2 * (1LL << 20), "-2.00 MiB"},
      {std::numeric_limits<std::int64_t>::min(), "-8.00 EiB"},
  };
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(format_bytes(bytes), text) << bytes;
  }
}

TEST(FormatBytes, CanBeReadBackWithinItsRounding) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 2000; ++i) {
    const auto bytes =
        static_cast<std::int64_t>(random() >> (2 + random() % 60)) + 1;  // below 4 EiB
    const double back = static_cast<double>(parsed(format_bytes(bytes)));
    ASSERT_NEAR(back / static_cast<double>(bytes), 1.0, 0.006) << format_bytes(bytes);
  }
}

}  // namespace
}  // namespace brim
