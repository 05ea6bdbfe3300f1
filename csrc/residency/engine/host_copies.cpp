// Pinned memory for host copies.
#include <tuple>

#include "residency/engine/copies.h"

namespace torch_uvm {

Block* Copies::host_block(const Record& record, Stream stream) {
  const auto cached = [&] {
    return state_.host_memory->try_allocate(record.bytes, Location::host(), stream,
                                            CachingManagedAllocator::Try::kCached);
  };
  if (Block* const block = cached()) {
    return block;
  }
  // Pinning new memory takes longer than all else here. A copy that is outdated is of no use until the next write-back.
  if (Record* const outdated = outdated_host_copy(record.bytes)) {
    state_.host_memory->free_idle(outdated->host_block, stream);
    forget_host_copy(*outdated);
    if (Block* const block = cached()) {
      return block;
    }
  }
  for (;;) {
    try {
      return state_.host_memory->allocate(record.bytes, Location::host(), stream);
    } catch (const OutOfMemory&) {
      // Drop a host copy of a storage that is used on the device, and no more than needed: each saves a write-back.
      Record* const spare = spare_host_copy(record.bytes);
      if (spare == nullptr) {
        return nullptr;
      }
      drop_host_copy(*spare);
    }
  }
}

Record* Copies::spare_host_copy(std::size_t bytes) {
  Record* best = nullptr;
  const auto rank = [&](const Record& other) { // outdated ones first, then the smallest of those that suffice
    return std::tuple(other.host_valid, other.bytes < bytes, other.bytes < bytes ? bytes - other.bytes : other.bytes);
  };
  for (const auto& [id, other] : state_.records) {
    if (other->host_block != nullptr && other->points_at == Side::kDevice && !other->retiring &&
        (best == nullptr || rank(*other) < rank(*best))) {
      best = other;
    }
  }
  return best;
}

Record* Copies::outdated_host_copy(std::size_t bytes) {
  Record* smallest = nullptr;
  for (const auto& [id, other] : state_.records) {
    const bool outdated = other->host_block != nullptr && !other->host_valid;
    if (outdated && other->bytes >= bytes && other->bytes <= 2 * bytes &&
        (smallest == nullptr || other->bytes < smallest->bytes) && other->in_place_streams.empty() &&
        state_.reached(other->host_ready) && state_.reached(other->device_ready)) { // no work uses it any more
      smallest = other;
    }
  }
  return smallest;
}

void Copies::drop_host_copy(Record& record) noexcept {
  state_.host_memory->free(record.host_block);
  forget_host_copy(record);
}

void Copies::forget_host_copy(Record& record) noexcept {
  record.host_block = nullptr;
  record.host_valid = false;
  record.retiring = false;
  record.in_place_streams.clear();
  state_.recycle_event(record.device, record.host_ready);
  state_.recycle_block_ready(record);
}

} // namespace torch_uvm
