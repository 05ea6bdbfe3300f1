#include "allocator/caching/pool_statistics.h"

#include <algorithm>
#include <utility>

namespace torch_uvm {

Stat PoolStatistics::Track::stat() const {
  return Stat{current, peak, gained - gained_at_reset, gained - current - lost_at_reset};
}

PoolStatistics::PoolStatistics(int devices) : scopes_(static_cast<std::size_t>(devices) + 2) {}

void PoolStatistics::allocated(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept {
  scope(home).note_change();
  each(home, kind, [&](Account& levels) {
    levels[k_allocation].increase(1);
    levels[k_allocated_bytes].increase(as_signed(bytes));
    levels[k_requested_bytes].increase(as_signed(requested));
    levels[k_active].increase(1);
    levels[k_active_bytes].increase(as_signed(bytes));
  });
  note_peak(home);
}

void PoolStatistics::freed(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept {
  freed_pending(home, kind, bytes, requested);
  reclaimed(home, kind, bytes);
}

void PoolStatistics::freed_pending(Location home, PoolKind kind, std::size_t bytes, std::size_t requested) noexcept {
  scope(home).note_change();
  each(home, kind, [&](Account& levels) {
    levels[k_allocation].decrease(1);
    levels[k_allocated_bytes].decrease(as_signed(bytes));
    levels[k_requested_bytes].decrease(as_signed(requested));
  });
}

void PoolStatistics::reclaimed(Location home, PoolKind kind, std::size_t bytes) noexcept {
  each(home, kind, [&](Account& levels) {
    levels[k_active].decrease(1);
    levels[k_active_bytes].decrease(as_signed(bytes));
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
    for (const auto& [level, amount] :
         {std::pair(k_allocation, std::int64_t{1}), std::pair(k_allocated_bytes, as_signed(bytes)),
          std::pair(k_requested_bytes, as_signed(requested)), std::pair(k_active, std::int64_t{1}),
          std::pair(k_active_bytes, as_signed(bytes))}) {
      scope(from).accounts[static_cast<std::size_t>(changed)][level].decrease(amount);
      scope(to).accounts[static_cast<std::size_t>(changed)][level].increase(amount);
    }
  }
  note_peak(to);
}

void PoolStatistics::split_changed(Location home, PoolKind kind, std::int64_t pieces, std::int64_t bytes) noexcept {
  each(home, kind, [&](Account& levels) {
    levels[k_inactive_split].change(pieces);
    levels[k_inactive_split_bytes].change(bytes);
  });
}

void PoolStatistics::segments_changed(Location home, PoolKind kind, std::int64_t bytes) noexcept {
  each(home, kind, [&](Account& levels) {
    levels[k_segment].change(bytes > 0 ? 1 : -1);
    levels[k_reserved_bytes].change(bytes);
  });
  count(bytes > 0 ? k_num_device_alloc : k_num_device_free, home);
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
#define TORCH_UVM_COPY(name) \
  std::ranges::transform(scope.accounts, statistics.name.begin(), [](const Account& a) { return a[k_##name].stat(); });
  TORCH_UVM_STAT_ARRAYS(TORCH_UVM_COPY)
#undef TORCH_UVM_COPY
#define TORCH_UVM_COPY(name) statistics.name = scope.counts[k_##name];
  TORCH_UVM_STAT_COUNTS(TORCH_UVM_COPY)
#undef TORCH_UVM_COPY
  return statistics;
}

void PoolStatistics::note_peak(Location home) noexcept {
  scope(home).untaken_peak = std::max(scope(home).untaken_peak, allocated_bytes(home));
}

std::int64_t PoolStatistics::take_allocated_peak(Location home) noexcept {
  return std::exchange(scope(home).untaken_peak, allocated_bytes(home));
}

void PoolStatistics::reset_peak(std::optional<Location> home) noexcept {
  for (Account& levels : scopes_[index(home)].accounts) {
    for (Track& level : levels) {
      level.peak = level.current;
    }
  }
}

void PoolStatistics::reset_accumulated(std::optional<Location> home) noexcept {
  Scope& scope = scopes_[index(home)];
  for (Account& levels : scope.accounts) {
    for (Track& level : levels) {
      level.lost_at_reset = level.gained - level.current;
      level.gained_at_reset = level.gained;
    }
  }
  scope.counts.fill(0);
}

} // namespace torch_uvm
