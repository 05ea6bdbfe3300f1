// A lock for critical sections of a few instructions, where a mutex would cost as much as the work under it.
#pragma once

#include <atomic>
#include <thread>

namespace torch_uvm {

/// Lockable with std::lock_guard. Not recursive, not fair. A waiter yields its core after some spinning, because the
/// holder may need it.
class SpinLock {
 public:
  void lock() noexcept {
    while (taken_.exchange(true, std::memory_order_acquire)) {
      for (int turns = 0; taken_.load(std::memory_order_relaxed); ++turns) {
        if (turns >= 64) {
          std::this_thread::yield();
        }
      }
    }
  }
  void unlock() noexcept {
    taken_.store(false, std::memory_order_release);
  }

 private:
  std::atomic<bool> taken_ = false;
};

} // namespace torch_uvm
