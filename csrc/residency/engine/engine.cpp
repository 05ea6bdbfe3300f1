// Lifetime of records, pins, recording and statistics. Operators are in operators.cpp, copies in copies.cpp.
#include "residency/engine/engine.h"

#include <chrono>

#include "allocator/invariants.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {

Engine::Lock::Lock(Engine& engine) : engine_(engine), lock_(engine_.mutex_) {
  engine_.holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

Engine::Lock::~Lock() {
  walk_if_due([this] { return engine_.check_records(); }); // the allocators check themselves
  release();
}

void Engine::Lock::release() {
  engine_.holder_.store({}, std::memory_order_relaxed);
  if (engine_.state_.locked.empty()) {
    lock_.unlock();
    return;
  }
  std::vector<void*> locked;
  locked.swap(engine_.state_.locked);
  lock_.unlock();
  for (void* const storage : locked) {
    engine_.state_.storages.release(storage); // may drop the last reference, which calls `destroyed`
  }
}

void Engine::Lock::wait_for_a_block() {
  release(); // the block waited for may belong to a storage in `state_.locked`
  engine_.state_.storages.end_finished_work();
  lock_.lock();
  engine_.freed_.wait_for(lock_, std::chrono::milliseconds(1));
  engine_.holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

Engine::Engine(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageAdapter& storages)
    : state_(runtime, memory, storages),
      copies_(state_, room_), // keeps a reference, and calls nothing yet
      room_(state_, copies_) {}

bool Engine::watches(int device) const {
  return state_.watches(device);
}

Record* Engine::record_on(const Block* block) const noexcept {
  return static_cast<Record*>(state_.memory.tag(block));
}

Record* Engine::adopt(Block* block, int device, void* storage) {
  state_.of(device).loops.start(); // a record without a budget: a pin, or a capture on any device
  auto record = std::make_unique<Record>();
  record->id = next_id_++;
  record->device = device;
  record->bytes = state_.memory.requested_bytes(block);
  record->storage = storage;
  record->adopted = state_.operators;
  record->device_block = block;
  record->site = AllocationSites::get().asked() ? AllocationSites::get().take(block) : 0;
  Record* const adopted = record.get();
  state_.records[adopted->id] = adopted;
  state_.memory.set_tag(block, record.release());
  return adopted;
}

std::pair<Record*, void*> Engine::create_on_host(std::size_t bytes, int index, Stream stream) {
  const Lock lock(*this);
  const std::optional<std::size_t> limit = state_.runtime.limit();
  if (!state_.of(index).budget || (limit && bytes > *limit)) {
    return {};
  }
  auto record = std::make_unique<Record>();
  record->device = index;
  record->bytes = bytes;
  record->in_place_streams.assign(1, stream);
  record->owners.assign(1, stream);
  record->points_at = Side::kHost;
  record->host_valid = true;
  record->adopted = state_.operators;
  record->host_block = copies_.host_block(*record, stream);
  state_.host_refused = record->host_block == nullptr;
  if (state_.host_refused) {
    return {};
  }
  record->id = next_id_++;
  state_.records[record->id] = record.get();
  state_.host_memory->set_tag(record->host_block, record.get());
  ++state_.statistics.over_budget;
  state_.note_workspace(index, -static_cast<std::int64_t>(bytes)); // next time there may be room for it on the device
  void* const ptr = state_.host_memory->data(record->host_block);
  return {record.release(), ptr};
}

Record* Engine::created_on_host_at(const void* ptr) const {
  const Block* const block = state_.host_memory->find(ptr);
  return block == nullptr ? nullptr : static_cast<Record*>(state_.host_memory->tag(block));
}

void Engine::attach(Record& record, void* storage) noexcept {
  record.storage = storage;
}

void Engine::free_if_dead(Record* record) noexcept {
  if (record->dead && record->in_use == 0) {
    state_.storages.forget(*record);
    delete record;
  }
}

void Engine::destroyed(Record* record) noexcept {
  const Lock lock(*this);
  Workspace& workspace = state_.of(record->device).workspace;
  const bool is_new = record->id >= workspace.first_new; // the operator's own, and part of its workspace
  if (record->device_block != nullptr && !record->fetching()) {
    blocks_being_freed_.fetch_add(1, std::memory_order_relaxed);
    workspace.freed += is_new ? 0 : static_cast<std::int64_t>(state_.memory.bytes(record->device_block));
  } else if (is_new && record->device_block == nullptr) { // created on the host, or evicted since
    state_.note_workspace(record->device, 0);
    workspace.ours += static_cast<std::int64_t>(record->bytes);
  }
  unregister(record);
}

void Engine::expired(Block* block) noexcept {
  const Lock lock(*this);
  auto* const record = static_cast<Record*>(state_.memory.tag(block));
  if (record != nullptr && record->pins == 0 &&
      state_.storages.is_expired(*record)) { // a pin through another label stays
    unregister(record);
  }
}

void Engine::unregister(Record* record) noexcept {
  if (record->fetching()) {
    copies_.abandon_fetch(*record);
  }
  if (record->device_block != nullptr) {
    state_.memory.set_tag(record->device_block, nullptr); // it can be looked up until the caller frees it
    record->device_block = nullptr;
  }
  if (record->host_block != nullptr) {
    copies_.drop_host_copy(*record);
  }
  state_.recycle_event(record->device, record->device_ready);
  record->dead = true;
  state_.records.erase(record->id);
  if (record->site != 0 && AllocationSites::get().asked()) {
    AllocationSites::get().gone(record->site, record->bytes);
  }
  try {
    if (record->announced) {
      state_.policy_of(*record).freed(record->id);
    }
  } catch (...) {
    ++state_.failures;
  }
  if (state_.recorder && record->announced) {
    state_.recorder->death(record->id);
  }
  free_if_dead(record);
}

void Engine::freed() noexcept {
  blocks_being_freed_.fetch_sub(1, std::memory_order_relaxed);
  freed_.notify_all();
}

void Engine::materialise(Record* record, Stream stream) {
  Event waited;
  const std::size_t bytes = record->bytes;
  {
    const Lock lock(*this);
    if (record->fetching()) {
      copies_.abandon_fetch(*record);
    }
    record->retiring = false;
    if (record->points_at == Side::kDevice) {
      add_stream(record->streams, stream);
      record->host_valid = false;
      waited = record->device_ready;
    } else {
      state_.host_memory->record_stream(record->host_block, stream);
      add_stream(record->in_place_streams, stream);
      waited = record->host_ready;
    }
    if (state_.reached(waited)) {
      return;
    }
    ++record->in_use; // must not move while the host waits
  }
  const double began = state_.now_us();
  try {
    state_.runtime.synchronize_event(waited);
  } catch (...) {
    const Lock lock(*this);
    --record->in_use;
    free_if_dead(record);
    throw;
  }
  const Lock lock(*this);
  --record->in_use;
  free_if_dead(record);
  ++state_.statistics.waited.count;
  state_.statistics.waited.bytes += static_cast<std::int64_t>(bytes);
  state_.statistics.waited.ms += (state_.now_us() - began) / 1e3;
}

void Engine::count_pin(Record& record) {
  state_.announce(record);
  if (record.pins == 0) {
    state_.policy_of(record).pin(record.id, true);
  }
  ++record.pins;
}

bool Engine::pin(Record* record, Stream stream, bool waits) {
  if (record->points_at == Side::kHost && record->captured == 0) {
    if (!state_.address_may_change(*record, Mover::kOperator)) {
      return false;
    }
    if (!copies_.bring_to_device(*record, stream)) {
      if (const Device& home = state_.of(record->device);
          waits && home.running != 0 && bytes_on(record->device).pinned + record->bytes <= home.cap) {
        return false;
      }
      throw no_room_to_pin(*record);
    }
  }
  if (record->points_at == Side::kDevice) {
    copies_.use_on_device(*record, stream, false);
  }
  count_pin(*record);
  record->retiring = false;
  return true;
}

Engine::Held Engine::bytes_on(int device) const {
  Held held;
  for (const auto& [id, record] : state_.records) {
    if (record->device == device && record->device_block != nullptr) {
      (record->pins != 0 ? held.pinned : held.used) += record->pins != 0 || record->in_use != 0 ? record->bytes : 0;
    }
  }
  return held;
}

OutOfMemory Engine::no_room_to_pin(const Record& wanted) const {
  const auto [pinned, used] = bytes_on(wanted.device);
  const std::string device = to_string(Location::device(wanted.device));
  const std::optional<std::size_t> budget = state_.devices[static_cast<std::size_t>(wanted.device)].budget;
  const bool others = budget && pinned + used + wanted.bytes <= *budget;
  return OutOfMemory(OutOfMemory::Cause::kBudget, wanted.bytes,
                     "no room to keep " + format_bytes(wanted.bytes) + " on " + device + ": its budget is " +
                         (budget ? format_bytes(*budget) : "none") + ", " + format_bytes(pinned) +
                         " are pinned there and operators that run use " + format_bytes(used) +
                         (others ? "; small storages, or others that cannot be evicted, take or split the rest" : "") +
                         "; unpin tensors or raise the budget");
}

void Engine::unpin(Record* record) noexcept {
  if (record->pins > record->captured && --record->pins == 0) { // a graph's pins are released by `release_capture`
    try {
      state_.policy_of(*record).pin(record->id, false);
    } catch (...) {
      ++state_.failures;
    }
  }
}

void Engine::mark_step(const Frame& frame) {
  const Lock lock(*this);
  for (int index = 0; index < static_cast<int>(state_.devices.size()); ++index) {
    if (const Loops& loops = state_.of(index).loops; state_.of(index).budget) {
      Policy& policy = loops[loop_of(frame, index)].policy;
      policy.mark_step();
      if (policy.counters().following) { // the step has made all that it keeps, such as an optimizer's state
        state_.memory.leave_none_for_small(index);
      }
    }
  }
  if (state_.recorder) {
    state_.recorder->mark_step();
    state_.operator_timer->finish();
  }
}

ResidencyStatistics Engine::statistics() {
  const Lock lock(*this);
  state_.transfers.collect(state_.statistics);
  ResidencyStatistics now = state_.statistics;
  for (int index = 0; index < static_cast<int>(state_.devices.size()); ++index) {
    if (const Device& device = state_.of(index); !device.loops.empty()) {
      now.plan_hits += static_cast<std::int64_t>(device.loops.sum(&Policy::Counters::plan_hits));
      now.plan_misses += static_cast<std::int64_t>(device.loops.sum(&Policy::Counters::plan_misses));
      const Stat reserved = state_.memory.statistics(Location::device(index)).reserved_bytes[0];
      const auto staged =
          static_cast<std::int64_t>(device.incoming ? device.incoming->bytes() + device.outgoing->bytes() : 0);
      now.device_bytes[index] = reserved.current + staged;
      now.peak_device_bytes[index] = reserved.peak + staged;
    }
  }
  now.plan_hits -= hits_at_reset_;
  now.plan_misses -= misses_at_reset_;
  now.host_bytes = state_.host_memory->statistics(std::nullopt).reserved_bytes[0].current;
  now.records = static_cast<std::int64_t>(state_.records.size());
  now.failures = state_.failures;
  return now;
}

bool Engine::is_settled(const Frame& frame) {
  const Lock lock(*this);
  for (int index = 0; index < static_cast<int>(state_.devices.size()); ++index) {
    if (state_.of(index).budget && !state_.of(index).loops[loop_of(frame, index)].policy.is_settled()) {
      return false;
    }
  }
  return true;
}

void Engine::reset_statistics() {
  const ResidencyStatistics now = statistics();
  const Lock lock(*this);
  hits_at_reset_ += now.plan_hits;
  misses_at_reset_ += now.plan_misses;
  state_.statistics = {};
  state_.failures = 0;
}

} // namespace torch_uvm
