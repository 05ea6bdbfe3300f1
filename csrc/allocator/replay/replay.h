// A log of allocations, done again on an allocator of one's choice: how long it takes, and what it costs in memory.
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

/// One row of a log, with pointers replaced by numbers.
struct ReplayEvent {
  enum class Kind : std::uint8_t {
    kAllocate,
    kFree,
    kIterationBegins, ///< no row: where the loop that was logged comes round
    kIterationEnds,
  };
  Kind kind = Kind::kAllocate;
  std::uint32_t stream = 0; ///< among the log's
  std::uint32_t allocation = 0; ///< its number, from 0 in the order of the log; freed once at most
  std::size_t bytes = 0;
};

struct ReplayLog {
  std::vector<Stream> streams; ///< as they were logged: which ones are the same, and whose they are, is all that counts
  std::vector<ReplayEvent> events;
  std::uint32_t allocations = 0;

  /// \throws InvalidArgument for numbers that do not fit, what is freed before it is allocated, or twice, iterations
  ///         that do not alternate, and streams of devices that the runtime does not have
  void check(const ManagedRuntime& runtime) const;
  std::size_t rows() const; ///< events that are rows
  std::size_t rows_of_last_iteration() const;
  Location busiest_home() const; ///< of the most bytes allocated; the host where there are none
};

/// What a log is replayed on.
struct ReplaySubject {
  std::shared_ptr<Allocator> runtime; ///< below all: what it has given out is what is reserved
  std::vector<std::shared_ptr<Allocator>> layers; ///< between, each of which counts its own events
  std::shared_ptr<Allocator> allocator; ///< above all
  /// What serves requests outside of iterations, and those for other homes than the options'; none: `allocator` does.
  std::shared_ptr<Allocator> outside;
  Location home; ///< the options'
  std::function<void()> begin_iteration, end_iteration; ///< none: iterations are nothing to it
  std::function<std::map<std::string, double>()> details; ///< of its own, at the end of the log; none: it has none
  bool event_per_free = false; ///< an event is recorded at each free, and nothing made of it
};

struct ReplayOptions {
  Location home; ///< that pools and arenas are for
  std::size_t ceiling = 0; ///< bytes of managed memory that a replay may have at once; the runtime's limit comes first
  std::size_t initial = 0; ///< bytes that a pool and an arena begin with
  AllocatorOptions cache;
};

/// The names that make_subject takes, as in `python -m torch_uvm replay --allocator`.
std::vector<std::string> replay_allocators();
/// \throws InvalidArgument for a name that there is not; what the allocator's making throws
ReplaySubject make_subject(const std::string& name, ManagedRuntime& runtime, const ReplayOptions& options);

/// What a replay has seen. Bytes as asked for are live; bytes taken from the runtime are reserved.
struct ReplayResult {
  std::string description; ///< of the allocator
  std::vector<double> seconds; ///< in the allocator, of each repetition
  std::vector<double> last_iteration_seconds; ///< of these, those of the last iteration and its end; 0 for none
  std::size_t last_iteration_calls = 0;
  std::size_t calls = 0; ///< of allocate and free
  std::size_t peak_live = 0;
  std::size_t peak_reserved = 0;
  double mean_live = 0; ///< over the rows
  double mean_reserved = 0;
  std::int64_t runtime_allocations = 0; ///< by the end of the log
  std::int64_t runtime_frees = 0;
  std::int64_t events_recorded = 0;
  std::map<std::string, double> details; ///< the subject's
  std::vector<std::size_t> live, reserved; ///< after each row
  std::string failure; ///< what the allocator said when it gave up; empty: it did not
  std::size_t failed_at = 0; ///< row, from 0
};

/// Told now and then of events done, of all that there are; what it throws ends the replay.
using ReplayProgress = std::function<void(std::size_t done, std::size_t of)>;

/// Replays a log in its order, on this thread: once to see what is live and reserved after each row, then `repeat`
/// times on the clock, each time on a fresh allocator. What the log never frees is freed afterwards, off the clock.
/// Streams are the runtime's default ones where the log's are, and new ones for the rest. An allocator that raises has
/// failed, which the result says; no other error is caught.
/// \throws InvalidArgument as ReplayLog::check; RuntimeFailure; what progress throws. All memory is given back
ReplayResult replay(const ReplayLog& log, ManagedRuntime& runtime, const std::function<ReplaySubject()>& make,
                    int repeat, const ReplayProgress& progress);

} // namespace torch_uvm
