#include "tensor/process/process_engine.h"

#include <atomic>
#include <mutex>

#include "residency/engine/relocation_min.h"
#include "tensor/process/context.h"

namespace torch_uvm {
namespace {

std::atomic<Engine*> the_engine{nullptr};
OperatorWatch the_watch; // set as the extension is loaded
std::atomic<void (*)() noexcept> interpreter_call{nullptr};
std::mutex engine_making; // guards creating the engine and calls of `watch`; only that of budgets.cpp is taken earlier
int budget_changes = 0; // that are going on; guarded by engine_making

void watch_while_needed(const Engine& engine) {
  the_watch.watch(budget_changes != 0 || engine.is_awake() || engine.has_open_captures() || the_watch.is_needed());
}

/// Requires `engine_making`.
Engine& find_or_make_engine() {
  if (Engine* const engine = the_engine.load(std::memory_order_acquire)) {
    return *engine;
  }
  Context& context = Context::get();
  // Leaked: storages are freed after static destructors have run.
  the_engine.store(new Engine(context.runtime(), context.managed_allocator(), *the_watch.storages),
                   std::memory_order_release);
  return *the_engine.load(std::memory_order_acquire);
}

} // namespace

void register_operator_watch(const OperatorWatch& watch) {
  the_watch = watch;
}

Engine* engine_in_use() {
  return Context::forked() ? nullptr : the_engine.load(std::memory_order_acquire);
}

Engine& made_engine() {
  if (Engine* const engine = engine_in_use()) {
    return *engine;
  }
  const std::lock_guard lock(engine_making);
  return find_or_make_engine();
}

void watch_operators() noexcept {
  try {
    const std::lock_guard lock(engine_making);
    if (const Engine* const engine = engine_in_use()) {
      watch_while_needed(*engine);
    }
  } catch (...) {
    // Out of host memory: operators stay unobserved, and the driver alone migrates pages.
  }
}

void set_budget(int device, std::optional<std::size_t> bytes, std::size_t ceiling) {
  std::unique_lock lock(engine_making);
  if (!bytes && engine_in_use() == nullptr) {
    return;
  }
  Engine& engine = find_or_make_engine();
  the_watch.watch(true); // before the budget: its cap can be kept only if operators are observed
  ++budget_changes;
  const auto finish = [&] {
    lock.lock();
    --budget_changes;
    watch_while_needed(engine);
  };
  // Not under the lock: lifting a budget waits for operators, and one of them may wake another device.
  lock.unlock();
  try {
    engine.set_budget(device, bytes, ceiling);
  } catch (...) {
    finish();
    throw;
  }
  finish();
  if (engine.may_run_unwatched()) {
    call_between_operators();
  }
}

void call_between_operators() noexcept {
  if (const auto call = interpreter_call.load()) {
    call();
  }
}

void register_interpreter(void (*call_between_operators)() noexcept) {
  interpreter_call.store(call_between_operators);
}

std::uint64_t begin_engine_capture() {
  const std::lock_guard lock(engine_making);
  const std::uint64_t capture = find_or_make_engine().begin_capture();
  the_watch.watch(true);
  return capture;
}

void end_engine_capture(std::uint64_t capture) noexcept {
  const std::lock_guard lock(engine_making);
  Engine* const engine = engine_in_use();
  if (engine != nullptr) {
    engine->end_capture(capture);
    watch_while_needed(*engine);
  }
}

void note_allocation(int device, std::size_t bytes) {
  Engine* const engine = engine_in_use();
  if (engine != nullptr && engine->has_idle_devices() && bytes >= relocation_min()) {
    engine->note_allocation(device);
  }
}

bool forget_record(Block* block) {
  Engine* const engine = engine_in_use();
  if (engine == nullptr || block == nullptr) {
    return false;
  }
  void* const record = Context::get().managed_allocator().tag(block);
  if (record != nullptr) {
    engine->destroyed(static_cast<Record*>(record));
  }
  return record != nullptr;
}

void forget_outlived(Block* block) {
  Engine* const engine = engine_in_use();
  if (engine != nullptr && block != nullptr) {
    engine->expired(block);
  }
}

} // namespace torch_uvm
