// The allocation-site profiler: counts storages and their transfers by where they were allocated.
//
// Off by default; an allocation then costs one more relaxed load. The report of a run turns it on. A site is a
// number that the probe assigns, for example to a line of a script. Here it is only a key.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "residency/trace/access_recorder.h"

namespace torch_uvm {

using AllocationSite = std::uint32_t; ///< 0: unknown

/// Figures of the storages of one site and size.
struct AllocationSiteFigures {
  AllocationSite site = 0;
  std::size_t bytes = 0; ///< size of each storage; 0: the row of all storages beyond `kMaxRows`
  std::int64_t made = 0; ///< allocated since `start`
  std::int64_t alive = 0; ///< allocated and not freed
  std::int64_t most_alive = 0; ///< peak of `alive`
  std::int64_t moves[4] = {}; ///< by TransferKind
  std::int64_t moved_bytes[4] = {};
};

/// Thread-safe. The mutex is a leaf: nothing else is called with it held. The probe is called without it.
class AllocationSites {
 public:
  /// Returns the calling thread's allocation site. Called when a storage is allocated, with none of our locks held. It
  /// may take the GIL, as PyTorch's own allocation history does.
  using Probe = AllocationSite (*)() noexcept;

  /// The process-wide instance. Leaked on purpose: storages are freed after static destructors have run.
  static AllocationSites& get();

  /// Clears the figures and starts counting.
  void start(Probe probe);
  /// Stops counting and keeps the figures. Waits for running calls of the probe, so the caller must not hold what the
  /// probe may wait for (the GIL).
  void stop() noexcept;
  bool asked() const noexcept {
    return probe_.load(std::memory_order_relaxed) != nullptr;
  }

  /// A storage was allocated. Not called for those below `relocation_min()`, which are never moved.
  void made(const void* block, std::size_t bytes) noexcept;
  /// Returns the site of the storage on a block and forgets the block. Its record keeps the site from now on.
  AllocationSite take(const void* block) noexcept;
  /// A storage without a record was freed.
  void gone(const void* block) noexcept;
  /// A storage with a record was freed.
  void gone(AllocationSite site, std::size_t bytes) noexcept;
  void moved(TransferKind kind, AllocationSite site, std::size_t bytes) noexcept;

  std::vector<AllocationSiteFigures> figures() const;

 private:
  static constexpr std::size_t kMaxRows = 8192;
  using Key = std::pair<AllocationSite, std::size_t>;

  /// With the mutex held. \throws std::bad_alloc
  AllocationSiteFigures& row(AllocationSite site, std::size_t bytes);

  std::atomic<Probe> probe_{nullptr};
  std::atomic<int> probing_{0};
  mutable std::mutex mutex_;
  std::map<Key, AllocationSiteFigures> rows_;
  std::unordered_map<const void*, Key> unrecorded_; ///< storages without a record, by block
};

} // namespace torch_uvm
