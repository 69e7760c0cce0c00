// Mutants of C++, of which one at most is on: the one whose number is in BRIM_MUTANT.
//
// prove_mutants.py writes them into a copy of the sources and includes this file in front of each.
// `a < b` becomes `a < ::mutant::Less<7>() < b`, which C++ reads as `(a < X) < b`: X stands between
// two operators of one precedence, so that nobody has to know where the operands begin and end.
// Each number is noted where its code is compiled for types that it can change, and again where it
// is reached; BRIM_MUTANTS names the file for both.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <type_traits>
#include <utility>

namespace mutant {

constexpr int kMost = 1 << 17;
enum Seen : unsigned char { unknown, compiled, reached };

inline volatile unsigned char seen[kMost];

inline const int active = [] {
  const char* number = std::getenv("BRIM_MUTANT");
  return number == nullptr ? -1 : std::atoi(number);
}();

/// Writes what was seen when the library or program is unloaded.
struct Report {
  ~Report() {
    const char* name = std::getenv("BRIM_MUTANTS");
    std::FILE* file = name == nullptr ? nullptr : std::fopen(name, "a");
    for (int n = 0; file != nullptr && n < kMost; ++n) {
      if (seen[n] != unknown) {
        std::fprintf(file, "%d %d\n", n, seen[n]);
      }
    }
    if (file != nullptr) {
      std::fclose(file);
    }
  }
};
inline const Report report;

template <int n>
struct Site {
  static inline const bool noted = [] {
    seen[n] = seen[n] == unknown ? compiled : seen[n];
    return true;
  }();
};

/// Whether this mutant is on. Never while compiling.
template <int n>
constexpr bool on() {
  if (std::is_constant_evaluated()) {
    return false;
  }
  static_cast<void>(&Site<n>::noted);
  seen[n] = reached;
  return active == n;
}

__extension__ using Wide = __int128;
__extension__ using UnsignedWide = unsigned __int128;
template <class T>
concept Scalar = std::is_scalar_v<T> || std::is_same_v<T, Wide> || std::is_same_v<T, UnsignedWide>;
template <class T>
concept Number = Scalar<T> && !std::is_pointer_v<T> && !std::is_enum_v<T> &&
                 !std::is_member_pointer_v<T> && !std::is_null_pointer_v<T>;

/// The left operand, on its way to the right one.
template <class Operator, class T>
struct Left {
  T value;
};

// Scalars go by value: a reference to a constant would need the constant to be an object. Arrays
// become pointers on the way.
#define MUTANT_OPERATOR(Name, op, limit)                                                          \
  template <int n>                                                                                \
  struct Name {};                                                                                 \
  template <Scalar T, int n>                                                                      \
  constexpr Left<Name<n>, T> operator op(T value, Name<n>&&) {                                    \
    return {value};                                                                               \
  }                                                                                               \
  template <class T, int n>                                                                       \
    requires(!Scalar<std::decay_t<T>>)                                                            \
  constexpr Left<Name<n>, T&&> operator op(T&& value, Name<n>&&) {                                \
    return {std::forward<T>(value)};                                                              \
  }                                                                                               \
  template <int n, class T, class U>                                                              \
  constexpr decltype(auto) apply(Left<Name<n>, T>&& left, U&& b) {                                \
    using Result = decltype(std::forward<T>(left.value) op std::forward<U>(b));                   \
    if constexpr (std::is_same_v<Result, bool>) {                                                 \
      if constexpr (requires { static_cast<bool>(left.value limit b); }) {                        \
        if (on<n>()) {                                                                            \
          return static_cast<bool>(left.value limit b);                                           \
        }                                                                                         \
      }                                                                                           \
      return static_cast<bool>(std::forward<T>(left.value) op std::forward<U>(b)) != on<n + 1>(); \
    } else {                                                                                      \
      if constexpr (Number<std::decay_t<T>> && Number<std::decay_t<U>>) {                         \
        if (on<n>()) {                                                                            \
          return static_cast<Result>(left.value limit b);                                         \
        }                                                                                         \
      }                                                                                           \
      return static_cast<Result>(std::forward<T>(left.value) op std::forward<U>(b));              \
    }                                                                                             \
  }                                                                                               \
  template <int n, class T, Scalar U>                                                             \
  constexpr decltype(auto) operator op(Left<Name<n>, T>&& left, U b) {                            \
    return apply(std::move(left), std::move(b));                                                  \
  }                                                                                               \
  template <int n, class T, class U>                                                              \
    requires(!Scalar<std::decay_t<U>>)                                                            \
  constexpr decltype(auto) operator op(Left<Name<n>, T>&& left, U&& b) {                          \
    return apply(std::move(left), std::forward<U>(b));                                            \
  }

// The limit of a comparison moves by one value (n), or it is the other way round (n + 1).
MUTANT_OPERATOR(Less, <, <=)
MUTANT_OPERATOR(LessEqual, <=, <)
MUTANT_OPERATOR(Greater, >, >=)
MUTANT_OPERATOR(GreaterEqual, >=, >)
MUTANT_OPERATOR(Equal, ==, !=)
MUTANT_OPERATOR(NotEqual, !=, ==)
// One operation on numbers is another (n).
MUTANT_OPERATOR(Plus, +, -)
MUTANT_OPERATOR(Minus, -, +)
MUTANT_OPERATOR(Times, *, /)
MUTANT_OPERATOR(Divide, /, *)
MUTANT_OPERATOR(Modulo, %, /)
#undef MUTANT_OPERATOR

/// `True<n>() | a` in front of an operand of || or &&: it is this value, whatever it was. (No
/// commas: it may be an argument of a macro.)
template <int n>
struct True {};
template <int n>
struct False {};
template <int n, class T>
constexpr bool operator|(True<n>&&, T&& operand) {
  return on<n>() || static_cast<bool>(operand);
}
template <int n, class T>
constexpr bool operator|(False<n>&&, T&& operand) {
  return !on<n>() && static_cast<bool>(operand);
}

/// `Not<n>()->*a` for `!a`: without the `!`.
template <int n>
struct Not {};
template <int n, class T>
constexpr bool operator->*(Not<n>&&, T&& operand) {
  return static_cast<bool>(operand) == on<n>();
}

/// A condition, the other way round.
template <int n, class T>
constexpr bool flip(T&& condition) {
  return static_cast<bool>(condition) != on<n>();
}

// Each for the other.
template <int n>
struct Min {
  template <class T>
  static constexpr const T& of(const T& a, const T& b) {
    return (b < a) != on<n>() ? b : a;
  }
  template <class T>
  static constexpr T of(std::initializer_list<T> all) {
    const T* found = all.begin();
    for (const T& each : all) {
      found = (each < *found) != on<n>() ? &each : found;
    }
    return *found;
  }
};
template <int n>
struct Max {
  template <class T>
  static constexpr const T& of(const T& a, const T& b) {
    return (a < b) != on<n>() ? b : a;
  }
  template <class T>
  static constexpr T of(std::initializer_list<T> all) {
    const T* found = all.begin();
    for (const T& each : all) {
      found = (*found < each) != on<n>() ? &each : found;
    }
    return *found;
  }
};

}  // namespace mutant
