#include "tensor/dispatch/collectives.h"

#ifdef TORCH_UVM_WITHOUT_DISTRIBUTED // such a torch has no c10d::Work

namespace torch_uvm {

void note_collective(const Engine::Frame& /*frame*/, const c10::IValue& /*work*/, bool /*on_current_stream*/) {}
void release_collectives(bool /*all*/) noexcept {}

} // namespace torch_uvm

#else

#include <ATen/core/ivalue_inl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <list>
#include <memory>
#include <mutex>

#include "tensor/dispatch/regions.h"

namespace torch_uvm {
namespace {

struct UnderWay {
  c10::intrusive_ptr<c10d::Work> work;
  std::unique_ptr<WorkUnderWay> operands;
};

/// Those that are not known to be done, the oldest first.
struct Collectives {
  std::mutex mutex; ///< in the lock order after the engine's
  std::list<UnderWay> under_way;
  std::atomic<bool> any = false; ///< without the mutex: whether to look
};

Collectives& collectives() {
  static auto* const all = new Collectives(); // leaked, as the engine is
  return *all;
}

/// Some of gloo's are never completed, and have no future.
bool tells_its_end(c10d::Work& work) {
  try {
    return work.getFuture() != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

} // namespace

void note_collective(const Engine::Frame& frame, const c10::IValue& work, bool on_current_stream) {
  if (std::ranges::none_of(frame.operands, &Record::collective)) { // its kernel has pinned them
    return;
  }
  if (const auto known = work.toCustomClass<c10d::Work>()) {
    if (!tells_its_end(*known)) {
      return;
    }
    std::list<UnderWay> found;
    found.push_back({known, std::make_unique<WorkUnderWay>(frame)});
    Collectives& all = collectives();
    const std::lock_guard lock(all.mutex);
    all.under_way.splice(all.under_way.end(), found);
    all.any = true;
  } else if (on_current_stream) {
    for (Record* const record : frame.operands) {
      record->collective = false;
    }
  }
}

void release_collectives(bool all) noexcept {
  Collectives& those = collectives();
  while (those.any.load(std::memory_order_relaxed)) {
    std::list<UnderWay> oldest;
    {
      const std::lock_guard lock(those.mutex);
      if (those.under_way.empty()) { // another thread asks
        return;
      }
      oldest.splice(oldest.end(), those.under_way, those.under_way.begin());
      those.any = !those.under_way.empty();
    }
    bool done = all;
    try { // outside of the lock: a Work of Python's takes the GIL
      done = done || oldest.front().work->isCompleted();
    } catch (...) { // it failed, so nothing is under way
      done = true;
    }
    if (!done) {
      const std::lock_guard lock(those.mutex);
      those.under_way.splice(those.under_way.begin(), oldest);
      those.any = true;
      return;
    }
  }
}

} // namespace torch_uvm

#endif
