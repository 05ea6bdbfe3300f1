// Graph captures: a captured storage keeps its address, on the device or on the host, for the lifetime of the graph.
#include "residency/engine/engine.h"

namespace torch_uvm {

std::uint64_t Engine::begin_capture() {
  const Lock lock(*this);
  captures_.emplace(next_capture_, Capture{});
  open_captures_.fetch_add(1, std::memory_order_relaxed);
  return next_capture_++;
}

void Engine::end_capture(std::uint64_t capture) noexcept {
  const Lock lock(*this);
  const auto found = captures_.find(capture);
  if (found != captures_.end() && found->second.open) {
    found->second.open = false;
    open_captures_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void Engine::pin_address(Record& record) {
  count_pin(record);
  ++record.captured;
}

void Engine::captured(std::span<const Operand> operands) noexcept {
  for (const Operand& operand : operands) {
    Record& record = *operand.record;
    try {
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
        if (capture.open && capture.pinned.insert(record.id).second) {
          pin_address(record); // with several open captures, for each: the right one is unknown
        }
      }
    } catch (...) {
      ++record.pins; // no host memory to track the pin: pin it forever
      ++record.captured;
      ++state_.failures;
    }
  }
}

void Engine::launched(std::uint64_t capture, Stream stream) {
  const Lock lock(*this);
  const auto found = captures_.find(capture);
  if (found != captures_.end()) {
    add_stream(found->second.streams, stream);
  }
}

void Engine::release_capture(std::uint64_t capture) noexcept {
  end_capture(capture);
  const Lock lock(*this);
  const auto found = captures_.find(capture);
  if (found == captures_.end()) {
    return;
  }
  for (const StorageId id : found->second.pinned) {
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
    --record->captured;
    unpin(record);
  }
  captures_.erase(found);
}

} // namespace torch_uvm
