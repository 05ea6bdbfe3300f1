// Statistics of an allocator. They are declared once, in these lists, which generate the struct and its flat dictionary
// with the keys of torch.cuda.memory_stats.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch_uvm {

/// A level and its history. `peak` counts from the last reset of the peaks, `allocated` and `freed` from the last reset
/// of the accumulated statistics.
struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;
};

/// The pool that a figure belongs to. Every change counts for kAll and for one of the other two.
enum class PoolKind : std::uint8_t { kAll, kSmall, kLarge };
constexpr std::size_t kPoolKinds = 3;

using StatArray = std::array<Stat, kPoolKinds>;

// clang-format off
// X(name): an array of levels, by pool kind
#define TORCH_UVM_STAT_ARRAYS(X) \
  X(allocation)            /* allocated blocks */ \
  X(segment)               /* segments taken from the source */ \
  X(active)                /* allocated blocks, and freed ones that still wait for device work */ \
  X(inactive_split)        /* free pieces of segments that are partly in use */ \
  X(allocated_bytes) \
  X(reserved_bytes) \
  X(active_bytes) \
  X(inactive_split_bytes) \
  X(requested_bytes)       /* as requested, before rounding */
// X(name): a count since the start or the last reset
#define TORCH_UVM_STAT_COUNTS(X) \
  X(num_alloc_retries)     /* requests that entered the failure path */ \
  X(num_ooms)              /* requests that raised OutOfMemory */ \
  X(num_sync_all_streams) \
  X(num_device_alloc)      /* segments made */ \
  X(num_device_free)       /* segments released */ \
  X(num_events_recorded)   /* not in PyTorch: events recorded */ \
  X(num_host_waits)        /* not in PyTorch: times the host waited before memory was reused */ \
  X(num_populate_failures) /* not in PyTorch: fresh segments whose prefetch failed; they are used anyway */ \
  X(num_over_cap)          /* not in PyTorch: segments made beyond their device's cap */
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

} // namespace torch_uvm
