#include "tensor/dispatch/kernels.h"

#include "tensor/dispatch/storage_records.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {

Kernel::Kernel() : counted_(!Context::forked() && begin_kernel()), holds_(!Context::forked() && !counted_) {}

Kernel::~Kernel() {
  if (Engine* const engine = engine_in_use(); engine != nullptr && !frame_.operands.empty()) {
    const Engine::Lock lock(*engine);
    engine->end(frame_);
  }
  if (counted_) {
    end_kernel();
  }
}

void Kernel::use(c10::StorageImpl* storage, bool writes) {
  if (!holds_) {
    return;
  }
  Engine& engine = *engine_in_use();
  const Engine::Lock lock(engine);
  Record* const record = record_of(engine, storage);
  ThreadState& mine = this_thread();
  // The thread's operator pins it already, unless the engine was asleep when a nested operator began.
  if (record != nullptr && (mine.running == nullptr || !mine.running->uses(*record))) {
    const Engine::Operand operand{record, writes};
    engine.begin_nested(frame_, {&operand, 1}, mine.stream_for(*record, *storage));
  }
}

} // namespace torch_uvm
