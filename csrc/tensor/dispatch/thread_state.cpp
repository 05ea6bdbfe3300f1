#include "tensor/dispatch/thread_state.h"

#include <atomic>

namespace torch_uvm {
namespace {

std::atomic<int> kernels_running{0};
std::atomic<bool> counts_kernels{false}; // true on the emulated accelerator, whose kernels are all counted

} // namespace

ThreadState& this_thread() noexcept {
  thread_local ThreadState state;
  return state;
}

void count_kernels() {
  counts_kernels.store(true);
}

void begin_kernel() noexcept {
  kernels_running.fetch_add(1);
  // Pairs with the fence in running_kernels. A kernel counts itself and then reads whether the engine is awake; the
  // engine wakes and then reads the count. At least one of them sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void end_kernel() noexcept {
  kernels_running.fetch_sub(1);
}

std::optional<int> running_kernels() noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return counts_kernels.load() ? std::optional(kernels_running.load()) : std::nullopt;
}

} // namespace torch_uvm
