// Makes room for a request. Retiring device copies are freed first. Then the cheapest storages are evicted (clean, or
// with a distant next use), and blocks in the way are relocated within the device.
#include <algorithm>
#include <cmath>
#include <limits>

#include "residency/engine/residency_engine.h"

namespace torch_uvm {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// Cost per byte of evicting a storage. An unplanned eviction stalls on the re-fetch; a dirty one also stalls on its
/// write-back. Add up to 1 if the storage is reused soon, decaying with distance (soonness).
constexpr double kByteReady = 0.001; // retiring, and its write-back is done
constexpr double kByteUnderWay = 0.05; // retiring, and its write-back is queued
constexpr double kCleanByte = 0.5;
constexpr double kDirtyByte = 1;
constexpr double kIdleByte = 0.002; // factor for a storage that no step uses: evicted once, not in each step
constexpr double kFetchedByte = 8; // wastes the fetch and needs another; a last resort

/// A retiring block matches a request if at most 1/64 of the block would be left over, as rounding wastes at most.
constexpr std::size_t kSlackShare = 64;

/// Maximum size of the blocks that a small request may evict by first fit. Larger blocks are chosen by cost.
constexpr std::size_t kMaxForSmall = 32 * MiB;

/// Number of attempts for a request: another thread may take the freed range, or a victim may turn out unmovable.
constexpr int kTries = 8;

/// Number of waits, up to 1 ms each, for blocks that other threads are about to free: enough for a preempted thread to
/// finish. Bounded, since that thread may need the GIL, which the requesting thread may hold.
constexpr int kMoments = 64;

} // namespace

double ResidencyEngine::cost_of(const Record& record, Need need) {
  // Operands of the operator being begun count as in use here. Only evict_one_operand evicts them.
  if (!of(record.device).quiescent || record.device_block == nullptr ||
      !record.address_may_change(Mover::kEngine, 0, operators_)) {
    return kNever;
  }
  if (record.range != nullptr && need == Need::kAhead && record.write_back > of(record.device).write_backs_read) {
    return kNever; // the host would wait
  }
  const auto bytes = static_cast<double>(record.bytes);
  if (record.fetching()) { // needed soon, but the request is needed now
    if (need == Need::kAhead) {
      return kNever;
    }
    return bytes * (kFetchedByte + soonness(record));
  }
  if (record.retiring) {
    const Device& device = of(record.device);
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
  const double leaves = record.host_valid ? kCleanByte : kDirtyByte;
  return bytes * (is_unused_by_step(record) ? kIdleByte * leaves : leaves + soonness(record));
}

bool ResidencyEngine::is_unused_by_step(const Record& record) const {
  const Policy& policy = *devices_[static_cast<std::size_t>(record.device)].policy;
  const std::uint64_t step = policy.step_length();
  return step != 0 && operators_ - record.last_use > step && !std::isfinite(policy.next_use(record.id));
}

double ResidencyEngine::soonness(const Record& record) {
  const double next = of(record.device).policy->next_use(record.id);
  // If no next use is known, fall back to LRU.
  const double distance = std::isfinite(next) ? next : static_cast<double>(operators_ - record.last_use);
  return 1.0 / (1.0 + distance);
}

bool ResidencyEngine::is_read(Record& record) {
  // Write-backs share one stream, so one that is done implies that all earlier ones are. Each query is a driver call.
  std::uint64_t& done = of(record.device).write_backs_read;
  if (record.write_back > done && reached(was_read(record))) {
    done = record.write_back;
  }
  return record.write_back <= done;
}

Record* ResidencyEngine::retiring(const Device::Retirement& retirement) const {
  Record* const record = find(retirement.storage);
  return record != nullptr && record->retiring && record->retirement == retirement.number ? record : nullptr;
}

bool ResidencyEngine::evict_same_size(std::size_t bytes, int index, Stream taker) {
  // Steps repeat, and so do sizes: a retiring block often fits the request exactly.
  for (const Device::Retirement& each : of(index).retired) {
    Record* const record = retiring(each);
    if (record != nullptr && std::isfinite(cost_of(*record, Need::kAhead))) {
      const std::size_t leaves = memory_.bytes(record->device_block);
      if (leaves >= bytes && leaves - bytes <= leaves / kSlackShare) {
        return release_device_copy(*record, taker);
      }
    }
  }
  return false;
}

double ResidencyEngine::price_of(const std::vector<Record*>& victims, Need need) {
  double price = 0;
  for (const Record* const victim : victims) {
    price += cost_of(*victim, need);
  }
  return price;
}

std::vector<Record*> ResidencyEngine::cheapest_bytes(std::size_t bytes, int device, Need need) {
  struct Candidate {
    double price_of_byte;
    Record* record;
  };
  std::vector<Candidate> candidates;
  for (const auto& [id, record] : records_) {
    if (record->device == device && record->device_block != nullptr) {
      if (const double cost = cost_of(*record, need); std::isfinite(cost)) {
        candidates.push_back({cost / static_cast<double>(record->bytes), record});
      }
    }
  }
  std::ranges::sort(candidates, [](const Candidate& left, const Candidate& right) {
    return left.price_of_byte != right.price_of_byte ? left.price_of_byte < right.price_of_byte
                                                     : left.record->id < right.record->id;
  });
  std::vector<Record*> victims;
  std::size_t found = 0;
  for (const Candidate& candidate : candidates) {
    if (found >= bytes) {
      break;
    }
    victims.push_back(candidate.record);
    found += candidate.record->bytes;
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

bool ResidencyEngine::evict_all(const std::vector<Record*>& victims, Stream taker) {
  return std::ranges::all_of(victims, [&](Record* victim) { return evict(*victim, taker); });
}

bool ResidencyEngine::evict_range(std::size_t bytes, int device, Need need, Stream taker) {
  if (try_repeatedly_to_evict(bytes, device, need, taker)) {
    return true;
  }
  if (need != Need::kNow) {
    return false;
  }
  if (memory_.takes_range(bytes, device)) {
    return forget_unmovable(device) && try_repeatedly_to_evict(bytes, device, need, taker);
  }
  // Last resorts: retry the storages marked unmovable before their time is up, since they may be movable by now, and
  // then slide at any price, since the host may have no memory for what leaves.
  return (forget_unmovable(device) && try_repeatedly_to_evict(bytes, device, need, taker)) ||
         slide(bytes, device, taker, kNever);
}

bool ResidencyEngine::try_repeatedly_to_evict(std::size_t bytes, int device, Need need, Stream taker) {
  for (int tries = 0; tries < kTries; ++tries) {
    found_unmovable_ = false;
    if (try_to_evict(bytes, device, need, taker)) {
      return true;
    }
    if (!found_unmovable_) {
      break; // else retry, now that the unmovable storage is marked and not chosen again
    }
  }
  return false;
}

bool ResidencyEngine::forget_unmovable(int device) {
  bool forgotten = false;
  for (const auto& [id, record] : records_) {
    if (record->device == device && is_unmovable(*record)) {
      record->unmovable_until = operators_;
      forgotten = true;
    }
  }
  return forgotten;
}

bool ResidencyEngine::evict_first_fit(std::size_t bytes, int device, Stream taker) {
  const auto run = memory_.first_fit_range(bytes, device, [&](void* tag, std::size_t block_bytes) {
    const auto* const record = static_cast<const Record*>(tag);
    return record == nullptr || record->fetching() || block_bytes > kMaxForSmall ? kNever
                                                                                 : cost_of(*record, Need::kNow);
  });
  if (!run) {
    return false;
  }
  std::vector<Record*> victims;
  for (void* const tag : *run) {
    victims.push_back(static_cast<Record*>(tag));
  }
  return evict_all(victims, taker);
}

bool ResidencyEngine::evict_all(int device, Stream taker) {
  bool any = false;
  for (const auto& [id, record] : records_) {
    if (record->device == device && std::isfinite(cost_of(*record, Need::kNow))) {
      if (evict(*record, taker)) {
        any = true;
      } else if (host_refused_) {
        break; // no pinned memory for further write-backs either
      }
    }
  }
  return any;
}

bool ResidencyEngine::try_to_evict(std::size_t bytes, int device, Need need, Stream taker) {
  if (memory_.takes_range(bytes, device)) {
    return evict_for_range(bytes, device, need, taker);
  }
  // Storages below relocation_min() are never moved. Place them together at low addresses (first fit), so that they do
  // not fragment the memory for large storages.
  if (bytes < relocation_min() && need == Need::kNow && evict_first_fit(bytes, device, taker)) {
    return true;
  }
  if (evict_same_size(bytes, device, taker)) {
    return true;
  }
  if (need == Need::kAhead && memory_.unused(device) < bytes && of(device).retired.empty()) {
    return false; // a prefetch evicts only retiring storages, and there are none
  }
  std::optional<std::vector<Record*>> run = min_cost_range(bytes, device, need);
  // Compare evicting a contiguous range with evicting the cheapest storages anywhere and relocating blocks afterwards.
  // Relocation needs free places for the blocks in the way, so retry with more and more spare bytes.
  for (const std::size_t spare : {std::size_t{0}, bytes / 8, bytes / 4, bytes / 2, bytes}) {
    const std::size_t wanting = bytes + spare - std::min(memory_.unused(device), bytes + spare);
    const std::vector<Record*> scattered = cheapest_bytes(wanting, device, need);
    if ((wanting > 0 && scattered.empty()) || (run && price_of(*run, need) <= price_of(scattered, need))) {
      break;
    }
    if (!evict_all(scattered, taker)) {
      return false;
    }
    // Relocated blocks are used by compute. On the stream of prefetches, compute would wait for all queued prefetches.
    const Stream on_device = need == Need::kAhead ? of(device).last_stream : taker;
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

std::optional<std::vector<Record*>> ResidencyEngine::min_cost_range(std::size_t bytes, int device, Need need) {
  const auto tags = memory_.min_cost_range(bytes, device, [&](void* tag, std::size_t /*block_bytes*/) {
    return tag == nullptr ? kNever : cost_of(*static_cast<Record*>(tag), need);
  });
  if (!tags) {
    return std::nullopt;
  }
  std::vector<Record*> run;
  for (void* const tag : *tags) {
    run.push_back(static_cast<Record*>(tag));
  }
  return run;
}

bool ResidencyEngine::is_block_being_freed(int device) const {
  if (blocks_being_freed_.load(std::memory_order_relaxed) != 0) {
    return true;
  }
  for (const auto& [id, record] : records_) {
    if (record->device == device && record->device_block != nullptr && record->pins == 0 &&
        storages_.is_expired(*record)) { // a pinned one's block stays: another label has it
      return true;
    }
  }
  return false;
}

Block* ResidencyEngine::room_for(std::size_t bytes, int device, Need need, Stream stream) {
  for (int tries = 0; tries < kTries; ++tries) {
    if (Block* const block = memory_.try_allocate(bytes, Location::device(device), stream)) {
      return block;
    }
    const bool made = need == Need::kToStay ? move_aside(bytes, device, stream) || slide(bytes, device, stream, kNever)
                                            : evict_range(bytes, device, need, stream);
    if (!made) {
      break;
    }
  }
  if (need != Need::kNow || !memory_.takes_range(kLargestRequest, device)) {
    return nullptr;
  }
  // Cached address ranges serve other requests only once they are released, for which the host waits.
  memory_.empty_cache();
  return memory_.try_allocate(bytes, Location::device(device), stream);
}

bool ResidencyEngine::make_room(std::size_t bytes, Location home, Stream stream) {
  if (home.is_host()) {
    return false;
  }
  bool wakes = false;
  bool made = false;
  try {
    Lock lock(*this);
    Device& device = of(home.index);
    if (!device.budget) {
      return false;
    }
    host_refused_ = false; // the host may have memory again
    if (device.idle) {
      // Storages created while idle get records as operators use them, so usually nothing can be evicted yet.
      device.idle = false;
      device.quiescent = false; // operators that run now were not watched
      note_awake();
      wakes = true;
    }
    const double began = now_us();
    made = evict_range(bytes, home.index, Need::kNow, stream);
    for (int moment = 0; !made && moment < kMoments && device.budget && is_block_being_freed(home.index); ++moment) {
      lock.wait_for_a_block();
      made = evict_range(bytes, home.index, Need::kNow, stream);
    }
    if (!made && device.hard) {
      made = evict_all(home.index, stream); // then unused segments can be released for a new one
    }
    ++statistics_.made_room.count;
    statistics_.made_room.bytes += made ? static_cast<std::int64_t>(bytes) : 0;
    statistics_.made_room.ms += (now_us() - began) / 1e3;
    device.excess = device.excess || (!made && !device.hard);
  } catch (...) {
    made = false; // the runtime failed; the allocator reports the lack of memory
  }
  if (wakes) {
    storages_.wake();
  }
  return made;
}

} // namespace torch_uvm
