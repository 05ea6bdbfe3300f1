#include "tensor/dispatch/watcher.h"

#include <ATen/record_function.h>

#include <memory>
#include <optional>

#include "residency/engine/relocation_min.h"
#include "tensor/dispatch/captures.h"
#include "tensor/dispatch/collectives.h"
#include "tensor/dispatch/deferred_updates.h"
#include "tensor/dispatch/observed_operators.h"
#include "tensor/dispatch/operand_walk.h"
#include "tensor/dispatch/storage_records.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

/// Turns what `inspect` found into operands and their current streams. Requires the engine's lock.
void look_up(ThreadState& mine, Engine& engine, const ObservedOperator& op) {
  mine.operands.clear();
  mine.streams.clear();
  for (const Named& named : mine.named) {
    if (Record* const record = record_of(engine, named.storage)) {
      mine.operands.push_back({record, op.writes(named.input)});
      mine.streams.ask(device_of(*record, *named.storage));
    }
  }
}

/// Whether this thread may be inside an operator's kernel: below autograd, the autograd keys are excluded. Inference
/// mode excludes them everywhere, so there the answer is always yes.
bool may_be_nested() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

struct Inputs {
  bool accelerator = false; ///< any accelerator tensor
  bool wrapper = false; ///< one without storage: the operators that this one calls touch the bytes
};

Inputs inspect(ThreadState& mine, const at::RecordFunction& function) {
  Inputs found;
  mine.named.clear();
  const auto inputs = function.inputs();
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    for_each_tensor(inputs[index], [&](const at::Tensor& tensor) {
      if (is_accelerators(tensor)) {
        found.accelerator = true;
        if (c10::StorageImpl* const storage = accelerators_storage(tensor)) {
          mine.named.push_back({storage, index});
        } else {
          found.wrapper = true;
        }
      }
    });
  }
  return found;
}

/// Fallback if the host is out of memory for operand bookkeeping: the operator uses its operands where they are, and
/// their bytes are complete.
void use_untracked(Engine& engine, const at::RecordFunction& function) noexcept {
  const auto note = [&](const at::Tensor& tensor) {
    c10::StorageImpl* const storage = accelerators_storage(tensor);
    Record* const record = storage == nullptr ? nullptr : known_record_of(engine, storage);
    if (record == nullptr) {
      return;
    }
    Stream stream = Stream::host();
    try {
      stream = current_stream_of(device_of(*record, *storage));
    } catch (...) {
      // The device query failed: the operator queries it as well, and will raise.
    }
    engine.used_unseen(*record, stream);
  };
  try {
    const Engine::Lock lock(engine);
    for (const c10::IValue& value : function.inputs()) {
      for_each_tensor(value, note);
    }
  } catch (...) {
    // Out of host memory while walking a list: these operands cannot be reported.
  }
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  Engine* const engine = engine_in_use();
  const bool deferred = has_deferred_updates() && !runs_deferred_update();
  if (engine == nullptr) {
    return nullptr;
  }
  if (!(engine->is_awake() || engine->has_open_captures() || deferred)) {
    if (!has_deferred_updates()) {
      release_collectives(/*all=*/true);
      watch_operators(); // nothing to watch for any more: removes this callback
    }
    return nullptr;
  }
  ThreadState& mine = this_thread();
  try {
    if (!engine->has_open_captures()) { // events must not be asked during a capture
      release_collectives();
    }
    Inputs inputs;
    const bool nested = mine.running != nullptr && !deferred;
    if (nested) { // most nested operators involve no device, so check that before the operator lookup
      inputs = inspect(mine, function);
      if (!inputs.accelerator || inputs.wrapper) {
        return nullptr;
      }
    }
    const ObservedOperator& op = mine.known.of(function);
    if (op.transparent) {
      return nullptr;
    }
    if (deferred) {
      engine->stay_awake(true); // uses of pending updates are detected by watching operators
      run_deferred_updates_before(function.inputs(), [&](std::size_t input) { return op.writes(input); });
    }
    if (!nested) {
      inputs = inspect(mine, function);
      if (inputs.wrapper) {
        return nullptr;
      }
    }
    if (inputs.accelerator && (mine.running == nullptr || engine->has_open_captures()) && is_capturing()) {
      const Engine::Lock lock(*engine);
      look_up(mine, *engine, op);
      engine->captured(mine.operands);
      return nullptr;
    }
    if (!engine->is_awake()) {
      return nullptr;
    }
    if (mine.running != nullptr) {
      if (inputs.accelerator) { // pin operands that only the nested operator has, or its allocations could evict them
        const Engine::Lock lock(*engine);
        look_up(mine, *engine, op);
        mine.sent_by = op.collective ? op.sent_by(function.inputs()) : mine.sent_by;
        engine->begin_nested(*mine.running, mine.operands, mine.streams.get());
        for (const Engine::Operand& operand : mine.operands) {
          operand.record->collective = operand.record->collective || op.collective;
        }
      }
      return nullptr;
    }
    mine.begin_outermost(function, op);
    if (inputs.accelerator) {
      wait_for_deferred_updates(function.inputs());
      const Engine::Lock lock(*engine);
      look_up(mine, *engine, op);
      mine.sent_by = op.sent_by(function.inputs());
      engine->begin(mine.frame,
                    {op.key, op.name.c_str(), op.in_place_ok, op.collective,
                     /*region=*/false, !engine->may_run_unwatched() || !may_be_nested()},
                    mine.operands, mine.streams.get());
    }
    if (!deferred && has_deferred_updates() && !runs_deferred_update()) { // another thread has deferred them meanwhile
      run_deferred_updates_before(function.inputs(), [&](std::size_t input) { return op.writes(input); });
    }
    return nullptr;
  } catch (...) {
    if (mine.outermost == &function) {
      mine.end_outermost();
    }
    use_untracked(*engine, function);
    return nullptr;
  }
}

void after_operator(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  Engine* const engine = engine_in_use();
  ThreadState& mine = this_thread();
  Engine::Frame* const frame = mine.running;
  if (engine == nullptr || frame == nullptr) {
    return;
  }
  const bool is_outermost = mine.outermost == &function;
  {
    std::optional<Engine::Lock> lock; // taken at most once, and only if there is something to report
    try {
      for (const c10::IValue& value : function.outputs()) {
        if (value.isObject()) { // a collective's Work
          if (!lock) {
            lock.emplace(*engine);
          }
          note_collective(*frame, value, mine.sent_by);
        }
        for_each_tensor(value, [&](const at::Tensor& tensor) {
          c10::StorageImpl* const storage = accelerators_storage(tensor);
          if (storage == nullptr || storage->nbytes() < relocation_min()) {
            return;
          }
          if (!lock) {
            lock.emplace(*engine);
          }
          bool made = false;
          Record* const record = record_of(*engine, storage, &made);
          if (made) {
            engine->created(*frame, record, mine.stream_for(*record, *storage));
          }
        });
      }
    } catch (...) {
      // Out of host memory: the storage is registered at its first use as an operand.
    }
    if (is_outermost && (!frame->operands.empty() || !frame->births.empty())) {
      if (!lock) {
        lock.emplace(*engine);
      }
      engine->end(*frame);
    }
  }
  if (is_outermost) {
    mine.end_outermost();
  }
}

class Storages final : public StorageRecords {
  void end_finished_work() noexcept override {
    release_collectives();
  }
};

void watch(bool on) {
  static at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  if (on && callback == at::INVALID_CALLBACK_HANDLE) {
    callback = at::addGlobalCallback(at::RecordFunctionCallback(&before_operator, &after_operator)
                                         .needsInputs(true)
                                         .needsOutputs(true)
                                         .scopes({at::RecordScope::FUNCTION}));
  } else if (!on && callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(callback);
    callback = at::INVALID_CALLBACK_HANDLE;
  }
}

} // namespace

void register_watcher() {
  static auto* storages = new Storages(); // leaked like the engine: storages outlive every static destructor
  register_operator_watch({storages, &watch, &has_deferred_updates});
}

} // namespace torch_uvm
