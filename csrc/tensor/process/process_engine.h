// The process's residency engine: made with the first budget or capture, and told of managed memory that comes and
// goes.
//
// Storages (tensor/storage) announce here what is created, freed and expired. Operators are watched, and storages are
// moved, by tensor/dispatch, which registers an OperatorWatch; so storages do not know it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "residency/engine/engine.h"

namespace torch_uvm {

/// Who shows the engine operators and storages (tensor/dispatch/watcher.cpp).
class OperatorWatch {
 public:
  virtual ~OperatorWatch() = default;
  /// What the engine is made with; lives as long as the process.
  virtual StorageDoor& storages() = 0;
  /// Sees operators from now on, or no longer. One call at a time.
  virtual void watch(bool on) = 0;
  /// Whether operators have to be seen whatever the engine says.
  virtual bool is_needed() const noexcept = 0;
};

/// Once a process, before anything else here.
void register_operator_watch(OperatorWatch& watch);

/// The process's engine; nullptr: there was no budget yet.
Engine* engine_in_use();

/// As Engine::set_budget; puts the watch in place, or takes it away.
void set_budget(int device, std::optional<std::size_t> bytes, bool hard);
void set_host_limit(std::optional<std::size_t> bytes);
void set_staging(std::optional<std::size_t> slot_bytes);
void evict_after_operators(bool on);

/// Puts the watch in place, or takes it away, as the engine needs it.
void watch_operators() noexcept;

/// As Engine::begin_capture and end_capture; while one is open, operators are watched.
std::uint64_t begin_engine_capture();
void end_engine_capture(std::uint64_t capture) noexcept;

// --- what storages announce

/// Managed memory of a device was given out.
void note_allocation(int device, std::size_t bytes);

/// A managed block is about to be freed. \return whether `note_freed` is to be called when that is done
bool forget_record(Block* block);
void note_freed() noexcept;

/// One of the storages on a managed block has died, and others live on.
void forget_outlived(Block* block);

} // namespace torch_uvm
