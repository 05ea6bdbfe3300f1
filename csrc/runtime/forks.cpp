#include "runtime/forks.h"

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <string>

#include "runtime/error.h"

namespace torch_uvm {
namespace {

std::atomic<unsigned> forks{0};

} // namespace

ForkWatch::ForkWatch() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  if (registered != 0) {
    throw RuntimeFailure(std::string("no room to be told of forks: ") + std::strerror(registered));
  }
  born_ = forks.load(std::memory_order_relaxed);
}

bool ForkWatch::in_child() const noexcept {
  return forks.load(std::memory_order_relaxed) != born_;
}

} // namespace torch_uvm
