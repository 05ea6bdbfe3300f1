// Checks the records' invariants, and the records against the allocators' state.
#include <unordered_set>
#include <vector>

#include "residency/engine/engine.h"

namespace torch_uvm {

namespace {

/// A violated invariant of a single record, or nullptr.
const char* what_is_wrong_with(const Record& record) {
  const bool on_device = record.points_at == Side::kDevice;
  if (record.dead) {
    return "dead, and still known";
  }
  if (on_device ? record.device_block == nullptr : record.host_block == nullptr || !record.host_valid) {
    return "its pointer shows a copy that is not there";
  }
  if (record.host_valid && record.host_block == nullptr) {
    return "a valid host copy that is not there";
  }
  if (record.retiring && !(on_device && record.host_valid)) {
    return "it retires, and no write-back was started, or one that is of no use";
  }
  if (record.device_ready && record.device_block == nullptr) {
    return "a device copy that is not there is waited for";
  }
  if ((record.host_ready || record.block_ready) && record.host_block == nullptr) {
    return "a host copy that is not there is waited for";
  }
  if (record.captured > record.pins) {
    return "graphs have pinned it more often than it is pinned";
  }
  return nullptr;
}

} // namespace

std::optional<std::string> Engine::check() {
  const Lock lock(*this);
  if (const auto wrong = check_records()) {
    return wrong;
  }
  if (const auto wrong = state_.host_memory->check()) {
    return "host copies: " + *wrong;
  }
  return state_.memory.check();
}

std::optional<std::string> Engine::check_records() const {
  std::unordered_set<const Block*> host_blocks;
  std::vector<std::size_t> fetched_ahead(state_.devices.size(), 0);
  for (const auto& [id, record] : state_.records) {
    const auto wrong = [&](const char* what) { return "storage " + std::to_string(id) + ": " + what; };
    if (record->id != id) {
      return wrong("filed wrongly");
    }
    if (const char* const what = what_is_wrong_with(*record)) {
      return wrong(what);
    }
    const auto device = static_cast<std::size_t>(record->device);
    const bool ahead = record->fetching() && record->fetch_round == state_.devices[device].fetch_round;
    fetched_ahead[device] += ahead ? record->bytes : 0;
    if (record->device_block != nullptr) {
      if (state_.memory.tag(record->device_block) != record) {
        return wrong("its block is another's");
      }
      if (state_.memory.requested_bytes(record->device_block) != record->bytes) {
        return wrong("a device copy of another size");
      }
    }
    if (record->host_block != nullptr) {
      if (!host_blocks.insert(record->host_block).second) {
        return wrong("its host copy is another's, too");
      }
      if (state_.host_memory->requested_bytes(record->host_block) != record->bytes) {
        return wrong("a host copy of another size");
      }
    }
  }
  for (std::size_t device = 0; device < state_.devices.size(); ++device) {
    if (state_.devices[device].fetched_ahead != fetched_ahead[device]) {
      return "device " + std::to_string(device) + ": " + std::to_string(state_.devices[device].fetched_ahead) +
             " bytes count as fetched ahead; the storages have " + std::to_string(fetched_ahead[device]);
    }
  }
  const std::int64_t copies = state_.host_memory->statistics().allocation[0].current;
  if (copies != static_cast<std::int64_t>(host_blocks.size())) {
    return "there are " + std::to_string(copies) + " host copies; the storages have " +
           std::to_string(host_blocks.size());
  }
  return std::nullopt;
}

} // namespace torch_uvm
