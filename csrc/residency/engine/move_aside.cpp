// Relocates blocks within the device that are in the way of a large request.
#include <limits>

#include "residency/engine/residency_engine.h"

namespace torch_uvm {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// Cost factor of relocating a block that a copy is using.
constexpr double kUnderWay = 16;

} // namespace

bool ResidencyEngine::move_aside(std::size_t bytes, int device, Stream taker) {
  if (!of(device).quiescent) {
    return false;
  }
  const auto cost = [&](void* tag, std::size_t block_bytes) {
    if (tag == nullptr) {
      return kNever;
    }
    const Record& record = *static_cast<Record*>(tag);
    if (!address_may_change(record, Mover::kEngine)) {
      return kNever;
    }
    const bool under_way = record.fetching() || record.retiring;
    return static_cast<double>(block_bytes) * (under_way ? kUnderWay : 1.0);
  };
  // While a storage is being fetched, its pointer is the host copy's. Relocating the device block then changes no
  // address, and only the engine can free the block.
  const auto claim = [&](void* tag) {
    Record& record = *static_cast<Record*>(tag);
    return record.fetching() || claim_address(record, Mover::kEngine);
  };
  const auto moves = memory_.reserve_moves(bytes, device, taker, cost, claim);
  std::size_t at = 0;
  try {
    for (; at < moves.size(); ++at) {
      move(moves[at], taker);
    }
  } catch (...) {
    for (; at < moves.size(); ++at) {
      memory_.roll_back(moves[at]);
    }
    throw;
  }
  return !moves.empty();
}

void ResidencyEngine::move(const CachingManagedAllocator::Move& move, Stream taker) {
  Record& record = *static_cast<Record*>(move.tag);
  if (!move.earlier.is_host() && move.earlier != of(record.device).fetches) {
    add_stream(record.owners, move.earlier);
    memory_.record_stream(move.to, move.earlier); // the other streams have been recorded for it
  }
  std::vector<Stream> users = memory_.streams(move.to);
  users.insert(users.end(), record.streams.begin(), record.streams.end());
  users.push_back(move.earlier);
  // Wait for this storage's own fetch by its event, not for the fetches queued behind it.
  std::erase_if(
      users, [&](Stream used) { return used.is_host() || (used == of(record.device).fetches && record.device_ready); });
  order(users, taker);
  for (Event* const event : {&record.device_ready, &was_read(record)}) { // copies that write or read the old block
    if (!reached(*event)) {
      wait(taker, *event);
    }
  }
  const Untimed untimed(*this, taker);
  runtime_.copy_async(memory_.data(move.to), memory_.data(move.from), record.bytes, taker);
  const Event moved = events_.record(taker);
  recycle_event(record.device, record.device_ready);
  record.device_ready = moved;
  record.ready_on = taker;
  record.streams.assign(1, taker);
  record.device_block = move.to;
  memory_.set_tag(move.to, &record);
  if (record.points_at == Side::kDevice) {
    storages_.point_at_device(record, move.to);
  }
  memory_.commit(move);
  ++statistics_.moved.count;
  statistics_.moved.bytes += static_cast<std::int64_t>(record.bytes);
}

} // namespace torch_uvm
