// What operators do to records, and what users ask for. How bytes travel is in relocation.cpp.
#include "residency/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "allocator/segment_source.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// Of a budget, what plans leave free: blocks do not tile it without a gap.
constexpr std::size_t kReserveShare = 32;

/// Operators between two looks for room for the next fetch, while there is none.
constexpr unsigned kLongestPause = 31;

/// Operators between the first two tries to come back within a soft budget; then twice as many each time.
constexpr std::uint64_t kFirstShrinkPause = 512;

constexpr int kMostUrgent = -1; ///< the engine's streams, where the runtime knows priorities

} // namespace

double Engine::now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Engine::Lock::~Lock() {
  std::vector<void*> kept;
  kept.swap(engine_.kept_);
  lock_.unlock();
  for (void* const storage : kept) {
    engine_.door_.let_go(storage); // may be the last to know it, and then `died` is called
  }
}

Engine::Engine(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageDoor& door)
    : runtime_(runtime),
      memory_(memory),
      door_(door),
      devices_(static_cast<std::size_t>(runtime.device_count())),
      events_(runtime, runtime.device_count()),
      transfers_(runtime) {
  auto source = std::make_unique<PinnedSegmentSource>(runtime);
  host_source_ = source.get();
  host_memory_ = std::make_unique<CachingManagedAllocator>(runtime, std::move(source));
}

void Engine::set_budget(int device, std::optional<std::size_t> bytes, bool hard) {
  if (device < 0 || device >= static_cast<int>(devices_.size())) {
    throw InvalidArgument("a budget for device " + std::to_string(device) + "; there are " +
                          std::to_string(devices_.size()) + " devices");
  }
  const Lock lock(*this);
  Device& changed = of(device);
  if (bytes && !changed.policy) {
    changed.fetches = runtime_.create_stream(device, kMostUrgent);
    changed.write_backs = runtime_.create_stream(device, kMostUrgent);
    changed.policy = std::make_unique<Policy>();
  }
  if (!bytes && changed.budget) {
    memory_.set_cap(device, std::nullopt, false);
    bring_back(device);
  }
  if (bytes) {
    PolicyOptions options;
    options.budget = *bytes;
    options.reserve = *bytes / kReserveShare;
    changed.policy->set_options(options);
    memory_.set_room_maker(this);
  }
  memory_.set_cap(device, bytes, hard);
  changed.budget = bytes;
  changed.hard = hard;
  if (bytes) {
    shrink(device);
  }
  changed.asleep = bytes && !hard;
  changed.excess = false;
  changed.next_shrink = changed.shrink_pause = 0;
  note_awake();
}

void Engine::note_awake() {
  awake_.store(std::ranges::any_of(devices_, [](const Device& each) { return each.budget && !each.asleep; }),
               std::memory_order_relaxed);
}

void Engine::bring_back(int device) {
  const Stream fetches = of(device).fetches;
  for (const auto& [id, record] : records_) {
    if (record->device != device) {
      continue;
    }
    use_on_device(*record, fetches, false);
    if (record->points_at == Side::kHost && !record->fixed) {
      throw OutOfMemory(OutOfMemory::Cause::kRuntime, record->bytes,
                        "no room on " + to_string(Location::device(device)) + " to bring back " +
                            format_bytes(record->bytes) + " that are on the host; the budget stays");
    }
  }
  runtime_.synchronize_stream(of(device).write_backs);
  runtime_.synchronize_stream(fetches);
  for (const auto& [id, record] : records_) {
    if (record->device == device && record->points_at == Side::kDevice && record->host_block != nullptr) {
      drop_host_copy(*record); // writes to the device copy will not be seen
    }
  }
}

void Engine::shrink(int device) {
  const auto over = [&] {
    return static_cast<std::size_t>(memory_.statistics(Location::device(device)).reserved_bytes[0].current) >
           *of(device).budget;
  };
  if (!over()) {
    return;
  }
  memory_.empty_cache();
  if (!over()) {
    return;
  }
  for (const auto& [id, record] : records_) {
    if (record->device == device && std::isfinite(cost_of(*record, Need::kNow))) {
      evict(*record, Stream::host());
    }
  }
  memory_.empty_cache();
}

std::optional<std::size_t> Engine::budget(int device) const {
  const std::lock_guard lock(mutex_);
  return devices_.at(static_cast<std::size_t>(device)).budget;
}

void Engine::set_host_limit(std::optional<std::size_t> bytes) {
  host_source_->set_limit(bytes);
}

Record* Engine::adopt(Block* block, int device, void* storage) {
  auto record = std::make_unique<Record>();
  record->id = next_id_++;
  record->device = device;
  record->bytes = memory_.requested_bytes(block);
  record->storage = storage;
  record->device_block = block;
  Record* const adopted = record.get();
  records_.emplace(adopted->id, adopted);
  memory_.set_tag(block, record.release());
  return adopted;
}

Record* Engine::find(StorageId id) const {
  const auto found = records_.find(id);
  return found == records_.end() ? nullptr : found->second;
}

void Engine::wait(Stream stream, Event event) {
  runtime_.wait_event(stream, event);
}

bool Engine::reached(Event& event) noexcept {
  try {
    return !event || runtime_.query_event(event);
  } catch (...) {
    return false; // then it is waited for, and what fails there is said there
  }
}

void Engine::give_event(int device, Event& event) noexcept {
  if (event) {
    events_.give(Stream::default_of(device), event);
    event = Event{};
  }
}

void Engine::announce(Record& record) {
  if (!record.announced) {
    record.announced = true;
    of(record.device).policy->created(record.id, record.bytes);
    if (recorder_) {
      recorder_->storage(record.id, record.device, record.bytes, record.points_at == Side::kDevice);
    }
  }
}

void Engine::take(Frame& frame, Record* record) {
  frame.held.push_back(record);
  ++record->in_use;
}

void Engine::begin(Frame& frame, const Operator& op, std::span<const Operand> operands,
                   const std::vector<Stream>& streams) noexcept {
  try {
    ++operators_;
    accesses_.clear();
    for (const Operand& operand : operands) {
      Record& record = *operand.record;
      if (record.last_use == operators_) { // it comes twice
        accesses_[record.operand].writes |= operand.writes;
        continue;
      }
      announce(record);
      record.last_use = operators_;
      record.operand = accesses_.size();
      accesses_.push_back({record.id, operand.writes});
      take(frame, &record);
    }
    frame.device = frame.held.empty() ? -1 : frame.held.front()->device;
    if (frame.device >= 0 && !op.capturing) {
      Device& device = of(frame.device);
      frame.planned = true;
      device.last_stream = streams[static_cast<std::size_t>(frame.device)];
      const Decision& decision = device.policy->begin(op.key, accesses_, op.in_place_ok);
      if (decision.forget) {
        device.pending.clear();
      }
      memory_.take_allocated_peak(frame.device);
      if (recorder_) {
        recorder_->operator_begin(op.name, now_us(), accesses_, op.in_place_ok);
      }
    }
    no_room_ahead_ = false;
    const std::int64_t in_place_before = statistics_.used_in_place.count;
    bool wanted_in_place = false;
    for (std::size_t index = 0; index < frame.held.size(); ++index) {
      Record& record = *frame.held[index];
      const bool writes = accesses_[index].writes;
      const Stream stream = streams[static_cast<std::size_t>(record.device)];
      record.collective = op.collective;
      if (op.capturing) {
        ++record.held; // a graph keeps its pointers, and nobody says when it ends
        use_where_it_is(record, stream, writes);
      } else if (record.points_at == Side::kHost && better_in_place(record, op)) {
        wanted_in_place = true;
        use_in_place(record, stream, writes);
      } else {
        use_on_device(record, stream, writes);
      }
    }
    if (!wanted_in_place && statistics_.used_in_place.count != in_place_before) {
      ++statistics_.over_budget;
    }
  } catch (...) {
    // A call of the runtime failed, or there is no memory for the books. Pointers show complete copies all the same;
    // what fails for good is said by the operator itself.
    ++failures_;
  }
}

void Engine::begin_nested(Frame& frame, std::span<const Operand> operands,
                          const std::vector<Stream>& streams) noexcept {
  try {
    for (const Operand& operand : operands) {
      Record& record = *operand.record;
      if (record.in_use == 0) {
        announce(record);
        take(frame, &record);
        use_where_it_is(record, streams[static_cast<std::size_t>(record.device)], operand.writes);
      } else if (operand.writes) {
        record.host_valid = record.host_valid && record.points_at == Side::kHost;
        record.retiring = false;
      }
    }
  } catch (...) {
    ++failures_;
  }
}

bool Engine::better_in_place(Record& record, const Operator& op) {
  Device& device = of(record.device);
  if (device.policy->use_in_place(record.id)) {
    return true;
  }
  if (!op.in_place_ok || record.fetching()) {
    return false;
  }
  // Unplanned: what is used once is not worth giving something up for.
  const bool tries = !no_room_ahead_;
  no_room_ahead_ = !tries || !start_fetch(record, Need::kAhead, device.fetches);
  return no_room_ahead_;
}

void Engine::use_where_it_is(Record& record, Stream stream, bool writes) {
  if (record.points_at == Side::kHost) {
    use_in_place(record, stream, writes);
  } else {
    use_on_device(record, stream, writes);
  }
}

void Engine::born(Frame& frame, Record* record, const std::vector<Stream>& streams) noexcept {
  try {
    take(frame, record);
    record->last_use = operators_;
    record->streams.assign(1, streams[static_cast<std::size_t>(record->device)]);
    record->announced = true; // as a birth, at the end
    frame.births.emplace_back(record->id, record->bytes);
  } catch (...) {
    ++failures_;
  }
}

void Engine::end(Frame& frame) noexcept {
  try {
    for (Record* const record : frame.held) {
      --record->in_use;
      if (!record->dead) {
        door_.watch_for_writes(*record, kept_);
      }
      free_if_dead(record);
    }
    frame.held.clear();
    std::erase_if(frame.births, [this](const auto& birth) { return find(birth.first) == nullptr; });
    const int device = frame.device >= 0      ? frame.device
                       : frame.births.empty() ? -1
                                              : find(frame.births.front().first)->device;
    if (device < 0 || !watches(device)) {
      return;
    }
    if (!frame.planned) { // nothing went in, something came out: a factory
      of(device).policy->begin(frame.key, {}, false);
    }
    std::size_t workspace = memory_.take_allocated_peak(device);
    workspace -= std::min(workspace, memory_.take_allocated_peak(device));
    if (recorder_) {
      for (const auto& [id, bytes] : frame.births) {
        recorder_->birth(id, device, bytes);
      }
      recorder_->resident(device,
                          static_cast<std::size_t>(memory_.levels(Location::device(device)).allocated_bytes[0]));
    }
    follow(of(device).policy->end(frame.births, workspace), device);
    if (of(device).exceeded) {
      of(device).exceeded = false;
      give_back_excess(frame, device);
    }
    if (of(device).excess) {
      keep_again(device);
    }
  } catch (...) {
    ++failures_;
  }
}

bool Engine::may_exceed(std::size_t bytes, Location home) {
  if (home.is_host()) {
    return true;
  }
  const Lock lock(*this);
  Device& device = of(home.index);
  if (!device.budget) {
    return true;
  }
  std::size_t used = 0; // by operators that run, which cannot do without
  std::size_t evictable = 0; // none, where the host takes no more copies
  for (const auto& [id, record] : records_) {
    if (record->device == home.index && record->device_block != nullptr) {
      if (record->in_use != 0) {
        used += record->bytes;
      } else if (record->held == 0 && !record->fixed && !host_refused_) {
        evictable += record->bytes;
      }
    }
  }
  const auto allocated = static_cast<std::size_t>(memory_.levels(home).allocated_bytes[0]);
  const std::size_t stays = allocated - std::min(allocated, evictable);
  // It fits by its bytes, and what stays lies in the way; or one operator alone is too much.
  if (stays + bytes > *device.budget && used + bytes <= *device.budget) {
    return false;
  }
  device.exceeded = true;
  ++statistics_.over_budget;
  return true;
}

void Engine::keep_again(int index) {
  Device& device = of(index);
  if (operators_ < device.next_shrink) {
    return;
  }
  // What was there when the engine woke becomes known as operators use it: tried now and then, ever more rarely, since
  // it empties the device and waits for it.
  shrink(index);
  const Levels now = memory_.levels(Location::device(index));
  device.excess = static_cast<std::size_t>(now.reserved_bytes[0]) > *device.budget;
  device.shrink_pause = device.excess ? std::max(2 * device.shrink_pause, kFirstShrinkPause) : 0;
  device.next_shrink = operators_ + device.shrink_pause;
}

void Engine::give_back_excess(const Frame& frame, int device) {
  const auto over = [&] {
    return static_cast<std::size_t>(memory_.levels(Location::device(device)).reserved_bytes[0]) > *of(device).budget;
  };
  const auto again = [&] { memory_.set_cap(device, of(device).budget, of(device).hard); };
  again();
  if (!over()) {
    return;
  }
  for (const auto& [id, bytes] : frame.births) {
    if (Record* const record = find(id); record != nullptr && std::isfinite(cost_of(*record, Need::kNow))) {
      evict(*record, Stream::host());
    }
  }
  again();
  if (over()) {
    shrink(device);
  }
}

void Engine::follow(const Decision& decision, int index) {
  Device& device = of(index);
  if (decision.forget) {
    device.pending.clear();
  }
  for (const StorageId id : decision.retire) {
    Record* const record = find(id);
    if (record == nullptr || record->points_at != Side::kDevice || record->in_use != 0 || record->held != 0 ||
        record->fixed || record->collective) {
      continue;
    }
    if (record->host_valid || start_write_back(*record)) {
      record->retiring = true;
      device.retired.push_back(id);
    }
  }
  give_up_written(index);
  device.pending.insert(device.pending.end(), decision.fetch.begin(), decision.fetch.end());
  start_pending_fetches(index, !decision.retire.empty() || !decision.fetch.empty());
}

void Engine::start_pending_fetches(int index, bool changed) {
  Device& device = of(index);
  if (changed) {
    device.pause = 0;
  } else if (device.pause > 0) {
    --device.pause; // to look for room costs more than an operator: not after each
    return;
  }
  while (!device.pending.empty()) {
    Record* const record = find(device.pending.front());
    const bool wanted = record != nullptr && record->points_at == Side::kHost && !record->fetching();
    if (wanted && (record->in_use != 0 || !start_fetch(*record, Need::kAhead, device.fetches))) {
      device.next_pause = std::min(2 * device.next_pause + 1, kLongestPause);
      device.pause = device.next_pause;
      return; // no room yet; or a running operator uses it on the host
    }
    device.next_pause = 0;
    device.pending.pop_front();
  }
}

void Engine::free_if_dead(Record* record) noexcept {
  if (record->dead && record->in_use == 0) {
    door_.forget(*record);
    delete record;
  }
}

void Engine::died(Record* record) noexcept {
  const Lock lock(*this);
  if (record->fetching()) {
    abandon_fetch(*record);
  }
  record->device_block = nullptr; // the caller frees it
  if (record->host_block != nullptr) {
    drop_host_copy(*record);
  }
  give_event(record->device, record->device_ready);
  record->dead = true;
  records_.erase(record->id);
  try {
    if (record->announced) {
      of(record->device).policy->died(record->id);
    }
  } catch (...) {
    ++failures_;
  }
  if (recorder_ && record->announced) {
    recorder_->death(record->id);
  }
  free_if_dead(record);
}

void Engine::settle(Record* record) {
  Event waited;
  {
    const Lock lock(*this);
    if (record->fetching()) {
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
    ++record->in_use; // stays while the host waits
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
  statistics_.waited.bytes += static_cast<std::int64_t>(record->bytes);
  statistics_.waited.ms += (now_us() - began) / 1e3;
}

void Engine::hold(Record* record, Stream stream) {
  announce(*record);
  if (record->points_at == Side::kHost) {
    use_on_device(*record, stream, false);
  }
  if (record->held++ == 0) {
    of(record->device).policy->hold(record->id, true);
  }
  record->retiring = false;
}

void Engine::release(Record* record) noexcept {
  if (record->held != 0 && --record->held == 0) {
    try {
      of(record->device).policy->hold(record->id, false);
    } catch (...) {
      ++failures_;
    }
  }
}

void Engine::mark_step() {
  const Lock lock(*this);
  for (Device& device : devices_) {
    if (device.budget) {
      device.policy->mark_step();
    }
  }
  if (recorder_) {
    recorder_->mark_step();
  }
}

void Engine::start_recording(const std::string& path) {
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
  recorder_ = std::make_unique<AccessRecorder>(path, budgets);
  for (const auto& [id, record] : records_) {
    if (record->announced) {
      recorder_->storage(id, record->device, record->bytes, record->points_at == Side::kDevice);
    }
  }
}

void Engine::stop_recording() {
  std::string error;
  {
    const Lock lock(*this);
    if (!recorder_) {
      return;
    }
    error = recorder_->close();
    recorder_.reset();
  }
  if (!error.empty()) {
    throw RuntimeFailure(error);
  }
}

ResidencyStatistics Engine::statistics() {
  const Lock lock(*this);
  transfers_.collect(statistics_);
  ResidencyStatistics now = statistics_;
  for (int index = 0; index < static_cast<int>(devices_.size()); ++index) {
    if (const Device& device = of(index); device.policy) {
      const Policy::Counters counters = device.policy->counters();
      now.plan_hits += static_cast<std::int64_t>(counters.plan_hits);
      now.plan_misses += static_cast<std::int64_t>(counters.plan_misses);
      const Stat reserved = memory_.statistics(Location::device(index)).reserved_bytes[0];
      now.device_bytes[index] = reserved.current;
      now.peak_device_bytes[index] = reserved.peak;
    }
  }
  now.plan_hits -= hits_at_reset_;
  now.plan_misses -= misses_at_reset_;
  now.host_bytes = host_memory_->statistics(std::nullopt).reserved_bytes[0].current;
  now.records = static_cast<std::int64_t>(records_.size());
  now.failures = failures_;
  return now;
}

void Engine::reset_statistics() {
  const ResidencyStatistics now = statistics();
  const Lock lock(*this);
  hits_at_reset_ += now.plan_hits;
  misses_at_reset_ += now.plan_misses;
  statistics_ = {};
}

std::optional<std::string> Engine::check() {
  const Lock lock(*this);
  for (const auto& [id, record] : records_) {
    const auto wrong = [&](const char* what) { return "storage " + std::to_string(id) + ": " + what; };
    if (record->id != id || record->dead) {
      return wrong("filed wrongly");
    }
    if (record->points_at == Side::kDevice ? record->device_block == nullptr
                                           : record->host_block == nullptr || !record->host_valid) {
      return wrong("its pointer shows a copy that is not there");
    }
    if (record->host_valid && record->host_block == nullptr) {
      return wrong("a valid host copy that is not there");
    }
    if (record->device_block != nullptr && memory_.tag(record->device_block) != record) {
      return wrong("its block is another's");
    }
  }
  if (const auto wrong = host_memory_->check()) {
    return "host copies: " + *wrong;
  }
  return memory_.check();
}

} // namespace torch_uvm
