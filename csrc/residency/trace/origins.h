// What storages of one making cost: where they were made, how many there are, and what crossed the link for them.
//
// Only while somebody asks (a report of a run): otherwise an allocation costs one relaxed load more. An origin is a
// number that the asker gives out, such as of a line of a script; here it is only counted by.
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

using Origin = std::uint32_t; ///< 0: nobody knows

/// Storages of one origin and size.
struct OriginFigures {
  Origin origin = 0;
  std::size_t bytes = 0; ///< of one of them; 0: of all those that there was no row left for
  std::int64_t made = 0;
  std::int64_t alive = 0; ///< of these
  std::int64_t most_alive = 0; ///< at once
  std::int64_t moves[4] = {}; ///< by TransferKind
  std::int64_t moved_bytes[4] = {};
};

/// Thread-safe. Its mutex is a leaf: the probe is called without it, and nothing else is called with it.
class Origins {
 public:
  /// Says where the calling thread is. Called where a storage is made, with no lock of ours held: it may wait for the
  /// GIL, as PyTorch's own record of allocations does.
  using Probe = Origin (*)() noexcept;

  /// The process's; leaked on purpose, storages die after every static destructor.
  static Origins& get();

  /// Counts from 0 again.
  void start(Probe probe);
  /// Figures stay. No call of the probe is under way when this returns; not to be called with what it waits for held.
  void stop() noexcept;
  bool asked() const noexcept {
    return probe_.load(std::memory_order_relaxed) != nullptr;
  }

  /// Storages below `relocation_min()` are never moved, and not counted.
  void made(const void* block, std::size_t bytes) noexcept;
  /// The storage on a block gets a record, which knows its origin from now on.
  Origin take(const void* block) noexcept;
  /// One that has no record.
  void gone(const void* block) noexcept;
  void gone(Origin origin, std::size_t bytes) noexcept;
  void moved(TransferKind kind, Origin origin, std::size_t bytes) noexcept;

  std::vector<OriginFigures> figures() const;

 private:
  static constexpr std::size_t kMostRows = 8192;
  using Key = std::pair<Origin, std::size_t>;

  /// With the mutex held. \throws std::bad_alloc
  OriginFigures& row(Origin origin, std::size_t bytes);

  std::atomic<Probe> probe_{nullptr};
  std::atomic<int> probing_{0};
  mutable std::mutex mutex_;
  std::map<Key, OriginFigures> rows_;
  std::unordered_map<const void*, Key> unrecorded_; ///< by block
};

} // namespace torch_uvm
