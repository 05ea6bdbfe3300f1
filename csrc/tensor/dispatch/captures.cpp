#include "tensor/dispatch/captures.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

#include "tensor/dispatch/thread_state.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"
#include "tensor/process/streams.h"

namespace torch_uvm {
namespace {

std::atomic<bool (*)()> capture_probe{nullptr};

} // namespace

std::uint64_t begin_capture() {
  if (!Context::get().in_use() || Context::forked()) {
    return 0;
  }
  const std::uint64_t capture = begin_engine_capture();
  ThreadState& mine = this_thread();
  if (mine.running != nullptr) {
    Engine& engine = *engine_in_use();
    const Engine::Lock lock(engine);
    mine.operands.clear();
    for (Record* const record : mine.running->operands) {
      mine.operands.push_back({record, false}); // its writes were reported when the operator began
    }
    engine.captured(mine.operands);
  }
  return capture;
}

void note_launch(std::uint64_t capture) {
  if (Engine* const engine = engine_in_use()) {
    const c10::impl::VirtualGuardImpl guard(at::getAccelerator(/*checked=*/true).value());
    engine->launched(capture, current_stream_of(guard.getDevice()));
  }
}

void release_capture(std::uint64_t capture) noexcept {
  if (Engine* const engine = engine_in_use()) {
    engine->release_capture(capture);
  }
}

void set_capture_probe(bool (*is_capturing)()) {
  capture_probe.store(is_capturing);
}

bool is_capturing() {
  const auto probe = capture_probe.load(std::memory_order_relaxed);
  return probe != nullptr && probe();
}

} // namespace torch_uvm
