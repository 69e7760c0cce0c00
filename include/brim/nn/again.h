#pragma once

#include <cstdint>

namespace brim::nn {

/// Whether a layer does without values that the layers before it can compute again in backward:
/// `false`, `true`, or `Again::kIfShort`, which keeps them until memory runs out.
class Again {
 public:
  static constexpr std::int64_t kIfShort = 2;

  /// @param number 0 or false, 1 or true, or kIfShort, as operators of torch's dispatcher take it
  // NOLINTNEXTLINE(google-explicit-constructor): callers write true and false
  constexpr Again(std::int64_t number = 0) : number_(number) {}

  // NOLINTNEXTLINE(google-explicit-constructor): to hand it to an operator, and for conditions
  constexpr operator std::int64_t() const { return number_; }

  [[nodiscard]] constexpr bool is_if_short() const { return number_ == kIfShort; }

  /// Whether such values are not kept at all.
  [[nodiscard]] constexpr bool is_always() const { return number_ != 0 && !is_if_short(); }

 private:
  std::int64_t number_;
};

}  // namespace brim::nn
