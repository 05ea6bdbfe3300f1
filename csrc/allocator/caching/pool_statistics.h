// The allocator's statistics, per home and in total.
//
// `Statistics` is the view for users; this is the stored form. Every figure is stored for the total and for each home,
// and in each for all pools and per pool, because the peak of a sum is not the sum of the peaks. Every allocation
// passes through here, so only what cannot be derived later is updated: freed is what was gained minus what is there.
//
// Not thread-safe; guarded by the allocator's mutex.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "allocator/statistics.h"
#include "runtime/location.h"

namespace torch_uvm {

/// Converts a size, which is at most kLargestRequest.
constexpr std::int64_t as_signed(std::size_t bytes) {
  return static_cast<std::int64_t>(bytes);
}

class PoolStatistics {
 public:
  /// For the host and devices 0 to `devices` - 1.
  explicit PoolStatistics(int devices);

  enum Count {
#define TORCH_UVM_DECLARE(name) k_##name,
    TORCH_UVM_STAT_COUNTS(TORCH_UVM_DECLARE)
#undef TORCH_UVM_DECLARE
        kCounts
  };

  void allocated(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept;
  void freed(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept;
  /// The block is freed but still waits for device work.
  void freed_pending(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept;
  /// A pending block has become free.
  void reclaimed(Location home, PoolKind kind, std::size_t bytes) noexcept;
  /// An allocated block changes its home. The total does not change.
  void moved(Location from, Location to, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept;
  /// The number of free pieces in partly used segments changed.
  void split_changed(Location home, PoolKind kind, std::int64_t pieces, std::int64_t bytes) noexcept;
  /// A segment was made, or (negative) released.
  void segments_changed(Location home, PoolKind kind, std::int64_t bytes) noexcept;
  /// Counts in the total, and in `home` if it is given.
  void count(Count count, std::optional<Location> home = std::nullopt) noexcept;

  /// nullopt: the total.
  Statistics statistics(std::optional<Location> home) const;
  std::size_t reserved_bytes(std::optional<Location> home, PoolKind kind = PoolKind::kAll) const noexcept {
    return static_cast<std::size_t>(account(home, kind)[k_reserved_bytes].current);
  }
  std::size_t active_bytes(Location home, PoolKind kind) const noexcept {
    return static_cast<std::size_t>(account(home, kind)[k_active_bytes].current);
  }
  /// Peak of the allocated bytes since the last call, independent of reset_peak.
  std::int64_t take_allocated_peak(Location home) noexcept;
  std::int64_t allocated_bytes(Location home) const noexcept {
    return account(home, PoolKind::kAll)[k_allocated_bytes].current;
  }
  /// Number of changes of the allocated bytes. Needs no lock.
  std::uint64_t allocation_changes(Location home) const noexcept {
    return scopes_[index(home)].allocation_changes.load(std::memory_order_relaxed);
  }
  void reset_peak(std::optional<Location> home) noexcept;
  void reset_accumulated(std::optional<Location> home) noexcept;

 private:
  enum Level {
#define TORCH_UVM_DECLARE(name) k_##name,
    TORCH_UVM_STAT_ARRAYS(TORCH_UVM_DECLARE)
#undef TORCH_UVM_DECLARE
        kLevels
  };

  struct Track {
    std::int64_t current = 0;
    std::int64_t peak = 0;
    std::int64_t gained = 0; ///< cumulative; the cumulative decrease is `gained - current`
    std::int64_t gained_at_reset = 0;
    std::int64_t lost_at_reset = 0;

    void increase(std::int64_t amount) {
      gained += amount;
      current += amount;
      peak = current > peak ? current : peak;
    }
    void decrease(std::int64_t amount) {
      current -= amount;
    }
    void change(std::int64_t amount) {
      amount > 0 ? increase(amount) : decrease(-amount);
    }
    Stat stat() const;
  };

  using Account = std::array<Track, kLevels>; ///< of one scope and pool

  struct Scope {
    std::array<Account, kPoolKinds> accounts; ///< by PoolKind
    std::array<std::int64_t, kCounts> counts{};
    std::int64_t untaken_peak = 0; ///< of the allocated bytes, for take_allocated_peak
    std::atomic<std::uint64_t> allocation_changes{0}; ///< written under the mutex

    void note_change() {
      allocation_changes.store(allocation_changes.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
  };

  void note_peak(Location home) noexcept;
  const Account& account(std::optional<Location> home, PoolKind kind) const {
    return scopes_[index(home)].accounts[static_cast<std::size_t>(kind)];
  }
  Scope& scope(Location home) {
    return scopes_[index(home)];
  }
  std::size_t index(std::optional<Location> home) const {
    return !home ? 0 : home->is_host() ? 1 : static_cast<std::size_t>(home->index) + 2;
  }
  /// Applies a change to the four affected accounts.
  template <typename Change>
  void each(Location home, PoolKind kind, Change change) {
    for (Scope* const changed : {&scopes_[0], &scope(home)}) {
      change(changed->accounts[static_cast<std::size_t>(PoolKind::kAll)]);
      change(changed->accounts[static_cast<std::size_t>(kind)]);
    }
  }

  std::vector<Scope> scopes_; ///< index 0: the total; 1: the host; then the devices
};

} // namespace torch_uvm
