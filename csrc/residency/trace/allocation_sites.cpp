#include "residency/trace/allocation_sites.h"

#include <algorithm>
#include <thread>

namespace torch_uvm {

AllocationSites& AllocationSites::get() {
  static auto* const sites = new AllocationSites(); // leaked on purpose
  return *sites;
}

void AllocationSites::start(Probe probe) {
  stop();
  {
    const std::lock_guard lock(mutex_);
    rows_.clear();
  }
  probe_.store(probe);
}

void AllocationSites::stop() noexcept {
  probe_.store(nullptr);
  while (probing_.load() != 0) {
    std::this_thread::yield();
  }
  const std::lock_guard lock(mutex_);
  unrecorded_.clear(); // frees and reuse of blocks are not reported from now on
}

AllocationSiteFigures& AllocationSites::row(AllocationSite site, std::size_t bytes) {
  const auto found = rows_.find({site, bytes});
  if (found != rows_.end()) {
    return found->second;
  }
  const Key key = rows_.size() < kMaxRows ? Key{site, bytes} : Key{0, 0};
  AllocationSiteFigures& made = rows_[key];
  made.site = key.first;
  made.bytes = key.second;
  return made;
}

void AllocationSites::made(const void* block, std::size_t bytes) noexcept {
  ++probing_;
  const Probe probe = probe_.load(); // load after the increment: `stop` then waits for this call
  if (probe != nullptr) {
    const AllocationSite site = probe();
    try {
      const std::lock_guard lock(mutex_);
      unrecorded_.insert_or_assign(block, Key{site, bytes});
      AllocationSiteFigures& figures = row(site, bytes);
      ++figures.made;
      figures.most_alive = std::max(figures.most_alive, ++figures.alive);
    } catch (...) {
      // No host memory: not counted.
    }
  }
  --probing_;
}

AllocationSite AllocationSites::take(const void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto taken = unrecorded_.extract(block);
  return taken ? taken.mapped().first : 0;
}

void AllocationSites::gone(const void* block) noexcept {
  std::unique_lock lock(mutex_);
  const auto taken = unrecorded_.extract(block);
  lock.unlock();
  if (taken) {
    gone(taken.mapped().first, taken.mapped().second);
  }
}

void AllocationSites::gone(AllocationSite site, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  auto found = rows_.find({site, bytes});
  if (found == rows_.end()) {
    found = rows_.find({0, 0}); // it was allocated when there were `kMaxRows`
  }
  if (found != rows_.end() && found->second.alive > 0) {
    --found->second.alive;
  }
}

void AllocationSites::moved(TransferKind kind, AllocationSite site, std::size_t bytes) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    AllocationSiteFigures& figures = row(site, bytes);
    ++figures.moves[static_cast<std::size_t>(kind)];
    figures.moved_bytes[static_cast<std::size_t>(kind)] += static_cast<std::int64_t>(bytes);
  } catch (...) {
    // No host memory: not counted.
  }
}

std::vector<AllocationSiteFigures> AllocationSites::figures() const {
  const std::lock_guard lock(mutex_);
  std::vector<AllocationSiteFigures> all;
  all.reserve(rows_.size());
  for (const auto& [key, figures] : rows_) {
    all.push_back(figures);
  }
  return all;
}

} // namespace torch_uvm
