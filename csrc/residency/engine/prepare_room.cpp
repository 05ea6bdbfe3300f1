// Makes contiguous room for an operator's results and workspace before it runs, while its operands can still move.
//
// A running operator's operands cannot move. If they fragment the free memory, or its results do, a request of the
// operator may find no contiguous range although there are enough free bytes.
#include <algorithm>
#include <functional>
#include <iterator>

#include "residency/engine/room.h"

namespace torch_uvm {
namespace {

/// Only requests of at least 1/32 of the cap are prepared for. Smaller ones find a place without it.
constexpr std::size_t kPreparedShare = 32;

} // namespace

void Room::prepare_room(const std::vector<Record*>& operands, int index, std::span<const std::size_t> results,
                        std::size_t workspace, std::vector<Record*>& left) {
  Device& device = state_.of(index);
  const Stream stream = device.last_stream;
  const std::size_t least = device.cap / kPreparedShare;
  std::size_t all = 0; // results and operands
  bool any = false;
  for (const std::size_t bytes : results) {
    all += bytes;
    any = any || bytes >= least;
  }
  for (const Record* const record : operands) {
    all += record->device == index && record->device_block != nullptr ? record->bytes : 0;
  }
  const bool temporary = workspace >= least && all + workspace <= device.cap;
  if (!(any || temporary) || all > device.cap || !device.quiescent) {
    return; // not worth it, cannot fit, or nothing may move yet
  }
  free_held(index);
  state_.note_workspace(index, 0);
  const std::int64_t peak = device.workspace.peak;
  try {
    std::vector<std::size_t> requests;
    std::ranges::copy_if(results, std::back_inserter(requests), [&](std::size_t bytes) { return bytes >= least; });
    if (temporary) { // maybe several blocks
      requests.push_back(workspace);
    }
    std::ranges::sort(requests, std::greater<>()); // small ones find a place beside large ones
    device.held.reserve(requests.size());
    for (const std::size_t bytes : requests) {
      Block* place = room_for(bytes, index, Need::kNow, stream);
      while (place == nullptr && evict_one_operand(operands, index, bytes, left)) {
        place = room_for(bytes, index, Need::kNow, stream);
      }
      if (place == nullptr) { // the operator's allocation exceeds the budget, or is made on the host
        break;
      }
      device.held.push_back(place);
    }
  } catch (...) {
    ++state_.failures;
  }
  state_.take_allocated_peak(index); // discard the peak: these blocks are no part of the operator's workspace
  device.workspace.peak = peak;
  for (const Block* const place : device.held) {
    device.held_bytes += static_cast<std::int64_t>(state_.memory.bytes(place));
  }
  if (!temporary) { // results alone do not fragment the places of each other
    free_held(index);
  }
}

bool Room::use_held_or_evict(std::size_t bytes, int index, Stream taker) {
  std::vector<Block*>& held = state_.of(index).held;
  if (bytes >= state_.of(index).cap / kPreparedShare) { // a small one finds another place
    const auto end =
        std::ranges::partition_point(held, [&](const Block* place) { return state_.memory.bytes(place) >= bytes; });
    if (end != held.begin()) {
      // The smaller ones, too: else a result would take this place once the operator has freed it, and the operator may
      // ask for it again.
      const auto left = static_cast<std::size_t>(end - held.begin() - 1);
      while (held.size() > left) {
        free_last_held(index);
      }
      return true;
    }
  }
  return evict_range(bytes, index, Need::kNow, taker) ||
         (free_held(index) && evict_range(bytes, index, Need::kNow, taker));
}

bool Room::free_held(int index) {
  const bool any = !state_.of(index).held.empty();
  while (!state_.of(index).held.empty()) {
    free_last_held(index);
  }
  return any;
}

void Room::free_last_held(int index) {
  Device& device = state_.of(index);
  state_.note_workspace(index, 0);
  device.held_bytes -= static_cast<std::int64_t>(state_.memory.bytes(device.held.back()));
  state_.memory.free(device.held.back());
  device.held.pop_back();
  state_.take_allocated_peak(index); // of the time before, with the place
}

bool Room::evict_one_operand(const std::vector<Record*>& operands, int device, std::size_t bytes,
                             std::vector<Record*>& left) {
  const Stream stream = state_.of(device).last_stream;
  Record* largest = nullptr;
  for (Record* const record : operands) {
    if (record->points_at == Side::kDevice && record->device == device &&
        state_.address_may_change(*record, Mover::kEngine) && (largest == nullptr || record->bytes > largest->bytes)) {
      largest = record;
    }
  }
  if (largest == nullptr) {
    return false;
  }
  left.push_back(largest); // before what may throw: the caller provides it again in any case
  if (!evict(*largest, stream)) {
    return false;
  }
  // Find one range for the request and the operand together, so that the operand is not in the way again.
  if (Block* const both = room_for(bytes + largest->bytes, device, Need::kNow, stream)) {
    state_.memory.free(both);
    copies_.start_fetch(*largest, Need::kNow, stream);
  }
  return true;
}

} // namespace torch_uvm
