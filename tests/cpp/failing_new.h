// Makes the Nth heap allocation of a program fail. Include it in one source file of a program: it replaces operator
// new.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace failing_new {

inline thread_local std::size_t until_failure = 0; // 0: no allocation fails

/// Whether every allocation is tried (`make faults`), instead of a sample.
inline bool each() {
  return std::getenv("TORCH_UVM_FAULTS") != nullptr;
}

/// Counts this thread's allocations, over several bodies, until one fails.
class Countdown {
 public:
  explicit Countdown(std::size_t nth) : left_(nth) {}

  /// \throws the exception of `body`
  template <typename Body>
  void operator()(Body body) {
    const struct Armed {
      explicit Armed(std::size_t& left) : left(left) {
        until_failure = left;
      }
      ~Armed() {
        left = until_failure;
        until_failure = 0;
      }
      std::size_t& left;
    } armed(left_);
    body();
  }
  bool has_failed() const {
    return left_ == 0;
  }

 private:
  std::size_t left_;
};

} // namespace failing_new

// All the functions that sanitizers replace. Not inlined: the compiler would warn about mismatched new and delete.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  if (failing_new::until_failure != 0 && --failing_new::until_failure == 0) {
    return nullptr;
  }
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (void* const ptr = operator new(bytes, std::nothrow)) {
    return ptr;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* ptr) noexcept {
  std::free(ptr);
}
[[gnu::noinline]] void operator delete(void* ptr, std::size_t /*bytes*/) noexcept {
  std::free(ptr);
}
[[gnu::noinline]] void operator delete(void* ptr, const std::nothrow_t& /*tag*/) noexcept {
  std::free(ptr);
}
