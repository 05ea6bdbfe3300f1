// The explanation in an out-of-memory error: the running operator's needs, the pinned bytes, and a sufficient budget.
#include <algorithm>

#include "allocator/size_classes.h"
#include "residency/engine/engine.h"
#include "residency/engine/relocation_min.h"
#include "residency/engine/shares.h"
#include "runtime/bytes.h"

namespace torch_uvm {

Engine::Staying Engine::staying(int device, std::span<Record* const> operands) const {
  Staying found;
  std::size_t known = 0;
  for (const auto& [id, record] : state_.records) {
    if (record->device != device) {
      continue;
    }
    const bool is_operand = std::ranges::find(operands, record) != operands.end();
    const std::size_t bytes = record->device_block == nullptr ? 0 : state_.memory.bytes(record->device_block);
    known += bytes;
    if (record->pins != 0) {
      found.pinned += bytes;
    } else if (is_operand) {
      found.operands += bytes == 0 ? record->bytes : bytes;
    } else if (record->in_use != 0 || state_.is_unmovable(*record)) {
      found.others += bytes;
    }
  }
  const auto allocated = state_.allocated_bytes(device);
  found.unknown = allocated - std::min(allocated, known);
  return found;
}

std::size_t Engine::budget_for(int device, std::size_t bytes) const {
  std::size_t budget = round_up(bytes, kLargeGranularity);
  for (;;) {
    const std::size_t cap = cap_within(device, budget, kStagingSlots * slot_bytes(device, budget));
    if (cap >= bytes) {
      return budget;
    }
    budget += round_up(bytes - cap, kLargeGranularity);
  }
}

std::string Engine::explain(std::size_t bytes, Location home) noexcept {
  try {
    if (home.is_host()) {
      return {};
    }
    const Lock lock(*this);
    const Device& device = state_.of(home.index);
    if (!device.budget) {
      return {};
    }
    const StorageAdapter::RunningOperator op = state_.storages.running();
    const Staying now = staying(home.index, op.operands);
    std::string said;
    if (op.name != nullptr) {
      said +=
          "The operator " + std::string(op.name) + " needs " + format_bytes(now.operands + bytes) + " on the device";
      said += now.operands == 0 ? ".\n"
                                : ": " + format_bytes(now.operands) + " of operands and results, and this request.\n";
    }
    if (now.pinned != 0) {
      said += "Pinned there by keep_resident, exports and graph captures: " + format_bytes(now.pinned) + ".\n";
    }
    if (now.others != 0) {
      said += "Used by operators of other threads, or by several labels: " + format_bytes(now.others) + ".\n";
    }
    if (now.unknown != 0) {
      said += "Below " + format_bytes(relocation_min()) +
              ", or made by operators that still run: " + format_bytes(now.unknown) + ".\n";
    }
    if (!device.quiescent) {
      said += "Nothing could be evicted: operators run that began before the budget was in force.\n";
    }
    std::size_t stays = now.operands + now.pinned + now.others + now.unknown;
    if (state_.host_refused) { // without pinned memory nothing can be evicted
      stays = state_.allocated_bytes(home.index);
      for (const Record* const record : op.operands) {
        stays += record->device == home.index && record->device_block == nullptr ? record->bytes : 0;
      }
    }
    const std::size_t budget = budget_for(home.index, stays + round_up(bytes, kLargeGranularity));
    if (budget > *device.budget && budget <= device.ceiling) {
      const std::string text = exact_bytes(budget);
      said += "The smallest budget that would do: " + text + " (torch_uvm.set_budget(\"" + text +
              "\"), `python -m torch_uvm run --budget " + text + "`).\n";
    }
    const std::optional<std::size_t> host_limit = state_.host_source->limit();
    if (state_.host_refused && host_limit) {
      said += "Nothing more can leave the device: pinned host memory is at its limit, " +
              format_bytes(state_.host_source->bytes()) + " of " + format_bytes(*host_limit) +
              ". To raise it: torch_uvm.set_host_limit(...), `python -m torch_uvm run --host-limit`, "
              "TORCH_UVM_CONF=host_limit:...\n";
    } else if (state_.host_refused) {
      said += "Nothing more can leave the device: the host has no more memory to pin beside " +
              format_bytes(state_.host_source->bytes()) + ".\n";
    }
    return said;
  } catch (...) {
    return {}; // no host memory: the error then has the allocator's text only
  }
}

} // namespace torch_uvm
