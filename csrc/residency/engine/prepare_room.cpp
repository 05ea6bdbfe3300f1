// Makes contiguous room for an operator's results and workspace before it runs, while its operands can still move.
//
// A running operator's operands cannot move. If they fragment the free memory, a request of the operator may find no
// contiguous range although there are enough free bytes.
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
  state_.note_workspace(index, 0);
  const std::int64_t peak = device.workspace.peak;
  std::vector<Block*> places; // keep all allocated, so that no two requests count on the same place
  try {
    places.reserve(results.size() + 1);
    bool found = true; // else the operator's allocation exceeds the budget, or is made on the host
    for (const std::size_t bytes : results) {
      if (bytes < least) {
        continue;
      }
      Block* place = room_for(bytes, index, Need::kNow, stream);
      while (place == nullptr && evict_one_operand(operands, index, bytes, left)) {
        place = room_for(bytes, index, Need::kNow, stream);
      }
      found = place != nullptr;
      if (!found) {
        break;
      }
      places.push_back(place);
    }
    // The workspace may be several blocks. So only if an operand is in the way that would have to be moved is one place
    // made for all; otherwise the operator's requests evict what they need.
    if (temporary && found && !min_cost_range(workspace, index, Need::kNow)) {
      if (Block* const place = room_for(workspace, index, Need::kNow, stream)) {
        places.push_back(place);
      }
    }
  } catch (...) {
    ++state_.failures;
  }
  for (Block* const place : places) {
    state_.memory.free(place);
  }
  state_.take_allocated_peak(index); // discard the peak: these blocks are no part of the operator's workspace
  device.workspace.peak = peak;
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
