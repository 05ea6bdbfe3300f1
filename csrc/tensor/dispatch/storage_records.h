// Connects the engine's records with PyTorch storages. A record has a weak reference to its storage.
#pragma once

#include <c10/core/StorageImpl.h>

#include "residency/engine/engine.h"

namespace torch_uvm {

/// The storage interface of the process's engine.
class StorageRecords : public StorageAdapter {
 public:
  bool lock_if_sole_owner(const Record& record, std::vector<void*>& locked) override;
  void release(void* locked) noexcept override;
  bool take_sole_ownership(const Record& record, std::vector<void*>& locked) override;
  bool is_expired(const Record& record) const override;
  void point_at_host(Record& record, void* ptr) noexcept override;
  void point_at_device(Record& record, Block* block) noexcept override;
  void watch_for_writes(Record& record, std::vector<void*>& locked) override;
  void wake() noexcept override;
  std::optional<int> unwatched_kernels() const noexcept override;
  RunningOperator running() const noexcept override;
  void forget(Record& record) noexcept override;
};

/// Finds or creates the record of a storage. Requires the engine's lock.
/// \param made set to true if the record was created
/// \param pins create it also for a device without a budget, and for a storage with several labels; if another label
///        has a record, that one pins the bytes and is returned
/// \return nullptr if the engine does not track the storage: its bytes are not a managed block of its own, it is
///         smaller than relocation_min(), or its device is idle or has no budget. Of storages that share bytes
///         (labels), only the one that the record was created for has it.
Record* record_of(Engine& engine, c10::StorageImpl* storage, bool* made = nullptr, bool pins = false);

/// The existing record of a storage, or nullptr. Requires the engine's lock.
Record* known_record_of(const Engine& engine, const c10::StorageImpl* storage) noexcept;

/// The record that a pin of the storage is in: its own, or that of another label of the same bytes. Requires the
/// engine's lock.
Record* pinned_record_of(const Engine& engine, const c10::StorageImpl* storage) noexcept;

/// Prepares an address that is about to leave PyTorch: as an operand of the graph if one is being captured on the
/// calling thread's stream, else by Engine::materialise. The caller keeps the storage alive.
void give_out_address(Engine& engine, c10::StorageImpl* storage);

} // namespace torch_uvm
