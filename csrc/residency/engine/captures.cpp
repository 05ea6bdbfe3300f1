// Graph captures: a captured storage keeps its address, on the device or on the host, for the lifetime of the graph.
// One in an address range keeps it anyway: it is an operand of each launch, and may be evicted between them.
#include "residency/engine/residency_engine.h"

namespace torch_uvm {

std::uint64_t ResidencyEngine::begin_capture() {
  const Lock lock(*this);
  captures_.emplace(next_capture_, Capture{});
  open_captures_.fetch_add(1, std::memory_order_relaxed);
  return next_capture_++;
}

void ResidencyEngine::end_capture(std::uint64_t capture) noexcept {
  const Lock lock(*this);
  const auto found = captures_.find(capture);
  if (found == captures_.end() || !found->second.open) {
    return;
  }
  found->second.open = false;
  open_captures_.fetch_sub(1, std::memory_order_relaxed);
  std::erase_if(found->second.pinned, [&](const auto& pinned) {
    Record* const record = state_.find(pinned.first);
    if (record == nullptr || record->range == nullptr || !record->is_in_range()) {
      return record == nullptr;
    }
    try {
      found->second.operands.push_back({pinned.first, pinned.second});
    } catch (...) { // no host memory: it stays pinned
      ++state_.failures;
      return false;
    }
    ++record->graphs;
    unpin_address(*record);
    return true;
  });
}

void ResidencyEngine::pin_address(Record& record) {
  count_pin(record);
  ++record.captured;
}

void ResidencyEngine::unpin_address(Record& record) noexcept {
  --record.captured;
  unpin(&record);
}

void ResidencyEngine::pin_for(Capture& capture, Record& record, bool writes) {
  const auto [place, is_new] = capture.pinned.try_emplace(record.id, writes);
  place->second = place->second || writes;
  if (is_new) {
    pin_address(record);
  }
}

void ResidencyEngine::captured(std::span<const Operand> operands) noexcept {
  for (const Operand& operand : operands) {
    Record& record = *operand.record;
    try {
      if (record.range != nullptr && record.points_at == Side::kHost && record.captured == 0) {
        copies_.use_on_device(record, state_.of(record.device).fetches, operand.writes);
      }
      // Block the host: the graph must not contain a wait for a copy that happens only once.
      copies_.wait_here(record);
      if (record.fetching()) {
        copies_.abandon_fetch(record); // the graph may write to the host copy, which the fetched copy would lack
      }
      copies_.mark_use(record, operand.writes);
      if (!has_open_captures() && record.captured == 0) {
        pin_address(record); // a capture we were not told of: its graph's end is not reported
      }
      for (auto& [id, capture] : captures_) {
        if (capture.open) {
          pin_for(capture, record, operand.writes); // with several open captures, for each: the right one is unknown
        }
      }
    } catch (...) {
      ++record.pins; // no host memory to track the pin: pin it forever
      ++record.captured;
      ++state_.failures;
    }
  }
}

std::vector<Engine::Operand> ResidencyEngine::launched(std::uint64_t capture, Stream stream) {
  std::vector<Operand> operands;
  const auto found = captures_.find(capture);
  if (found == captures_.end()) {
    return operands;
  }
  add_stream(found->second.streams, stream);
  for (const Access& access : found->second.operands) {
    if (Record* const record = state_.find(access.storage)) { // else it was freed before the graph was
      operands.push_back({record, access.writes});
    }
  }
  return operands;
}

void ResidencyEngine::release_capture(std::uint64_t capture) noexcept {
  end_capture(capture);
  const Lock lock(*this);
  const auto found = captures_.find(capture);
  if (found == captures_.end()) {
    return;
  }
  for (const Access& access : found->second.operands) {
    if (Record* const record = state_.find(access.storage)) {
      --record->graphs;
    }
  }
  for (const auto& [id, writes] : found->second.pinned) {
    Record* const record = state_.find(id);
    if (record == nullptr) {
      continue; // freed before the graph was
    }
    try {
      // The last launch may still run: order later copies and reuse of the memory after it.
      std::vector<Stream>& streams = record->points_at == Side::kDevice ? record->streams : record->in_place_streams;
      for (const Stream stream : found->second.streams) {
        add_stream(streams, stream);
        if (record->points_at == Side::kHost) {
          state_.host_memory->record_stream(record->host_block, stream);
        }
      }
    } catch (...) {
      ++state_.failures;
      continue; // leave it pinned, which is safe
    }
    unpin_address(*record);
  }
  captures_.erase(found);
}

} // namespace torch_uvm
