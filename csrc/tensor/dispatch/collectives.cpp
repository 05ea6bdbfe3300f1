#include "tensor/dispatch/collectives.h"

#ifdef TORCH_UVM_WITHOUT_DISTRIBUTED // such a torch has no c10d::Work

namespace torch_uvm {

void note_collective(const Engine::Frame& /*frame*/, const c10::IValue& /*work*/, SentBy /*sent*/) {}
void release_collectives(bool /*all*/) noexcept {}

} // namespace torch_uvm

#else

#include <ATen/core/ivalue_inl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <typeinfo>

#include "tensor/dispatch/regions.h"

namespace torch_uvm {
namespace {

struct UnderWay {
  c10::intrusive_ptr<c10d::Work> work;
  std::unique_ptr<WorkUnderWay> operands;
};

/// Those that are not known to be done, in the order in which to ask.
struct Collectives {
  std::mutex mutex; ///< in the lock order after the engine's
  std::list<UnderWay> under_way;
  std::atomic<bool> any = false; ///< without the mutex: whether to look
};

Collectives& collectives() {
  static auto* const all = new Collectives(); // leaked, as the engine is
  return *all;
}

/// Some of gloo's are never completed, and have no future. Those of the backend "fake" have one, and never are either.
bool tells_its_end(c10d::Work& work) {
  if (std::strstr(typeid(work).name(), "FakeWork") != nullptr) { // its header would add 350 KB
    return false;
  }
  try {
    return work.getFuture() != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

} // namespace

void note_collective(const Engine::Frame& frame, const c10::IValue& work, SentBy sent) {
  if (std::ranges::none_of(frame.operands, &Record::collective)) { // its kernel has pinned them
    return;
  }
  if (const auto known = work.toCustomClass<c10d::Work>()) {
    if (!tells_its_end(*known)) {
      return;
    }
    std::list<UnderWay> found(1); // first, as a WorkUnderWay takes the engine's lock to end
    found.front() = {known, std::make_unique<WorkUnderWay>(frame)};
    Collectives& all = collectives();
    const std::lock_guard lock(all.mutex);
    all.under_way.splice(all.under_way.end(), found);
    all.any = true;
  } else if (sent != SentBy::kCurrentStream) {
    return;
  }
  for (Record* const record : frame.operands) { // the Work of one in a group seems done before the group is sent
    record->collective = sent == SentBy::kPerhapsAGroup;
  }
}

void release_collectives(bool all) noexcept {
  Collectives& those = collectives();
  while (those.any.load(std::memory_order_relaxed)) {
    std::list<UnderWay> next;
    {
      const std::lock_guard lock(those.mutex);
      if (those.under_way.empty()) { // another thread asks
        return;
      }
      next.splice(next.end(), those.under_way, those.under_way.begin());
      those.any = !those.under_way.empty();
    }
    bool done = all;
    try { // outside of the lock: a Work of Python's takes the GIL
      done = done || next.front().work->isCompleted();
    } catch (...) { // it failed, so nothing is under way
      done = true;
    }
    if (!done) {
      const std::lock_guard lock(those.mutex);
      those.under_way.splice(those.under_way.end(), next); // one that waits for its message keeps none of the others
      those.any = true;
      return;
    }
  }
}

} // namespace torch_uvm

#endif
