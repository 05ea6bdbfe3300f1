// Under a hard budget, what fits by bytes fits: neighbours slide together, ordered with everything that uses them, and
// keep their bytes if calls of the runtime fail.
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <random>

#include "doubles/failing_calls.h"
#include "residency_rig.h"
#include "runtime/emulated/emulated_runtime.h"

namespace {

using namespace residency;

constexpr std::size_t kRoom = 24 * MiB;
constexpr std::size_t kLargest = 4 * MiB;
constexpr std::size_t kUnit = 64 * KiB; // medium blocks are multiples of it

/// Bytes that differ from place to place, so that a misplaced piece is noticed.
const unsigned char* pattern(unsigned char content) {
  static const auto* const all = [] {
    auto* const made = new std::vector<unsigned char>(kRoom + 256 * 1021);
    std::mt19937 random(7);
    for (unsigned char& byte : *made) {
      byte = static_cast<unsigned char>(random());
    }
    return made;
  }();
  return all->data() + std::size_t{content} * 1021;
}

/// Storages of random sizes on a device whose work is delayed at random. Nothing can be evicted: the host's limit is 0.
class Heap {
 public:
  explicit Heap(std::uint64_t seed)
      : random(seed), runtime(delayed(seed)), memory(runtime, source()), adapter_(memory) {
    engine = std::make_unique<Engine>(runtime, memory, adapter_);
    engine->set_staging(0);
    engine->set_host_limit(0);
    engine->set_budget(0, kRoom);
    for (Stream& stream : streams_) {
      stream = runtime.create_stream(0, 0);
    }
  }
  ~Heap() {
    for (Storage& storage : storages) {
      free(storage);
    }
    memory.free(large_);
    runtime.synchronize_device(0);
    memory.set_pressure_callback(nullptr);
    engine.reset();
    for (const Stream stream : streams_) {
      runtime.destroy_stream(stream);
    }
  }

  Stream stream() {
    return streams_[random() % std::size(streams_)];
  }
  /// Fills the budget and frees about half of the storages. Every write is a kernel that may still be queued.
  void fill_with_gaps() {
    unsigned char content = 1;
    for (;;) {
      const std::size_t bytes = kMiB + kUnit * (1 + random() % ((kLargest - kMiB) / kUnit));
      const Stream on = stream();
      Storage made;
      made.bytes = bytes - random() % kUnit;
      made.block = memory.try_allocate(made.bytes, Location::device(0), on);
      if (made.block == nullptr) {
        break;
      }
      made.ptr = static_cast<unsigned char*>(memory.data(made.block));
      storages.push_back(made);
      on_[&storages.back()] = on;
      write(storages.back(), content++);
    }
    for (Storage& storage : storages) {
      if (random() % 2 == 0) {
        free(storage);
      }
    }
  }
  void pin_some() {
    for (Storage& storage : storages) {
      if (storage.record != nullptr && random() % 4 == 0) {
        const Engine::Lock lock(*engine);
        engine->pin(storage.record, on_.at(&storage));
      }
    }
  }
  /// The free bytes of the largest range without a pinned block, as far as a request can ask for all of them.
  std::size_t fits() {
    std::size_t most = 0, now = 0;
    for (const SegmentInfo& segment : memory.snapshot()) {
      now = 0;
      for (const BlockInfo& block : segment.blocks) {
        const Record* const record = record_at(block.address);
        now = record != nullptr && record->pins != 0 ? 0 : now + (block.requested_bytes == 0 ? block.bytes : 0);
        most = std::max(most, now);
      }
    }
    return most < 10 * MiB ? most : most / (2 * MiB) * (2 * MiB);
  }
  /// \throws OutOfMemory
  void allocate_large(std::size_t bytes, const std::function<void()>& before_kernel = {}) {
    const Stream on = stream();
    Block* const made = memory.allocate(bytes, Location::device(0), on);
    if (before_kernel) {
      before_kernel();
    }
    large_ = made;
    large_bytes_ = bytes;
    kernel(memory.data(large_), pattern(255), bytes, on); // overwrites what was there
  }
  void use_all() {
    for (Storage& storage : storages) {
      if (storage.record != nullptr) {
        write(storage, static_cast<unsigned char>(storage.content + 100));
      }
    }
  }
  /// Reads by kernels, each ordered as an operator.
  void check_contents() {
    std::deque<std::vector<unsigned char>> seen;
    std::vector<Storage*> read;
    for (Storage& storage : storages) {
      if (storage.record != nullptr) {
        seen.emplace_back(storage.bytes);
        read.push_back(&storage);
        run(storage, false, [&](Stream on) { kernel(seen.back().data(), storage.ptr, storage.bytes, on); });
      }
    }
    runtime.synchronize_device(0);
    for (std::size_t index = 0; index < read.size(); ++index) {
      CHECK(std::memcmp(seen[index].data(), pattern(read[index]->content), read[index]->bytes) == 0);
    }
    CHECK(large_ == nullptr || std::memcmp(memory.data(large_), pattern(255), large_bytes_) == 0);
    for (const auto& wrong : {engine->check(), memory.check()}) {
      if (wrong) {
        throw harness::Failure(*wrong);
      }
    }
  }
  void free(Storage& storage) {
    if (storage.record != nullptr) {
      engine->destroyed(storage.record);
    }
    memory.free(storage.block);
    if (storage.record != nullptr && storage.block != nullptr) {
      engine->freed();
    }
    storage = Storage{};
  }

  std::mt19937_64 random;
  EmulatedRuntime runtime;
  CachingManagedAllocator memory;
  std::unique_ptr<Engine> engine;
  std::deque<Storage> storages; // elements must not move

 private:
  static constexpr std::size_t kMiB = 1 * MiB;

  static EmulatedConfig delayed(std::uint64_t seed) {
    EmulatedConfig config;
    config.schedule_seed = seed;
    return config;
  }
  std::unique_ptr<SegmentSource> source() {
    return std::make_unique<ManagedSegmentSource>(runtime);
  }
  const Record* record_at(std::uintptr_t address) const {
    for (const Storage& storage : storages) {
      if (storage.record != nullptr && reinterpret_cast<std::uintptr_t>(storage.ptr) == address) {
        return storage.record;
      }
    }
    return nullptr;
  }
  void kernel(void* to, const void* from, std::size_t bytes, Stream on) {
    runtime.copy_async(to, from, bytes, on);
  }
  void write(Storage& storage, unsigned char content) {
    run(storage, true, [&](Stream on) { kernel(storage.ptr, pattern(content), storage.bytes, on); });
    storage.content = content;
  }
  template <typename Kernel>
  void run(Storage& storage, bool writes, Kernel launch) {
    const Stream on = on_.at(&storage);
    Engine::Frame frame;
    frame.key = 10;
    {
      const Engine::Lock lock(*engine);
      if (storage.record == nullptr) {
        storage.record = engine->adopt(storage.block, 0, &storage);
      }
      const Engine::Operand operand{storage.record, writes};
      engine->begin(frame, {frame.key, "test", false, false, false}, std::span(&operand, 1), {on});
    }
    launch(on);
    const Engine::Lock lock(*engine);
    engine->end(frame);
  }

  Adapter adapter_;
  Stream streams_[3];
  std::map<const Storage*, Stream> on_; ///< the stream that all operators on a storage use
  Block* large_ = nullptr;
  std::size_t large_bytes_ = 0;
};

TEST(what_fits_by_bytes_is_allocated_without_an_eviction) {
  std::int64_t moved = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    try {
      Heap heap(seed);
      heap.fill_with_gaps();
      const std::size_t bytes = heap.fits();
      heap.allocate_large(bytes);
      heap.check_contents();
      heap.use_all();
      heap.check_contents();
      const ResidencyStatistics figures = heap.engine->statistics();
      CHECK_EQ(figures.over_budget, 0);
      CHECK_EQ(figures.written_back.count, 0);
      CHECK_EQ(figures.failures, 0);
      CHECK(heap.memory.statistics(Location::device(0)).reserved_bytes[0].peak <= static_cast<std::int64_t>(kRoom));
      moved += figures.moved.count;
    } catch (const std::exception& error) {
      throw harness::Failure("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  CHECK(moved > 100);
}

TEST(pinned_storages_stay_and_those_between_them_slide) {
  std::int64_t moved = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    try {
      Heap heap(seed);
      heap.fill_with_gaps();
      heap.pin_some();
      std::vector<std::pair<const Storage*, const unsigned char*>> pinned;
      for (const Storage& storage : heap.storages) {
        if (storage.record != nullptr && storage.record->pins != 0) {
          pinned.emplace_back(&storage, storage.ptr);
        }
      }
      heap.allocate_large(heap.fits());
      heap.use_all();
      heap.check_contents();
      for (const auto& [storage, ptr] : pinned) {
        CHECK(storage->ptr == ptr);
      }
      CHECK_EQ(heap.engine->statistics().over_budget, 0);
      moved += heap.engine->statistics().moved.count;
    } catch (const std::exception& error) {
      throw harness::Failure("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  CHECK(moved > 50);
}

TEST(no_byte_is_lost_if_a_call_fails_amid_a_slide_under_delayed_work) {
  int failed = 0, served = 0;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    bool reached = true;
    for (std::size_t nth = 1; reached; ++nth) {
      Heap heap(seed);
      heap.fill_with_gaps();
      const std::size_t bytes = heap.fits();
      {
        EmulatedFailures failures(heap.runtime);
        failures.fail("*", nth);
        try {
          heap.allocate_large(bytes, [&] { reached = failures.clear() == 0; }); // the test's own call must not fail
          ++served;
        } catch (const OutOfMemory&) {
        } catch (const RuntimeFailure&) {
        }
        reached = failures.clear() == 0 && reached;
      }
      failed += reached;
      heap.check_contents();
      heap.use_all();
      heap.check_contents();
    }
  }
  CHECK(failed > 60);
  CHECK(served > 20);
}

} // namespace

HARNESS_MAIN()
