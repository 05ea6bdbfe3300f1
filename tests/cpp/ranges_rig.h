// The rig of the engine's tests over storages that are address ranges, on the emulated runtime: real memory comes and
// goes, so an access to a range without memory ends the program.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "harness.h"
#include "residency/engine/engine.h"
#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"

namespace ranges_rig {

using namespace torch_uvm;

constexpr std::size_t kBytes = 2 * MiB;
constexpr std::size_t kBudget = 8 * MiB; // four storages
constexpr std::size_t kDeviceBytes = 32 * MiB;
constexpr Stream kStream = Stream::default_of(0);
using Seed = std::optional<std::uint64_t>;

inline EmulatedConfig config(Seed seed) {
  EmulatedConfig made;
  made.memory = kDeviceBytes;
  made.schedule_seed = seed;
  return made;
}

inline AllocatorOptions options() {
  AllocatorOptions made;
  made.uses_ranges = true;
  made.range_min_bytes = MiB;
  return made;
}

struct Storage {
  Block* block = nullptr; ///< nullptr: on the host
  unsigned char* ptr = nullptr;
  unsigned char* address = nullptr; ///< the one that it has for life
  unsigned char content = 0;
  std::size_t bytes = 0;
  Record* record = nullptr;
};

class Adapter final : public StorageAdapter {
 public:
  explicit Adapter(CachingManagedAllocator& memory) : memory_(memory) {}
  bool lock_if_sole_owner(const Record& /*record*/, std::vector<void*>& /*locked*/) override {
    return true;
  }
  bool take_sole_ownership(const Record& /*record*/, std::vector<void*>& /*locked*/) override {
    return false;
  }
  void release(void* /*locked*/) noexcept override {}
  bool is_expired(const Record& /*record*/) const override {
    return false;
  }
  void point_at_host(Record& record, void* ptr) noexcept override {
    of(record).block = nullptr;
    of(record).ptr = static_cast<unsigned char*>(ptr);
  }
  void point_at_device(Record& record, Block* block) noexcept override {
    of(record).block = block;
    of(record).ptr = static_cast<unsigned char*>(memory_.data(block));
  }
  void watch_for_writes(Record& /*record*/, std::vector<void*>& /*locked*/) override {}
  void wake() noexcept override {}
  void forget(Record& /*record*/) noexcept override {}
  std::optional<int> unwatched_kernels() const noexcept override {
    return 0;
  }

 private:
  static Storage& of(const Record& record) {
    return *static_cast<Storage*>(record.storage);
  }
  CachingManagedAllocator& memory_;
};

struct Rig {
  EmulatedRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime), options()};
  Adapter adapter{memory};
  const std::unique_ptr<Engine> owned_engine = Engine::make(runtime, memory, adapter);
  Engine& engine = *owned_engine;
  std::vector<std::unique_ptr<Storage>> storages;
  const std::vector<Stream> streams{kStream};

  explicit Rig(Seed seed = std::nullopt) : runtime(config(seed)) {
    engine.set_budget(0, kBudget);
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

  /// Frees everything, and checks that no memory is left.
  void free_all() {
    for (const auto& storage : storages) {
      free(*storage);
    }
    storages.clear();
    memory.empty_cache();
    CHECK_EQ(runtime.memory_info(0).free, kDeviceBytes);
    CHECK(!engine.check());
  }

  void begin(Engine::Frame& frame, const std::vector<Storage*>& used, bool writes, bool in_place_ok = false) {
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
    engine.begin(frame, {frame.key, "test", in_place_ok, false, false, true}, operands, streams);
  }

  /// Runs a kernel on the storages as an operator. It may write to the first one.
  template <typename Kernel>
  void run(OperatorKey key, const std::vector<Storage*>& used, bool writes, Kernel kernel, bool in_place_ok = false) {
    Engine::Frame frame;
    frame.key = key;
    if (engine.is_awake()) {
      begin(frame, used, writes, in_place_ok);
    }
    runtime.begin_kernel(kStream, {});
    kernel();
    runtime.end_kernel(kStream, {});
    if (engine.is_awake()) {
      const Engine::Lock lock(engine);
      engine.end(frame);
    }
  }

  Storage& make(std::size_t bytes = kBytes) {
    storages.push_back(std::make_unique<Storage>());
    Storage& made = *storages.back();
    Engine::Frame frame;
    frame.key = 1;
    made.block = memory.allocate(bytes, Location::device(0), kStream);
    made.address = made.ptr = static_cast<unsigned char*>(memory.data(made.block));
    made.bytes = bytes;
    made.content = static_cast<unsigned char>(storages.size());
    run(1, {&made}, true, [&] { std::memset(made.ptr, made.content, bytes); });
    return made;
  }

  static bool is_right(const Storage& storage) {
    return std::all_of(storage.ptr, storage.ptr + storage.bytes,
                       [&](unsigned char byte) { return byte == storage.content; });
  }
  /// Reads the storages in an operator, and writes the first one's next content.
  void use(const std::vector<Storage*>& used, OperatorKey key = 2) {
    run(key, used, true, [&] {
      for (Storage* const storage : used) {
        CHECK(storage->ptr == storage->address);
        CHECK(is_right(*storage));
      }
      ++used.front()->content;
      std::memset(used.front()->ptr, used.front()->content, used.front()->bytes);
    });
  }
  /// Uses the storages, and evicts them after that.
  void evict(const std::vector<Storage*>& used) {
    engine.evict_after_operators(true);
    use(used);
    engine.evict_after_operators(false);
    for (Storage* const storage : used) {
      CHECK(storage->block == nullptr);
    }
  }
  /// Evicts a storage, and takes all free memory of the device. \return it, for free_device
  void* evict_and_fill_device(Storage& storage) {
    evict({&storage});
    memory.empty_cache(); // or it would get the memory again that it had
    return runtime.allocate_device(runtime.memory_info(0).free, 0);
  }
  /// Makes storages of more than the budget, so that all others that can go are evicted.
  void press() {
    for (std::size_t count = 0; count < kBudget / kBytes + 2; ++count) {
      make();
    }
  }
  void is_well(bool within = true) {
    for (const auto& storage : storages) {
      CHECK(storage->ptr == storage->address);
    }
    if (const auto wrong = engine.check()) {
      harness::fail(__FILE__, __LINE__, *wrong);
    }
    if (within) {
      CHECK(memory.levels(Location::device(0)).reserved_bytes[0] <= static_cast<std::int64_t>(kBudget));
      CHECK_EQ(engine.statistics().over_budget, 0);
    }
    CHECK_EQ(engine.statistics().failures, 0);
  }
};

inline const std::vector<Seed> kSeeds{std::nullopt, 1, 2, 3, 4, 5, 6, 7};

} // namespace ranges_rig
