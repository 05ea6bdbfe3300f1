#include "tensor/dispatch/pins.h"

#include <chrono>

#include "residency/engine/relocation_min.h"
#include "runtime/bytes.h"
#include "runtime/error.h"
#include "tensor/dispatch/deferred_updates.h"
#include "tensor/dispatch/operand_walk.h"
#include "tensor/dispatch/storage_records.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/labels.h"

namespace torch_uvm {
namespace {

/// How long keep_resident waits for another thread's operator that uses the storage on the host, or its room.
constexpr std::chrono::seconds kLongestWait{30};

} // namespace

void materialise(const at::Tensor& tensor) {
  finish_deferred_updates_of(tensor);
  Engine* const engine = engine_in_use();
  c10::StorageImpl* const storage = accelerators_storage(tensor);
  if (engine == nullptr || storage == nullptr || !(engine->is_awake() || engine->has_open_captures())) {
    return;
  }
  give_out_address(*engine, storage);
}

void keep_resident(const at::Tensor& tensor, bool keep) {
  if (keep) {
    finish_deferred_updates_of(tensor);
  }
  c10::StorageImpl* const storage = accelerators_storage(tensor);
  if (storage == nullptr || Context::forked()) {
    return;
  }
  // A storage below `relocation_min` has no record and needs no pin, unless it was created on the host.
  Engine* const engine = keep && storage->nbytes() >= relocation_min() ? &made_engine() : engine_in_use();
  if (engine == nullptr) {
    return;
  }
  const auto began = std::chrono::steady_clock::now();
  Engine::Lock lock(*engine);
  for (;;) {
    Record* const record =
        keep ? record_of(*engine, storage, nullptr, /*pins=*/true) : pinned_record_of(*engine, storage);
    if (record == nullptr) {
      return;
    }
    if (!keep) {
      engine->unpin(record);
      return;
    }
    const Stream stream = current_stream_of(device_of(*record, *storage));
    const Engine::Frame* const own = this_thread().running;
    const bool in_time = std::chrono::steady_clock::now() - began <= kLongestWait;
    if (engine->pin(record, stream, /*waits=*/in_time && own == nullptr)) {
      return;
    }
    const bool waits_for_itself = own != nullptr && own->uses(*record);
    if (waits_for_itself || !in_time) {
      throw OutOfMemory(OutOfMemory::Cause::kBudget, record->bytes,
                        "no room to keep " + format_bytes(record->bytes) + " on " +
                            to_string(Location::device(record->device)) +
                            ": an operator that has not ended uses them on the host");
    }
    lock.wait_for_a_block();
  }
}

bool knows_all() {
  Engine* const engine = engine_in_use();
  if (engine == nullptr) {
    return true;
  }
  const Engine::Lock lock(*engine); // the engine sets the tags of the blocks that it knows
  bool all = true;
  for (int device = 0; device < Context::get().runtime().device_count(); ++device) {
    Context::get().managed_allocator().min_cost_range(1, device, [&](void* tag, std::size_t bytes) {
      all = all && (tag != nullptr || bytes < relocation_min());
      return kNever;
    });
  }
  return all;
}

void make_known(const std::vector<c10::Storage>& storages) {
  Engine* const engine = engine_in_use();
  if (engine == nullptr) {
    return;
  }
  const Engine::Lock lock(*engine);
  for (const c10::Storage& each : storages) {
    c10::StorageImpl* const storage = each.unsafeGetStorageImpl();
    // Skip storages with labels: record_of may remove a label, which replaces the pointer that another thread may be
    // reading. Operators do that later.
    if (!has_owner(storage->_mutable_data_ptr_no_checks())) {
      record_of(*engine, storage);
    }
  }
}

} // namespace torch_uvm
