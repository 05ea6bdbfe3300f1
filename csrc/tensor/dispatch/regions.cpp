#include "tensor/dispatch/regions.h"

#include <atomic>

#include "tensor/dispatch/captures.h"
#include "tensor/dispatch/operand_walk.h"
#include "tensor/dispatch/storage_records.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

/// Tells the engine of storages that the graph created. A storage that has a record already is not new.
void note_births(Engine& engine, Engine::Frame& frame, std::span<c10::StorageImpl* const> storages) {
  for (c10::StorageImpl* const storage : storages) {
    bool made = false;
    Record* const record = record_of(engine, storage, &made);
    if (made) {
      engine.created(frame, record, this_thread().stream_for(*record, *storage));
    }
  }
}

} // namespace

Region::~Region() {
  leave({});
}

std::unique_ptr<Region> Region::enter_unwatched(Engine& engine) {
  if (engine.is_awake()) {
    return nullptr;
  }
  std::unique_ptr<Region> region(new Region);
  engine.begin_unseen_graph();
  // A device that woke before it could see this call would move the inputs, so look again. The fence pairs with the
  // engine's mutex, which a waking device releases before it looks for calls.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (engine.is_awake()) {
    engine.end_unseen_graph();
    region->open_ = false;
    return nullptr;
  }
  return region;
}

std::unique_ptr<Region> Region::enter(Engine& engine, std::uint64_t key, const char* name,
                                      std::span<const Input> inputs) {
  ThreadState& mine = this_thread();
  const Engine::Lock lock(engine);
  mine.operands.clear();
  mine.streams.clear();
  for (const Input& input : inputs) {
    if (Record* const record = record_of(engine, input.storage)) {
      mine.operands.push_back({record, input.writes});
      mine.streams.ask(device_of(*record, *input.storage));
    }
  }
  if (is_capturing()) {
    engine.captured(mine.operands);
    return nullptr;
  }
  if (mine.running != nullptr) {
    engine.begin_nested(*mine.running, mine.operands, mine.streams.get());
    return nullptr;
  }
  std::unique_ptr<Region> region(new Region);
  region->seen_ = true;
  mine.running = &region->frame_;
  region->frame_.key = key;
  region->frame_.thread = mine.program_thread();
  region->frame_.name = name;
  engine.begin(region->frame_, {.key = key, .name = name, .region = true}, mine.operands, mine.streams.get());
  return region;
}

void Region::leave(std::span<c10::StorageImpl* const> outputs) noexcept {
  if (!open_) {
    return;
  }
  open_ = false;
  if (seen_) {
    this_thread().running = nullptr;
  }
  Engine* const engine = engine_in_use();
  if (engine == nullptr) { // forked meanwhile
    return;
  }
  if (!seen_) {
    engine->end_unseen_graph();
    return;
  }
  const Engine::Lock lock(*engine);
  try {
    note_births(*engine, frame_, outputs);
  } catch (...) {
    // Out of host memory: the storage is registered at its first use as an operand.
  }
  engine->end(frame_);
}

WorkUnderWay::WorkUnderWay(std::span<const at::Tensor> tensors) {
  if (Context::forked()) {
    return;
  }
  Engine& engine = made_engine(); // the first budget may be set before the work ends
  unwatched_ = Region::enter_unwatched(engine);
  if (unwatched_) {
    return;
  }
  frame_.operands.reserve(tensors.size());
  const Engine::Lock lock(engine);
  for (const at::Tensor& tensor : tensors) {
    c10::StorageImpl* const storage = accelerators_storage(tensor);
    if (Record* const record = storage == nullptr ? nullptr : record_of(engine, storage)) {
      hold(record);
    }
  }
}

WorkUnderWay::WorkUnderWay(Engine& engine, std::uint64_t key, const char* name, std::span<const Region::Input> inputs) {
  unwatched_ = Region::enter_unwatched(engine);
  if (unwatched_) {
    return;
  }
  frame_.operands.reserve(inputs.size());
  const std::unique_ptr<Region> ready = Region::enter(engine, key, name, inputs); // pins them until it is destroyed
  const Engine::Lock lock(engine);
  for (const Region::Input& input : inputs) {
    if (Record* const record = record_of(engine, input.storage)) {
      hold(record);
    }
  }
}

WorkUnderWay::WorkUnderWay(const Engine::Frame& frame) {
  frame_.operands.reserve(frame.operands.size());
  for (Record* const record : frame.operands) {
    hold(record);
  }
}

void WorkUnderWay::hold(Record* record) {
  frame_.operands.push_back(record);
  ++record->in_use;
  record->collective = false; // its end is known
}

void WorkUnderWay::end() noexcept {
  unwatched_.reset();
  Engine* const engine = engine_in_use();
  if (!frame_.operands.empty() && engine != nullptr) {
    const Engine::Lock lock(*engine);
    engine->end(frame_);
    frame_.operands.clear();
  }
}

} // namespace torch_uvm
