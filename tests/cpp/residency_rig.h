// The engine over the test's own storages, and training steps over more storages than the budget holds.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "harness.h"
#include "recording/recording_runtime.h"
#include "residency/engine/engine.h"
#include "runtime/bytes.h"

namespace residency {

using namespace torch_uvm;

constexpr std::size_t kBytes = 2 * MiB;
#ifdef STAGED // copies go through slots of plain device memory, which the budget includes in addition to segments
constexpr std::size_t kSlot = 256 * KiB;
#else
constexpr std::size_t kSlot = 0;
#endif
constexpr std::size_t kBudget = 8 * MiB + 4 * kSlot;
/// every nth call fails: staged copies make several times as many calls
constexpr std::size_t kEvery = kSlot == 0 ? 1 : 7;
constexpr Stream kStream = Stream::default_of(0);

/// Stands for a tensor's storage: a pointer, and the value that all its bytes should have.
struct Storage {
  Block* block = nullptr; ///< nullptr: on the host
  unsigned char* ptr = nullptr;
  unsigned char content = 0;
  std::size_t bytes = kBytes;
  Record* record = nullptr;
  bool gone = false; ///< its bytes belong to another owner: it must not be moved
  bool shared = false; ///< its bytes have a further owner
  bool was_shared = false;
  bool going = false; ///< it has no owner left: a thread is about to free it
};

class Adapter final : public StorageAdapter {
 public:
  explicit Adapter(CachingManagedAllocator& memory) : memory_(memory) {}
  bool lock_if_sole_owner(const Record& record, std::vector<void*>& /*kept*/) override {
    return !of(record).gone && !of(record).going && !of(record).shared && !of(record).was_shared;
  }
  bool take_sole_ownership(const Record& record, std::vector<void*>& /*kept*/) override {
    return !of(record).shared && std::exchange(of(record).was_shared, false);
  }
  void release(void* /*kept*/) noexcept override {}
  bool is_expired(const Record& record) const override {
    if (of(record).going && on_going) {
      on_going();
    }
    return of(record).going;
  }
  void point_at_host(Record& record, void* ptr) noexcept override {
    of(record).block = nullptr;
    of(record).ptr = static_cast<unsigned char*>(ptr);
  }
  void point_at_device(Record& record, Block* block) noexcept override {
    of(record).block = block;
    of(record).ptr = static_cast<unsigned char*>(memory_.data(block));
  }
  void watch_for_writes(Record& /*record*/, std::vector<void*>& /*kept*/) override {}
  void wake() noexcept override {
    ++woken;
  }
  void forget(Record& /*record*/) noexcept override {}
  std::optional<int> unwatched_kernels() const noexcept override {
    return unseen;
  }

  int woken = 0;
  std::optional<int> unseen; ///< the number of running operators that the engine does not see; nullopt: unknown
  std::function<void()> on_going; ///< called when the engine asks whether a storage is about to be freed

 private:
  static Storage& of(const Record& record) {
    return *static_cast<Storage*>(record.storage);
  }
  CachingManagedAllocator& memory_;
};

template <typename Runtime>
struct RigOn {
  Runtime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  Adapter adapter{memory};
  const std::unique_ptr<Engine> owned_engine = std::make_unique<Engine>(runtime, memory, adapter);
  Engine& engine = *owned_engine;
  std::vector<std::unique_ptr<Storage>> storages;
  const std::vector<Stream> streams{kStream};

  RigOn() {
    engine.set_staging(kSlot);
    engine.set_budget(0, kBudget);
  }
  ~RigOn() {
    for (const auto& storage : storages) {
      free(*storage);
    }
    memory.set_pressure_callback(nullptr);
  }

  void free(Storage& storage) {
    Block* const block = storage.block;
    Record* const record = storage.record;
    if (record != nullptr) {
      engine.destroyed(record);
    }
    memory.free(block);
    if (record != nullptr && block != nullptr) {
      engine.freed();
    }
    storage = Storage{};
  }

  /// Runs `kernel` as an operator on these storages. It may write to the first one.
  template <typename Kernel>
  void run(OperatorKey key, const std::vector<Storage*>& used, bool writes, Kernel kernel) {
    if (!engine.is_awake()) {
      kernel();
      return;
    }
    Engine::Frame frame;
    frame.key = key;
    {
      const Engine::Lock lock(engine);
      std::vector<Engine::Operand> operands;
      for (Storage* const storage : used) {
        if (storage->record == nullptr && engine.watches(0)) {
          storage->record = engine.adopt(storage->block, 0, storage);
        }
        if (storage->record != nullptr) {
          operands.push_back({storage->record, writes && storage == used.front()});
        }
      }
      engine.begin(frame, {key, "test", false, false, false}, operands, streams);
    }
    kernel();
    const Engine::Lock lock(engine);
    engine.end(frame);
  }

  /// Makes a storage and fills it.
  /// \throws OutOfMemory
  Storage& make(unsigned char content, std::size_t bytes = kBytes) {
    Block* const block = memory.allocate(bytes, Location::device(0), kStream);
    storages.push_back(std::make_unique<Storage>());
    Storage& made = *storages.back();
    made.bytes = bytes;
    made.block = block;
    made.ptr = static_cast<unsigned char*>(memory.data(block));
    engine.note_allocation(0);
    run(1, {&made}, true, [&] { write(made, content); });
    return made;
  }

  static void write(Storage& storage, unsigned char content) {
    std::memset(storage.ptr, content, storage.bytes);
    storage.content = content;
  }
  static void check(const Storage& storage) {
    CHECK(storage.ptr[0] == storage.content);
    CHECK(storage.ptr[storage.bytes / 2] == storage.content);
    CHECK(storage.ptr[storage.bytes - 1] == storage.content);
  }
  void check_engine() {
    if (const auto wrong = engine.check()) {
      harness::fail(__FILE__, __LINE__, *wrong);
    }
  }
  std::int64_t reserved() const {
    return memory.statistics(Location::device(0)).reserved_bytes[0].current;
  }
};

using Rig = RigOn<RecordingRuntime>;

/// Steps over more storages than the budget holds: each operator reads two storages and writes to one of them.
template <typename Runtime>
void train(RigOn<Runtime>& rig, int storages, int steps) {
  for (int number = 0; number < storages; ++number) {
    try {
      rig.make(static_cast<unsigned char>(number + 1));
    } catch (const OutOfMemory&) {
      // The failing call. The other storages are unchanged.
    }
  }
  const std::size_t count = rig.storages.size();
  for (int step = 0; step < steps; ++step) {
    for (std::size_t index = 0; index < count; ++index) {
      Storage& written = *rig.storages[index];
      Storage& read = *rig.storages[(index + 1) % count];
      rig.run(10 + index, {&written, &read}, true, [&] {
        Rig::check(written);
        Rig::check(read);
        Rig::write(written, static_cast<unsigned char>(written.content + 1));
      });
      rig.check_engine();
    }
  }
}

} // namespace residency
