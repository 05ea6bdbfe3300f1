// Makes room for a request. Retiring device copies are freed first. Then the cheapest storages are evicted (clean, or
// with a distant next use), and blocks in the way are relocated within the device.
#include "residency/engine/room.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "residency/engine/relocation_min.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// Cost per byte of evicting a storage. An unplanned eviction stalls on the re-fetch; a dirty one also stalls on its
/// write-back. Add up to 1 if the storage is reused soon, decaying with distance (soonness).
constexpr double kByteReady = 0.001; // retiring, and its write-back is done
constexpr double kByteUnderWay = 0.05; // retiring, and its write-back is queued
constexpr double kCleanByte = 0.5;
constexpr double kDirtyByte = 1;
constexpr double kFetchedByte = 8; // wastes the fetch and needs another; a last resort

/// Number of attempts for a request: another thread may take the freed range, or a victim may turn out unmovable.
constexpr int kTries = 8;

} // namespace

double Room::cost_of(const Record& record, Need need) {
  // Operands of the operator being begun count as in use here. Only evict_one_operand evicts them.
  if (!state_.of(record.device).quiescent || record.device_block == nullptr ||
      !record.address_may_change(Mover::kEngine, 0, state_.operators)) {
    return kNever;
  }
  const auto bytes = static_cast<double>(record.bytes);
  if (record.fetching()) { // needed soon, but the request is needed now
    if (need == Need::kAhead) {
      return kNever;
    }
    return bytes * (kFetchedByte + soonness(record));
  }
  if (record.retiring) {
    const Device& device = state_.of(record.device);
    if (record.write_back <= device.write_backs_read) {
      return bytes * kByteReady;
    }
    // Write-backs finish in the order in which they were started: prefer the oldest.
    const auto turn = static_cast<double>(record.write_back - device.write_backs_read);
    return bytes * kByteUnderWay * (1 + turn / static_cast<double>(device.write_backs_started));
  }
  if (need == Need::kAhead) {
    return kNever;
  }
  return bytes * ((record.host_valid ? kCleanByte : kDirtyByte) + soonness(record));
}

double Room::soonness(const Record& record) {
  const double next = state_.policy_of(record).next_use(record.id);
  // If no next use is known, fall back to LRU.
  const double distance = std::isfinite(next) ? next : static_cast<double>(state_.operators - record.last_use);
  return 1.0 / (1.0 + distance);
}

Record* Room::retiring(const Device::Retirement& retirement) const {
  Record* const record = state_.find(retirement.storage);
  return record != nullptr && record->retiring && record->retirement == retirement.number ? record : nullptr;
}

std::vector<Record*> Room::retiring(int device) const {
  std::vector<Record*> found;
  for (const Device::Retirement& each : state_.of(device).retired) {
    if (Record* const record = retiring(each)) {
      found.push_back(record);
    }
  }
  return found;
}

std::optional<std::vector<Record*>> Room::retiring_range(std::size_t bytes, int device, bool read) {
  const auto cost = [&](const Record& record) {
    const bool fits = record.retiring && (!read || record.write_back <= state_.of(device).write_backs_read);
    return fits ? cost_of(record, Need::kAhead) : kNever;
  };
  std::vector<const Block*> blocks;
  for (const Record* const record : retiring(device)) {
    if (cost(*record) < kNever) {
      blocks.push_back(record->device_block);
    }
  }
  if (blocks.empty()) {
    return std::nullopt;
  }
  return records_of(state_.memory.min_cost_range_near(std::move(blocks), bytes, device, [&](void* tag, std::size_t) {
    return tag == nullptr ? kNever : cost(*static_cast<Record*>(tag));
  }));
}

double Room::price_of(const std::vector<Record*>& victims, Need need) {
  double price = 0;
  for (const Record* const victim : victims) {
    price += cost_of(*victim, need);
  }
  return price;
}

std::vector<Record*> Room::cheapest_bytes(std::size_t bytes, int device, Need need) {
  if (bytes == 0) {
    return {};
  }
  using Candidate = std::tuple<double, StorageId, Record*>; // by the price of a byte
  std::vector<Candidate> candidates;
  std::size_t all = 0;
  const auto add = [&](Record* record) {
    if (const double cost = cost_of(*record, need); cost < kNever) {
      candidates.emplace_back(cost / static_cast<double>(record->bytes), record->id, record);
      all += record->bytes;
    }
  };
  std::ranges::for_each(retiring(device), add);
  if (all < bytes && need == Need::kNow) { // else the others need not be priced
    candidates.clear();
    for (const auto& [id, record] : state_.records) {
      if (record->device == device && record->device_block != nullptr) {
        add(record);
      }
    }
  }
  std::ranges::make_heap(candidates, std::greater{}); // few of them are wanted
  std::vector<Record*> victims;
  std::size_t found = 0;
  while (found < bytes && !candidates.empty()) {
    std::ranges::pop_heap(candidates, std::greater{});
    victims.push_back(std::get<Record*>(candidates.back()));
    found += victims.back()->bytes;
    candidates.pop_back();
  }
  if (found < bytes) {
    return {};
  }
  // Drop victims that are no longer needed, starting with the most expensive.
  for (std::size_t at = victims.size(); at-- > 0;) {
    if (found - victims[at]->bytes >= bytes) {
      found -= victims[at]->bytes;
      victims.erase(victims.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
  return victims;
}

bool Room::evict(Record& record, Stream taker) {
  try {
    return copies_.evict(record, taker);
  } catch (const RuntimeFailure&) { // such as an event on a stream that a graph is captured from: try another one
    state_.mark_unmovable(record);
    ++state_.failures;
    return false;
  }
}

bool Room::evict_all(const std::vector<Record*>& victims, Stream taker) {
  return std::ranges::all_of(victims, [&](Record* victim) { return evict(*victim, taker); });
}

bool Room::evict_range(std::size_t bytes, int device, Need need, Stream taker) {
  if (try_repeatedly_to_evict(bytes, device, need, taker)) {
    return true;
  }
  if (need != Need::kNow) {
    return false;
  }
  // Last resorts: retry the storages marked unmovable before their time is up, since they may be movable by now; slide
  // at any price, since the host may have no memory for what leaves; and slide where everything has left that can.
  if ((forget_unmovable(device) && try_repeatedly_to_evict(bytes, device, need, taker)) ||
      slide(bytes, device, taker, kNever)) {
    return true;
  }
  const std::size_t wanting = bytes - std::min(state_.memory.unused(device), bytes);
  const bool suffices = wanting == 0 || !cheapest_bytes(wanting, device, need).empty();
  return suffices && evict_all(device, taker) && slide(bytes, device, taker, kNever);
}

bool Room::try_repeatedly_to_evict(std::size_t bytes, int device, Need need, Stream taker) {
  for (int tries = 0; tries < kTries; ++tries) {
    state_.found_unmovable = false;
    if (try_to_evict(bytes, device, need, taker)) {
      return true;
    }
    if (!state_.found_unmovable) {
      break; // else retry, now that the unmovable storage is marked and not chosen again
    }
  }
  return false;
}

bool Room::forget_unmovable(int device) {
  bool forgotten = false;
  for (const auto& [id, record] : state_.records) {
    if (record->device == device && state_.is_unmovable(*record)) {
      record->unmovable_until = state_.operators;
      forgotten = true;
    }
  }
  return forgotten;
}

bool Room::evict_first_fit(std::size_t bytes, int device, Stream taker) {
  const auto run = state_.memory.first_fit_range(bytes, device, [&](void* tag, std::size_t) {
    const auto* const record = static_cast<const Record*>(tag);
    return record == nullptr || record->fetching() ? kNever : cost_of(*record, Need::kNow);
  });
  return run && evict_all(*records_of(run), taker);
}

bool Room::evict_all(int device, Stream taker) {
  bool any = false;
  for (const auto& [id, record] : state_.records) {
    if (record->device == device && std::isfinite(cost_of(*record, Need::kNow))) {
      if (evict(*record, taker)) {
        any = true;
      } else if (state_.host_refused) {
        break; // no pinned memory for further write-backs either
      }
    }
  }
  return any;
}

bool Room::try_to_evict(std::size_t bytes, int device, Need need, Stream taker) {
  // Storages below relocation_min() are never moved. Place them together at low addresses (first fit), so that they do
  // not fragment the memory for large storages.
  if (bytes < relocation_min() && need == Need::kNow && evict_first_fit(bytes, device, taker)) {
    return true;
  }
  if (const auto run = retiring_range(bytes, device, /*read=*/true)) { // nothing waits
    return evict_all(*run, taker);
  }
  if (need == Need::kAhead && state_.memory.unused(device) < bytes && state_.of(device).retired.empty()) {
    return false; // a prefetch evicts only retiring storages, and there are none
  }
  // Compare evicting a contiguous range with evicting the cheapest storages anywhere and relocating blocks afterwards.
  // Relocation needs free places for the blocks in the way, so retry with more and more spare bytes.
  std::optional<std::vector<Record*>> run;
  for (const std::size_t spare : {std::size_t{0}, bytes / 8, bytes / 4, bytes / 2, bytes}) {
    const std::size_t wanting = bytes + spare - std::min(state_.memory.unused(device), bytes + spare);
    if (wanting == 0 && spare != 0) {
      continue; // nothing has left since the last search
    }
    if (wanting > 0) {
      if (spare == 0) {
        run = min_cost_range(bytes, device, need);
      }
      const std::vector<Record*> scattered = cheapest_bytes(wanting, device, need);
      if (scattered.empty() || (run && price_of(*run, need) <= price_of(scattered, need))) {
        break;
      }
      if (!evict_all(scattered, taker)) {
        return false;
      }
    }
    // Relocated blocks are used by compute. On the stream of prefetches, compute would wait for all queued prefetches.
    const Stream on_device = need == Need::kAhead ? state_.of(device).last_stream : taker;
    if (move_aside(bytes, device, on_device)) {
      return true;
    }
    run = min_cost_range(bytes, device, need);
    // A prefetch is not worth more than its own copy.
    const double worth = need == Need::kAhead ? static_cast<double>(bytes) : kNever;
    if (slide(bytes, device, on_device, std::min(worth, run ? price_of(*run, need) : kNever))) {
      return true;
    }
  }
  return run && evict_all(*run, taker);
}

BlockCost Room::cost_of_block(Need need) {
  return [this, need](void* tag, std::size_t /*bytes*/) {
    return tag == nullptr ? kNever : cost_of(*static_cast<Record*>(tag), need);
  };
}

std::optional<std::vector<Record*>> Room::records_of(const std::optional<std::vector<void*>>& tags) {
  if (!tags) {
    return std::nullopt;
  }
  std::vector<Record*> records;
  for (void* const tag : *tags) {
    records.push_back(static_cast<Record*>(tag));
  }
  return records;
}

std::optional<std::vector<Record*>> Room::min_cost_range(std::size_t bytes, int device, Need need) {
  if (auto retiring = retiring_range(bytes, device, /*read=*/false)) {
    return retiring; // the others need not be priced
  }
  return records_of(state_.memory.min_cost_range(bytes, device, cost_of_block(need)));
}

Block* Room::room_for(std::size_t bytes, int device, Need need, Stream stream) {
  for (int tries = 0; tries < kTries; ++tries) {
    // Room was made twice and not found: it is free memory that other streams still use.
    const auto how = tries > 1 && need == Need::kNow ? CachingManagedAllocator::Try::kWaiting
                                                     : CachingManagedAllocator::Try::kWithoutWait;
    if (Block* const block = state_.memory.try_allocate(bytes, Location::device(device), stream, how)) {
      return block;
    }
    const bool made = need == Need::kToStay ? move_aside(bytes, device, stream) || slide(bytes, device, stream, kNever)
                                            : evict_range(bytes, device, need, stream);
    if (!made) {
      return nullptr;
    }
  }
  return nullptr;
}

} // namespace torch_uvm
