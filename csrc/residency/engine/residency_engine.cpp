// Lifetime of records, pins, recording and statistics. Operators are in operators.cpp, copies in relocation.cpp.
#include "residency/engine/residency_engine.h"

#include <algorithm>
#include <chrono>

#include "allocator/invariants.h"
#include "allocator/segment_source.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {

double ResidencyEngine::now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::unique_ptr<Engine> Engine::make(ManagedRuntime& runtime, CachingManagedAllocator& memory,
                                     StorageAdapter& storages) {
  return std::make_unique<ResidencyEngine>(runtime, memory, storages);
}

Engine::Lock::Lock(Engine& engine) : engine_(static_cast<ResidencyEngine&>(engine)), lock_(engine_.mutex_) {
  engine_.holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

Engine::Lock::~Lock() {
  walk_if_due([this] { return engine_.check_records(); }); // the allocators check themselves
  release();
}

void Engine::Lock::release() {
  engine_.holder_.store({}, std::memory_order_relaxed);
  if (engine_.locked_.empty()) {
    lock_.unlock();
    return;
  }
  std::vector<void*> locked;
  locked.swap(engine_.locked_);
  lock_.unlock();
  for (void* const storage : locked) {
    engine_.storages_.release(storage); // may drop the last reference, which calls `destroyed`
  }
}

void Engine::Lock::wait_for_a_block() {
  release(); // the block waited for may belong to a storage in `locked_`
  lock_.lock();
  engine_.freed_.wait_for(lock_, std::chrono::milliseconds(1));
  engine_.holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

ResidencyEngine::ResidencyEngine(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageAdapter& storages)
    : runtime_(runtime),
      memory_(memory),
      storages_(storages),
      devices_(static_cast<std::size_t>(runtime.device_count())),
      events_(runtime, runtime.device_count()),
      transfers_(runtime) {
  auto source = std::make_unique<PinnedSegmentSource>(runtime);
  host_source_ = source.get();
  host_memory_ = std::make_unique<CachingManagedAllocator>(runtime, std::move(source));
}

bool ResidencyEngine::watches(int device) const {
  const Device& asked = devices_[static_cast<std::size_t>(device)];
  return asked.budget && !asked.idle;
}

Record* ResidencyEngine::record_on(const Block* block) const noexcept {
  return static_cast<Record*>(memory_.tag(block));
}

Record* ResidencyEngine::adopt(Block* block, int device, void* storage) {
  if (!of(device).policy) {
    of(device).policy = std::make_unique<Policy>(); // a record without a budget: a pin, or a capture on any device
  }
  auto record = std::make_unique<Record>();
  record->id = next_id_++;
  record->device = device;
  record->bytes = memory_.requested_bytes(block);
  record->storage = storage;
  record->device_block = block;
  record->range = CachingManagedAllocator::is_range(block) ? block : nullptr;
  record->site = AllocationSites::get().asked() ? AllocationSites::get().take(block) : 0;
  Record* const adopted = record.get();
  records_[adopted->id] = adopted;
  memory_.set_tag(block, record.release());
  return adopted;
}

Record* ResidencyEngine::find(StorageId id) const {
  Record* const* const found = records_.find(id);
  return found == nullptr ? nullptr : *found;
}

void ResidencyEngine::wait(Stream stream, Event event) {
  const Untimed untimed(*this, stream);
  runtime_.wait_event(stream, event);
}

void ResidencyEngine::waits_for_memory(Stream stream, const std::function<void()>& queue) {
  // Another thread that has the lock may be waiting for the allocator's, which this thread has.
  const bool mine = holder_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (stream.is_host() || !(mine || lock.try_lock())) {
    queue();
    return;
  }
  const Untimed untimed(*this, stream);
  queue();
}

bool ResidencyEngine::reached(Event& event) noexcept {
  try {
    return !event || runtime_.query_event(event);
  } catch (...) {
    return false; // the caller then waits for the event, and the error surfaces there
  }
}

void ResidencyEngine::recycle_event(int device, Event& event) noexcept {
  if (event) {
    events_.give(Stream::default_of(device), event);
    event = Event{};
  }
}

void ResidencyEngine::recycle_block_ready(Record& record) noexcept {
  if (record.block_ready) {
    memory_.recycle_event(Stream::default_of(record.device), record.block_ready);
    record.block_ready = Event{};
  }
}

void ResidencyEngine::free_if_dead(Record* record) noexcept {
  if (record->dead && record->in_use == 0) {
    storages_.forget(*record);
    delete record;
  }
}

void ResidencyEngine::destroyed(Record* record) noexcept {
  const Lock lock(*this);
  if (record->device_block != nullptr && !record->fetching()) {
    blocks_being_freed_.fetch_add(1, std::memory_order_relaxed);
    of(record->device).workspace.freed += static_cast<std::int64_t>(memory_.bytes(record->device_block));
  }
  unregister(record);
}

void ResidencyEngine::expired(Block* block) noexcept {
  const Lock lock(*this);
  auto* const record = static_cast<Record*>(memory_.tag(block));
  if (record != nullptr && record->pins == 0 && storages_.is_expired(*record)) { // a pin through another label stays
    unregister(record);
  }
}

void ResidencyEngine::unregister(Record* record) noexcept {
  if (record->fetching() && record->range == nullptr) {
    abandon_fetch(*record);
  } else if (record->fetching()) {
    no_longer_ahead(*record); // the range is freed in the order of the fetch
  }
  if (record->range != nullptr && record->points_at == Side::kDevice) {
    keep_until_read(*record);
  }
  if (record->device_block != nullptr) {
    memory_.set_tag(record->device_block, nullptr); // it can be looked up until the caller frees it
    record->device_block = nullptr;
  }
  if (record->range != nullptr && record->points_at == Side::kHost) {
    memory_.free(record->range); // else the caller frees it
  }
  record->range = nullptr;
  if (record->host_block != nullptr) {
    drop_host_copy(*record);
  }
  recycle_event(record->device, record->device_ready);
  record->dead = true;
  records_.erase(record->id);
  if (record->site != 0 && AllocationSites::get().asked()) {
    AllocationSites::get().gone(record->site, record->bytes);
  }
  try {
    if (record->announced) {
      of(record->device).policy->freed(record->id);
    }
  } catch (...) {
    ++failures_;
  }
  if (recorder_ && record->announced) {
    recorder_->death(record->id);
  }
  free_if_dead(record);
}

void ResidencyEngine::freed() noexcept {
  blocks_being_freed_.fetch_sub(1, std::memory_order_relaxed);
  freed_.notify_all();
}

void ResidencyEngine::materialise(Record* record) {
  Event waited;
  const std::size_t bytes = record->bytes;
  {
    const Lock lock(*this);
    if (record->range != nullptr && record->points_at == Side::kHost) {
      use_on_device(*record, of(record->device).fetches, /*writes=*/true); // the address needs memory
    } else if (record->fetching()) {
      abandon_fetch(*record);
    }
    record->retiring = false;
    if (record->points_at == Side::kDevice) {
      record->host_valid = false;
      waited = record->device_ready;
    } else {
      waited = record->host_ready;
    }
    if (reached(waited)) {
      return;
    }
    ++record->in_use; // must not move while the host waits
  }
  const double began = now_us();
  try {
    runtime_.synchronize_event(waited);
  } catch (...) {
    const Lock lock(*this);
    --record->in_use;
    free_if_dead(record);
    throw;
  }
  const Lock lock(*this);
  --record->in_use;
  free_if_dead(record);
  ++statistics_.waited.count;
  statistics_.waited.bytes += static_cast<std::int64_t>(bytes);
  statistics_.waited.ms += (now_us() - began) / 1e3;
}

void ResidencyEngine::count_pin(Record& record) {
  announce(record);
  if (record.pins == 0) {
    of(record.device).policy->pin(record.id, true);
  }
  ++record.pins;
}

bool ResidencyEngine::pin(Record* record, Stream stream) {
  if (record->points_at == Side::kHost && record->captured == 0) {
    if (!address_may_change(*record, Mover::kOperator)) {
      return false;
    }
    if (!bring_to_device(*record, stream)) {
      throw no_room_to_pin(*record);
    }
    use_on_device(*record, stream, false);
    if (record->range != nullptr) {
      wait_here(*record); // code that holds the address does not ask for it again, which would wait
    }
  }
  count_pin(*record);
  record->retiring = false;
  return true;
}

OutOfMemory ResidencyEngine::no_room_to_pin(const Record& wanted) const {
  std::size_t pinned = 0, used = 0;
  for (const auto& [id, record] : records_) {
    if (record->device == wanted.device && record->device_block != nullptr) {
      (record->pins != 0 ? pinned : used) += record->pins != 0 || record->in_use != 0 ? record->bytes : 0;
    }
  }
  const std::string device = to_string(Location::device(wanted.device));
  const std::optional<std::size_t> budget = devices_[static_cast<std::size_t>(wanted.device)].budget;
  return OutOfMemory(OutOfMemory::Cause::kBudget, wanted.bytes,
                     "no room to keep " + format_bytes(wanted.bytes) + " on " + device + ": its budget is " +
                         (budget ? format_bytes(*budget) : "none") + ", " + format_bytes(pinned) +
                         " are pinned there and operators that run use " + format_bytes(used) +
                         "; unpin tensors or raise the budget");
}

void ResidencyEngine::unpin(Record* record) noexcept {
  if (record->pins > record->captured && --record->pins == 0) { // a graph's pins are released by `release_capture`
    if (record->range != nullptr && record->points_at == Side::kDevice) {
      record->host_valid = false; // code that holds the address, which never changes, may have written
      record->retiring = false;
    }
    try {
      of(record->device).policy->pin(record->id, false);
    } catch (...) {
      ++failures_;
    }
  }
}

void ResidencyEngine::mark_step() {
  const Lock lock(*this);
  for (Device& device : devices_) {
    if (device.budget) {
      device.policy->mark_step();
    }
  }
  if (recorder_) {
    recorder_->mark_step();
    operator_timer_->end_group();
  }
}

void ResidencyEngine::start_recording(const std::string& path) {
  wake_idle_devices();
  const Lock lock(*this);
  if (recorder_) {
    throw InvalidArgument("accesses are being recorded already; stop that first");
  }
  std::vector<std::size_t> budgets;
  for (const Device& device : devices_) {
    budgets.push_back(device.budget.value_or(0));
  }
  if (!is_awake()) {
    throw InvalidArgument("accesses are seen on devices with a budget only; set one before recording");
  }
  auto recorder = std::make_unique<AccessRecorder>(path, budgets);
  operator_timer_ = std::make_unique<OperatorTimer>(
      runtime_, [recorder = recorder.get()](std::uint64_t first, std::uint64_t operators, double us) {
        recorder->ran(first, operators, us);
      });
  recorder_ = std::move(recorder);
  for (const auto& [id, record] : records_) {
    if (record->announced) {
      recorder_->storage(id, record->device, record->bytes, record->points_at == Side::kDevice);
    }
  }
}

void ResidencyEngine::stop_recording() {
  std::string error;
  {
    const Lock lock(*this);
    if (!recorder_) {
      return;
    }
    transfers_.end_recording(statistics_);
    operator_timer_.reset();
    error = recorder_->close();
    recorder_.reset();
  }
  if (!error.empty()) {
    throw RuntimeFailure(error);
  }
}

ResidencyStatistics ResidencyEngine::statistics() {
  const Lock lock(*this);
  transfers_.collect(statistics_);
  ResidencyStatistics now = statistics_;
  for (int index = 0; index < static_cast<int>(devices_.size()); ++index) {
    if (const Device& device = of(index); device.policy) {
      const Policy::Counters counters = device.policy->counters();
      now.plan_hits += static_cast<std::int64_t>(counters.plan_hits);
      now.plan_misses += static_cast<std::int64_t>(counters.plan_misses);
      const Stat reserved = memory_.statistics(Location::device(index)).reserved_bytes[0];
      const auto staged =
          static_cast<std::int64_t>(device.incoming ? device.incoming->bytes() + device.outgoing->bytes() : 0);
      now.device_bytes[index] = reserved.current + staged;
      now.peak_device_bytes[index] = reserved.peak + staged;
    }
  }
  now.plan_hits -= hits_at_reset_;
  now.plan_misses -= misses_at_reset_;
  now.host_bytes = host_memory_->statistics(std::nullopt).reserved_bytes[0].current;
  now.records = static_cast<std::int64_t>(records_.size());
  now.failures = failures_;
  return now;
}

bool ResidencyEngine::schedules_are_settled() {
  const Lock lock(*this);
  return std::ranges::all_of(devices_,
                             [](const Device& device) { return !device.budget || device.policy->is_settled(); });
}

void ResidencyEngine::reset_statistics() {
  const ResidencyStatistics now = statistics();
  const Lock lock(*this);
  hits_at_reset_ += now.plan_hits;
  misses_at_reset_ += now.plan_misses;
  statistics_ = {};
}

} // namespace torch_uvm
