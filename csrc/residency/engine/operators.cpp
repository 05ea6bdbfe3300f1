// Prepares operands before an operator and releases them after it. fetches_ahead.cpp carries out the policy's
// decisions; copies are in copies.cpp.
#include <algorithm>

#include "residency/engine/engine.h"
#include "residency/engine/relocation_min.h"

namespace torch_uvm {
void Engine::add_operand(Frame& frame, Record* record) {
  record->operand = frame.operands.size();
  frame.operands.push_back(record);
  ++record->in_use;
}

std::span<const Access> Engine::accesses_on(int device, const Frame& frame) {
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

std::size_t Engine::loop_of(const Frame& frame, int device, std::span<const Operand> operands) {
  Loops& loops = state_.of(device).loops;
  const auto known = std::ranges::find_if(operands, [&](const Operand& operand) {
    const Record& record = *operand.record;
    return record.device == device && record.announced && record.loop != Loops::kUnknown;
  });
  const std::size_t used = known != operands.end() ? known->record->loop : Loops::kUnknown;
  if (frame.thread != nullptr) {
    return loops.of_thread(*frame.thread, used, used != Loops::kUnknown && known->record->handed_over);
  }
  return used != Loops::kUnknown ? used : loops.unknown();
}

void Engine::note_begin(Frame& frame, const Operator& op) {
  Device& device = state_.of(frame.device);
  frame.counted = true;
  if (device.running++ != 0) {
    device.quiet.overlap = state_.operators;
  }
  if (!device.quiescent && !device.idle) {
    count_since_wake(frame.device, op.surely_outermost);
  }
}

void Engine::begin(Frame& frame, const Operator& op, std::span<const Operand> operands,
                   const std::vector<Stream>& streams) noexcept {
  try {
    ++state_.operators;
    if (operands.empty()) {
      look_for_quiet_devices();
      return;
    }
    frame.device = operands.front().record->device;
    Device& device = state_.of(frame.device);
    frame.loop = loop_of(frame, frame.device, operands);
    device.loops.share_budget(state_.operators);
    accesses_.clear();
    for (const Operand& operand : operands) {
      Record& record = *operand.record;
      if (record.last_use == state_.operators) { // an operand twice
        accesses_[record.operand].writes |= operand.writes;
        continue;
      }
      if (record.device == frame.device) {
        state_.announce(record, frame.loop);
      } else {
        state_.announce(record);
      }
      record.last_use = state_.operators;
      accesses_.push_back({record.id, operand.writes}); // same order as frame.operands
      state_.of(record.device).last_stream = streams[static_cast<std::size_t>(record.device)];
      add_operand(frame, &record);
    }
    note_begin(frame, op);
    frame.region = op.region;
    device.regions += op.region ? 1 : 0;
    frame.planned = true;
    const Decision& decision =
        device.loops.go_to(frame.loop).policy.begin(op.key, accesses_on(frame.device, frame), op.in_place_ok);
    std::span<const std::size_t> births = decision.births;
    const std::size_t guess = decision.guess;
    // A compiled graph's temporary bytes are many blocks, which need no contiguous room.
    const std::size_t workspace = op.region ? 0 : decision.workspace;
    state_.begin_workspace(frame.device, next_id_);
    if (state_.recorder) {
      let_host_get_ahead(device); // before an event is on the stream, which the device would not have reached yet
    }
    if (device.timed) {
      device.time_operator(state_.runtime, decision);
    }
    const EngineState::OwnTime own(state_, frame.device);
    if (state_.recorder) {
      state_.recorder->operator_begin(op.name, state_.now_us(), accesses_, op.in_place_ok);
      state_.operator_timer->begin(device.last_stream);
    }
    for (std::size_t index = 0; index < frame.operands.size(); ++index) {
      copies_.mark_use(*frame.operands[index], accesses_[index].writes);
      // A storage that a collective used last must not move while this operator is prepared either.
      frame.operands[index]->collective = frame.operands[index]->collective || op.collective;
    }
    no_room_ahead_ = false;
    const std::int64_t in_place_before = state_.statistics.used_in_place.count;
    bool wanted_in_place = false;
    const auto provide = [&](Record& record) {
      const bool writes = accesses_[record.operand].writes;
      const Stream stream = streams[static_cast<std::size_t>(record.device)];
      try {
        if (record.points_at == Side::kHost && choose_in_place(record, op)) {
          wanted_in_place = true;
          copies_.use_in_place(record, stream, writes);
        } else {
          copies_.use_on_device(record, stream, writes);
        }
      } catch (...) {
        use_after_failed_preparation(record, stream, writes);
      }
    };
    state_.beginning = &frame.operands;
    for (Record* const record : frame.operands) {
      provide(*record);
    }
    // Make room for a guessed size only if no contiguous range can be evicted: then an operand may be in the way, which
    // cannot move once the operator runs. Otherwise eviction waits until the operator does allocate as much.
    if (births.empty() && guess != 0 && !room_.min_cost_range(guess, frame.device, Need::kNow)) {
      births = {&guess, 1};
    }
    if (!births.empty() || workspace != 0) {
      std::vector<Record*> left;
      room_.prepare_room(frame.operands, frame.device, births, workspace, left);
      for (Record* const record : left) {
        provide(*record);
      }
    }
    state_.beginning = nullptr;
    for (Record* const record : frame.operands) {
      record->collective = op.collective;
    }
    if (state_.statistics.used_in_place.count != in_place_before) {
      if (OperatorTimer* const timer = state_.timer_of(frame.device)) {
        timer->used_in_place();
      }
      state_.statistics.over_budget += wanted_in_place ? 0 : 1;
    }
  } catch (...) { // no host memory for the frame
    state_.beginning = nullptr;
    for (const Operand& operand : operands) {
      use_untracked(*operand.record, streams[static_cast<std::size_t>(operand.record->device)], operand.writes);
    }
  }
}

void Engine::use_untracked(Record& record, Stream stream, bool writes) noexcept {
  use_after_failed_preparation(record, stream, writes);
  if (record.in_use == 0) {
    state_.mark_unmovable(record); // no frame holds it, so its end of use is unknown
  }
}

void Engine::use_after_failed_preparation(Record& record, Stream stream, bool writes) noexcept {
  ++state_.failures;
  copies_.wait_here(record);
  if (record.fetching() && writes) {
    copies_.abandon_fetch(record);
  }
  copies_.mark_use(record, writes);
  try { // later work must still wait for the operator
    if (record.points_at == Side::kDevice) {
      add_stream(record.streams, stream);
    } else {
      add_stream(record.in_place_streams, stream);
      state_.host_memory->record_stream(record.host_block, stream);
    }
  } catch (...) { // no host memory
    state_.mark_unmovable(record);
  }
}

void Engine::begin_nested(Frame& frame, std::span<const Operand> operands,
                          const std::vector<Stream>& streams) noexcept {
  try {
    for (const Operand& operand : operands) {
      Record& record = *operand.record;
      if (!frame.uses(record)) { // it may be in use by another thread's operator, which may end first
        if (frame.planned && record.device == frame.device && !record.announced) { // a result, before `created`
          state_.announce(record, frame.loop);
        } else {
          state_.announce(record);
        }
        add_operand(frame, &record);
        copies_.mark_use(record, operand.writes);
        try {
          use_where_it_is(record, streams[static_cast<std::size_t>(record.device)], operand.writes);
        } catch (...) {
          use_after_failed_preparation(record, streams[static_cast<std::size_t>(record.device)], operand.writes);
        }
        continue;
      }
      const Stream stream = streams[static_cast<std::size_t>(record.device)];
      if (operand.writes) {
        if (record.fetching()) { // the outer operator only reads it, on the host
          state_.wait(stream, record.device_ready);
          copies_.abandon_fetch(record);
        }
        record.host_valid = record.host_valid && record.points_at == Side::kHost;
        record.retiring = false;
      }
      const std::vector<Stream>& known = record.points_at == Side::kDevice ? record.streams : record.in_place_streams;
      if (std::ranges::find(known, stream) == known.end()) { // as in a hook for saved tensors that has its own stream
        use_where_it_is(record, stream, operand.writes);
      }
    }
  } catch (...) {
    for (const Operand& operand : operands) {
      use_untracked(*operand.record, streams[static_cast<std::size_t>(operand.record->device)], operand.writes);
    }
  }
}

bool Engine::choose_in_place(Record& record, const Operator& op) {
  Device& device = state_.of(record.device);
  if (record.captured != 0 || state_.policy_of(record).use_in_place(record.id)) {
    return true;
  }
  if (!op.in_place_ok || record.fetching()) {
    return false;
  }
  // The schedule has this use on the device, but the storage was not fetched. Fetch it only if there is room: a single
  // use does not justify an eviction.
  const bool tries = !no_room_ahead_;
  no_room_ahead_ = !tries || !copies_.start_fetch(record, Need::kAhead, device.fetches);
  return no_room_ahead_;
}

void Engine::use_where_it_is(Record& record, Stream stream, bool writes) {
  if (record.points_at == Side::kHost) {
    copies_.use_in_place(record, stream, writes);
  } else {
    copies_.use_on_device(record, stream, writes);
  }
}

void Engine::created(Frame& frame, Record* record, const std::vector<Stream>& streams) noexcept {
  try {
    add_operand(frame, record);
    record->last_use = state_.operators;
    record->streams.assign(1, streams[static_cast<std::size_t>(record->device)]);
    record->announced = true; // `end` tells the policy, as created
    record->loop = frame.planned && record->device == frame.device ? frame.loop : 0;
    frame.births.emplace_back(record->id, state_.bytes_taken(*record));
  } catch (...) {
    ++state_.failures;
  }
}

void Engine::end(Frame& frame) noexcept {
  if (frame.counted) {
    frame.counted = false;
    --state_.of(frame.device).running;
  }
  try {
    if (frame.region) {
      --state_.of(frame.device).regions;
    }
    if (frame.planned) {
      room_.free_held(frame.device);
    }
    release_operands(frame);
    std::erase_if(frame.births, [this](const auto& birth) { return state_.find(birth.first) == nullptr; });
    const int device = frame.device >= 0      ? frame.device
                       : frame.births.empty() ? -1
                                              : state_.find(frame.births.front().first)->device;
    std::erase_if(frame.births, [&](const auto& birth) {
      Record* const record = state_.find(birth.first);
      if (record->device == device) {
        return false;
      }
      record->announced = false; // created on another device, whose own policy must know it
      state_.announce(*record);
      return true;
    });
    if (device < 0 || !state_.watches(device)) {
      return;
    }
    if (!frame.planned) { // results but no operands: a factory function
      if (!state_.of(device).quiescent) {
        // PyTorch excludes the autograd keys around all of them, so each may be nested in an unwatched operator.
        count_since_wake(device, /*surely_outermost=*/false);
      }
      frame.loop = loop_of(frame, device);
      for (const auto& [id, bytes] : frame.births) {
        state_.find(id)->loop = frame.loop;
      }
      const Decision& decision = state_.of(device).loops.go_to(frame.loop).policy.begin(frame.key, {}, false);
      if (state_.of(device).timed) {
        state_.of(device).time_operator(state_.runtime, decision);
      }
    }
    Loops::Loop& loop = state_.of(device).loops.go_to(frame.loop); // another thread's may have been the latest
    for (OperatorTimer* const timer : {loop.timer.get(), state_.operator_timer.get()}) {
      if (timer != nullptr) {
        timer->end();
      }
    }
    const std::size_t workspace =
        frame.planned ? state_.end_workspace(device) : 0; // a factory's begin was not recorded
    if (state_.recorder) {
      for (const auto& [id, bytes] : frame.births) {
        state_.recorder->birth(id, device, state_.find(id)->bytes);
      }
      if (workspace >= relocation_min()) {
        state_.recorder->workspace(workspace);
      }
      state_.recorder->resident(device, state_.allocated_bytes(device));
    }
    const EngineState::OwnTime own(state_, device);
    const Decision& decision = loop.policy.end(frame.births, workspace);
    if (state_.of(device).quiescent) {
      follow(decision, device);
    }
    if (evicts_after_operators_) {
      room_.evict_all(device, state_.of(device).last_stream);
    }
    if (state_.of(device).exceeded) {
      state_.of(device).exceeded = false;
      release_excess(frame, device);
    }
    if (state_.of(device).excess && state_.of(device).quiescent) {
      retry_budget(device);
    }
    if (frame.planned) {
      become_idle_if_quiet(device);
    }
  } catch (...) {
    ++state_.failures;
  }
}

void Engine::evict_after_operators(bool on) {
  {
    const Lock lock(*this);
    evicts_after_operators_ = on;
  }
  if (on) {
    wake_idle_devices();
  }
}

void Engine::used_unseen(Record& record, Stream stream) noexcept {
  use_untracked(record, stream, /*writes=*/true); // it may write
}

void Engine::release_operands(Frame& frame) noexcept {
  for (Record* const record : frame.operands) {
    --record->in_use;
    try {
      if (!record->dead) {
        state_.storages.watch_for_writes(*record, state_.locked);
      }
    } catch (...) { // writes cannot be watched: assume one, so that the other copy is not taken for up to date
      ++state_.failures;
      copies_.mark_use(*record, true);
      if (record->fetching()) {
        copies_.abandon_fetch(*record);
      }
      state_.mark_unmovable(*record);
    }
    free_if_dead(record);
  }
  frame.operands.clear();
}

} // namespace torch_uvm
