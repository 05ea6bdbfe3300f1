#include "allocator/caching/pool_statistics.h"

#include <algorithm>
#include <utility>

namespace torch_uvm {

Stat PoolStatistics::Track::stat() const {
  return Stat{current, peak, gained - gained_at_reset, gained - current - lost_at_reset};
}

void PoolStatistics::Account::note_active() {
  active_peak = std::max(active_peak, levels[kAllocation].current + levels[kPending].current);
  active_bytes_peak = std::max(active_bytes_peak, levels[kAllocatedBytes].current + levels[kPendingBytes].current);
}

Stat PoolStatistics::Account::active() const {
  const Track& allocation = levels[kAllocation];
  const std::int64_t current = allocation.current + levels[kPending].current;
  return Stat{current, std::max(active_peak, allocation.peak), allocation.gained - allocation.gained_at_reset,
              allocation.gained - current - active_lost_at_reset};
}

Stat PoolStatistics::Account::active_bytes() const {
  const Track& allocated = levels[kAllocatedBytes];
  const std::int64_t current = allocated.current + levels[kPendingBytes].current;
  return Stat{current, std::max(active_bytes_peak, allocated.peak), allocated.gained - allocated.gained_at_reset,
              allocated.gained - current - active_bytes_lost_at_reset};
}

PoolStatistics::PoolStatistics(int devices) : scopes_(static_cast<std::size_t>(devices) + 2) {}

void PoolStatistics::allocated(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept {
  scope(home).note_change();
  each(home, kind, [&](Account& account) {
    account.levels[kAllocation].increase(1);
    account.levels[kAllocatedBytes].increase(as_signed(bytes));
    account.levels[kRequestedBytes].increase(as_signed(requested));
    if (account.levels[kPending].current != 0) {
      account.note_active();
    }
  });
}

void PoolStatistics::freed(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept {
  scope(home).note_change();
  each(home, kind, [&](Account& account) {
    account.levels[kAllocation].decrease(1);
    account.levels[kAllocatedBytes].decrease(as_signed(bytes));
    account.levels[kRequestedBytes].decrease(as_signed(requested));
  });
}

void PoolStatistics::freed_pending(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept {
  freed(home, kind, bytes, requested);
  each(home, kind, [&](Account& account) {
    account.levels[kPending].increase(1);
    account.levels[kPendingBytes].increase(as_signed(bytes));
  });
}

void PoolStatistics::reclaimed(Location home, PoolKind kind, std::size_t bytes) noexcept {
  each(home, kind, [&](Account& account) {
    account.levels[kPending].decrease(1);
    account.levels[kPendingBytes].decrease(as_signed(bytes));
  });
}

void PoolStatistics::moved(Location from, Location to, PoolKind kind, std::size_t bytes,
                           std::size_t requested) noexcept {
  if (from == to) {
    return;
  }
  scope(from).note_change();
  scope(to).note_change();
  for (const PoolKind changed : {PoolKind::kAll, kind}) {
    Account& old = scope(from).accounts[static_cast<std::size_t>(changed)];
    old.levels[kAllocation].decrease(1);
    old.levels[kAllocatedBytes].decrease(as_signed(bytes));
    old.levels[kRequestedBytes].decrease(as_signed(requested));
    Account& now = scope(to).accounts[static_cast<std::size_t>(changed)];
    now.levels[kAllocation].increase(1);
    now.levels[kAllocatedBytes].increase(as_signed(bytes));
    now.levels[kRequestedBytes].increase(as_signed(requested));
    now.note_active();
  }
}

void PoolStatistics::split_changed(Location home, PoolKind kind, std::int64_t pieces, std::int64_t bytes) noexcept {
  each(home, kind, [&](Account& account) {
    account.levels[kSplit].change(pieces);
    account.levels[kSplitBytes].change(bytes);
  });
}

void PoolStatistics::segment_made(Location home, PoolKind kind, std::size_t bytes) noexcept {
  each(home, kind, [&](Account& account) {
    account.levels[kSegment].increase(1);
    account.levels[kReservedBytes].increase(as_signed(bytes));
  });
  count(k_num_device_alloc, home);
}

void PoolStatistics::segment_released(Location home, PoolKind kind, std::size_t bytes) noexcept {
  each(home, kind, [&](Account& account) {
    account.levels[kSegment].decrease(1);
    account.levels[kReservedBytes].decrease(as_signed(bytes));
  });
  count(k_num_device_free, home);
}

void PoolStatistics::count(Count count, std::optional<Location> home) noexcept {
  ++scopes_[0].counts[count];
  if (home) {
    ++scope(*home).counts[count];
  }
}

Statistics PoolStatistics::statistics(std::optional<Location> home) const {
  const Scope& scope = scopes_[index(home)];
  Statistics statistics;
  for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
    const Account& account = scope.accounts[kind];
    statistics.allocation[kind] = account.levels[kAllocation].stat();
    statistics.segment[kind] = account.levels[kSegment].stat();
    statistics.active[kind] = account.active();
    statistics.inactive_split[kind] = account.levels[kSplit].stat();
    statistics.allocated_bytes[kind] = account.levels[kAllocatedBytes].stat();
    statistics.reserved_bytes[kind] = account.levels[kReservedBytes].stat();
    statistics.active_bytes[kind] = account.active_bytes();
    statistics.inactive_split_bytes[kind] = account.levels[kSplitBytes].stat();
    statistics.requested_bytes[kind] = account.levels[kRequestedBytes].stat();
  }
  for (Stat* const stat : {&statistics.allocated_bytes[0], &statistics.active_bytes[0]}) {
    stat->peak = std::max(stat->peak, scope.peak_before_take);
  }
#define TORCH_UVM_COPY(name) statistics.name = scope.counts[k_##name];
  TORCH_UVM_STAT_COUNTS(TORCH_UVM_COPY)
#undef TORCH_UVM_COPY
  return statistics;
}

Levels PoolStatistics::levels(std::optional<Location> home) const noexcept {
  const Scope& scope = scopes_[index(home)];
  Levels levels;
  for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
    const auto current = [&](Level level) { return scope.accounts[kind].levels[level].current; };
    levels.allocation[kind] = current(kAllocation);
    levels.segment[kind] = current(kSegment);
    levels.active[kind] = current(kAllocation) + current(kPending);
    levels.inactive_split[kind] = current(kSplit);
    levels.allocated_bytes[kind] = current(kAllocatedBytes);
    levels.reserved_bytes[kind] = current(kReservedBytes);
    levels.active_bytes[kind] = current(kAllocatedBytes) + current(kPendingBytes);
    levels.inactive_split_bytes[kind] = current(kSplitBytes);
    levels.requested_bytes[kind] = current(kRequestedBytes);
  }
  return levels;
}

std::int64_t PoolStatistics::take_allocated_peak(Location home) noexcept {
  Scope& scope = this->scope(home);
  Track& allocated = scope.allocated_bytes();
  scope.peak_before_take = std::max(scope.peak_before_take, allocated.peak);
  const std::int64_t peak = std::max(allocated.peak, std::exchange(scope.peak_before_reset, 0));
  allocated.peak = allocated.current;
  return peak;
}

void PoolStatistics::reset_peak(std::optional<Location> home) noexcept {
  Scope& scope = scopes_[index(home)];
  scope.peak_before_reset = std::max(scope.peak_before_reset, scope.allocated_bytes().peak);
  scope.peak_before_take = 0;
  for (Account& account : scope.accounts) {
    for (Track& level : account.levels) {
      level.peak = level.current;
    }
    account.active_peak = 0;
    account.active_bytes_peak = 0;
    account.note_active();
  }
}

void PoolStatistics::reset_accumulated(std::optional<Location> home) noexcept {
  Scope& scope = scopes_[index(home)];
  for (Account& account : scope.accounts) {
    account.active_lost_at_reset += account.active().freed;
    account.active_bytes_lost_at_reset += account.active_bytes().freed;
    for (Track& level : account.levels) {
      const std::int64_t lost = level.gained - level.current;
      level.gained_at_reset = level.gained;
      level.lost_at_reset = lost;
    }
  }
  scope.counts.fill(0);
}

} // namespace torch_uvm
