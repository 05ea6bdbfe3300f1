// The allocator's accounts: what each home has and had, and all homes together.
//
// `Statistics` is what users read; this is what is kept. Every figure is kept for the total and for each
// home, and there for all pools and for one, because a peak of the sum is not a sum of peaks. As each
// allocation passes here, only what cannot be worked out later is written:
// - what was freed is what was allocated less what there is,
// - active is allocated plus pending, and its peak needs a look only while something is pending.
//
// Not thread-safe: the allocator's mutex guards it.
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

/// Of a size, which is never that large (see kLargestRequest).
constexpr std::int64_t as_signed(std::size_t bytes) {
  return static_cast<std::int64_t>(bytes);
}

class Ledger {
 public:
  /// For the host and devices 0 to `devices` - 1.
  explicit Ledger(int devices);

  enum Count {
#define TORCH_UVM_DECLARE(name) k_##name,
    TORCH_UVM_STAT_COUNTS(TORCH_UVM_DECLARE)
#undef TORCH_UVM_DECLARE
        kCounts
  };

  void allocated(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept;
  void freed(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept;
  /// Freed, but still waited for.
  void freed_pending(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept;
  /// The wait is over.
  void reclaimed(Location home, PoolKind kind, std::size_t bytes) noexcept;
  /// An allocated block has another home now. The total does not see it.
  void moved(Location from, Location to, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept;
  /// Free pieces of segments that are partly in use became more (positive) or fewer.
  void split_changed(Location home, PoolKind kind, std::int64_t pieces, std::int64_t bytes) noexcept;
  void segment_made(Location home, PoolKind kind, std::size_t bytes) noexcept;
  void segment_given_back(Location home, PoolKind kind, std::size_t bytes) noexcept;
  /// In the total, and of the home if one is to be charged.
  void count(Count count, std::optional<Location> home = std::nullopt) noexcept;

  /// nullopt: the total.
  Statistics statistics(std::optional<Location> home) const;
  Levels levels(std::optional<Location> home) const noexcept;
  std::size_t reserved_bytes(Location home, PoolKind kind = PoolKind::kAll) const noexcept {
    return static_cast<std::size_t>(account(home, kind).levels[kReservedBytes].current);
  }
  /// The most bytes allocated at once since the last call, whatever else was reset meanwhile.
  std::int64_t take_allocated_peak(Location home) noexcept;
  std::int64_t allocated_bytes(Location home) const noexcept {
    return account(home, PoolKind::kAll).levels[kAllocatedBytes].current;
  }
  /// How often what is allocated has changed. May be asked without the mutex.
  std::uint64_t allocation_changes(Location home) const noexcept {
    return scopes_[index(home)].allocation_changes.load(std::memory_order_relaxed);
  }
  void reset_peak(std::optional<Location> home) noexcept;
  void reset_accumulated(std::optional<Location> home) noexcept;

 private:
  enum Level {
    kAllocation,
    kAllocatedBytes,
    kRequestedBytes,
    kPending,
    kPendingBytes,
    kSplit,
    kSplitBytes,
    kSegment,
    kReservedBytes,
    kLevels
  };

  struct Track {
    std::int64_t current = 0;
    std::int64_t peak = 0;
    std::int64_t gained = 0; ///< ever; what was lost is `gained - current`
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

  /// Of one scope and pool.
  struct Account {
    std::array<Track, kLevels> levels;
    // Seen while something was pending; at other times allocated blocks are the active ones, and their
    // peak covers it.
    std::int64_t active_peak = 0;
    std::int64_t active_bytes_peak = 0;
    std::int64_t active_lost_at_reset = 0;
    std::int64_t active_bytes_lost_at_reset = 0;

    void note_active();
    Stat active() const;
    Stat active_bytes() const;
  };

  struct Scope {
    std::array<Account, kPoolKinds> accounts; ///< by PoolKind
    std::array<std::int64_t, kCounts> counts{};
    // The track of allocated bytes has one peak for two readers. When one starts it anew, the other keeps here what
    // it was, so that counting it twice costs the allocations nothing.
    std::int64_t peak_before_take = 0;
    std::int64_t peak_before_reset = 0;
    std::atomic<std::uint64_t> allocation_changes{0}; ///< written with the mutex held

    void note_change() {
      allocation_changes.store(allocation_changes.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
    Track& allocated_bytes() {
      return accounts[static_cast<std::size_t>(PoolKind::kAll)].levels[kAllocatedBytes];
    }
  };

  const Account& account(Location home, PoolKind kind) const {
    return scopes_[index(home)].accounts[static_cast<std::size_t>(kind)];
  }
  Scope& scope(Location home) {
    return scopes_[home.is_host() ? 1 : static_cast<std::size_t>(home.index) + 2];
  }
  std::size_t index(std::optional<Location> home) const {
    return !home ? 0 : home->is_host() ? 1 : static_cast<std::size_t>(home->index) + 2;
  }
  /// Does something to the four accounts that a change concerns.
  template <typename Change>
  void each(Location home, PoolKind kind, Change change) {
    for (Scope* const changed : {&scopes_[0], &scope(home)}) {
      change(changed->accounts[static_cast<std::size_t>(PoolKind::kAll)]);
      change(changed->accounts[static_cast<std::size_t>(kind)]);
    }
  }

  std::vector<Scope> scopes_; ///< the total, the host, the devices
};

} // namespace torch_uvm
