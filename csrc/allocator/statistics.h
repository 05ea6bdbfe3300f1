// What an allocator counts. Declared once, here: the struct and its flat dictionary with the keys of
// torch.cuda.memory_stats are made from these lists.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch_uvm {

/// A level and its history. `peak` is of the level since the last reset, the sums since theirs.
struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;
};

/// Which pool a figure belongs to; every change counts for kAll and for one of the other two.
enum class PoolKind : std::uint8_t { kAll, kSmall, kLarge };
constexpr std::size_t kPoolKinds = 3;

using StatArray = std::array<Stat, kPoolKinds>;

// clang-format off
// X(name): an array of levels, by pool kind
#define TORCH_UVM_STAT_ARRAYS(X) \
  X(allocation)            /* blocks in a caller's hands */ \
  X(segment)               /* segments from the runtime */ \
  X(active)                /* blocks in use, or freed and still waited for */ \
  X(inactive_split)        /* free pieces of segments that are partly in use */ \
  X(allocated_bytes) \
  X(reserved_bytes) \
  X(active_bytes) \
  X(inactive_split_bytes) \
  X(requested_bytes)       /* as asked for, before rounding */
// X(name): a count since the start or the last reset
#define TORCH_UVM_STAT_COUNTS(X) \
  X(num_alloc_retries)     /* allocations that succeeded, or failed, only after the failure path */ \
  X(num_ooms)              /* allocations that raised */ \
  X(num_sync_all_streams) \
  X(num_device_alloc)      /* runtime calls that made a segment */ \
  X(num_device_free)       /* runtime calls that gave one back */ \
  X(num_events_recorded)   /* ours: events that somebody needed */ \
  X(num_host_waits)        /* ours: times the host waited before it reused memory */ \
  X(num_populate_failures) /* ours: fresh segments whose prefetch failed; they are used all the same */ \
  X(num_over_cap)          /* ours: segments that exceeded their device's cap, which was not hard */
// clang-format on

struct Statistics {
#define TORCH_UVM_DECLARE(name) StatArray name;
  TORCH_UVM_STAT_ARRAYS(TORCH_UVM_DECLARE)
#undef TORCH_UVM_DECLARE
#define TORCH_UVM_DECLARE(name) std::int64_t name = 0;
  TORCH_UVM_STAT_COUNTS(TORCH_UVM_DECLARE)
#undef TORCH_UVM_DECLARE

  /// ("allocated_bytes.large_pool.peak", 1234), ... , ("num_ooms", 0), in the order declared.
  std::vector<std::pair<std::string, std::int64_t>> flatten() const;
};

/// What there is now of each level of Statistics, with none of its history: a fraction of the work to read.
struct Levels {
  using Array = std::array<std::int64_t, kPoolKinds>;
#define TORCH_UVM_DECLARE(name) Array name{};
  TORCH_UVM_STAT_ARRAYS(TORCH_UVM_DECLARE)
#undef TORCH_UVM_DECLARE
};

} // namespace torch_uvm
