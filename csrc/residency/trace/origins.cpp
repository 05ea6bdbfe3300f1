#include "residency/trace/origins.h"

#include <algorithm>
#include <thread>

namespace torch_uvm {

Origins& Origins::get() {
  static auto* const origins = new Origins(); // leaked on purpose
  return *origins;
}

void Origins::start(Probe probe) {
  stop();
  {
    const std::lock_guard lock(mutex_);
    rows_.clear();
  }
  probe_.store(probe);
}

void Origins::stop() noexcept {
  probe_.store(nullptr);
  while (probing_.load() != 0) {
    std::this_thread::yield();
  }
  const std::lock_guard lock(mutex_);
  unrecorded_.clear(); // frees and reuse of blocks are not reported from now on
}

OriginFigures& Origins::row(Origin origin, std::size_t bytes) {
  const auto found = rows_.find({origin, bytes});
  if (found != rows_.end()) {
    return found->second;
  }
  const Key key = rows_.size() < kMostRows ? Key{origin, bytes} : Key{0, 0};
  OriginFigures& made = rows_[key];
  made.origin = key.first;
  made.bytes = key.second;
  return made;
}

void Origins::made(const void* block, std::size_t bytes) noexcept {
  ++probing_;
  const Probe probe = probe_.load(); // load after the increment: `stop` then waits for this call
  if (probe != nullptr) {
    const Origin origin = probe();
    try {
      const std::lock_guard lock(mutex_);
      unrecorded_.insert_or_assign(block, Key{origin, bytes});
      OriginFigures& figures = row(origin, bytes);
      ++figures.made;
      figures.most_alive = std::max(figures.most_alive, ++figures.alive);
    } catch (...) {
      // No host memory: not counted.
    }
  }
  --probing_;
}

Origin Origins::take(const void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = unrecorded_.find(block);
  if (found == unrecorded_.end()) {
    return 0;
  }
  const Origin origin = found->second.first;
  unrecorded_.erase(found);
  return origin;
}

void Origins::gone(const void* block) noexcept {
  Key key;
  {
    const std::lock_guard lock(mutex_);
    const auto found = unrecorded_.find(block);
    if (found == unrecorded_.end()) {
      return;
    }
    key = found->second;
    unrecorded_.erase(found);
  }
  gone(key.first, key.second);
}

void Origins::gone(Origin origin, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = rows_.find({origin, bytes});
  if (found != rows_.end() && found->second.alive > 0) {
    --found->second.alive;
  }
}

void Origins::moved(TransferKind kind, Origin origin, std::size_t bytes) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    OriginFigures& figures = row(origin, bytes);
    ++figures.moves[static_cast<std::size_t>(kind)];
    figures.moved_bytes[static_cast<std::size_t>(kind)] += static_cast<std::int64_t>(bytes);
  } catch (...) {
    // No host memory: not counted.
  }
}

std::vector<OriginFigures> Origins::figures() const {
  const std::lock_guard lock(mutex_);
  std::vector<OriginFigures> all;
  all.reserve(rows_.size());
  for (const auto& [key, figures] : rows_) {
    all.push_back(figures);
  }
  return all;
}

} // namespace torch_uvm
