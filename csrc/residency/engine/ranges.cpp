// Storages whose block is an address range: a fetch gives the range memory, and an eviction takes it away. The address
// that the storage shows stays the same.
//
// Taking memory away is not ordered on streams. So an eviction lets the write-back stream wait for all users, records
// an event there, and the host takes the memory after that event. A planned eviction is polled for it
// (fetches_ahead.cpp). For an eviction that is needed at once, the host waits.
#include <algorithm>
#include <chrono>

#include "residency/engine/residency_engine.h"

namespace torch_uvm {
namespace {

/// Number of attempts to find memory: another thread may take what was freed.
constexpr int kTries = 8;

} // namespace

bool ResidencyEngine::is_used_since(const Record& record) const {
  return !record.streams.empty() || std::ranges::any_of(memory_.streams(record.device_block), [&](Stream used) {
    return std::ranges::find(record.written_back_after, used) == record.written_back_after.end();
  });
}

void ResidencyEngine::note_last_use(Record& record) {
  Device& device = of(record.device);
  for (const Stream used : memory_.streams(record.device_block)) {
    add_stream(record.streams, used);
  }
  order(record.streams, device.write_backs);
  const Event event = memory_.take_event(device.write_backs);
  try {
    runtime_.record_event(event, device.write_backs);
  } catch (...) {
    memory_.recycle_event(device.write_backs, event);
    throw;
  }
  recycle_block_ready(record);
  record.block_ready = event;
  record.written_back_after.swap(record.streams);
  record.streams.clear();
  record.write_back = ++device.write_backs_started;
}

void ResidencyEngine::take_memory(Record& record) {
  if (!record.block_ready || is_used_since(record)) {
    note_last_use(record);
  }
  if (!is_read(record)) {
    const double began = now_us();
    runtime_.synchronize_event(record.block_ready);
    ++statistics_.waited.count;
    statistics_.waited.bytes += static_cast<std::int64_t>(record.bytes);
    statistics_.waited.ms += (now_us() - began) / 1e3;
  }
  memory_.detach(record.range);
}

void ResidencyEngine::take_unused_memory(Record& record, Stream stream) noexcept {
  try {
    runtime_.synchronize_stream(stream); // the fetch writes to the range
    memory_.detach(record.range);
  } catch (...) {
    ++failures_;
  }
}

void ResidencyEngine::keep_until_read(Record& record) noexcept {
  if (!record.block_ready || reached(record.block_ready)) {
    return;
  }
  try {
    memory_.record_stream(record.device_block, of(record.device).write_backs);
  } catch (...) { // no host memory for the record
    ++failures_;
    wait_here(record);
  }
}

Block* ResidencyEngine::memory_for(Record& record, Need need, Stream stream) {
  using Room = CachingManagedAllocator::Room;
  if (need == Need::kAnyway) {
    return memory_.attach(record.range, stream, Room::kOverCap) ? record.range : nullptr;
  }
  for (int tries = 0; tries < kTries; ++tries) {
    if (memory_.attach(record.range, stream, Room::kNow)) {
      return record.range;
    }
    if (need == Need::kToStay || !evict_range(record.bytes, record.device, need, stream)) {
      break;
    }
  }
  return need != Need::kAhead && memory_.attach(record.range, stream, Room::kWait) ? record.range : nullptr;
}

bool ResidencyEngine::evict_for_range(std::size_t bytes, int device, Need need, Stream taker) {
  const std::optional<std::vector<Record*>> victims = min_cost_range(bytes, device, need);
  return victims && evict_all(*victims, taker);
}

bool ResidencyEngine::bring_anyway(Record& record, Stream stream) {
  if (record.range == nullptr || record.shows_pinned || !bring_to_device(record, stream, Need::kAnyway)) {
    return false;
  }
  Device& device = of(record.device);
  device.exceeded = device.exceeded || device.hard; // returned to after the operator
  device.mapped_beyond = device.exceeded;
  device.excess = device.excess || !device.hard;
  ++statistics_.over_budget;
  return true;
}

void ResidencyEngine::show_pinned(Record& record) {
  if (!storages_.lock_if_sole_owner(record, locked_)) {
    return; // it is being destroyed
  }
  storages_.point_at_host(record, host_memory_->data(record.host_block));
  record.shows_pinned = true;
  ++failures_;
}

} // namespace torch_uvm
