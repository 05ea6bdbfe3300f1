// The engine's state of one device and of one captured graph.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include "residency/engine/loops.h"
#include "residency/engine/record.h"
#include "residency/engine/staging.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Allocated bytes during the running operator, without the engine's own fetches and evictions.
struct Workspace {
  std::int64_t peak = 0;
  std::int64_t ours = 0; ///< bytes fetched minus bytes evicted since it began
  std::int64_t freed = 0; ///< bytes of older storages that ended while it ran, as in a compiled graph
  StorageId first_new = 0; ///< storages from this one on began while it ran
};

/// Allocated bytes when the allocator was last queried.
struct Allocated {
  std::size_t bytes = 0;
  std::uint64_t changes = ~std::uint64_t{0}; ///< the allocator's change counter at that time
};

/// Whether a device may become idle, and its state when it did (sleep.cpp).
struct QuietPeriod {
  static constexpr std::uint64_t kMin = 128; ///< minimum number of quiet operators, however short the step

  std::uint64_t since = 0; ///< the operator that last restarted the quiet period
  std::uint64_t still_since = 0; ///< the same, except for operators that missed the schedule
  std::uint64_t next_look = 0;
  std::uint64_t misses = 0; ///< the policies' misses at that operator
  std::uint64_t overlap = 0; ///< the latest operator that began while another one ran
  std::int64_t rooms = 0; ///< statistics_.made_room.count at the latest look
  std::uint64_t write_backs = 0; ///< Device::write_backs_started at the latest look
  std::size_t peak = 0; ///< peak allocated bytes since eviction or a call for room last ended the quiet period
  std::size_t level = 0; ///< allocated bytes above which, plus a small margin, the quiet period restarts
  std::size_t alarm = 0; ///< allocated bytes above which the device wakes; 0: it has not become idle
  std::size_t other = 0; ///< allocated bytes without a record when the device became idle
  std::size_t unseen = 0; ///< allocated bytes without a record that were allocated while it was idle
  unsigned idle_periods = 0; ///< how often it has been idle
  unsigned seen = 0; ///< weighted count of operators since it woke
};

struct Device {
  static constexpr std::size_t kNever = ~std::size_t{0};

  /// Records the allocated bytes; a marked rise restarts the quiet period.
  /// \param now the engine's count of operators
  void note_level(std::size_t bytes, std::uint64_t now);
  void restart_quiet(std::uint64_t now);
  /// Times an operator of the current loop on `last_stream`, while its policy asks for that.
  /// \param decision of the policy's `begin` for it
  void time_operator(ManagedRuntime& runtime, const Decision& decision) noexcept;

  std::optional<std::size_t> budget; ///< what the user set, in bytes; nullopt: none
  std::size_t cap = 0; ///< the budget without the staging slots, rounded (cap_within); the allocator enforces it
  std::size_t ceiling = 0; ///< an operator may exceed the cap up to here
  bool idle = false; ///< idle: operators are not watched
  bool quiescent = true; ///< quiescent: no unwatched operator runs; else nothing may be evicted
  QuietPeriod quiet;
  std::atomic<std::size_t> alarm{kNever}; ///< quiet.alarm while idle because its steps fit, else kNever; any thread's
  int running = 0; ///< running operators whose first operand is on this device
  Loops loops; ///< none before the first budget or capture
  bool timed = false; ///< policies get durations: events time kernels
  LinkRates rates; ///< measured if `timed`
  Stream fetches;
  Stream write_backs;
  std::unique_ptr<Staging> incoming; ///< nullptr if staging was never needed
  std::unique_ptr<Staging> outgoing;
  struct Fetch {
    StorageId storage;
    std::uint64_t asked; ///< the latest operator at that time; a later use makes the fetch needless
  };
  std::deque<Fetch> pending; ///< the policy's fetches that have not started for want of room
  std::size_t fetched_ahead = 0; ///< bytes prefetched for the current schedule and not used yet
  std::uint64_t fetch_round = 0; ///< number of dropped schedules: their prefetches may never be used
  std::multimap<std::uint64_t, StorageId> unforeseen; ///< unscheduled evictions, by the operator that uses them next
  unsigned pause = 0; ///< operators until the next search for room for `pending`
  unsigned next_pause = 0;
  struct Retirement {
    StorageId storage;
    std::uint64_t number; ///< differs from Record::retirement if the storage was used and retired again
  };
  std::deque<Retirement> retired; ///< in order of their write-backs; some may have been used again
  std::uint64_t retirements = 0;
  Workspace workspace;
  std::vector<Block*> held; ///< the running operator's places for large results and its workspace, the largest first
  std::int64_t held_bytes = 0;
  Allocated allocated;
  Stream last_stream; ///< of the latest operator: blocks with no work pending are freed to this stream's list
  std::uint64_t write_backs_started = 0;
  std::uint64_t write_backs_read = 0; ///< write-backs known to have finished reading the device copy
  bool exceeded = false; ///< the running operator has exceeded the budget
  unsigned regions = 0; ///< running compiled graphs
  bool excess = false; ///< the budget may be exceeded: it was set, or unwatched operators allocated
  std::uint64_t next_shrink = 0; ///< the operator after which to try to shrink to the budget
  std::uint64_t shrink_pause = 0;
};

struct Capture {
  bool open = true;
  std::unordered_set<StorageId> pinned;
  std::vector<Stream> streams; ///< that the graph was launched on
};

} // namespace torch_uvm
