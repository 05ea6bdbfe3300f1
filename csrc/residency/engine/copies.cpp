// Copies between device and host: write-backs, evictions, fetches, and uses on either side. The choice of victims is in
// room.cpp.
#include "residency/engine/copies.h"

#include <algorithm>
#include <utility>

#include "allocator/invariants.h"
#include "residency/trace/allocation_sites.h"

namespace torch_uvm {
namespace {

/// The staging buffer if it can be used; nullptr: copy directly.
Staging* ready(const std::unique_ptr<Staging>& staging) noexcept {
  return staging && staging->is_ready() ? staging.get() : nullptr;
}

} // namespace

bool Copies::claim_address(Record& record, Mover mover) {
  if (!state_.address_may_change(record, mover)) {
    return false;
  }
  if (!state_.storages.lock_if_sole_owner(record, state_.locked)) {
    state_.mark_unmovable(record); // other storages share its bytes, or it is being destroyed
    return false;
  }
  return true;
}

void Copies::order(const std::vector<Stream>& earlier, Stream later) {
  for (const Stream stream : earlier) {
    const bool just_used = stream == just_used_;
    if (stream == later || (just_used && std::ranges::find(behind_, later) != behind_.end())) {
      continue;
    }
    if (just_used || !state_.runtime.query_stream(stream)) {
      Event event = state_.events.record(stream);
      try {
        state_.wait(later, event);
      } catch (...) {
        state_.recycle_event(stream.device, event);
        throw;
      }
      state_.recycle_event(stream.device, event);
    }
    if (just_used) {
      behind_.push_back(later);
    }
  }
}

bool Copies::is_host_copy_ready(Record& record) {
  if (!state_.reached(record.host_ready)) {
    return false;
  }
  state_.recycle_event(record.device, record.host_ready); // each query is a driver call: do not repeat it
  return true;
}

bool Copies::start_write_back(Record& record) {
  expect(record.points_at == Side::kDevice, "a write-back from the device, where the storage points");
  const Stream stream = state_.of(record.device).write_backs;
  Staging* const staging = ready(state_.of(record.device).outgoing);
  const Stream link = staging != nullptr ? staging->link() : stream;
  if (record.host_block == nullptr) {
    record.host_block = host_block(record, link);
    state_.host_refused = record.host_block == nullptr;
    if (state_.host_refused) {
      return false;
    }
  }
  state_.storages.watch_for_writes(record, state_.locked); // they would miss the host copy, or come before its bytes
  state_.host_memory->record_stream(record.host_block, link);
  if (!is_host_copy_ready(record)) {
    state_.wait(link, record.host_ready); // an earlier copy may have used another stream (staged or direct)
  }
  for (const Stream used : state_.memory.streams(record.device_block)) {
    add_stream(record.streams, used);
  }
  order(record.streams, stream);
  record.written_back_after = record.streams;
  state_.recycle_block_ready(record);
  record.block_ready = state_.memory.take_event(stream); // to free the block with
  try {
    state_.transfers.copy(Transfers::Kind::kWriteBack, state_.host_memory->data(record.host_block),
                          state_.memory.data(record.device_block), record.bytes, stream, staging,
                          state_.recorder != nullptr, record.block_ready);
    state_.recycle_event(record.device, record.host_ready);
    record.host_ready = state_.events.record(link);
  } catch (...) {
    drop_host_copy(record); // part of the copy may be queued, and the next one may use another stream
    throw;
  }
  record.write_back = ++state_.of(record.device).write_backs_started;
  record.host_valid = true;
  record.streams.clear();
  record.in_place_streams.clear();
  note_move(TransferKind::kWriteBack, record);
  return true;
}

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

void Copies::note_owners(Record& record) {
  for (const Stream stream : state_.memory.streams(record.device_block)) {
    if (stream != state_.of(record.device).fetches && stream != state_.of(record.device).write_backs) {
      add_stream(record.owners, stream);
    }
  }
}

void Copies::record_owners(const Record& record) {
  for (const Stream stream : record.owners) {
    state_.memory.record_stream(record.device_block, stream); // nothing for the stream that the block belongs to
  }
}

bool Copies::release_device_copy(Record& record, Stream taker) {
  if (!claim_address(record, Mover::kEngine)) {
    return false;
  }
  expect(record.points_at == Side::kDevice && record.host_valid, "a device copy is released for a valid host copy");
  note_owners(record);
  Block* const block = record.device_block;
  const bool only_copied = record.block_ready && !is_used_since(record); // since the write-back began
  if (!only_copied) {
    const Stream next = taker.is_host() ? state_.of(record.device).write_backs : taker;
    if (!state_.is_read(record) && next != state_.of(record.device).write_backs) {
      state_.wait(next, state_.was_read(record));
    }
    // Also wait for streams that used the block after the write-back began, and for those added by `record_stream`.
    order(record.streams, next);
    for (const Stream used : state_.memory.streams(block)) {
      if (std::ranges::find(record.written_back_after, used) == record.written_back_after.end() &&
          std::ranges::find(record.streams, used) == record.streams.end()) {
        order({used}, next);
      }
    }
    state_.memory.hand_over(block, next);
  }
  state_.memory.set_tag(block, nullptr);
  record.device_block = nullptr;
  record.retiring = false;
  record.points_at = Side::kHost;
  record.streams.clear();
  state_.recycle_event(record.device, record.device_ready);
  state_.storages.point_at_host(record, state_.host_memory->data(record.host_block));
  const auto bytes = static_cast<std::int64_t>(state_.memory.bytes(block));
  if (!only_copied) {
    state_.memory.free(block);
  } else if (state_.is_read(record)) { // the write-back waited for all other work on the block
    state_.memory.free_idle(block, taker.is_host() ? state_.of(record.device).write_backs : taker);
  } else { // the block's next user waits for the write-back only, not for all queued work
    state_.memory.free_after(block, std::exchange(record.block_ready, Event{}), state_.of(record.device).write_backs);
  }
  state_.note_workspace(record.device, -bytes);
  return true;
}

void Copies::take_sole_ownership(Record& record) {
  if (state_.storages.take_sole_ownership(record, state_.locked)) {
    record.host_valid = false;
    record.retiring = false;
  }
}

bool Copies::evict(Record& record, Stream taker) {
  if (record.fetching()) {
    abandon_fetch(record);
    state_.fetch_again(record);
    return true;
  }
  take_sole_ownership(record);
  const bool clean = record.host_valid && !record.retiring;
  const bool planned = record.retiring;
  if (!record.host_valid && !start_write_back(record)) {
    return false;
  }
  if (!release_device_copy(record, taker)) {
    return false;
  }
  if (clean) {
    ++state_.statistics.dropped_clean.count;
    state_.statistics.dropped_clean.bytes += static_cast<std::int64_t>(record.bytes);
    note_move(TransferKind::kDrop, record);
  }
  if (!planned) {
    state_.fetch_again(record);
  }
  return true;
}

bool Copies::start_fetch(Record& record, Need need, Stream stream) {
  expect(record.points_at == Side::kHost && record.host_valid && record.device_block == nullptr,
         "a fetch of a valid host copy, of which there is none yet");
  const EngineState::Untimed untimed(state_, stream);
  Block* const block = places_.room_for(record.bytes, record.device, need, stream);
  if (block == nullptr) {
    return false;
  }
  // Stage prefetches only. An operator's own fetch would occupy its slot until earlier operators finish, and block
  // prefetches meanwhile.
  const bool stages = stream == state_.of(record.device).fetches;
  Staging* const staging = stages ? ready(state_.of(record.device).incoming) : nullptr;
  const Stream link = staging != nullptr ? staging->link() : stream;
  try {
    state_.storages.watch_for_writes(record, state_.locked); // they would miss the device copy
    state_.host_memory->record_stream(record.host_block, link);
    if (!is_host_copy_ready(record)) {
      state_.wait(link, record.host_ready);
    }
    order(record.in_place_streams, link);
    state_.transfers.copy(Transfers::Kind::kFetch, state_.memory.data(block),
                          state_.host_memory->data(record.host_block), record.bytes, stream, staging,
                          state_.recorder != nullptr);
    record.device_ready = state_.events.record(stream);
    record.ready_on = stream;
  } catch (...) {
    state_.memory.free(block);
    throw;
  }
  record.device_block = block;
  record.fetch_round = state_.of(record.device).fetch_round;
  state_.of(record.device).fetched_ahead += record.bytes;
  state_.memory.set_tag(block, &record);
  state_.note_workspace(record.device, static_cast<std::int64_t>(state_.memory.bytes(block)));
  record.streams.assign(1, stream);
  note_move(TransferKind::kFetch, record);
  return true;
}

void Copies::abandon_fetch(Record& record) noexcept {
  expect(record.fetching(), "an abandoned fetch has begun");
  // The block was allocated on the fetch's stream, so its next use is ordered after the copy.
  state_.memory.set_tag(record.device_block, nullptr);
  state_.memory.free(record.device_block);
  record.device_block = nullptr;
  state_.no_longer_ahead(record);
  // The workspace is not corrected for the freed block: abandoned fetches are rare.
  record.streams.clear();
  state_.recycle_event(record.device, record.device_ready);
}

void Copies::mark_use(Record& record, bool writes) noexcept {
  if (record.points_at == Side::kDevice) {
    // Without watched operators, each use may be followed by writes that nothing reports.
    record.host_valid = record.host_valid && !writes && state_.watches(record.device);
    record.retiring = false; // it is in use again
  }
}

void Copies::wait_here(Record& record) noexcept {
  for (const Event event : {record.host_ready, record.device_ready}) {
    try {
      if (event) {
        state_.runtime.synchronize_event(event);
      }
    } catch (...) {
      ++state_.failures; // the device has failed; the operator will report it
    }
  }
}

bool Copies::bring_to_device(Record& record, Stream stream, Need need) {
  if (record.points_at == Side::kDevice) {
    return true;
  }
  if (!state_.address_may_change(record, Mover::kOperator) ||
      (record.device_block == nullptr && !start_fetch(record, need, stream))) {
    return false;
  }
  if (!claim_address(record, Mover::kOperator)) {
    abandon_fetch(record);
    return false;
  }
  state_.storages.point_at_device(record, record.device_block);
  record.points_at = Side::kDevice;
  state_.no_longer_ahead(record);
  return true;
}

void Copies::use_on_device(Record& record, Stream stream, bool writes) {
  const bool was_on_host = record.points_at == Side::kHost;
  if (!bring_to_device(record, stream)) {
    use_in_place(record, stream, writes);
    return;
  }
  mark_use(record, writes); // before anything that may throw: an unnoticed write would be lost
  if (record.device_ready && record.ready_on != stream) {
    if (state_.reached(record.device_ready)) {
      state_.recycle_event(record.device, record.device_ready); // each query is a driver call: do not repeat it
    } else {
      state_.wait(stream, record.device_ready);
      record.ready_on = stream;
    }
  }
  if (record.streams.size() == 1 && record.streams.front() == state_.of(record.device).fetches) {
    state_.memory.hand_over(record.device_block,
                            stream); // only the fetch has used the block, and `stream` waits for it
    record.streams.clear();
  }
  if (was_on_host) {
    record_owners(record);
  }
  add_stream(record.streams, stream);
}

void Copies::use_in_place(Record& record, Stream stream, bool writes) {
  if (record.points_at == Side::kDevice) {
    use_on_device(record, stream, writes);
    return;
  }
  if (record.fetching() && writes) { // if both only read the host copy, the fetch may go on
    state_.wait(stream, record.device_ready); // the fetch must finish reading before the operator writes
    abandon_fetch(record);
  }
  if (!is_host_copy_ready(record)) {
    state_.wait(stream, record.host_ready);
  }
  state_.host_memory->record_stream(record.host_block, stream);
  add_stream(record.in_place_streams, stream);
  ++state_.statistics.used_in_place.count;
  state_.statistics.used_in_place.bytes += static_cast<std::int64_t>(record.bytes);
  note_move(TransferKind::kInPlace, record);
}

void Copies::note_move(TransferKind kind, const Record& record) noexcept {
  if (state_.recorder) {
    const std::uint64_t number = state_.recorder->transfer(kind, record.id, record.bytes, state_.now_us());
    if (kind == TransferKind::kFetch || kind == TransferKind::kWriteBack) {
      state_.transfers.record_latest(*state_.recorder, number);
    }
  }
  if (AllocationSites::get().asked()) {
    AllocationSites::get().moved(kind, record.site, record.bytes);
  }
}

} // namespace torch_uvm
