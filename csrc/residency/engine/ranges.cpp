// Storages whose block is an address range: a fetch gives the range memory, and an eviction takes it away. The address
// that the storage shows stays the same.
//
// An operator that uses the host copy in place finds it at that address, too: its memory is mapped into the range. It
// stays there until the next fetch, because mapping pinned memory takes half of the time that a copy takes.
//
// Taking memory away is not ordered on streams. So an eviction lets the write-back stream wait for all users, and
// records an event there. A planned eviction is polled for it (fetches_ahead.cpp). In one that is needed at once, the
// memory goes to the next user, whose stream waits for that event, before it has left this storage.
#include <algorithm>

#include "residency/engine/copies.h"

namespace torch_uvm {

bool Copies::is_used_since(const Record& record) const {
  return !record.streams.empty() || std::ranges::any_of(state_.memory.streams(record.device_block), [&](Stream used) {
    return std::ranges::find(record.written_back_after, used) == record.written_back_after.end();
  });
}

void Copies::note_last_use(Record& record) {
  Device& device = state_.of(record.device);
  for (const Stream used : state_.memory.streams(record.device_block)) {
    add_stream(record.streams, used);
  }
  order(record.streams, device.write_backs);
  const Event event = state_.memory.take_event(device.write_backs);
  try {
    state_.runtime.record_event(event, device.write_backs);
  } catch (...) {
    state_.memory.recycle_event(device.write_backs, event);
    throw;
  }
  state_.recycle_block_ready(record);
  record.block_ready = event;
  record.written_back_after.swap(record.streams);
  record.streams.clear();
  record.write_back = ++device.write_backs_started;
}

void Copies::take_memory(Record& record) {
  if (!record.block_ready || is_used_since(record)) {
    note_last_use(record);
  }
  if (state_.is_read(record)) {
    state_.memory.detach(record.range);
    return;
  }
  state_.memory.detach_after(record.range, record.block_ready, state_.of(record.device).write_backs);
  record.block_ready = Event{}; // the allocator's
}

void Copies::take_unused_memory(Record& record, Stream stream) noexcept {
  try {
    state_.runtime.synchronize_stream(stream); // the fetch writes to the range
    state_.memory.detach(record.range);
  } catch (...) {
    ++state_.failures;
  }
}

void Copies::keep_until_read(Record& record) noexcept {
  if (!record.block_ready || state_.reached(record.block_ready)) {
    return;
  }
  try {
    state_.memory.record_stream(record.device_block, state_.of(record.device).write_backs);
  } catch (...) { // no host memory for the record
    ++state_.failures;
    wait_here(record);
  }
}

void Copies::map_host_copy(Record& record) {
  try {
    state_.memory.map_host_copy(record.range, record.host_block);
    record.in_place = true;
  } catch (...) {
    show_pinned(record);
  }
}

bool Copies::leave_host_copy(Record& record, Mover mover) {
  if (!claim_address(record, mover)) {
    return false;
  }
  unmap_after_uses(record);
  return true;
}

void Copies::unmap_host_copy(Record& record) noexcept {
  try {
    unmap_after_uses(record);
  } catch (...) {
    ++state_.failures; // the addresses are not used again
    record.in_place = false;
  }
}

void Copies::unmap_after_uses(Record& record) {
  const Stream after = state_.of(record.device).write_backs; // as for other memory that leaves ranges, so in its order
  order(record.in_place_streams, after);
  order(record.owners, after);
  const Event event = state_.memory.take_event(after);
  try {
    state_.runtime.record_event(event, after);
    state_.memory.unmap_host_copy(record.range, event, after);
  } catch (...) {
    state_.memory.recycle_event(after, event);
    throw;
  }
  record.in_place = false;
}

void Copies::show_pinned(Record& record) {
  if (!state_.storages.lock_if_sole_owner(record, state_.locked)) {
    return; // it is being destroyed
  }
  state_.storages.point_at_host(record, state_.host_memory->data(record.host_block));
  record.shows_pinned = true;
  ++state_.failures;
}

} // namespace torch_uvm
