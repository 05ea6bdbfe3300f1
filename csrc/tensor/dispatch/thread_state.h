// Per-thread state of the watcher: the running outermost operator or compiled graph, and buffers that are reused.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "residency/engine/engine.h"
#include "tensor/dispatch/observed_operators.h"
#include "tensor/dispatch/operand_walk.h"

namespace torch_uvm {

/// The device that the engine tracks the storage on. The storage's own label may name another device if the bytes had
/// several labels.
inline c10::Device device_of(const Record& record, const c10::StorageImpl& storage) {
  return {storage.device().type(), static_cast<c10::DeviceIndex>(record.device)};
}

/// An accelerator storage among an operator's inputs.
struct Named {
  c10::StorageImpl* storage;
  std::size_t input;
};

/// The vectors are reused, so that observing an operator allocates no memory.
struct ThreadState {
  Engine::Frame* running = nullptr; ///< frame of the outermost operator or region; nullptr: none is running
  const at::RecordFunction* outermost = nullptr; ///< the outermost operator, unless it is a region; does not move
  Engine::Frame frame; ///< of `outermost`
  std::vector<Named> named; ///< operands of the operator inspected last
  std::vector<Engine::Operand> operands;
  CurrentStreams streams;
  SentBy sent_by{}; ///< of the collective that began last
  ObservedOperators known;
  const Thread thread = std::make_shared<char>();

  /// Engine::Frame::thread, of what the thread begins now.
  const Thread* program_thread() const noexcept;
  /// `frame`, as of now.
  const Engine::Frame& now() noexcept {
    frame.thread = program_thread();
    return frame;
  }
  void begin_outermost(const at::RecordFunction& function, const ObservedOperator& op) {
    frame.reset();
    frame.thread = program_thread();
    frame.key = op.key;
    frame.name = op.name.c_str(); // elements of `known` do not move
    outermost = &function;
    running = &frame;
  }
  void end_outermost() noexcept {
    outermost = nullptr;
    running = nullptr;
  }
  const std::vector<Stream>& stream_for(const Record& record, const c10::StorageImpl& storage) {
    streams.clear();
    streams.ask(device_of(record, storage));
    return streams.get();
  }
};

/// The calling thread's state. A thread_local lookup is a function call, so call this once per callback.
ThreadState& this_thread() noexcept;

// The count of running host kernels over all threads (kernels.h), without those that hold their storages.

/// Declares whether every kernel has a `Kernel` object from now on, so that `unwatched_kernels` is exact. The emulated
/// accelerator does so.
void count_kernels(bool on);
/// \return whether it counts: not if the engine is awake, so that the kernel will hold its storages
bool begin_kernel() noexcept;
void end_kernel() noexcept; ///< of one that counts
/// nullopt if kernels are not counted (CUDA).
std::optional<int> unwatched_kernels() noexcept;

} // namespace torch_uvm
