#include "predict/parts_need.h"

#include <brim/predict/allocation_record.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace brim {
namespace {

using detail::PartsNeed;

struct PartsWork {
  std::int64_t items;
  bool lingers = false;       // what a part needed is freed only when the next one has as much
  bool concatenates = false;  // all results once more at the end
  std::int64_t before = 0;    // bytes that are there all the time

  static constexpr std::int64_t kTemporary = 100;  // bytes per item
  static constexpr std::int64_t kResult = 7;

  [[nodiscard]] std::vector<AllocationEvent> events(std::int64_t size) const {
    std::vector<AllocationEvent> events;
    std::uintptr_t made = 0;
    const auto allocate = [&](std::int64_t bytes) {
      events.push_back({++made, bytes});
      return AllocationEvent{made, bytes, 0, true};
    };
    if (before > 0) {
      allocate(before);
    }
    AllocationEvent last;
    for (std::int64_t start = 0; start < items; start += size) {
      const std::int64_t part = std::min(size, items - start);
      const AllocationEvent temporary = allocate(kTemporary * part);
      if (lingers && last.freed) {
        events.push_back(last);
      }
      allocate(kResult * part);
      if (!lingers) {
        events.push_back(temporary);
      }
      last = temporary;
    }
    if (lingers) {
      events.push_back(last);
    }
    if (concatenates) {
      allocate(kResult * items);
    }
    return events;
  }

  [[nodiscard]] auto record(std::int64_t size) const { return record_of(events(size)); }

  [[nodiscard]] std::int64_t need(std::int64_t size) const {
    std::int64_t now = 0;
    std::int64_t most = 0;
    for (const AllocationEvent& event : events(size)) {
      now += event.freed ? -event.bytes : event.bytes;
      most = std::max(most, now);
    }
    return most;
  }
};

TEST(PartsNeed, IsExactAtAnySize) {
  for (const bool lingers : {false, true}) {
    for (const bool concatenates : {false, true}) {
      for (const std::int64_t before : {0, 5000}) {
        const PartsWork work{1000, lingers, concatenates, before};
        for (const auto& [size, other] : {std::pair{120, 200}, {200, 120}, {260, 280}}) {
          const auto need = PartsNeed::of(*work.record(size), size, *work.record(other), other);
          ASSERT_TRUE(need) << size << " " << other << " " << lingers << concatenates << before;
          for (const std::int64_t at : {100, 150, 249, 250, 251, 333, 400, 500, 700, 999, 1000}) {
            EXPECT_NEAR(need->need_at(static_cast<double>(at)), static_cast<double>(work.need(at)),
                        1e-6)
                << at << " from " << size << " and " << other << ", " << lingers << concatenates;
          }
        }
      }
    }
  }
}

TEST(PartsNeed, FindsALargeSizeAmongThoseThatFit) {
  const PartsWork work{1000};
  const auto need = PartsNeed::of(*work.record(120), 120, *work.record(150), 150);
  ASSERT_TRUE(need);
  const auto bytes = static_cast<double>(work.need(400));
  const std::int64_t size = need->largest_within(bytes, 1000);
  EXPECT_GE(size, 395);
  EXPECT_LE(static_cast<double>(work.need(size)), bytes);
  EXPECT_LE(static_cast<double>(work.need(size * 995 / 1000)), bytes);
  EXPECT_EQ(need->largest_within(10, 1000), 0);
}

TEST(PartsNeed, IsEmptyForOtherWork) {
  const PartsWork work{1000};
  EXPECT_FALSE(PartsNeed::of(*work.record(600), 600, *work.record(700), 700)) << "too few parts";
  // Equal layers repeat too, but at a larger size they need more.
  const auto layers = [](std::int64_t size) {
    std::vector<AllocationEvent> events;
    for (std::uintptr_t layer = 1; layer <= 12; ++layer) {
      events.push_back({layer, 100 * size});
    }
    return record_of(events);
  };
  EXPECT_FALSE(PartsNeed::of(*layers(10), 10, *layers(20), 20));
  EXPECT_FALSE(PartsNeed::of(*layers(20), 20, *layers(10), 10));
  // So do they beside a constant that hides how much more.
  const auto beside = [](std::int64_t constant, std::int64_t in_each, std::int64_t size) {
    std::vector<AllocationEvent> events{{1, constant}};
    for (std::uintptr_t layer = 1; layer <= 4; ++layer) {
      events.push_back({2 * layer, 100 * size});
      events.push_back({2 * layer + 1, in_each});
    }
    return record_of(events);
  };
  EXPECT_FALSE(PartsNeed::of(*beside(7'600'000, 1, 922), 922, *beside(7'600'000, 1, 983), 983));
  EXPECT_FALSE(PartsNeed::of(*beside(1, 1'900'000, 922), 922, *beside(1, 1'900'000, 983), 983));
}

}  // namespace
}  // namespace brim
