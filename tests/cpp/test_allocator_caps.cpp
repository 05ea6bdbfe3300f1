// A cap holds under concurrency and with every runtime call failing.
#include <array>
#include <atomic>
#include <latch>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "room_helpers.h"

using namespace contract;

/// Device memory whose first segment waits in the source until it may go on.
struct Slow final : SegmentSource {
  explicit Slow(ManagedRuntime& runtime) : runtime(runtime) {}
  void* allocate(std::size_t bytes, Location home) override {
    if (hold.exchange(false)) {
      inside.count_down();
      go_on.wait();
    }
    return runtime.allocate_device(bytes, home.index);
  }
  void free(void* ptr, std::size_t /*bytes*/) noexcept override {
    runtime.free_device(ptr);
  }
  ManagedRuntime& runtime;
  std::atomic<bool> hold = true;
  std::latch inside{1}, go_on{1};
};

TEST(requests_wait_for_a_segment_in_creation) {
  RecordingRuntime runtime(1);
  auto made = std::make_unique<Slow>(runtime);
  Slow& source = *made;
  CachingManagedAllocator allocator(runtime, std::move(made));
  allocator.set_cap(0, 64 * MiB);
  Block* first = nullptr;
  std::thread other([&] { first = allocator.allocate(40 * MiB, kDevice, kStream); });
  source.inside.wait();
  Block* beside = nullptr;
  std::atomic<bool> refused = false;
  std::thread waits([&] { beside = allocator.allocate(16 * MiB, kDevice, kStream); });
  std::thread waits_in_vain([&] {
    try {
      allocator.allocate(40 * MiB, kDevice, kStream);
    } catch (const OutOfMemory&) {
      refused = true;
    }
  });
  source.go_on.count_down();
  other.join();
  waits.join();
  waits_in_vain.join();
  CHECK(beside != nullptr);
  CHECK_EQ(allocator.statistics().segment[0].current, 1); // both requests are served from that segment
  CHECK(refused);
  allocator.free(first);
  allocator.free(beside);
  CHECK(!allocator.check());
}

TEST(a_cap_that_is_set_during_a_segments_creation_holds) {
  for (const bool fits : {true, false}) {
    RecordingRuntime runtime(1);
    auto made = std::make_unique<Slow>(runtime);
    Slow& source = *made;
    CachingManagedAllocator allocator(runtime, std::move(made));
    Block* block = nullptr;
    std::atomic<bool> refused = false;
    std::thread other([&] {
      try {
        block = allocator.allocate(40 * MiB, kDevice, kStream);
      } catch (const OutOfMemory&) {
        refused = true;
      }
    });
    source.inside.wait();
    allocator.set_cap(0, fits ? 64 * MiB : 32 * MiB);
    source.go_on.count_down();
    other.join();
    CHECK(refused == !fits);
    CHECK_EQ(block != nullptr, fits);
    CHECK(!allocator.check());
    allocator.free(block);
  }
}

TEST(concurrent_threads_never_exceed_a_hard_cap) {
  // Counted by the source itself: its bytes exist before the allocator's statistics show them.
  struct Counting final : SegmentSource {
    explicit Counting(ManagedRuntime& runtime) : runtime(runtime) {}
    void* allocate(std::size_t bytes, Location home) override {
      const std::size_t now = live.fetch_add(bytes) + bytes;
      for (std::size_t seen = most.load(); seen < now && !most.compare_exchange_weak(seen, now);) {
      }
      return runtime.allocate_device(bytes, home.index);
    }
    void free(void* ptr, std::size_t bytes) noexcept override {
      live -= bytes;
      runtime.free_device(ptr);
    }
    ManagedRuntime& runtime;
    std::atomic<std::size_t> live = 0, most = 0;
  };
  RecordingRuntime runtime(1);
  auto made = std::make_unique<Counting>(runtime);
  Counting& source = *made;
  CachingManagedAllocator allocator(runtime, std::move(made));
  allocator.set_cap(0, 128 * MiB);
  std::array<std::string, 3> failures;
  std::atomic<std::size_t> refused = 0;
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < failures.size(); ++thread) {
    threads.emplace_back([&, thread] {
      try {
        std::mt19937_64 random(thread + 1);
        std::vector<Block*> held;
        for (int step = 0; step < 4000; ++step) {
          if (held.size() > 12 || (!held.empty() && random() % 3 == 0)) {
            std::swap(held[random() % held.size()], held.back());
            allocator.free(held.back());
            held.pop_back();
            continue;
          }
          const std::size_t bytes = random() % 2 == 0 ? 1 + random() % MiB : 1 + random() % (24 * MiB);
          if (random() % 2 == 0) {
            Block* const block = allocator.try_allocate(bytes, kDevice, kStream);
            block != nullptr ? held.push_back(block) : void(++refused);
          } else {
            try {
              held.push_back(allocator.allocate(bytes, kDevice, kStream));
            } catch (const OutOfMemory& error) {
              CHECK(error.cause == OutOfMemory::Cause::kBudget);
              ++refused;
            }
          }
          if (random() % 64 == 0) {
            allocator.empty_cache();
          }
          if (random() % 128 == 0) {
            CHECK(!allocator.check());
          }
        }
        for (Block* const block : held) {
          allocator.free(block);
        }
      } catch (const std::exception& error) {
        failures[thread] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& failure : failures) {
    CHECK_EQ(failure, "");
  }
  CHECK(refused > 0);
  CHECK(source.most <= 128 * MiB);
  CHECK(source.most > 96 * MiB); // the limit was nearly reached
  CHECK(!allocator.check());
}

// --- failing calls ------------------------------------------------------------------------------------------------

namespace {

/// Works under a cap, with a callback that evicts the min-cost range, while the Nth runtime call fails.
class FailingScript {
 public:
  FailingScript(bool managed, std::string_view failing, std::size_t nth)
      : failing_(failing),
        nth_(nth),
        rig_(std::make_unique<RecordingRuntime>(1), managed),
        calls_(static_cast<RecordingRuntime&>(*rig_.runtime)),
        a_(rig_.stream()),
        b_(rig_.stream()) {
    callback_.script = this;
    work_ = rig_.runtime->create_event(0, false);
    rig_.allocator->set_pressure_callback(&callback_);
    calls_.clear_calls();
    calls_.fail(failing, nth);
  }
  ~FailingScript() {
    rig_.runtime->destroy_event(work_);
  }

  /// \return whether there were that many calls
  bool run() {
    step([&] { rig_.allocator->set_cap(0, 64 * MiB); });
    for (const std::size_t megabytes : {3, 12, 2, 20, 8, 16, 30, 4, 1}) {
      for (const Stream stream : {a_, b_}) {
        keep([&] { return rig_.allocate(megabytes * MiB, stream); });
        busy(stream);
      }
      step([&] {
        if (!held_.empty()) {
          rig_.allocator->record_stream(held_.rbegin()->second, a_);
        }
      });
      keep([&] { return rig_.allocator->try_allocate(megabytes * MiB, kDevice, a_); });
    }
    while (!held_.empty()) {
      rig_.allocator->hand_over(held_.begin()->second, b_);
      drop(held_.begin()->first);
    }
    step([&] { rig_.allocator->set_cap(0, 20 * MiB); });
    step([&] { rig_.allocator->set_cap(0, 4 * MiB); });
    keep([&] { return rig_.allocate(30 * MiB, a_); });
    while (!held_.empty()) {
      drop(held_.begin()->first);
    }
    step([&] { rig_.allocator->empty_cache(); });
    return (failing_ == "*" ? calls_.calls().size() : calls_.count(failing_)) >= nth_;
  }
  std::size_t leaked() {
    calls_.clear_failures();
    for (const Stream stream : {a_, b_}) {
      rig_.runtime->synchronize_stream(stream); // queues that wait for each other would keep each other alive
    }
    rig_.allocator.reset();
    return calls_.live_objects() - 3; // two streams, one event
  }
  std::size_t asked() const {
    return callback_.asked;
  }

 private:
  struct Callback final : PressureCallback {
    bool make_room(std::size_t bytes, Location home, Stream) override {
      ++asked;
      const auto run = script->rig_.allocator->min_cost_range(bytes, home.index, by_bytes);
      for (void* const tag : run.value_or(std::vector<void*>{})) {
        script->drop(number_of(tag));
      }
      return run.has_value();
    }
    FailingScript* script = nullptr;
    std::size_t asked = 0;
  };

  void drop(std::size_t number) {
    rig_.allocator->free(held_.at(number));
    held_.erase(number);
    rig_.check();
  }
  void step(const std::function<void()>& body) {
    try {
      body();
    } catch (const RuntimeFailure&) { // the failing call
    } catch (const OutOfMemory&) {
    }
    rig_.check();
    const auto cap = rig_.allocator->cap(0);
    CHECK(!cap || *cap < 64 * MiB || reserved_on(rig_) <= static_cast<std::int64_t>(*cap));
  }
  void keep(const std::function<Block*()>& body) {
    const std::int64_t before = rig_.allocator->statistics().allocation[0].current;
    const std::size_t held = held_.size();
    Block* block = nullptr;
    step([&] { block = body(); });
    if (block != nullptr) {
      rig_.allocator->set_tag(block, tag_of(next_));
      held_[next_++] = block;
    }
    CHECK_EQ(rig_.allocator->statistics().allocation[0].current - before,
             static_cast<std::int64_t>(held_.size()) - static_cast<std::int64_t>(held));
  }
  void busy(Stream stream) {
    calls_.hold(stream);
    step([&] { rig_.runtime->record_event(work_, stream); });
  }

  const std::string_view failing_;
  const std::size_t nth_;
  Rig rig_;
  RecordingRuntime& calls_;
  Stream a_, b_;
  Event work_;
  Callback callback_;
  std::map<std::size_t, Block*> held_;
  std::size_t next_ = 1;
};

} // namespace

TEST(every_call_fails_once_under_a_cap) {
  for (const bool managed : {true, false}) {
    for (std::size_t nth = 1;; ++nth) {
      FailingScript script(managed, "*", nth);
      const bool reached = script.run();
      CHECK(script.asked() > 3);
      CHECK_EQ(script.leaked(), std::size_t{0});
      if (!reached) {
        CHECK(nth > 60);
        break;
      }
    }
  }
}

HARNESS_MAIN()
