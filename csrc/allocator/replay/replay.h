// Replays a log of allocations on any allocator, to measure its time and memory use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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

struct ReplayOptions {
  Location home; ///< home of pools and arenas
  std::size_t initial = 0; ///< initial bytes of a pool or arena
  AllocatorOptions cache;
};

/// The names that `replay` accepts, as in `python -m torch_uvm tools replay --allocator`.
std::vector<std::string> replay_allocators();

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

/// Replays a log in order on the calling thread, on a new allocator of that name. Allocations that the log never frees
/// are freed at the end, untimed. Default streams of the log stay default streams; others are replaced by new streams.
/// If the allocator throws OutOfMemory, the replay ends and the result describes the failure. Other exceptions
/// propagate.
/// \param sample whether to record the reserved bytes after each row
/// \throws InvalidArgument for an unknown name, numbers out of range, a free before its allocation, a double free,
///         iterations that nest, and devices that the runtime does not have; RuntimeFailure. All memory is freed
ReplayResult replay(const ReplayLog& log, ManagedRuntime& runtime, const std::string& allocator,
                    const ReplayOptions& options, bool sample);

} // namespace torch_uvm
