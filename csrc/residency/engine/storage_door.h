// The engine's narrow door to the floor that knows tensors.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "residency/engine/record.h"

namespace torch_uvm {

/// Called with the engine's mutex held, but for `let_go`; takes no lock of the engine's or above it.
class StorageDoor {
 public:
  virtual ~StorageDoor() = default;
  /// Keeps the storage alive while its pointer changes: what is appended to `kept` goes to `let_go`, later.
  /// \return false: it is being destroyed, or its bytes are no longer the record's alone
  virtual bool keep(const Record& record, std::vector<void*>& kept) = 0;
  virtual void let_go(void* kept) noexcept = 0;
  /// Where the storage shared its bytes with others, and all of those are gone: they are its own again.
  /// \return whether that was so; then the bytes may have been written through the others
  virtual bool reclaim(const Record& record, std::vector<void*>& kept) = 0;
  /// Nobody owns the storage any more: another thread is about to say that it died.
  virtual bool is_going(const Record& record) const = 0;
  /// The storage's pointer shows this copy from now on; nothing is freed.
  virtual void point_at_host(Record& record, void* ptr) noexcept = 0;
  virtual void point_at_device(Record& record, Block* block) noexcept = 0;
  /// Says when code that the watcher does not see may write to the storage (Engine::settle); once, where PyTorch can.
  virtual void watch_for_writes(Record& record, std::vector<void*>& kept) = 0;
  /// Operators are to be watched from now on. With no lock held.
  virtual void wake() noexcept = 0;
  /// Kernels that run now; nullopt: they are not counted. A kernel that begins after this call finds the engine awake,
  /// and holds its storages.
  virtual std::optional<int> running_kernels() const noexcept = 0;
  /// The outermost operator that the calling thread runs: its name, and the storages that it holds.
  struct RunningOperator {
    const char* name = nullptr; ///< nullptr: it runs none
    std::span<Record* const> held;
  };
  virtual RunningOperator running() const noexcept {
    return {};
  }
  /// The record is about to be freed.
  virtual void forget(Record& record) noexcept = 0;
};

} // namespace torch_uvm
