// Room for what an operator is going to make, found while its operands may still move.
//
// Once an operator runs, its operands stay where they are; where they lie in the midst of what is free, no piece may be
// left for its result, though it would fit by its bytes.
#include "residency/engine/engine.h"

namespace torch_uvm {
namespace {

/// Of a budget, what a result has at least that is worth it: smaller ones find a place.
constexpr std::size_t kPreparedShare = 32;

} // namespace

void Engine::prepare_room(const Frame& frame, std::span<const std::size_t> pieces, Stream stream,
                          std::vector<Record*>& left) {
  Device& device = of(frame.device);
  std::size_t all = 0; // with its operands
  bool any = false;
  for (const std::size_t bytes : pieces) {
    all += bytes;
    any = any || bytes >= device.cap / kPreparedShare;
  }
  for (const Record* const record : frame.held) {
    all += record->device == frame.device && record->device_block != nullptr ? record->bytes : 0;
  }
  if (!any || all > device.cap || !device.settled) {
    return; // nothing to do; or nothing helps
  }
  note_workspace(frame.device, 0);
  const std::int64_t peak = device.workspace.peak;
  std::vector<Block*> places; // held together, or the second would be given the first one's
  try {
    places.reserve(pieces.size());
    for (const std::size_t bytes : pieces) {
      if (bytes < device.cap / kPreparedShare) {
        continue;
      }
      Block* place = room_for(bytes, frame.device, Need::kNow, stream);
      while (place == nullptr && make_one_leave(frame, bytes, stream, left)) {
        place = room_for(bytes, frame.device, Need::kNow, stream);
      }
      if (place == nullptr) {
        break; // the allocator will say what is missing, and may_exceed what to do
      }
      places.push_back(place);
    }
  } catch (...) {
    ++failures_;
  }
  for (Block* const place : places) {
    memory_.free(place);
  }
  take_allocated_peak(frame.device); // that was no need of the operator's
  device.workspace.peak = peak;
}

bool Engine::make_one_leave(const Frame& frame, std::size_t bytes, Stream stream, std::vector<Record*>& left) {
  Record* largest = nullptr;
  for (Record* const record : frame.held) {
    if (record->points_at == Side::kDevice && record->device == frame.device &&
        address_may_change(*record, Mover::kEngine) && (largest == nullptr || record->bytes > largest->bytes)) {
      largest = record;
    }
  }
  if (largest == nullptr) {
    return false;
  }
  left.push_back(largest); // before it leaves: who has the list provides it again
  if (!evict(*largest, stream)) {
    return false;
  }
  // Side by side with what is wanted: where it lay it would be in the way again.
  if (Block* const both = room_for(bytes + largest->bytes, frame.device, Need::kNow, stream)) {
    memory_.free(both);
    start_fetch(*largest, Need::kNow, stream);
  }
  return true;
}

} // namespace torch_uvm
