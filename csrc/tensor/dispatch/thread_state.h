// What each thread runs: its outermost operator or compiled graph, and what is kept from one operator to the next.
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

/// Where the engine has the storage: its label may be another device's, which the bytes had, too.
inline c10::Device device_of(const Record& record, const c10::StorageImpl& storage) {
  return {storage.device().type(), static_cast<c10::DeviceIndex>(record.device)};
}

/// A storage of an accelerator among an operator's inputs.
struct Named {
  c10::StorageImpl* storage;
  std::size_t input;
};

/// Reused: an operator comes a million times, and nothing is allocated for one.
struct ThreadState {
  Engine::Frame* running = nullptr; ///< of the outermost operator that the thread runs; nullptr: it runs none
  const at::RecordFunction* outermost = nullptr; ///< if that is no region. PyTorch keeps it where it is until its end
  Engine::Frame frame; ///< its
  std::vector<Named> named; ///< by the operator that was looked at last
  std::vector<Engine::Operand> operands;
  CurrentStreams streams;
  ObservedOperators known;

  void begin_outermost(const at::RecordFunction& function, const ObservedOperator& op) {
    frame.reset();
    frame.key = op.key();
    frame.name = op.name().c_str(); // `known` keeps it where it is
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

/// Of the calling thread. To find it takes a call each time: once for each callback.
ThreadState& this_thread() noexcept;

// Kernels that run, over all threads (kernels.h).

void count_kernels(); ///< from now on
void begin_kernel() noexcept;
void end_kernel() noexcept;
/// nullopt: not all kernels are counted.
std::optional<int> running_kernels() noexcept;

} // namespace torch_uvm
