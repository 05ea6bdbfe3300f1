// Replays a log of allocations on any allocator, to measure its time and memory use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "allocator/adaptors/adaptors.h"
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
};

/// The allocators of a replay.
struct ReplaySubject {
  std::shared_ptr<CountingAllocator> runtime; ///< the lowest upstream: its allocated bytes are the reserved bytes
  std::shared_ptr<Allocator> allocator; ///< the allocator under test
  /// Serves requests outside iterations, and those for homes that `allocator` does not serve. Null: `allocator` does.
  std::shared_ptr<Allocator> outside;
  std::function<void()> begin_iteration = [] {}, end_iteration = [] {};
};

struct ReplayOptions {
  Location home; ///< home of pools and arenas
  std::size_t initial = 0; ///< initial bytes of a pool or arena
  AllocatorOptions cache;
};

/// The names accepted by make_subject, as in `python -m torch_uvm tools replay --allocator`.
std::vector<std::string> replay_allocators();
/// \throws InvalidArgument for an unknown name; what the allocator's constructor throws
ReplaySubject make_subject(const std::string& name, ManagedRuntime& runtime, const ReplayOptions& options);
/// The runtime as an allocator, with counters. Each allocation and free is one of the runtime. Caches nothing.
std::shared_ptr<CountingAllocator> counted_runtime(ManagedRuntime& runtime);

struct ReplayResult {
  double seconds = 0; ///< without samples: time in the allocator
  double last_iteration_seconds = 0; ///< of these, time in the last iteration including its end; 0 if there is none
  std::vector<std::size_t> reserved; ///< with samples: bytes taken from the runtime, after each row
  std::size_t peak_reserved = 0;
  std::int64_t runtime_allocations = 0; ///< at the end of the log
  std::int64_t runtime_frees = 0;
  std::string failure; ///< the allocator's OutOfMemory message; empty: no failure
  std::size_t failed_at = 0; ///< index of the failed row
};

/// Replays a log in order on the calling thread. Allocations that the log never frees are freed at the end, untimed.
/// Default streams of the log stay default streams; others are replaced by new streams. If the allocator throws
/// OutOfMemory, the replay ends and the result describes the failure. Other exceptions propagate.
/// \param sample whether to record the reserved bytes after each row
/// \throws InvalidArgument for numbers out of range, a free before its allocation, a double free, iterations that nest,
///         and devices that the runtime does not have; RuntimeFailure. All memory is freed
ReplayResult replay(const ReplayLog& log, ManagedRuntime& runtime, const std::function<ReplaySubject()>& make,
                    bool sample);

} // namespace torch_uvm
