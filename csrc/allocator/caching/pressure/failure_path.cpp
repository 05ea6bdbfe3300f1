// What is tried before OutOfMemory is raised. The first step that helps ends the list.
//
//   refused by the limit, the host or the runtime | refused by the device's cap
//   1. wait for pending frees                     | 1. if small: move others away from the lowest address
//   2. release cached segments                    | 2. merge free neighbours
//   3. merge free neighbours                      | 3. release unused segments of the device
//   4. memory-pressure callback (evicts, if the   | 4. memory-pressure callback
//      device has a budget)                       | 5. wait for pending frees
//                                                 | 6. take what is left for small requests
//                                                 | 7. exceed the cap up to its ceiling, if the callback
//                                                 |    allows it
//
// The callback is called up to 16 times. Each call that makes room is followed by a retry, which also waits for pending
// frees.
//
// If all fail, the caller `with_idle_memory` (tensor/storage/user_allocators.h) releases the idle memory of user-made
// allocators (arenas, plans, pools) and, if there was any, tries everything once more.
#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "allocator/caching/state.h"

namespace torch_uvm {
Block* CachingManagedAllocator::State::allocate_under_pressure(const Request& request, Lock& lock,
                                                               std::optional<OutOfMemory> refusal) {
  pool_statistics.count(PoolStatistics::k_num_alloc_retries, request.home);
  const bool was_capped = cap_of(request.home).has_value();
  move_away_for_small(request, lock);
  // If a cap refused, the memory-pressure callback comes before the host waits for the device: it costs only a stream
  // dependency and a copy.
  if (Block* const block = cap_of(request.home) && !refusal ? merged_within_cap(request, lock, refusal)
                                                            : retry(request, lock, refusal)) {
    return block;
  }
  if (Block* const block = call_pressure_callback(request, lock, refusal)) {
    return block;
  }
  if (cap_of(request.home)) {
    if (Block* const block = retry(request, lock, refusal)) { // this time with waiting
      return block;
    }
    const std::size_t own = round_up(request.bytes, kLargeGranularity);
    if (Block* const block = refusal ? nullptr : from_new_segment(request, own, lock, refusal)) {
      return block; // from what was left for small requests
    }
    if (!refusal) {
      release(request.home); // so that unused segments do not add to the excess
      Block* const block =
          may_exceed_cap(request, own, lock) ? from_new_segment(request, own, lock, refusal, true) : nullptr;
      if (block != nullptr) {
        return block;
      }
    }
  } else if (was_capped) { // the budget has been lifted since
    if (Block* const block = retry(request, lock, refusal)) {
      return block;
    }
  }
  note_refused(request.requested, request.stream);
  std::string explanation;
  if (PressureCallback* const callback = pressure_callback) {
    const Unlocked unlocked(lock);
    explanation = callback->explain(request.bytes, request.home);
  }
  raise(request.requested, request.home, refusal ? *refusal : cap_refusal(request), explanation);
}

void CachingManagedAllocator::State::move_away_for_small(const Request& request, Lock& lock) {
  PressureCallback* const callback = pressure_callback;
  if (request.kind != SizeClass::kSmall || !cap_of(request.home) || callback == nullptr) {
    return;
  }
  // It will take the lowest place. If that is behind a larger block, rather move others away from a lower one.
  const auto run = heap.first_run(request.bytes, request.home);
  if (run && run->first->before != nullptr && !callback->never_moves(run->first->before->bytes)) {
    const Unlocked unlocked(lock); // the callback frees blocks of this allocator
    callback->make_room_for_small(request.bytes, request.home, request.stream);
  }
}

Block* CachingManagedAllocator::State::call_pressure_callback(const Request& request, Lock& lock,
                                                              std::optional<OutOfMemory>& refusal) {
  // Another thread may take the memory that the callback frees, so retry; but a callback that always returns true must
  // not loop forever.
  constexpr int kRounds = 16;
  for (int round = 0; round < kRounds; ++round) {
    PressureCallback* const callback = pressure_callback;
    if (callback == nullptr) {
      return nullptr;
    }
    {
      const Unlocked unlocked(lock); // the callback frees blocks, also of this allocator
      if (!callback->make_room(request.bytes, request.home, request.stream)) {
        return nullptr;
      }
    }
    if (Block* const block = retry(request, lock, refusal)) {
      return block;
    }
  }
  return nullptr;
}

Block* CachingManagedAllocator::State::retry(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal) {
  if (cap_of(request.home)) {
    if (Block* const block = within_cap(request, lock, refusal)) {
      return block;
    }
    if (!refusal) {
      if (pending_first == nullptr) {
        return nullptr; // releasing other homes' caches would not help under this cap
      }
      wait_for_pending();
      return within_cap(request, lock, refusal);
    }
  }
  wait_for_pending();
  if (Block* const block = from_cache(request, lock)) {
    return block;
  }
  // All homes' managed memory shares one limit and one host as backing store. Plain device memory does not.
  release(managed ? std::nullopt : std::optional(request.home));
  if (Block* const block = from_fresh_segment(request, lock, refusal)) {
    return block;
  }
  return from_run(request, lock);
}

Block* CachingManagedAllocator::State::from_run(const Request& request, Lock& lock) {
  // Under a cap, use this home's segments only: memory from other homes' segments would come on top of it.
  const bool any_home = managed && !cap_of(request.home);
  const auto segment_home = any_home ? std::nullopt : std::optional(request.home);
  // Most small blocks are never relocated to make room for larger ones. If there is no room for small segments, place
  // small blocks together at the lowest address, so that larger requests find contiguous memory elsewhere.
  const bool together = cap_of(request.home) && request.kind == SizeClass::kSmall;
  const auto run = together ? heap.first_run(request.bytes, request.home) : heap.best_run(request.bytes, segment_home);
  return run ? take_run(*run, request, lock) : nullptr;
}

Block* CachingManagedAllocator::State::take_run(const Heap::Run& run, const Request& request, Lock& lock) {
  for (const Block* block = run.first; !request.may_wait; block = block->after) {
    if (request.barred(runtime, block->free_list->stream)) {
      return nullptr;
    }
    if (block == run.last) {
      break;
    }
  }
  FreeList& free_list = heap.free_list(request.home, request.stream);
  // Order the streams before merging anything. Keep the lock while the host waits, because the run must not change.
  for (const Block* block = run.first;; block = block->after) {
    const Stream earlier = block->free_list->stream;
    if (!earlier.is_host() && earlier != request.stream) {
      if (request.stream.is_host()) {
        if (request.may_wait && !runtime.query_stream(earlier)) {
          pool_statistics.count(PoolStatistics::k_num_host_waits, request.home);
          runtime.synchronize_stream(earlier);
        }
      } else {
        order_after(*block, request, lock); // never blocks the host, so the lock is kept
      }
    }
    if (block == run.last) {
      break;
    }
  }
  return allocate(heap.split_range(run, request.bytes), request, free_list);
}

std::size_t CachingManagedAllocator::State::release(std::optional<Location> home, std::size_t enough) noexcept {
  std::size_t bytes = 0;
  Heap::Segments& segments = heap.segments();
  for (auto position = segments.begin(); position != segments.end() && pool_statistics.reserved_bytes(home) > enough;) {
    const Segment& segment = position->second;
    if (segment.used != 0 || (home && segment.home != *home)) {
      ++position;
      continue;
    }
    bytes += segment.bytes;
    position = release(position);
  }
  return bytes;
}

Heap::Segments::iterator CachingManagedAllocator::State::release(Heap::Segments::iterator segment) noexcept {
  void* const ptr = reinterpret_cast<void*>(segment->first);
  const std::size_t bytes = segment->second.bytes;
  if (const Location home = segment->second.home; !home.is_host()) {
    caps[static_cast<std::size_t>(home.index)].refused = false;
  }
  const auto next = heap.remove_segment(segment);
  source->free(ptr, bytes); // waits for work still queued on the segment's streams
  return next;
}

std::string CachingManagedAllocator::State::where_the_bytes_are() const {
  std::string table;
  const auto row = [&table](const char* name, const std::array<std::string, 5>& cells) {
    std::array<char, 128> line{};
    std::snprintf(line.data(), line.size(), "  %-10s%14s%14s%14s%14s%20s\n", name, cells[0].c_str(), cells[1].c_str(),
                  cells[2].c_str(), cells[3].c_str(), cells[4].c_str());
    table += line.data();
  };
  row("home", {"allocated", "pending", "cached", "reserved", "largest free block"});
  const auto account = [&](const char* name, std::optional<Location> home) {
    std::size_t cached = 0;
    std::size_t largest = 0;
    for (const auto& [address, segment] : heap.segments()) {
      for (const Block* block = segment.first; block != nullptr; block = block->after) {
        if (block->state == BlockState::kFree && (!home || block->free_list->home == *home)) {
          cached += block->bytes;
          largest = std::max(largest, block->bytes);
        }
      }
    }
    const Statistics now = pool_statistics.statistics(home);
    const std::int64_t allocated = now.allocated_bytes[0].current;
    row(name, {format_bytes(static_cast<std::size_t>(allocated)),
               format_bytes(static_cast<std::size_t>(now.active_bytes[0].current - allocated)), format_bytes(cached),
               format_bytes(static_cast<std::size_t>(now.reserved_bytes[0].current)), format_bytes(largest)});
  };
  account("all", std::nullopt);
  account("host", Location::host());
  for (int device = 0; device < devices; ++device) {
    account(to_string(Location::device(device)).c_str(), Location::device(device));
  }
  for (int device = 0; device < devices; ++device) {
    if (const auto& cap = cap_of(Location::device(device))) {
      table += "  budget of " + to_string(Location::device(device)) + ": " + format_bytes(*cap) +
               ", of which segments take " + format_bytes(taken(device)) + "\n";
    }
  }
  const std::optional<std::size_t> limit = runtime.limit();
  table += "  managed memory of the process: " + format_bytes(runtime.managed_bytes()) + " reserved, limit " +
           (limit ? format_bytes(*limit) : "none");
  try {
    const std::size_t available = runtime.host_memory_available();
    if (available != std::numeric_limits<std::size_t>::max()) { // max() means that the system does not report it
      table += "; the host has " + format_bytes(available) + " available";
    }
  } catch (const RuntimeFailure&) {
    // The table explains a failure and must not cause another one.
  }
  return table;
}

void CachingManagedAllocator::State::raise(std::size_t requested, Location home, const OutOfMemory& refusal,
                                           const std::string& explanation) {
  pool_statistics.count(PoolStatistics::k_num_ooms, home);
  const char* const remedy = managed && refusal.cause == OutOfMemory::Cause::kLimit
                                 ? "To raise the limit: torch_uvm.set_limit(...), `python -m torch_uvm run --limit`, "
                                   "TORCH_UVM_CONF=limit:...\n"
                                 : "";
  throw OutOfMemory(refusal.cause, requested,
                    "out of memory: " + format_bytes(requested) + " (" + std::to_string(requested) + " bytes) for " +
                        to_string(home) + ". " + refusal.what() + ".\n" + remedy + explanation +
                        "Where the bytes are:\n" + where_the_bytes_are());
}

} // namespace torch_uvm
