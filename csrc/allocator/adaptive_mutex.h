// A mutex for a few hundred instructions, wanted by several threads at once.
#pragma once

#include <mutex>
#include <thread>

namespace torch_uvm {

/// Lockable. Whoever finds it taken looks again for some microseconds, ever more seldom, before it lets the system put
/// it to sleep: to be woken takes many times as long as what is done under it. With std::mutex eight threads that
/// allocated and freed on sixteen cores took 10.5 us for a pair that one thread does in 0.1; so they take 3.2.
class AdaptiveMutex {
 public:
  explicit AdaptiveMutex(int most_pauses = usual_pauses()) : most_pauses_(most_pauses) {}

  void lock() {
    for (int pauses = 1; pauses <= most_pauses_; pauses *= 2) {
      if (mutex_.try_lock()) {
        return;
      }
      for (int i = 0; i < pauses; ++i) {
        pause();
      }
    }
    mutex_.lock();
  }
  bool try_lock() {
    return mutex_.try_lock();
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  /// In a row; in all almost twice as many, of some 10 to 50 ns each. Where cores are few, the holder may want ours.
  static int usual_pauses() {
    static const int pauses = std::thread::hardware_concurrency() < 4 ? 0 : 1024;
    return pauses;
  }

  static void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#else
    std::this_thread::yield();
#endif
  }

  std::mutex mutex_;
  const int most_pauses_;
};

} // namespace torch_uvm
