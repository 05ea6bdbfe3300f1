#include "tensor/dispatch/thread_state.h"

#include <torch/csrc/autograd/graph_task.h>

#include <atomic>

#include "tensor/dispatch/deferred_updates.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

std::atomic<int> kernels_running{0};
std::atomic<bool> counts_kernels{false}; // true on the emulated accelerator, whose kernels are all counted

} // namespace

const Thread* ThreadState::program_thread() const noexcept {
  return torch::autograd::get_current_graph_task_id() >= 0 || runs_deferred_update() ? nullptr : &thread;
}

ThreadState& this_thread() noexcept {
  thread_local ThreadState state;
  return state;
}

void count_kernels(bool on) {
  counts_kernels.store(on);
}

bool begin_kernel() noexcept {
  kernels_running.fetch_add(1);
  // Pairs with the fence in unwatched_kernels. A kernel counts itself and then reads whether the engine is awake; the
  // engine wakes and then reads the count. At least one of them sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const Engine* const engine = engine_in_use();
  const bool counts = engine == nullptr || !engine->is_awake();
  if (!counts) {
    end_kernel();
  }
  return counts;
}

void end_kernel() noexcept {
  kernels_running.fetch_sub(1);
}

std::optional<int> unwatched_kernels() noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return counts_kernels.load() ? std::optional(kernels_running.load()) : std::nullopt;
}

} // namespace torch_uvm
