#pragma once

#include <utility>

namespace brim {

/// An object for each thread, made at its first use there and deleted with the thread. Finding it
/// takes one look-up and no guard, where a thread-local object with a destructor takes two of both.
/// It is on the heap, since glibc has some eighty bytes for fast access to all thread-local
/// variables of this library beside torch's: if they were larger, a look-up would take 4 ns more.
template <class Object>
class PerThread {
 public:
  static Object& get() {
    Object* const found = instance;
    return found != nullptr ? *found : make();
  }

 private:
  [[gnu::cold, gnu::noinline]] static Object& make() {
    struct AtExit {
      ~AtExit() { delete std::exchange(instance, nullptr); }
    };
    thread_local const AtExit at_exit;
    instance = new Object;
    return *instance;
  }

  static inline constinit thread_local Object* instance = nullptr;
};

}  // namespace brim
