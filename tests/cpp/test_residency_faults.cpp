// The engine under failing calls with delayed work: a missing order produces wrong bytes. Kernels are copies on the
// compute stream, which the schedule delays.
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>

#include "doubles/failing_calls.h"
#include "harness.h"
#include "residency/engine/relocation_min.h"
#include "residency_rig.h"
#include "runtime/emulated/emulated_runtime.h"

namespace {

using namespace residency;

constexpr std::size_t kSize = kDefaultRelocationMin;
/// size of one of the four staging slots, which the budget includes in addition to segments
constexpr std::size_t kPiece = kSlot / 4;
constexpr std::size_t kRoom = 4 * MiB + 4 * kPiece;
constexpr std::size_t kStorages = 24;

EmulatedConfig delayed(std::uint64_t seed) {
  EmulatedConfig config;
  config.schedule_seed = seed;
  return config;
}

/// A buffer with identical bytes, the source of the kernels' writes.
const unsigned char* all_of(unsigned char content) {
  static const auto* const all = [] {
    auto* const made = new std::vector<std::vector<unsigned char>>;
    for (int each = 0; each < 256; ++each) {
      made->emplace_back(2 * kSize, static_cast<unsigned char>(each));
    }
    return made;
  }();
  return (*all)[content].data();
}

class Delayed {
 public:
  explicit Delayed(std::uint64_t seed) : runtime(delayed(seed)), memory_(runtime, source()), adapter_(memory_) {
    engine_ = std::make_unique<Engine>(runtime, memory_, adapter_);
    engine_->set_staging(kPiece);
  }
  ~Delayed() {
    for (Storage& storage : storages_) {
      if (storage.record != nullptr) {
        engine_->destroyed(storage.record);
      }
      memory_.free(storage.block);
      if (storage.record != nullptr && storage.block != nullptr) {
        engine_->freed();
      }
    }
    runtime.synchronize_device(0);
    memory_.set_pressure_callback(nullptr);
  }

  Engine& engine() {
    return *engine_;
  }

  /// \return whether there was enough memory
  bool make(unsigned char content) {
    try {
      Storage made;
      made.bytes = kSize + content % 5 * kSize / 8; // so that free pieces must be joined
      made.block = memory_.allocate(made.bytes, Location::device(0), kStream);
      made.ptr = static_cast<unsigned char*>(memory_.data(made.block));
      storages_.push_back(made);
    } catch (const std::exception&) {
      return false;
    }
    run(1, storages_.back(), content);
    return true;
  }

  /// An operator that reads one storage, which is verified at the end, and writes to another.
  void step(std::size_t number) {
    Storage& written = storages_[number % storages_.size()];
    Storage& read = storages_[(number + storages_.size() / 2) % storages_.size()];
    run(10 + number % storages_.size(), written, static_cast<unsigned char>(written.content + 1), &read);
    if (number % 3 == 0) {
      use_temporary((3 + number % 4) * kSize);
    }
  }
  std::size_t count() const {
    return storages_.size();
  }

  void check_all() {
    runtime.synchronize_device(0);
    for (const Storage& storage : storages_) {
      for (const std::size_t at : {std::size_t{0}, storage.bytes / 2, storage.bytes - 1}) {
        CHECK_EQ(static_cast<int>(storage.ptr[at]), static_cast<int>(storage.content));
      }
    }
    for (const Seen& seen : seen_) {
      CHECK_EQ(static_cast<int>(seen.bytes[0]), static_cast<int>(seen.wanted));
      CHECK_EQ(static_cast<int>(seen.bytes.back()), static_cast<int>(seen.wanted));
    }
    seen_.clear();
    if (const auto wrong = engine_->check()) {
      throw harness::Failure(*wrong);
    }
  }

  /// Excludes the test's own calls from failing and from counting.
  void fail(std::string_view name, std::size_t nth) {
    failing_ = name;
    failures_.fail(name, nth);
  }
  std::size_t clear_failures() {
    return failures_.clear();
  }

  EmulatedRuntime runtime;

 private:
  struct Seen {
    std::vector<unsigned char> bytes;
    unsigned char wanted;
  };

  std::unique_ptr<SegmentSource> source() {
    return std::make_unique<ManagedSegmentSource>(runtime);
  }

  void run(OperatorKey key, Storage& written, unsigned char content, Storage* read = nullptr) {
    Engine::Frame frame;
    frame.key = key;
    {
      const Engine::Lock lock(*engine_);
      std::vector<Engine::Operand> operands;
      for (Storage* const storage : {&written, read}) {
        if (storage == nullptr) {
          continue;
        }
        if (storage->record == nullptr && engine_->watches(0)) {
          storage->record = engine_->adopt(storage->block, 0, storage);
        }
        if (storage->record != nullptr) {
          operands.push_back({storage->record, storage == &written});
        }
      }
      engine_->begin(frame, {key, "test", key % 3 == 0, false, false}, operands, {kStream});
    }
    if (read != nullptr) {
      seen_.push_back({std::vector<unsigned char>(read->bytes), read->content});
      kernel(seen_.back().bytes.data(), read->ptr, read->bytes);
    }
    kernel(written.ptr, all_of(content), written.bytes);
    written.content = content;
    const Engine::Lock lock(*engine_);
    engine_->end(frame);
  }
  /// Memory that what is free suffices for once others move or leave.
  void use_temporary(std::size_t bytes) {
    Block* made = nullptr;
    try {
      made = memory_.allocate(bytes, Location::device(0), kStream);
    } catch (const std::exception&) {
      return; // the failing call
    }
    kernel(memory_.data(made), all_of(255), kSize);
    memory_.free(made);
  }
  void kernel(void* to, const void* from, std::size_t bytes) {
    const std::size_t missing = failures_.clear();
    runtime.copy_async(to, from, bytes, kStream);
    if (missing != 0) {
      failures_.fail(failing_, missing);
    }
  }

  CachingManagedAllocator memory_;
  Adapter adapter_;
  std::unique_ptr<Engine> engine_;
  std::string failing_;
  EmulatedFailures failures_{runtime};
  std::deque<Storage> storages_; // elements must not move
  std::deque<Seen> seen_;
};

void train(Delayed& rig, std::size_t steps) {
  for (std::size_t number = 0; number < steps * rig.count(); ++number) {
    rig.step(number);
  }
}

/// \return whether there were that many calls
bool train_with(std::uint64_t seed, std::string_view name, std::size_t nth) {
  Delayed rig(seed);
  rig.engine().set_budget(0, kRoom);
  for (std::size_t number = 0; number < kStorages; ++number) {
    rig.make(static_cast<unsigned char>(number));
  }
  rig.fail(name, nth);
  train(rig, 3);
  const bool reached = rig.clear_failures() == 0;
  rig.check_all();
  train(rig, 1); // later steps work
  rig.check_all();
  return reached;
}

/// Makes every nth call fail, each under several schedules.
void calls_fail(std::string_view name, std::size_t every, std::uint64_t seeds) {
  std::size_t failed = 0;
  for (std::size_t nth = 1;; nth += every) {
    for (std::uint64_t seed = nth; seed < nth + seeds; ++seed) {
      try {
        if (!train_with(seed, name, nth)) {
          CHECK(failed > 20);
          return;
        }
      } catch (const std::exception& error) {
        throw harness::Failure(std::string(name) + ", call " + std::to_string(nth) + ", seed " + std::to_string(seed) +
                               ": " + error.what());
      }
    }
    ++failed;
  }
}

const bool kLong = std::getenv("TORCH_UVM_FAULTS") != nullptr; // `make faults`: every call, under more schedules

TEST(no_byte_is_lost_if_any_call_fails_under_delayed_work) {
  calls_fail("*", kLong ? 1 : 19, kLong ? 4 : 1);
}

TEST(no_byte_is_lost_if_waits_between_streams_fail) {
  calls_fail("wait_event", kLong ? 1 : 7, kLong ? 5 : 1);
}

TEST(setting_a_budget_can_be_retried_after_a_failure) {
  std::size_t failed = 0;
  for (std::size_t nth = 1;; ++nth) {
    Delayed rig(nth);
    for (std::size_t number = 0; number < kStorages; ++number) {
      rig.make(static_cast<unsigned char>(number));
    }
    const std::size_t before = rig.runtime.live_objects();
    rig.fail("*", nth);
    bool threw = false;
    try {
      rig.engine().set_budget(0, kRoom);
    } catch (const RuntimeFailure&) {
      threw = true;
      CHECK(!rig.engine().budget(0));
      CHECK_EQ(rig.runtime.live_objects(), before);
    }
    const bool reached = rig.clear_failures() == 0;
    CHECK(reached || !threw);
    rig.engine().set_budget(0, kRoom);
    train(rig, 3);
    rig.check_all();
    CHECK(rig.engine().statistics().written_back.count > 0);
    if (!reached) {
      break;
    }
    ++failed;
  }
  CHECK(failed > 1);
}

TEST(a_budget_whose_lifting_failed_stays_in_force) {
  for (std::size_t nth = 1;; nth += kEvery) {
    Delayed rig(nth);
    rig.engine().set_budget(0, kRoom);
    for (std::size_t number = 0; number < kStorages; ++number) {
      rig.make(static_cast<unsigned char>(number));
    }
    train(rig, 2);
    rig.fail("*", nth);
    bool threw = false;
    try {
      rig.engine().set_budget(0, std::nullopt);
    } catch (const std::exception&) {
      threw = true;
      CHECK(rig.engine().budget(0) == kRoom);
    }
    const bool reached = rig.clear_failures() == 0;
    rig.check_all();
    if (threw) {
      train(rig, 2);
      rig.check_all();
      rig.engine().set_budget(0, std::nullopt);
    }
    rig.check_all();
    if (!reached) {
      break;
    }
  }
}

} // namespace

HARNESS_MAIN()
