// Tells a forked child from the process that made an object. Managed memory, threads and events belong to the parent.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <string>

#include "runtime/error.h"

namespace torch_uvm {

/// For managed memory in a forked child, which has none.
[[noreturn]] inline void refuse_in_child() {
  throw RuntimeFailure(
      "managed memory is not available in a forked child process: it belongs to the parent. Start the process with the "
      "spawn method to use it there");
}

/// Remembers in which process it was made.
class ForkWatch {
 public:
  /// \throws RuntimeFailure if the system has no room to report forks
  ForkWatch() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1); });
    if (registered != 0) {
      throw RuntimeFailure(std::string("no room to be told of forks: ") + std::strerror(registered));
    }
    born_ = forks_.load();
  }

  /// Whether this process was forked, directly or not, from the one in which the object was made.
  bool in_child() const noexcept {
    return forks_.load(std::memory_order_relaxed) != born_;
  }

  /// \throws RuntimeFailure if it was
  void check_not_in_child() const {
    if (in_child()) {
      refuse_in_child();
    }
  }

 private:
  static inline std::atomic<unsigned> forks_{0}; ///< since the first ForkWatch was made
  unsigned born_; ///< `forks_` then
};

} // namespace torch_uvm
