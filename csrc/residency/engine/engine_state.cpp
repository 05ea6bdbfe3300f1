#include "residency/engine/engine_state.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace torch_uvm {

EngineState::EngineState(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageAdapter& storages)
    : runtime(runtime),
      memory(memory),
      storages(storages),
      devices(static_cast<std::size_t>(runtime.device_count())),
      events(runtime, runtime.device_count()),
      transfers(runtime) {
  auto source = std::make_unique<PinnedSegmentSource>(runtime);
  host_source = source.get();
  host_memory = std::make_unique<CachingManagedAllocator>(runtime, std::move(source));
}

double EngineState::now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

EngineState::OwnTime::OwnTime(EngineState& state, int device)
    : state_(state), device_(device), began_(state.timer_of(device) != nullptr ? state.runtime.host_ms() : 0) {
  ++state.own_scopes;
}

EngineState::OwnTime::~OwnTime() {
  OperatorTimer* const timer = --state_.own_scopes == 0 && began_ != 0 ? state_.timer_of(device_) : nullptr;
  if (timer != nullptr) {
    timer->engine_took(state_.runtime.host_ms() - began_);
  }
}

bool EngineState::watches(int device) const {
  const Device& asked = devices[static_cast<std::size_t>(device)];
  return asked.budget && !asked.idle;
}

Record* EngineState::find(StorageId id) const {
  Record* const* const found = records.find(id);
  return found == nullptr ? nullptr : *found;
}

std::size_t EngineState::bytes_taken(const Record& record) const {
  return record.device_block != nullptr ? memory.bytes(record.device_block)
                                        : memory.bytes_taken(record.bytes, record.device);
}

void EngineState::announce(Record& record, std::size_t loop) {
  Loops& loops = of(record.device).loops;
  if (record.announced && record.loop != loop) {
    policy_of(record).freed(record.id);
    if (record.handed_over) {
      loops.join(record.loop, loop);
    }
    record.handed_over = record.loop != Loops::kUnknown;
    record.loop = loop;
    policy_of(record).created(record.id, bytes_taken(record));
    policy_of(record).pin(record.id, record.pins != 0);
  } else if (!record.announced) {
    record.announced = true;
    record.loop = loop;
    policy_of(record).created(record.id, bytes_taken(record));
    if (recorder) {
      recorder->storage(record.id, record.device, record.bytes, record.points_at == Side::kDevice);
    }
  }
}

bool EngineState::is_unread(const Record& record) const {
  return beginning != nullptr && record.operand < beginning->size() && (*beginning)[record.operand] == &record;
}

void EngineState::wait(Stream stream, Event event) {
  const Untimed untimed(*this, stream);
  runtime.wait_event(stream, event);
}

bool EngineState::reached(Event& event) noexcept {
  try {
    return !event || runtime.query_event(event);
  } catch (...) {
    return false; // the caller then waits for the event, and the error surfaces there
  }
}

void EngineState::recycle_event(int device, Event& event) noexcept {
  if (event) {
    events.give(Stream::default_of(device), event);
    event = Event{};
  }
}

void EngineState::recycle_block_ready(Record& record) noexcept {
  if (record.block_ready) {
    memory.recycle_event(Stream::default_of(record.device), record.block_ready);
    record.block_ready = Event{};
  }
}

bool EngineState::is_read(Record& record) {
  // Write-backs share one stream, so one that is done implies that all earlier ones are. Each query is a driver call.
  std::uint64_t& done = of(record.device).write_backs_read;
  if (record.write_back > done && reached(was_read(record))) {
    done = record.write_back;
  }
  return record.write_back <= done;
}

std::size_t EngineState::allocated_bytes(int device) const {
  return memory.allocated_bytes(Location::device(device));
}

std::int64_t EngineState::take_allocated_peak(int device) {
  Allocated& known = of(device).allocated;
  std::size_t most = known.bytes;
  if (known.changes != memory.allocation_changes(device)) {
    const CachingManagedAllocator::AllocatedPeak peak = memory.take_allocated_peak(device);
    known = {peak.now, peak.changes};
    most = peak.most;
  }
  return static_cast<std::int64_t>(most);
}

void EngineState::begin_workspace(int device, StorageId first_new) {
  take_allocated_peak(device);
  of(device).workspace = {.first_new = first_new};
}

void EngineState::note_workspace(int device, std::int64_t bytes) {
  Workspace& workspace = of(device).workspace;
  const std::int64_t peak = take_allocated_peak(device) - of(device).held_bytes;
  of(device).note_level(static_cast<std::size_t>(peak), operators);
  // `ours` does not include this change yet. A block just freed still counts in both `peak` and `ours`. A block just
  // allocated counts only in `peak`, so its bytes are subtracted.
  workspace.peak = std::max(workspace.peak, peak - workspace.ours - std::max<std::int64_t>(bytes, 0));
  workspace.ours += bytes;
}

std::size_t EngineState::end_workspace(int device) {
  note_workspace(device, 0);
  const Workspace& workspace = of(device).workspace;
  const std::int64_t now = static_cast<std::int64_t>(of(device).allocated.bytes) - workspace.ours + workspace.freed;
  return static_cast<std::size_t>(std::max<std::int64_t>(workspace.peak - now, 0));
}

void EngineState::no_longer_ahead(const Record& record) noexcept {
  Device& device = of(record.device);
  device.fetched_ahead -= record.fetch_round == device.fetch_round ? record.bytes : 0;
}

void EngineState::fetch_again(const Record& record) {
  const double next = policy_of(record).next_use_on_device(record.id);
  if (std::isfinite(next)) {
    of(record.device).unforeseen.emplace(operators + static_cast<std::uint64_t>(std::max(next, 0.0)), record.id);
  }
}

} // namespace torch_uvm
