// Copies between device and host: write-backs, evictions, fetches, and uses on either side. The choice of victims is in
// room.cpp.
#include <algorithm>
#include <utility>

#include "residency/engine/residency_engine.h"

namespace torch_uvm {
namespace {

/// The staging buffer if it can be used; nullptr: copy directly.
Staging* ready(const std::unique_ptr<Staging>& staging) noexcept {
  return staging && staging->is_ready() ? staging.get() : nullptr;
}

} // namespace

bool ResidencyEngine::is_unread(const Record& record) const {
  return beginning_ != nullptr && record.operand < beginning_->operands.size() &&
         beginning_->operands[record.operand] == &record;
}

bool ResidencyEngine::claim_address(Record& record, Mover mover) {
  const bool stays = mover == Mover::kOperator && record.range != nullptr && !record.shows_pinned && !record.dead;
  if (!stays && !address_may_change(record, mover)) {
    return false;
  }
  if (!storages_.lock_if_sole_owner(record, locked_)) {
    mark_unmovable(record); // other storages share its bytes, or it is being destroyed
    return false;
  }
  return true;
}

void ResidencyEngine::order(const std::vector<Stream>& earlier, Stream later) {
  for (const Stream stream : earlier) {
    const bool just_used = stream == just_used_;
    if (stream == later || (just_used && std::ranges::find(behind_, later) != behind_.end())) {
      continue;
    }
    if (just_used || !runtime_.query_stream(stream)) {
      Event event = events_.record(stream);
      try {
        wait(later, event);
      } catch (...) {
        recycle_event(stream.device, event);
        throw;
      }
      recycle_event(stream.device, event);
    }
    if (just_used) {
      behind_.push_back(later);
    }
  }
}

bool ResidencyEngine::is_host_copy_ready(Record& record) {
  if (!reached(record.host_ready)) {
    return false;
  }
  recycle_event(record.device, record.host_ready); // each query is a driver call: do not repeat it
  return true;
}

Block* ResidencyEngine::host_block(std::size_t bytes, Stream stream) {
  if (Block* const block = host_memory_->try_allocate(bytes, Location::host(), stream)) {
    return block;
  }
  try {
    return host_memory_->allocate(bytes, Location::host(), stream);
  } catch (const OutOfMemory&) {
    // Drop host copies of storages that are used on the device. They only save a later write-back.
    for (const auto& [id, record] : records_) {
      if (record->host_block != nullptr && record->points_at == Side::kDevice && !record->retiring) {
        drop_host_copy(*record);
      }
    }
  }
  try {
    return host_memory_->allocate(bytes, Location::host(), stream);
  } catch (const OutOfMemory&) {
    return nullptr;
  }
}

bool ResidencyEngine::start_write_back(Record& record) {
  const Stream stream = of(record.device).write_backs;
  // Only copies of managed memory need staging.
  Staging* const staging = record.range != nullptr ? nullptr : ready(of(record.device).outgoing);
  const Stream link = staging != nullptr ? staging->link() : stream;
  if (record.host_block == nullptr) {
    record.host_block = host_block(record.bytes, link);
    host_refused_ = record.host_block == nullptr;
    if (host_refused_) {
      return false;
    }
  }
  host_memory_->record_stream(record.host_block, link);
  if (!is_host_copy_ready(record)) {
    wait(link, record.host_ready); // an earlier copy may have used another stream (staged or direct)
  }
  for (const Stream used : memory_.streams(record.device_block)) {
    add_stream(record.streams, used);
  }
  order(record.streams, stream);
  record.written_back_after = record.streams;
  recycle_block_ready(record);
  record.block_ready = memory_.take_event(stream); // to free the block with
  try {
    transfers_.copy(Transfers::Kind::kWriteBack, host_memory_->data(record.host_block),
                    memory_.data(record.device_block), record.bytes, stream, staging, recorder_ != nullptr,
                    record.block_ready);
    recycle_event(record.device, record.host_ready);
    record.host_ready = events_.record(link);
  } catch (...) {
    drop_host_copy(record); // part of the copy may be queued, and the next one may use another stream
    throw;
  }
  record.write_back = ++of(record.device).write_backs_started;
  record.host_valid = true;
  record.streams.clear();
  record.in_place_streams.clear();
  note_move(TransferKind::kWriteBack, record);
  return true;
}

void ResidencyEngine::note_owners(Record& record) {
  for (const Stream stream : memory_.streams(record.device_block)) {
    if (stream != of(record.device).fetches && stream != of(record.device).write_backs) {
      add_stream(record.owners, stream);
    }
  }
}

void ResidencyEngine::record_owners(const Record& record) {
  for (const Stream stream : record.owners) {
    memory_.record_stream(record.device_block, stream); // nothing for the stream that the block belongs to
  }
}

bool ResidencyEngine::release_device_copy(Record& record, Stream taker) {
  if (!claim_address(record, Mover::kEngine)) {
    return false;
  }
  note_owners(record);
  Block* const block = record.device_block;
  const bool only_copied = record.block_ready && !is_used_since(record); // since the write-back began
  if (record.range != nullptr) {
    take_memory(record);
  } else if (!only_copied) {
    const Stream next = taker.is_host() ? of(record.device).write_backs : taker;
    if (!is_read(record) && next != of(record.device).write_backs) {
      wait(next, was_read(record));
    }
    // Also wait for streams that used the block after the write-back began, and for those added by `record_stream`.
    order(record.streams, next);
    for (const Stream used : memory_.streams(block)) {
      if (std::ranges::find(record.written_back_after, used) == record.written_back_after.end() &&
          std::ranges::find(record.streams, used) == record.streams.end()) {
        order({used}, next);
      }
    }
    memory_.hand_over(block, next);
  }
  memory_.set_tag(block, nullptr);
  record.device_block = nullptr;
  record.retiring = false;
  record.points_at = Side::kHost;
  record.streams.clear();
  recycle_event(record.device, record.device_ready);
  const bool has_range = record.range != nullptr;
  storages_.point_at_host(record, has_range ? memory_.data(block) : host_memory_->data(record.host_block));
  const auto bytes = static_cast<std::int64_t>(memory_.bytes(block));
  if (has_range) {
    // It keeps the block.
  } else if (!only_copied) {
    memory_.free(block);
  } else if (is_read(record)) { // the write-back waited for all other work on the block
    memory_.free_idle(block, taker.is_host() ? of(record.device).write_backs : taker);
  } else { // the block's next user waits for the write-back only, not for all queued work
    memory_.free_after(block, std::exchange(record.block_ready, Event{}), of(record.device).write_backs);
  }
  note_workspace(record.device, -bytes);
  return true;
}

void ResidencyEngine::take_sole_ownership(Record& record) {
  if (storages_.take_sole_ownership(record, locked_)) {
    record.host_valid = false;
    record.retiring = false;
  }
}

bool ResidencyEngine::evict(Record& record, Stream taker) {
  if (record.fetching()) {
    abandon_fetch(record);
    fetch_again(record);
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
    ++statistics_.dropped_clean.count;
    statistics_.dropped_clean.bytes += static_cast<std::int64_t>(record.bytes);
    note_move(TransferKind::kDrop, record);
  }
  if (!planned) {
    fetch_again(record);
  }
  return true;
}

bool ResidencyEngine::start_fetch(Record& record, Need need, Stream stream) {
  const Untimed untimed(*this, stream);
  const bool has_range = record.range != nullptr;
  Block* const block =
      has_range ? memory_for(record, need, stream) : room_for(record.bytes, record.device, need, stream);
  if (block == nullptr) {
    return false;
  }
  // Stage prefetches only. An operator's own fetch would occupy its slot until earlier operators finish, and block
  // prefetches meanwhile.
  const bool stages = stream == of(record.device).fetches && !has_range;
  Staging* const staging = stages ? ready(of(record.device).incoming) : nullptr;
  const Stream link = staging != nullptr ? staging->link() : stream;
  try {
    host_memory_->record_stream(record.host_block, link);
    if (!is_host_copy_ready(record)) {
      wait(link, record.host_ready);
    }
    order(record.in_place_streams, link);
    transfers_.copy(Transfers::Kind::kFetch, memory_.data(block), host_memory_->data(record.host_block), record.bytes,
                    stream, staging, recorder_ != nullptr);
    record.device_ready = events_.record(stream);
    record.ready_on = stream;
  } catch (...) {
    has_range ? take_unused_memory(record, stream) : memory_.free(block);
    throw;
  }
  record.device_block = block;
  record.fetch_round = of(record.device).fetch_round;
  of(record.device).fetched_ahead += record.bytes;
  memory_.set_tag(block, &record);
  note_workspace(record.device, static_cast<std::int64_t>(memory_.bytes(block)));
  record.streams.assign(1, stream);
  note_move(TransferKind::kFetch, record);
  return true;
}

void ResidencyEngine::abandon_fetch(Record& record) noexcept {
  // The block was allocated on the fetch's stream, so its next use is ordered after the copy.
  memory_.set_tag(record.device_block, nullptr);
  record.range != nullptr ? take_unused_memory(record, record.ready_on) : memory_.free(record.device_block);
  record.device_block = nullptr;
  no_longer_ahead(record);
  // The workspace is not corrected for the freed block: abandoned fetches are rare.
  record.streams.clear();
  recycle_event(record.device, record.device_ready);
}

void ResidencyEngine::mark_use(Record& record, bool writes) noexcept {
  if (record.points_at == Side::kDevice) {
    // Without watched operators, each use may be followed by writes that nothing reports.
    record.host_valid = record.host_valid && !writes && watches(record.device);
    record.retiring = false; // it is in use again
  }
}

void ResidencyEngine::wait_here(Record& record) noexcept {
  for (const Event event : {record.host_ready, record.device_ready}) {
    try {
      if (event) {
        runtime_.synchronize_event(event);
      }
    } catch (...) {
      ++failures_; // the device has failed; the operator will report it
    }
  }
}

bool ResidencyEngine::bring_to_device(Record& record, Stream stream, Need need) {
  if (record.points_at == Side::kDevice) {
    return true;
  }
  const bool stays = record.range != nullptr && !record.shows_pinned;
  if ((!stays && !address_may_change(record, Mover::kOperator)) ||
      (record.device_block == nullptr && !start_fetch(record, need, stream))) {
    return false;
  }
  if (!claim_address(record, Mover::kOperator)) {
    abandon_fetch(record);
    return false;
  }
  storages_.point_at_device(record, record.device_block);
  record.points_at = Side::kDevice;
  record.shows_pinned = false;
  no_longer_ahead(record);
  return true;
}

void ResidencyEngine::use_on_device(Record& record, Stream stream, bool writes) {
  const bool was_on_host = record.points_at == Side::kHost;
  if (!bring_to_device(record, stream) && !bring_anyway(record, stream)) {
    use_in_place(record, stream, writes);
    return;
  }
  mark_use(record, writes); // before anything that may throw: an unnoticed write would be lost
  if (record.device_ready && record.ready_on != stream) {
    if (reached(record.device_ready)) {
      recycle_event(record.device, record.device_ready); // each query is a driver call: do not repeat it
    } else {
      wait(stream, record.device_ready);
      record.ready_on = stream;
    }
  }
  if (record.streams.size() == 1 && record.streams.front() == of(record.device).fetches) {
    memory_.hand_over(record.device_block, stream); // only the fetch has used the block, and `stream` waits for it
    record.streams.clear();
  }
  if (was_on_host) {
    record_owners(record);
  }
  add_stream(record.streams, stream);
}

void ResidencyEngine::use_in_place(Record& record, Stream stream, bool writes) {
  if (record.points_at == Side::kDevice) {
    use_on_device(record, stream, writes);
    return;
  }
  if (record.range != nullptr && !record.shows_pinned) {
    show_pinned(record);
  }
  if (record.fetching()) {
    if (!writes) {
      // Both only read the host copy, so the fetch may go on.
    } else {
      wait(stream, record.device_ready); // the fetch must finish reading before the operator writes
      abandon_fetch(record);
    }
  }
  if (!is_host_copy_ready(record)) {
    wait(stream, record.host_ready);
  }
  host_memory_->record_stream(record.host_block, stream);
  add_stream(record.in_place_streams, stream);
  ++statistics_.used_in_place.count;
  statistics_.used_in_place.bytes += static_cast<std::int64_t>(record.bytes);
  note_move(TransferKind::kInPlace, record);
}

void ResidencyEngine::note_move(TransferKind kind, const Record& record) noexcept {
  if (recorder_) {
    const std::uint64_t number = recorder_->transfer(kind, record.id, record.bytes, now_us());
    if (kind == TransferKind::kFetch || kind == TransferKind::kWriteBack) {
      transfers_.record_latest(*recorder_, number);
    }
  }
  if (AllocationSites::get().asked()) {
    AllocationSites::get().moved(kind, record.site, record.bytes);
  }
}

void ResidencyEngine::drop_host_copy(Record& record) noexcept {
  host_memory_->free(record.host_block);
  record.host_block = nullptr;
  record.host_valid = false;
  record.retiring = false;
  record.in_place_streams.clear();
  recycle_event(record.device, record.host_ready);
  recycle_block_ready(record);
}

} // namespace torch_uvm
