// Prepares operands before an operator and releases them after it. fetches_ahead.cpp carries out the policy's
// decisions; copies are in relocation.cpp.
#include <algorithm>

#include "residency/engine/residency_engine.h"

namespace torch_uvm {

void ResidencyEngine::announce(Record& record) {
  if (!record.announced) {
    record.announced = true;
    of(record.device).policy->created(record.id, record.bytes);
    if (recorder_) {
      recorder_->storage(record.id, record.device, record.bytes, record.points_at == Side::kDevice);
    }
  }
}

void ResidencyEngine::add_operand(Frame& frame, Record* record) {
  record->operand = frame.operands.size();
  frame.operands.push_back(record);
  ++record->in_use;
}

std::span<const Access> ResidencyEngine::accesses_on(int device, const Frame& frame) {
  if (std::ranges::all_of(frame.operands, [device](const Record* record) { return record->device == device; })) {
    return accesses_;
  }
  told_.clear();
  for (const Record* const record : frame.operands) {
    if (record->device == device) {
      told_.push_back(accesses_[record->operand]);
    }
  }
  return told_;
}

void ResidencyEngine::note_begin(Frame& frame, const Operator& op) {
  Device& device = of(frame.device);
  frame.counted = true;
  if (device.running++ != 0) {
    device.quiet.overlap = operators_;
  }
  if (!device.quiescent && !device.idle) {
    count_since_wake(frame.device, op.surely_outermost);
  }
}

void ResidencyEngine::begin(Frame& frame, const Operator& op, std::span<const Operand> operands,
                            const std::vector<Stream>& streams) noexcept {
  try {
    ++operators_;
    accesses_.clear();
    for (const Operand& operand : operands) {
      Record& record = *operand.record;
      if (record.last_use == operators_) { // an operand twice
        accesses_[record.operand].writes |= operand.writes;
        continue;
      }
      announce(record);
      record.last_use = operators_;
      accesses_.push_back({record.id, operand.writes}); // same order as frame.operands
      of(record.device).last_stream = streams[static_cast<std::size_t>(record.device)];
      add_operand(frame, &record);
    }
    if (frame.operands.empty()) {
      look_for_quiet_devices();
      return;
    }
    frame.device = frame.operands.front()->device;
    note_begin(frame, op);
    Device& device = of(frame.device);
    frame.region = op.region;
    device.regions += op.region ? 1 : 0;
    frame.planned = true;
    // An address range has no memory while its storage is on the host.
    const bool has_range = std::ranges::any_of(frame.operands, [](const Record* it) { return it->range != nullptr; });
    const Decision& decision =
        device.policy->begin(op.key, accesses_on(frame.device, frame), op.in_place_ok && !has_range);
    std::span<const std::size_t> births = decision.births;
    const std::size_t guess = decision.guess;
    begin_workspace(frame.device);
    if (device.durations) {
      device.durations->begin(decision, device.last_stream);
    }
    if (recorder_) {
      recorder_->operator_begin(op.name, now_us(), accesses_, op.in_place_ok);
      operator_timer_->begin(device.last_stream);
    }
    for (std::size_t index = 0; index < frame.operands.size(); ++index) {
      mark_use(*frame.operands[index], accesses_[index].writes);
      // A storage that a collective used last must not move while this operator is prepared either.
      frame.operands[index]->collective = frame.operands[index]->collective || op.collective;
    }
    no_room_ahead_ = false;
    const std::int64_t in_place_before = statistics_.used_in_place.count;
    bool wanted_in_place = false;
    const auto provide = [&](Record& record) {
      const bool writes = accesses_[record.operand].writes;
      const Stream stream = streams[static_cast<std::size_t>(record.device)];
      try {
        if (record.points_at == Side::kHost && choose_in_place(record, op)) {
          wanted_in_place = true;
          use_in_place(record, stream, writes);
        } else {
          use_on_device(record, stream, writes);
        }
      } catch (...) {
        use_after_failed_preparation(record, stream, writes);
      }
    };
    beginning_ = &frame;
    for (Record* const record : frame.operands) {
      provide(*record);
    }
    // Make room for a guessed size only if no contiguous range can be evicted: then an operand may be in the way, which
    // cannot move once the operator runs. Otherwise eviction waits until the operator does allocate as much.
    if (births.empty() && guess != 0 && of(frame.device).hard && !min_cost_range(guess, frame.device, Need::kNow)) {
      births = {&guess, 1};
    }
    if (!births.empty()) {
      std::vector<Record*> left;
      prepare_room(frame, births, of(frame.device).last_stream, left);
      for (Record* const record : left) {
        provide(*record);
      }
    }
    beginning_ = nullptr;
    for (Record* const record : frame.operands) {
      record->collective = op.collective;
    }
    if (!wanted_in_place && statistics_.used_in_place.count != in_place_before) {
      ++statistics_.over_budget;
    }
  } catch (...) { // no host memory for the frame
    beginning_ = nullptr;
    for (const Operand& operand : operands) {
      use_untracked(*operand.record, streams[static_cast<std::size_t>(operand.record->device)], operand.writes);
    }
  }
}

void ResidencyEngine::use_untracked(Record& record, Stream stream, bool writes) noexcept {
  use_after_failed_preparation(record, stream, writes);
  if (record.in_use == 0) {
    mark_unmovable(record); // no frame holds it, so its end of use is unknown
  }
}

void ResidencyEngine::use_after_failed_preparation(Record& record, Stream stream, bool writes) noexcept {
  ++failures_;
  wait_here(record);
  if (record.fetching() && writes) {
    abandon_fetch(record);
  }
  mark_use(record, writes);
  try { // later work must still wait for the operator
    if (record.range != nullptr && record.points_at == Side::kHost && !record.shows_pinned) {
      show_pinned(record);
    }
    if (record.points_at == Side::kDevice) {
      add_stream(record.streams, stream);
    } else {
      add_stream(record.in_place_streams, stream);
      host_memory_->record_stream(record.host_block, stream);
    }
  } catch (...) { // no host memory
    mark_unmovable(record);
  }
}

void ResidencyEngine::begin_nested(Frame& frame, std::span<const Operand> operands,
                                   const std::vector<Stream>& streams) noexcept {
  try {
    for (const Operand& operand : operands) {
      Record& record = *operand.record;
      if (!frame.uses(record)) { // it may be in use by another thread's operator, which may end first
        announce(record);
        add_operand(frame, &record);
        mark_use(record, operand.writes);
        try {
          use_where_it_is(record, streams[static_cast<std::size_t>(record.device)], operand.writes);
        } catch (...) {
          use_after_failed_preparation(record, streams[static_cast<std::size_t>(record.device)], operand.writes);
        }
      } else if (operand.writes) {
        if (record.fetching()) { // the outer operator only reads it, on the host
          wait(streams[static_cast<std::size_t>(record.device)], record.device_ready);
          abandon_fetch(record);
        }
        record.host_valid = record.host_valid && record.points_at == Side::kHost;
        record.retiring = false;
      }
    }
  } catch (...) {
    for (const Operand& operand : operands) {
      use_untracked(*operand.record, streams[static_cast<std::size_t>(operand.record->device)], operand.writes);
    }
  }
}

bool ResidencyEngine::choose_in_place(Record& record, const Operator& op) {
  Device& device = of(record.device);
  if (record.range != nullptr) {
    return record.captured != 0;
  }
  if (record.captured != 0 || device.policy->use_in_place(record.id)) {
    return true;
  }
  if (!op.in_place_ok || record.fetching()) {
    return false;
  }
  // The schedule has this use on the device, but the storage was not fetched. Fetch it only if there is room: a single
  // use does not justify an eviction.
  const bool tries = !no_room_ahead_;
  no_room_ahead_ = !tries || !start_fetch(record, Need::kAhead, device.fetches);
  return no_room_ahead_;
}

void ResidencyEngine::use_where_it_is(Record& record, Stream stream, bool writes) {
  if (record.points_at == Side::kHost && (record.range == nullptr || record.shows_pinned)) {
    use_in_place(record, stream, writes);
  } else { // the address of a range does not change
    use_on_device(record, stream, writes);
  }
}

void ResidencyEngine::created(Frame& frame, Record* record, const std::vector<Stream>& streams) noexcept {
  try {
    add_operand(frame, record);
    record->last_use = operators_;
    record->streams.assign(1, streams[static_cast<std::size_t>(record->device)]);
    record->announced = true; // `end` tells the policy, as created
    frame.births.emplace_back(record->id, record->bytes);
  } catch (...) {
    ++failures_;
  }
}

void ResidencyEngine::end(Frame& frame) noexcept {
  if (frame.counted) {
    frame.counted = false;
    --of(frame.device).running;
  }
  try {
    if (frame.region) {
      --of(frame.device).regions;
    }
    release_operands(frame);
    std::erase_if(frame.births, [this](const auto& birth) { return find(birth.first) == nullptr; });
    const int device = frame.device >= 0      ? frame.device
                       : frame.births.empty() ? -1
                                              : find(frame.births.front().first)->device;
    std::erase_if(frame.births, [&](const auto& birth) {
      Record* const record = find(birth.first);
      if (record->device == device) {
        return false;
      }
      record->announced = false; // created on another device, whose own policy must know it
      announce(*record);
      return true;
    });
    if (device < 0 || !watches(device)) {
      return;
    }
    if (!frame.planned) { // results but no operands: a factory function
      if (!of(device).quiescent) {
        // PyTorch excludes the autograd keys around all of them, so each may be nested in an unwatched operator.
        count_since_wake(device, /*surely_outermost=*/false);
      }
      const Decision& decision = of(device).policy->begin(frame.key, {}, false);
      if (of(device).durations) {
        of(device).durations->begin(decision, of(device).last_stream);
      }
    }
    const std::size_t workspace = frame.planned ? end_workspace(device) : 0; // a factory's begin was not recorded
    if (recorder_) {
      for (const auto& [id, bytes] : frame.births) {
        recorder_->birth(id, device, bytes);
      }
      if (workspace >= relocation_min()) {
        recorder_->workspace(workspace);
      }
      recorder_->resident(device, allocated_bytes(device));
    }
    const Decision& decision = of(device).policy->end(frame.births, workspace);
    if (of(device).quiescent) {
      follow(decision, device);
    }
    if (evicts_after_operators_) {
      evict_all(device, of(device).last_stream);
    }
    if (of(device).exceeded) {
      of(device).exceeded = of(device).mapped_beyond = false;
      release_excess(frame, device);
    }
    if (of(device).excess && of(device).quiescent) {
      retry_budget(device);
    }
    if (frame.planned) {
      become_idle_if_quiet(device);
    }
  } catch (...) {
    ++failures_;
  }
}

void ResidencyEngine::evict_after_operators(bool on) {
  {
    const Lock lock(*this);
    evicts_after_operators_ = on;
  }
  if (on) {
    wake_idle_devices();
  }
}

void ResidencyEngine::used_unseen(Record& record, Stream stream) noexcept {
  use_untracked(record, stream, /*writes=*/true); // it may write
}

void ResidencyEngine::release_operands(Frame& frame) noexcept {
  for (Record* const record : frame.operands) {
    --record->in_use;
    try {
      if (!record->dead) {
        storages_.watch_for_writes(*record, locked_);
      }
    } catch (...) { // writes cannot be watched: assume one, so that the other copy is not taken for up to date
      ++failures_;
      mark_use(*record, true);
      if (record->fetching()) {
        abandon_fetch(*record);
      }
      mark_unmovable(*record);
    }
    free_if_dead(record);
  }
  frame.operands.clear();
}

// An operator's workspace: its peak of allocated bytes beyond operands and results, without the engine's fetches and
// evictions while it runs.

std::int64_t ResidencyEngine::take_allocated_peak(int device) {
  Allocated& known = of(device).allocated;
  std::size_t most = known.bytes;
  if (known.changes != memory_.allocation_changes(device)) {
    const CachingManagedAllocator::AllocatedPeak peak = memory_.take_allocated_peak(device);
    known = {peak.now, peak.changes};
    most = peak.most;
  }
  return static_cast<std::int64_t>(most);
}

void ResidencyEngine::begin_workspace(int device) {
  take_allocated_peak(device);
  of(device).workspace = {};
}

void ResidencyEngine::note_workspace(int device, std::int64_t bytes) {
  Workspace& workspace = of(device).workspace;
  const std::int64_t peak = take_allocated_peak(device);
  note_level(of(device), static_cast<std::size_t>(peak));
  // `ours` does not include this change yet. A block just freed still counts in both `peak` and `ours`. A block just
  // allocated counts only in `peak`, so its bytes are subtracted.
  workspace.peak = std::max(workspace.peak, peak - workspace.ours - std::max<std::int64_t>(bytes, 0));
  workspace.ours += bytes;
}

std::size_t ResidencyEngine::end_workspace(int device) {
  note_workspace(device, 0);
  const Workspace& workspace = of(device).workspace;
  const std::int64_t now = static_cast<std::int64_t>(of(device).allocated.bytes) - workspace.ours + workspace.freed;
  return static_cast<std::size_t>(std::max<std::int64_t>(workspace.peak - now, 0));
}

} // namespace torch_uvm
