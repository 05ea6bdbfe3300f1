#include "tensor/dispatch/watcher.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/bytes.h"
#include "runtime/error.h"
#include "tensor/dispatch/deferred_updates.h"
#include "tensor/dispatch/observed_operators.h"
#include "tensor/dispatch/operand_walk.h"
#include "tensor/dispatch/storage_records.h"
#include "tensor/process/context.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

std::atomic<Engine*> the_engine{nullptr};
std::mutex engine_making; // and the callback's; before every other lock of ours
at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
std::atomic<bool (*)()> capture_probe{nullptr};

using Frame = Engine::Frame;

/// How long a pin waits for another thread's operator that uses the storage on the host.
constexpr std::chrono::seconds kLongestWait{30};

std::atomic<int> unseen_kernels{0};
std::atomic<bool> counts_kernels{false}; // of all operators: on the emulated accelerator

/// Where the engine has the storage: its label may be another device's, which the bytes had, too.
c10::Device device_of(const Record& record, const c10::StorageImpl& storage) {
  return {storage.device().type(), static_cast<c10::DeviceIndex>(record.device)};
}

/// A storage of an accelerator among an operator's inputs.
struct Named {
  c10::StorageImpl* storage;
  std::size_t input;
};

/// Reused: an operator comes a million times, and nothing is allocated for one.
struct OfThread {
  Frame* running = nullptr; ///< of the outermost operator that the thread runs; nullptr: it runs none
  const at::RecordFunction* outermost = nullptr; ///< if that is no region. PyTorch keeps it where it is until its end
  Frame frame; ///< its
  std::vector<Named> named; ///< by the operator that was looked at last
  std::vector<Engine::Operand> operands;
  CurrentStreams streams;
  ObservedOperators known;

  void begin_outermost(const at::RecordFunction& function, const ObservedOperator& op) {
    frame.reset();
    frame.key = op.key();
    frame.name = op.name().c_str(); // `known` keeps it where it is
    outermost = &function;
    running = &frame;
  }
  void end_outermost() noexcept {
    outermost = nullptr;
    running = nullptr;
  }
  const std::vector<Stream>& stream_for(const Record& record, const c10::StorageImpl& storage) {
    streams.clear();
    streams.ask(device_of(record, storage));
    return streams.get();
  }
};
thread_local OfThread of_thread; // to find it takes a call each time: once for each callback

/// What `inspect` has found. With the engine's lock held.
void look_up(OfThread& mine, Engine& engine, const ObservedOperator& op) {
  mine.operands.clear();
  mine.streams.clear();
  for (const Named& named : mine.named) {
    if (Record* const record = record_of(engine, named.storage)) {
      mine.operands.push_back({record, op.writes(named.input)});
      mine.streams.ask(device_of(*record, *named.storage));
    }
  }
}

/// Whether this thread runs the kernel of an operator, as far as PyTorch tells: below autograd, autograd is excluded.
/// In inference mode it is throughout.
bool may_be_nested() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

bool is_capturing() {
  const auto probe = capture_probe.load(std::memory_order_relaxed);
  return probe != nullptr && probe();
}

struct Inputs {
  bool accelerator = false; ///< any tensor of a device
  bool wrapper = false; ///< one that has no storage: what is within the operator is what touches bytes
};

Inputs inspect(OfThread& mine, const at::RecordFunction& function) {
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

/// There was no memory to look the operands up with. The operator finds them where they are, complete.
void without_the_books(Engine& engine, const at::RecordFunction& function) noexcept {
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
      // The device cannot tell: the operator, which asks it too, will raise.
    }
    engine.used_unseen(*record, stream);
  };
  try {
    const Engine::Lock lock(engine);
    for (const c10::IValue& value : function.inputs()) {
      for_each_tensor(value, note);
    }
  } catch (...) {
    // No memory to walk a list of operands: it has none of ours that could be told.
  }
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  Engine* const engine = engine_in_use();
  const bool deferred = has_deferred_updates() && !runs_deferred_update();
  if (engine == nullptr || Context::forked()) {
    return nullptr;
  }
  if (!(engine->is_awake() || engine->has_open_captures() || deferred)) {
    if (!has_deferred_updates()) {
      watch_operators(); // no longer
    }
    return nullptr;
  }
  OfThread& mine = of_thread;
  try {
    Inputs inputs;
    const bool nested = mine.running != nullptr && !deferred;
    if (nested) { // most of what an operator calls has nothing to do with a device: that is found out first
      inputs = inspect(mine, function);
      if (!inputs.accelerator || inputs.wrapper) {
        return nullptr;
      }
    }
    const ObservedOperator& op = mine.known.of(function);
    if (op.is_transparent()) {
      return nullptr;
    }
    if (deferred) {
      engine->stay_awake(); // who waits for an update is seen by its operators
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
      if (inputs.accelerator) { // what it alone names may be given up for what it allocates
        const Engine::Lock lock(*engine);
        look_up(mine, *engine, op);
        engine->begin_nested(*mine.running, mine.operands, mine.streams.get());
        for (const Engine::Operand& operand : mine.operands) {
          operand.record->collective = operand.record->collective || op.is_collective();
        }
      }
      return nullptr;
    }
    mine.begin_outermost(function, op);
    if (inputs.accelerator) {
      wait_for_deferred_updates(function.inputs());
      const Engine::Lock lock(*engine);
      look_up(mine, *engine, op);
      engine->begin(mine.frame,
                    {op.key(), op.name().c_str(), op.in_place_ok() && !runs_deferred_update(), op.is_collective(),
                     /*region=*/false, !engine->is_unsettled() || !may_be_nested()},
                    mine.operands, mine.streams.get());
    }
    return nullptr;
  } catch (...) {
    if (mine.outermost == &function) {
      mine.end_outermost();
    }
    without_the_books(*engine, function);
    return nullptr;
  }
}

void after_operator(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  Engine* const engine = engine_in_use();
  OfThread& mine = of_thread;
  Frame* const frame = mine.running;
  if (engine == nullptr || frame == nullptr) {
    return;
  }
  const bool is_outermost = mine.outermost == &function;
  {
    std::optional<Engine::Lock> lock; // one for all there is to say, and none where there is nothing
    try {
      for (const c10::IValue& value : function.outputs()) {
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
            engine->born(*frame, record, mine.stream_for(*record, *storage));
          }
        });
      }
    } catch (...) {
      // A storage that is not noticed here is noticed as somebody's operand.
    }
    if (is_outermost && (!frame->held.empty() || !frame->births.empty())) {
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

/// New ones have their first operand, or their maker.
void note_births(Engine& engine, Frame& frame, std::span<c10::StorageImpl* const> storages) {
  for (c10::StorageImpl* const storage : storages) {
    bool made = false;
    Record* const record = record_of(engine, storage, &made);
    if (made) {
      engine.born(frame, record, of_thread.stream_for(*record, *storage));
    }
  }
}

void watch(bool on) {
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

void watch_while_needed(const Engine& engine) {
  watch(engine.is_awake() || engine.has_open_captures() || has_deferred_updates());
}

Engine& engine_made() {
  if (Engine* const engine = the_engine.load(std::memory_order_acquire)) {
    return *engine;
  }
  Context& context = Context::get();
  static auto* door = new StorageRecords(); // leaked, and the engine: storages outlive every static destructor
  the_engine.store(new Engine(context.runtime(), context.managed_allocator(), *door), std::memory_order_release);
  return *the_engine.load(std::memory_order_acquire);
}

} // namespace

StorageDoor::RunningOperator StorageRecords::running() const noexcept {
  const Frame* const frame = of_thread.running;
  return frame == nullptr ? RunningOperator{} : RunningOperator{frame->name, frame->held};
}

Engine* engine_in_use() {
  return the_engine.load(std::memory_order_acquire);
}

void watch_operators() noexcept {
  try {
    const std::lock_guard lock(engine_making);
    if (const Engine* const engine = engine_in_use()) {
      watch_while_needed(*engine);
    }
  } catch (...) {
    // No memory for it: residency stays the driver's.
  }
}

void set_budget(int device, std::optional<std::size_t> bytes, bool hard) {
  const std::lock_guard lock(engine_making);
  if (!bytes && engine_in_use() == nullptr) {
    return;
  }
  Engine& engine = engine_made();
  watch(true); // before a cap is there that only the engine can keep
  engine.set_budget(device, bytes, hard);
  watch_while_needed(engine);
}

void set_host_limit(std::optional<std::size_t> bytes) {
  const std::lock_guard lock(engine_making);
  engine_made().set_host_limit(bytes);
}

void set_staging(std::optional<std::size_t> slot_bytes) {
  const std::lock_guard lock(engine_making);
  engine_made().set_staging(slot_bytes);
}

void evict_after_operators(bool on) {
  const std::lock_guard lock(engine_making);
  engine_made().evict_after_operators(on);
}

namespace {

/// What there is of a tensor's storage, under the engine's lock.
Record* find_record(Engine& engine, const at::Tensor& tensor, bool asleep = false) {
  c10::StorageImpl* const storage = accelerators_storage(tensor);
  return storage == nullptr ? nullptr : record_of(engine, storage, nullptr, asleep);
}

} // namespace

void settle(const at::Tensor& tensor) {
  finish_deferred_updates_of(tensor);
  Engine* const engine = engine_in_use();
  if (engine == nullptr || !engine->is_awake() || Context::forked()) {
    return;
  }
  Record* record = nullptr;
  {
    const Engine::Lock lock(*engine);
    record = find_record(*engine, tensor);
  }
  if (record != nullptr) {
    engine->settle(record); // the tensor keeps it
  }
}

void keep_resident(const at::Tensor& tensor, bool keep) {
  if (keep) {
    finish_deferred_updates_of(tensor);
  }
  Engine* const engine = engine_in_use();
  if (engine == nullptr || Context::forked()) {
    return;
  }
  const auto began = std::chrono::steady_clock::now();
  Engine::Lock lock(*engine);
  for (;;) {
    Record* const record = find_record(*engine, tensor, /*asleep=*/keep);
    if (record == nullptr) {
      return;
    }
    if (!keep) {
      engine->release(record);
      return;
    }
    const Stream stream = current_stream_of(device_of(*record, *tensor.storage().unsafeGetStorageImpl()));
    if (engine->hold(record, stream)) {
      return;
    }
    const Frame* const own = of_thread.running;
    const bool waits_for_itself = own != nullptr && own->holds(*record);
    if (waits_for_itself || std::chrono::steady_clock::now() - began > kLongestWait) {
      throw OutOfMemory(OutOfMemory::Cause::kBudget, record->bytes,
                        "no room to keep " + format_bytes(record->bytes) + " on " +
                            to_string(Location::device(record->device)) +
                            ": an operator that has not ended uses them on the host");
    }
    lock.wait_for_a_block();
  }
}

void make_known(const std::vector<at::Tensor>& tensors) {
  Engine* const engine = engine_in_use();
  if (engine == nullptr || Context::forked()) {
    return;
  }
  const Engine::Lock lock(*engine);
  for (const at::Tensor& tensor : tensors) {
    find_record(*engine, tensor);
  }
}

Region::Region(bool seen) : seen_(seen) {
  if (seen) {
    of_thread.running = &frame_;
  } else {
    engine_in_use()->begin_unseen_graph();
  }
}

Region::~Region() {
  leave({});
}

std::unique_ptr<Region> Region::enter(std::uint64_t key, std::span<const Input> inputs) {
  Engine* const engine = engine_in_use();
  if (engine == nullptr || Context::forked()) {
    return nullptr;
  }
  if (!engine->is_awake()) {
    return std::unique_ptr<Region>(new Region(/*seen=*/false)); // a device may wake before the call ends
  }
  OfThread& mine = of_thread;
  const Engine::Lock lock(*engine);
  mine.operands.clear();
  mine.streams.clear();
  for (const Input& input : inputs) {
    if (Record* const record = record_of(*engine, input.storage)) {
      mine.operands.push_back({record, input.writes});
      mine.streams.ask(device_of(*record, *input.storage));
    }
  }
  if (is_capturing()) {
    engine->captured(mine.operands);
    return nullptr;
  }
  if (mine.running != nullptr) {
    engine->begin_nested(*mine.running, mine.operands, mine.streams.get());
    return nullptr;
  }
  std::unique_ptr<Region> region(new Region(/*seen=*/true));
  region->frame_.key = key;
  Engine::Operator op;
  op.key = key;
  op.name = "compiled graph";
  op.region = true;
  region->frame_.name = op.name;
  engine->begin(region->frame_, op, mine.operands, mine.streams.get());
  return region;
}

void Region::leave(std::span<c10::StorageImpl* const> outputs) noexcept {
  if (!open_) {
    return;
  }
  open_ = false;
  Engine* const engine = engine_in_use();
  if (!seen_) {
    engine->end_unseen_graph();
    return;
  }
  of_thread.running = nullptr;
  if (Context::forked()) {
    return;
  }
  const Engine::Lock lock(*engine);
  try {
    note_births(*engine, frame_, outputs);
  } catch (...) {
    // As in after_operator.
  }
  engine->end(frame_);
}

Kernel::Kernel() {
  if (of_thread.running != nullptr || Context::forked()) {
    return; // the operator holds its storages
  }
  counted_ = true;
  unseen_kernels.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst); // the engine wakes, and counts after it: one sees the other
  const Engine* const engine = engine_in_use();
  holds_ = engine != nullptr && engine->is_awake();
}

Kernel::~Kernel() {
  if (!counted_) {
    return;
  }
  if (!frame_.held.empty()) {
    Engine& engine = *engine_in_use();
    const Engine::Lock lock(engine);
    engine.end(frame_);
  }
  unseen_kernels.fetch_sub(1);
}

void Kernel::use(c10::StorageImpl* storage, bool writes) {
  if (!holds_) {
    return;
  }
  Engine& engine = *engine_in_use();
  const Engine::Lock lock(engine);
  if (Record* const record = record_of(engine, storage)) {
    const Engine::Operand operand{record, writes};
    engine.begin_nested(frame_, {&operand, 1}, of_thread.stream_for(*record, *storage));
  }
}

void Kernel::count() {
  counts_kernels.store(true);
}

std::optional<int> Kernel::unseen() noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return counts_kernels.load() ? std::optional(unseen_kernels.load()) : std::nullopt;
}

WorkUnderWay::WorkUnderWay(std::span<const at::Tensor> tensors) {
  Engine* const engine = engine_in_use();
  if (engine == nullptr || !engine->is_awake() || Context::forked()) {
    return;
  }
  frame_.held.reserve(tensors.size());
  const Engine::Lock lock(*engine);
  for (const at::Tensor& tensor : tensors) {
    if (Record* const record = find_record(*engine, tensor)) {
      frame_.held.push_back(record);
      ++record->in_use;
    }
  }
}

WorkUnderWay::~WorkUnderWay() {
  if (!frame_.held.empty() && !Context::forked()) {
    Engine& engine = *engine_in_use();
    const Engine::Lock lock(engine);
    engine.end(frame_);
  }
}

std::uint64_t begin_capture() {
  if (!Context::get().in_use() || Context::forked()) {
    return 0;
  }
  const std::lock_guard making(engine_making);
  Engine& engine = engine_made();
  const std::uint64_t capture = engine.begin_capture();
  watch(true);
  OfThread& mine = of_thread;
  if (mine.running != nullptr) {
    const Engine::Lock lock(engine);
    mine.operands.clear();
    for (Record* const record : mine.running->held) {
      mine.operands.push_back({record, false}); // what it writes was said when it was entered
    }
    engine.captured(mine.operands);
  }
  return capture;
}

void end_capture(std::uint64_t capture) noexcept {
  const std::lock_guard making(engine_making);
  Engine* const engine = engine_in_use();
  if (engine != nullptr && !Context::forked()) {
    engine->end_capture(capture);
    watch_while_needed(*engine);
  }
}

void note_replay(std::uint64_t capture) {
  if (Context::forked()) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(at::getAccelerator(/*checked=*/true).value());
  const c10::Device device = guard.getDevice();
  engine_in_use()->replayed(capture, Stream{device.index(), guard.getStreamNativeHandle(guard.getStream(device))});
}

void release_capture(std::uint64_t capture) noexcept {
  if (!Context::forked()) {
    engine_in_use()->release_capture(capture);
  }
}

void before_mutable_access(c10::StorageImpl* storage) {
  if (of_thread.running != nullptr) {
    return; // an operator's kernel: its schema says what it writes
  }
  finish_deferred_updates_of(storage);
  Engine* const engine = engine_in_use();
  if (engine == nullptr || Context::forked()) {
    return;
  }
  Record* record = nullptr;
  {
    const Engine::Lock lock(*engine);
    record = record_of(*engine, storage);
  }
  if (record != nullptr) {
    engine->settle(record);
  }
}

bool forget_record(Block* block) {
  Engine* const engine = engine_in_use();
  if (engine == nullptr || block == nullptr || Context::forked()) {
    return false; // a child has the parent's records, and the mutex as a thread of the parent may have left it
  }
  void* const record = Context::get().managed_allocator().tag(block);
  if (record != nullptr) {
    engine->died(static_cast<Record*>(record));
  }
  return record != nullptr;
}

void forget_outlived(Block* block) {
  Engine* const engine = engine_in_use();
  if (engine != nullptr && block != nullptr && !Context::forked()) {
    engine->outlived(block);
  }
}

void note_freed() noexcept {
  engine_in_use()->freed();
}

bool is_on_host(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_evicted;
}

void note_allocation(int device, std::size_t bytes) {
  Engine* const engine = engine_in_use();
  if (engine != nullptr && engine->has_sleepers() && bytes >= relocation_min()) {
    engine->note_allocation(device);
  }
}

void set_capture_probe(bool (*is_capturing)()) {
  capture_probe.store(is_capturing);
}

} // namespace torch_uvm
