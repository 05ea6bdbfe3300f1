// Replays a log of allocations on any allocator, to measure its time and memory use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/allocator.h"
#include "allocator/caching/caching_managed_allocator.h"

namespace torch_uvm {

/// A row of a log, with pointers replaced by allocation numbers.
struct ReplayEvent {
  enum class Kind : std::uint8_t {
    kAllocate,
    kFree,
    kIterationBegins, ///< not a row: start of an iteration of the logged loop
    kIterationEnds,
  };
  Kind kind = Kind::kAllocate;
  std::uint32_t stream = 0; ///< index into ReplayLog::streams
  std::uint32_t allocation = 0; ///< allocation number, from 0 in log order; freed at most once
  std::size_t bytes = 0;
};

struct ReplayLog {
  /// As logged; what counts is which are equal, their device, and whether they are default streams.
  std::vector<Stream> streams;
  std::vector<ReplayEvent> events;
  std::uint32_t allocations = 0;

  /// \throws InvalidArgument for numbers out of range, a free before its allocation, a double free, iterations that do
  ///         not alternate, and streams of devices that the runtime does not have
  void check(const ManagedRuntime& runtime) const;
  std::size_t rows() const; ///< events except iteration boundaries
  std::size_t rows_of_last_iteration() const;
  Location busiest_home() const; ///< the home with the most allocated bytes; the host if there are no allocations
};

/// The allocators of a replay.
struct ReplaySubject {
  std::shared_ptr<Allocator> runtime; ///< the lowest upstream: its allocated bytes are the reserved bytes
  std::vector<std::shared_ptr<Allocator>> layers; ///< intermediate allocators, each with its own event count
  std::shared_ptr<Allocator> allocator; ///< the allocator under test
  /// Serves requests outside iterations, and those for homes other than `home`. Null: `allocator` serves them.
  std::shared_ptr<Allocator> outside;
  Location home; ///< from the options
  std::function<void()> begin_iteration, end_iteration; ///< null: iterations are ignored
  /// Allocator-specific figures at the end of the log; null: none.
  std::function<std::map<std::string, double>()> details;
  bool event_per_free = false; ///< record an unused event at each free, as a baseline
};

struct ReplayOptions {
  Location home; ///< home of pools and arenas
  std::size_t ceiling = 0; ///< maximum managed bytes at any time; the runtime's limit applies first
  std::size_t initial = 0; ///< initial bytes of a pool or arena
  AllocatorOptions cache;
};

/// The names accepted by make_subject, as in `python -m torch_uvm replay --allocator`.
std::vector<std::string> replay_allocators();
/// \throws InvalidArgument for an unknown name; what the allocator's constructor throws
ReplaySubject make_subject(const std::string& name, ManagedRuntime& runtime, const ReplayOptions& options);

/// Measurements of a replay. Live bytes are the requested bytes of live allocations. Reserved bytes are taken from the
/// runtime.
struct ReplayResult {
  std::string description; ///< of the allocator
  std::vector<double> seconds; ///< time in the allocator, per repetition
  /// Of these, time in the last iteration including its end; 0 if there is none.
  std::vector<double> last_iteration_seconds;
  std::size_t last_iteration_calls = 0;
  std::size_t calls = 0; ///< number of calls of allocate and free
  std::size_t peak_live = 0;
  std::size_t peak_reserved = 0;
  double mean_live = 0; ///< averaged over the rows
  double mean_reserved = 0;
  std::int64_t runtime_allocations = 0; ///< at the end of the log
  std::int64_t runtime_frees = 0;
  std::int64_t events_recorded = 0;
  std::map<std::string, double> details; ///< from ReplaySubject::details
  std::vector<std::size_t> live, reserved; ///< after each row
  std::string failure; ///< the allocator's OutOfMemory message; empty: no failure
  std::size_t failed_at = 0; ///< index of the failed row
};

/// Called periodically with the number of completed events and the total. An exception ends the replay.
using ReplayProgress = std::function<void(std::size_t done, std::size_t of)>;

/// Replays a log in order on the calling thread: once untimed to sample live and reserved bytes after each row, then
/// `repeat` times timed, each on a fresh allocator. Allocations that the log never frees are freed at the end, untimed.
/// Default streams of the log stay default streams; others are replaced by new streams. If the allocator throws
/// OutOfMemory, the replay ends and the result describes the failure. Other exceptions propagate.
/// \throws InvalidArgument as ReplayLog::check; RuntimeFailure; what progress throws. All memory is freed
ReplayResult replay(const ReplayLog& log, ManagedRuntime& runtime, const std::function<ReplaySubject()>& make,
                    int repeat, const ReplayProgress& progress);

} // namespace torch_uvm
