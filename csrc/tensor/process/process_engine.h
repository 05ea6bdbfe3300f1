// The process's residency engine, created with the first budget, graph capture or pin.
//
// Storages (tensor/storage) announce here what is created, freed and expired. tensor/dispatch observes operators and
// relocates storages; it registers an OperatorWatch here, so that tensor/storage does not depend on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "residency/engine/engine.h"

namespace torch_uvm {

/// Reports operators to the engine and gives it access to storages; implemented in tensor/dispatch/watcher.cpp.
struct OperatorWatch {
  StorageAdapter* storages; ///< the storage interface for the engine; lives as long as the process
  void (*watch)(bool on); ///< starts or stops observing operators; calls are serialised by the caller
  bool (*is_needed)() noexcept; ///< whether operators have to be observed even while all devices are idle
};

/// Call once per process, before any other function of this file.
void register_operator_watch(const OperatorWatch& watch);

/// The process's engine; nullptr before the first budget, capture or pin, and in a forked child, which has the parent's
/// records and may have inherited the mutex locked.
Engine* engine_in_use();
/// The same, created if there is none yet.
Engine& made_engine();
/// Locks it, if there is one: other threads' operators move no bytes meanwhile.
inline std::optional<Engine::Lock> lock_engine() {
  Engine* const engine = engine_in_use();
  return engine == nullptr ? std::nullopt : std::optional<Engine::Lock>(std::in_place, *engine);
}

/// As Engine::set_budget; also starts or stops observing operators.
void set_budget(int device, std::optional<std::size_t> bytes,
                std::size_t ceiling = CachingManagedAllocator::kNoCeiling);

/// Starts or stops observing operators, as the engine and the watch need it.
void watch_operators() noexcept;

/// Has Engine::note_between_operators called on the main thread, between two of its bytecodes, if the calling thread is
/// the main thread. Takes no GIL.
void call_between_operators() noexcept;
/// The interpreter's means for that, which csrc/python registers once.
void register_interpreter(void (*call_between_operators)() noexcept);

/// As Engine::begin_capture and end_capture. Operators are observed while a capture is open.
std::uint64_t begin_engine_capture();
void end_engine_capture(std::uint64_t capture) noexcept;

// --- what storages announce

/// Managed memory was allocated for a device.
void note_allocation(int device, std::size_t bytes);

/// A managed block is about to be freed. \return whether to call Engine::freed after the free
bool forget_record(Block* block);

/// One of several storages (labels) on a managed block has expired; others are still live.
void forget_outlived(Block* block);

} // namespace torch_uvm
