#include "tensor/dispatch/thread_state.h"

#include <atomic>

namespace torch_uvm {
namespace {

std::atomic<int> running_unseen{0};
std::atomic<bool> counts_kernels{false}; // of all operators: on the emulated accelerator

} // namespace

ThreadState& this_thread() noexcept {
  thread_local ThreadState state;
  return state;
}

void count_unseen_kernels() {
  counts_kernels.store(true);
}

void begin_unseen_kernel() noexcept {
  running_unseen.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst); // the engine wakes, and counts after it: one sees the other
}

void end_unseen_kernel() noexcept {
  running_unseen.fetch_sub(1);
}

std::optional<int> unseen_kernels() noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return counts_kernels.load() ? std::optional(running_unseen.load()) : std::nullopt;
}

} // namespace torch_uvm
