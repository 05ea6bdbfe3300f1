// A lock for a few instructions: a mutex that is taken and given back costs as much as all of what is done under it.
#pragma once

#include <atomic>
#include <thread>

namespace torch_uvm {

/// Lockable, as std::lock_guard wants it. Not recursive, not fair. Whoever finds it taken for long gives up its core:
/// the holder may want it.
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
