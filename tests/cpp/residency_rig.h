// The engine over storages of a test's own, and steps over more of them than the budget holds.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "harness.h"
#include "residency/engine/engine.h"
#include "runtime/bytes.h"
#include "runtime/testing/recording_runtime.h"

namespace residency {

using namespace torch_uvm;

constexpr std::size_t kBytes = 2 * MiB;
#ifdef STAGED // copies go through slots of plain device memory, which come on top of what segments may have
constexpr std::size_t kSlot = 256 * KiB;
#else
constexpr std::size_t kSlot = 0;
#endif
constexpr std::size_t kBudget = 8 * MiB + 4 * kSlot;
constexpr std::size_t kEvery = kSlot == 0 ? 1 : 7; ///< call is made to fail: staged copies make several times as many
constexpr Stream kStream = Stream::default_of(0);

/// What stands for a tensor's storage: a pointer, and the byte that the test knows to be everywhere in it.
struct Storage {
  Block* block = nullptr; ///< nullptr: on the host
  unsigned char* ptr = nullptr;
  unsigned char content = 0;
  std::size_t bytes = kBytes;
  Record* record = nullptr;
  bool gone = false; ///< its bytes are somebody else's: it must not be moved
  bool shared = false; ///< ... or others have them, too
  bool was_shared = false;
  bool going = false; ///< nobody owns it: a thread is about to free it
};

class Adapter final : public StorageAdapter {
 public:
  explicit Adapter(CachingManagedAllocator& memory) : memory_(memory) {}
  bool keep(const Record& record, std::vector<void*>& /*kept*/) override {
    return !of(record).gone && !of(record).going && !of(record).shared && !of(record).was_shared;
  }
  bool take_sole_ownership(const Record& record, std::vector<void*>& /*kept*/) override {
    return !of(record).shared && std::exchange(of(record).was_shared, false);
  }
  void let_go(void* /*kept*/) noexcept override {}
  bool is_going(const Record& record) const override {
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
  std::optional<int> running_kernels() const noexcept override {
    return unseen;
  }

  int woken = 0;
  std::optional<int> unseen; ///< operators that run unseen, if they are counted
  std::function<void()> on_going; ///< called when the engine learns that a storage goes

 private:
  static Storage& of(const Record& record) {
    return *static_cast<Storage*>(record.storage);
  }
  CachingManagedAllocator& memory_;
};

struct Rig {
  RecordingRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  Adapter adapter{memory};
  const std::unique_ptr<Engine> owned_engine = Engine::make(runtime, memory, adapter);
  Engine& engine = *owned_engine;
  std::vector<std::unique_ptr<Storage>> storages;
  const std::vector<Stream> streams{kStream};

  explicit Rig(bool hard = true) {
    engine.set_staging(kSlot);
    engine.set_budget(0, kBudget, hard);
  }
  ~Rig() {
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

  /// Runs `kernel` as an operator on these storages, the first of which it may write to.
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

  /// A new storage, filled. \throws OutOfMemory
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

/// Steps over more storages than the budget holds: each reads two and writes to one of them.
inline void train(Rig& rig, int storages, int steps) {
  for (int number = 0; number < storages; ++number) {
    try {
      rig.make(static_cast<unsigned char>(number + 1));
    } catch (const OutOfMemory&) {
      // A call that was made to fail; the others have what they had.
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
