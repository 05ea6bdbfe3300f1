// The engine's interface to the tensor layer: how it changes a storage's data pointer and keeps storages alive.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "residency/engine/record.h"

namespace torch_uvm {

/// Called with the engine's mutex held, except `release` and `wake`. Implementations must not take the engine's mutex
/// or a lock that is ordered before it.
class StorageAdapter {
 public:
  virtual ~StorageAdapter() = default;
  /// Locks the weak reference to keep the storage alive while its pointer changes. Appends the strong reference to
  /// `locked`; the engine passes it to `release` later.
  /// \return false if the storage is being destroyed or shares its bytes with other storages
  virtual bool lock_if_sole_owner(const Record& record, std::vector<void*>& locked) = 0;
  virtual void release(void* locked) noexcept = 0;
  /// Takes sole ownership of the bytes again if the storage shared them and all the other storages are gone.
  /// \return whether that was so; the bytes may then have been written through the other storages
  virtual bool take_sole_ownership(const Record& record, std::vector<void*>& locked) = 0;
  /// Whether the storage has no owner left: another thread is about to report its destruction.
  virtual bool is_expired(const Record& record) const = 0;
  /// Sets the storage's data pointer to its host or device copy. Frees nothing.
  virtual void point_at_host(Record& record, void* ptr) noexcept = 0;
  virtual void point_at_device(Record& record, Block* block) noexcept = 0;
  /// Arranges for Engine::materialise to be called before code outside watched operators may write to the storage. One
  /// call covers one such access; effective only where PyTorch supports it.
  virtual void watch_for_writes(Record& record, std::vector<void*>& locked) = 0;
  /// Starts watching operators. Called with no lock held.
  virtual void wake() noexcept = 0;
  /// Ends the uses of storages by asynchronous work that is done. Called with no lock held.
  virtual void end_finished_work() noexcept {}
  /// Number of running kernels that began unwatched; nullopt if they are not counted. A kernel that begins after this
  /// call sees the engine active and holds its storages.
  virtual std::optional<int> unwatched_kernels() const noexcept = 0;
  /// The outermost operator that the calling thread runs, and the storages that it holds.
  struct RunningOperator {
    const char* name = nullptr; ///< nullptr if the thread runs no operator
    std::span<Record* const> operands;
  };
  virtual RunningOperator running() const noexcept {
    return {};
  }
  /// The record is about to be freed.
  virtual void forget(Record& record) noexcept = 0;
};

} // namespace torch_uvm
