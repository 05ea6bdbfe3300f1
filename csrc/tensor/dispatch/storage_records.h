// Storages as the engine finds them, without keeping them alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "residency/engine/engine.h"

namespace torch_uvm {

/// The door that the process's engine is made with.
class StorageRecords final : public StorageDoor {
 public:
  bool keep(const Record& record, std::vector<void*>& kept) override;
  void let_go(void* kept) noexcept override;
  bool reclaim(const Record& record, std::vector<void*>& kept) override;
  bool is_going(const Record& record) const override;
  void point_at_host(Record& record, void* ptr) noexcept override;
  void point_at_device(Record& record, Block* block) noexcept override;
  void watch_for_writes(Record& record, std::vector<void*>& kept) override;
  void wake() noexcept override;
  std::optional<int> running_kernels() const noexcept override;
  RunningOperator running() const noexcept override;
  void forget(Record& record) noexcept override;
};

/// The record of a storage, found or made; nullptr for storages that are not watched: other memory, small ones, a
/// device with no budget; of bytes that carry several labels, all but the first. With the engine's lock held.
/// \param made set if it was made
/// \param asleep also where nobody watches now
Record* record_of(Engine& engine, c10::StorageImpl* storage, bool* made = nullptr, bool asleep = false);

/// The one that it has; nullptr: none. With the engine's lock held.
Record* known_record_of(const Engine& engine, const c10::StorageImpl* storage) noexcept;

/// As record_of, of a tensor's storage.
Record* find_record(Engine& engine, const at::Tensor& tensor, bool asleep = false);

} // namespace torch_uvm
