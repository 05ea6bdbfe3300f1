#include "tensor/dispatch/thread_state.h"

#include <atomic>

namespace torch_uvm {
namespace {

std::atomic<int> running{0};
std::atomic<bool> counts_kernels{false}; // of all operators: on the emulated accelerator

} // namespace

ThreadState& this_thread() noexcept {
  thread_local ThreadState state;
  return state;
}

void count_kernels() {
  counts_kernels.store(true);
}

void begin_kernel() noexcept {
  running.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst); // the engine wakes, and counts after it: one sees the other
}

void end_kernel() noexcept {
  running.fetch_sub(1);
}

std::optional<int> running_kernels() noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return counts_kernels.load() ? std::optional(running.load()) : std::nullopt;
}

} // namespace torch_uvm
