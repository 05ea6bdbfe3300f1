#include "tensor/dispatch/storage_records.h"

#include <c10/util/intrusive_ptr.h>

#include "residency/engine/relocation_min.h"
#include "tensor/dispatch/captures.h"
#include "tensor/dispatch/deferred_updates.h"
#include "tensor/dispatch/operand_walk.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/process_engine.h"
#include "tensor/process/streams.h"
#include "tensor/storage/advice_registry.h"
#include "tensor/storage/block_storage.h"
#include "tensor/storage/labels.h"

namespace torch_uvm {
namespace {

using Strong = c10::intrusive_ptr<c10::StorageImpl>;
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Templated, so that a torch without the member, whose references take no GIL, compiles.
template <typename Storage>
bool has_python_object(const Storage& storage) {
  if constexpr (requires { storage.pyobj_slot()->load_pyobj(); }) {
    return storage.pyobj_slot()->load_pyobj() != nullptr;
  } else {
    return false;
  }
}

/// The record's StorageImpl. The weak reference keeps the object allocated, but if no owner is left its contents are
/// released.
c10::StorageImpl* storage_of(const Record& record) {
  return static_cast<c10::StorageImpl*>(record.storage);
}

/// Promotes the record's weak reference; null if the storage has expired. Also if Python alone owns it: that would take
/// the GIL, whose holder may wait for the engine's mutex.
Strong lock(const Record& record) {
  c10::StorageImpl* const storage = storage_of(record);
  if (c10::raw::weak_intrusive_ptr::use_count(storage) == 1 && has_python_object(*storage)) {
    return {};
  }
  return Strong::reclaim(c10::raw::weak_intrusive_ptr::lock(storage));
}

/// The storage materializer of torch 2.13 and later: PyTorch calls it before it hands out a mutable data pointer.
[[maybe_unused]] void before_mutable_access(c10::StorageImpl* storage) {
  if (this_thread().running != nullptr) {
    return; // an operator's kernel: the watcher knows its writes from the schema
  }
  finish_deferred_updates_of(storage);
  Engine* const engine = engine_in_use();
  if (engine != nullptr) {
    give_out_address(*engine, storage);
  }
}

/// Replaces the storage's pointer without freeing the old memory.
void replace(const Record& record, c10::DataPtr data) noexcept {
  c10::StorageImpl* const storage = storage_of(record);
  storage->_mutable_data_ptr_no_checks().release_context();
  storage->set_data_ptr_noswap(std::move(data));
}

#if __has_include(<c10/core/StorageMaterializer.h>) // from torch 2.13 on
constexpr bool kTellsOfWrites = true;

bool is_armed(const c10::StorageImpl* storage) {
  return storage->has_materializer();
}
void arm(c10::StorageImpl* storage) {
  if (!is_armed(storage)) {
    storage->set_materializer(&before_mutable_access);
  }
}
#else
constexpr bool kTellsOfWrites = false;

bool is_armed(const c10::StorageImpl* /*storage*/) {
  return false;
}
void arm(c10::StorageImpl* /*storage*/) {}
#endif

/// The managed block of a device storage, whether or not other labels share it; nullptr for others.
Block* own_block(const c10::DataPtr& data) {
  const c10::DataPtr& bytes = data_behind_labels(data);
  return is_own_block(bytes) && !data.device().is_cpu() ? static_cast<Block*>(bytes.get_context()) : nullptr;
}

} // namespace

bool StorageRecords::lock_if_sole_owner(const Record& record, std::vector<void*>& locked) {
  if (record.storage == nullptr) {
    return false; // created on the host, and not used yet
  }
  locked.reserve(locked.size() + 1);
  Strong storage = lock(record);
  if (!storage) {
    return false;
  }
  const c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  // Advice applies to the pages of a block, so a storage with advice must not leave its block.
  const bool its_own =
      record.points_at == Side::kHost
          ? is_on_host(data) && data.get_context() == &record
          : is_own_block(data) && data.get_context() == record.device_block && !has_advice(record.device_block);
  locked.push_back(storage.release()); // even if false: this may be the last owner, which must not go under the mutex
  return its_own;
}

void StorageRecords::release(void* locked) noexcept {
  Strong::reclaim(static_cast<c10::StorageImpl*>(locked));
}

bool StorageRecords::take_sole_ownership(const Record& record, std::vector<void*>& locked) {
  locked.reserve(locked.size() + 1);
  Strong storage = lock(record);
  if (!storage) {
    return false;
  }
  const bool reclaimed = has_owner(storage->_mutable_data_ptr_no_checks()) && take_off_labels(storage.get());
  locked.push_back(storage.release());
  return reclaimed;
}

bool StorageRecords::is_expired(const Record& record) const {
  return c10::raw::weak_intrusive_ptr::use_count(storage_of(record)) == 0;
}

void StorageRecords::point_at_host(Record& record, void* ptr) noexcept {
  const c10::Device label = storage_of(record)->device();
  forget_hints(static_cast<Block*>(storage_of(record)->_mutable_data_ptr_no_checks().get_context()));
  replace(record, host_data(record, ptr, label));
}

void StorageRecords::point_at_device(Record& record, Block* block) noexcept {
  const c10::Device label = storage_of(record)->device();
  if (const c10::DataPtr& data = storage_of(record)->_mutable_data_ptr_no_checks(); is_own_block(data)) {
    forget_hints(static_cast<Block*>(data.get_context())); // a move between blocks: advice belongs to the old one
  }
  replace(record, managed_data(block, label));
}

void StorageRecords::watch_for_writes(Record& record, std::vector<void*>& locked) {
  // Only needed while there is a host copy: an unobserved write to the device copy would make it stale unnoticed.
  if (kTellsOfWrites && record.host_block != nullptr && !is_armed(storage_of(record)) &&
      lock_if_sole_owner(record, locked)) {
    arm(storage_of(record));
  }
}

void StorageRecords::wake() noexcept {
  watch_operators();
  call_between_operators();
}

std::optional<int> StorageRecords::unwatched_kernels() const noexcept {
  return torch_uvm::unwatched_kernels();
}

StorageAdapter::RunningOperator StorageRecords::running() const noexcept {
  const Engine::Frame* const frame = this_thread().running;
  return frame == nullptr ? RunningOperator{} : RunningOperator{frame->name, frame->operands};
}

void StorageRecords::forget(Record& record) noexcept {
  if (record.storage != nullptr) {
    c10::raw::weak_intrusive_ptr::decref(storage_of(record));
    record.storage = nullptr;
  }
}

Record* pinned_record_of(const Engine& engine, const c10::StorageImpl* storage) noexcept {
  const c10::DataPtr& data = const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks();
  if (is_on_host(data)) {
    return static_cast<Record*>(data.get_context());
  }
  Block* const block = own_block(data); // a zero-byte storage has none
  return block == nullptr ? nullptr : engine.record_on(block);
}

Record* known_record_of(const Engine& engine, const c10::StorageImpl* storage) noexcept {
  Record* const record = pinned_record_of(engine, storage);
  const bool is_other_label = record != nullptr && storage_of(*record) != storage &&
                              has_owner(const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks());
  return is_other_label ? nullptr : record;
}

Record* record_of(Engine& engine, c10::StorageImpl* storage, bool* made, bool pins) {
  if (Record* const record = known_record_of(engine, storage)) {
    if (record->storage == nullptr) { // created on the host
      engine.attach(*record, Weak(Strong::reclaim_copy(storage)).release()); // until StorageRecords::forget
    }
    return record;
  }
  const c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  Block* const block = own_block(data);
  if (block == nullptr || storage->nbytes() < relocation_min()) {
    return nullptr;
  }
  if (Record* const other = engine.record_on(block)) { // another label's: a block has one record
    return pins ? other : nullptr;
  }
  const int device = data.device().index();
  const bool watched = engine.watches(device) || engine.has_open_captures();
  // A pin needs a record in any case: a budget may be set, or the last other label dropped, while the pin lasts.
  if (!pins && (!watched || (has_owner(data) && !take_off_labels(storage)))) {
    return nullptr;
  }
  Weak weak(Strong::reclaim_copy(storage));
  Record* const record = engine.adopt(block, device, storage);
  weak.release(); // now owned by the record, until StorageRecords::forget
  if (made != nullptr) {
    *made = true;
  }
  return record;
}

void give_out_address(Engine& engine, c10::StorageImpl* storage) {
  Record* record = nullptr;
  Stream stream;
  {
    const Engine::Lock lock(engine);
    record = record_of(engine, storage);
    if (record != nullptr && engine.has_open_captures() && is_capturing()) {
      const Engine::Operand operand{record, /*writes=*/true}; // for all that is known
      engine.captured({&operand, 1});
      return;
    }
    if (record != nullptr) {
      stream = current_stream_of(device_of(*record, *storage));
    }
  }
  if (record != nullptr) {
    engine.materialise(record, stream); // the record is valid without the lock: the storage is kept alive
  }
}

} // namespace torch_uvm
