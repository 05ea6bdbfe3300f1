// Relocates blocks within the device that are in the way of a large request: to free places elsewhere (move_aside), or,
// where there are none, towards their neighbours (slide).
#include <algorithm>
#include <cstring>

#include "residency/engine/room.h"

namespace torch_uvm {
namespace {

/// Cost factor of relocating a block that a copy is using: compute waits for that copy on the link, and the others
/// queued before it.
constexpr double kUnderWay = 64;

/// Cost of relocating a byte, in the unit of cost_of (room.cpp): a byte on the link. The link copies 55 GB/s, the
/// device 2000 GB/s.
constexpr double kDeviceByte = 55.0 / 2000;

/// Number of ranges to try: an owner may refuse that its storage moves.
constexpr int kTries = 8;

} // namespace

double Room::cost_to_move(const Record* record, std::size_t block_bytes) const {
  if (record == nullptr || !state_.address_may_change(*record, Mover::kEngine)) {
    return kNever;
  }
  const bool under_way = record->fetching() || record->retiring;
  return static_cast<double>(block_bytes) * (under_way ? kUnderWay : 1.0);
}

bool Room::claim_move(Record& record) {
  // While a storage is being fetched, its pointer is the host copy's. Relocating the device block then changes no
  // address, and only the engine can free the block.
  return record.fetching() || copies_.claim_address(record, Mover::kEngine);
}

bool Room::move_aside(std::size_t bytes, int device, Stream taker) {
  if (!state_.of(device).quiescent) {
    return false;
  }
  const auto cost = [&](void* tag, std::size_t size) { return cost_to_move(static_cast<Record*>(tag), size); };
  const auto claim = [&](void* tag) { return claim_move(*static_cast<Record*>(tag)); };
  const auto moves = state_.memory.reserve_moves(bytes, device, taker, cost, claim);
  std::size_t at = 0;
  try {
    for (; at < moves.size(); ++at) {
      move(moves[at], taker);
    }
  } catch (...) {
    for (; at < moves.size(); ++at) {
      state_.memory.roll_back(moves[at]);
    }
    throw;
  }
  return !moves.empty();
}

bool Room::slide(std::size_t bytes, int device, Stream taker, double limit) {
  if (!state_.of(device).quiescent || taker.is_host()) {
    return false;
  }
  const auto cost = [&](void* tag, std::size_t size) { return cost_to_move(static_cast<Record*>(tag), size); };
  const auto claim = [&](const auto& step) { return claim_move(*static_cast<Record*>(step.tag)); };
  for (int tries = 0; tries < kTries; ++tries) {
    const auto slides = state_.memory.find_slides(bytes, device, cost, limit / kDeviceByte);
    if (!slides) {
      return false;
    }
    if (!std::ranges::all_of(slides->steps, claim)) {
      continue; // the storage is marked, and the next range is one without it
    }
    for (const auto& step : slides->steps) {
      const auto reserved = state_.memory.slide(static_cast<Record*>(step.tag)->device_block, step.up, taker);
      if (!reserved) {
        return false; // another thread has taken the free block
      }
      try {
        move(*reserved, taker);
      } catch (...) {
        state_.memory.roll_back(*reserved);
        throw;
      }
    }
    return true;
  }
  return false;
}

Event Room::copy_within(void* to, const void* from, std::size_t bytes, Stream stream) {
  auto* const into = static_cast<char*>(to);
  const auto* const out_of = static_cast<const char*>(from);
  const bool up = into > out_of;
  const auto shift = static_cast<std::size_t>(up ? into - out_of : out_of - into);
  std::size_t done = 0;
  try {
    while (done < bytes) { // no piece overwrites a byte that is still to be copied
      const std::size_t piece = std::min(shift, bytes - done);
      const std::size_t at = up ? bytes - done - piece : done;
      state_.runtime.copy_async(into + at, out_of + at, piece, stream);
      done += piece;
    }
    return state_.events.record(stream);
  } catch (...) {
    if (done == 0 || shift >= bytes) {
      throw; // the bytes are still where they were
    }
  }
  // The old place is overwritten in part, so the host finishes the copy. If it cannot wait for the pieces either, the
  // device has failed, and every later use of it reports that.
  ++state_.failures;
  for (int tries = 0; tries < kTries; ++tries) {
    try {
      state_.runtime.synchronize_stream(stream);
      break;
    } catch (...) {
      ++state_.failures;
    }
  }
  const std::size_t at = up ? 0 : done;
  std::memmove(into + at, out_of + at, bytes - done);
  return {};
}

void Room::move(const CachingManagedAllocator::Move& move, Stream taker) {
  Record& record = *static_cast<Record*>(move.tag);
  if (!move.earlier.is_host() && move.earlier != state_.of(record.device).fetches) {
    add_stream(record.owners, move.earlier);
    state_.memory.record_stream(move.to, move.earlier); // the other streams have been recorded for it
  }
  std::vector<Stream> users = state_.memory.streams(move.to);
  users.insert(users.end(), record.streams.begin(), record.streams.end());
  users.push_back(move.earlier);
  // Wait for this storage's own fetch by its event, not for the fetches queued behind it.
  std::erase_if(users, [&](Stream used) {
    return used.is_host() || (used == state_.of(record.device).fetches && record.device_ready);
  });
  copies_.order(users, taker);
  for (Event* const event :
       {&record.device_ready, &state_.was_read(record)}) { // copies that write or read the old block
    if (!state_.reached(*event)) {
      state_.wait(taker, *event);
    }
  }
  record.streams.reserve(1); // nothing may fail once the copy has begun: it may have overwritten its source
  const EngineState::Untimed untimed(state_, taker);
  const Event moved = copy_within(state_.memory.data(move.to), move.source, record.bytes, taker);
  state_.recycle_event(record.device, record.device_ready);
  record.device_ready = moved;
  record.ready_on = taker;
  record.streams.assign(1, taker);
  record.device_block = move.to;
  state_.memory.set_tag(move.to, &record);
  if (record.points_at == Side::kDevice) {
    state_.storages.point_at_device(record, move.to);
  }
  state_.memory.commit(move);
  ++state_.statistics.moved.count;
  state_.statistics.moved.bytes += static_cast<std::int64_t>(record.bytes);
}

} // namespace torch_uvm
