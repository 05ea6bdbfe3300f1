// Seeded random use. Every structure is checked after each step of a single thread, and at the end of several threads.
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "allocator_rig.h"
#include "recording/recording_runtime.h"
#include "runtime/emulated/emulated_runtime.h"

using namespace contract;

namespace {

std::size_t random_size(std::mt19937_64& random) {
  switch (random() % 8) {
    case 0:
      return 1 + random() % 512;
    case 1:
    case 2:
    case 3:
      return 1 + random() % (64 * KiB);
    case 4:
      return 1 + random() % (2 * MiB);
    case 5:
    case 6:
      return 1 + random() % (10 * MiB);
    default:
      return 1 + random() % (40 * MiB);
  }
}

/// A caller's view of a block: only the owner may write to it.
struct Held {
  Block* block;
  std::size_t bytes;
  unsigned char mark;
};

class Walk {
 public:
  Walk(Rig& rig, std::vector<Stream> streams, std::uint64_t seed)
      : rig_(rig), streams_(std::move(streams)), random_(seed) {}

  void step() {
    const std::uint64_t roll = random_() % 100;
    if (held_.empty() || roll < 45) {
      allocate();
    } else if (roll < 85) {
      free(random_() % held_.size());
    } else if (roll < 91) {
      rig_.allocator->record_stream(any().block, stream());
    } else if (roll < 96 && rig_.managed) {
      const Stream to = stream();
      rig_.allocator->set_home(any().block, Location{to.device}, to);
    } else if (roll < 98) {
      rig_.allocator->free(any_again());
    } else if (roll < 99) {
      rig_.allocator->empty_cache();
    } else {
      CHECK(rig_.allocator->find(rig_.allocator->data(any().block)) != nullptr);
    }
  }

  void finish() {
    while (!held_.empty()) {
      free(held_.size() - 1);
    }
  }

  std::size_t refused() const {
    return refused_;
  }

 private:
  Held& any() {
    return held_[random_() % held_.size()];
  }
  /// Removes a random block from the held ones and verifies it.
  Block* any_again() {
    const std::size_t i = random_() % held_.size();
    std::swap(held_[i], held_.back());
    const Held held = held_.back();
    held_.pop_back();
    verify(held);
    return held.block;
  }
  Stream stream() {
    return streams_[random_() % streams_.size()];
  }
  void allocate() {
    const Stream on = stream();
    const std::size_t bytes = random_size(random_);
    try {
      Block* const block = rig_.allocator->allocate(bytes, Location{on.device}, on);
      const Held held{block, bytes, static_cast<unsigned char>(random_())};
      auto* const data = static_cast<unsigned char*>(rig_.allocator->data(block));
      data[0] = data[bytes / 2] = data[bytes - 1] = held.mark;
      held_.push_back(held);
    } catch (const OutOfMemory&) {
      ++refused_;
    }
  }
  void verify(const Held& held) const {
    const auto* const data = static_cast<const unsigned char*>(rig_.allocator->data(held.block));
    CHECK(data[0] == held.mark && data[held.bytes / 2] == held.mark && data[held.bytes - 1] == held.mark);
  }
  void free(std::size_t i) {
    std::swap(held_[i], held_.back());
    verify(held_.back());
    rig_.allocator->free(held_.back().block);
    held_.pop_back();
  }

  Rig& rig_;
  std::vector<Stream> streams_;
  std::mt19937_64 random_;
  std::vector<Held> held_;
  std::size_t refused_ = 0;
};

Rig recording() {
  return Rig(std::make_unique<RecordingRuntime>(2), true);
}

Rig emulated_rig(std::optional<std::uint64_t> seed) {
  EmulatedConfig config;
  config.devices = 2;
  config.schedule_seed = seed;
  return Rig(std::make_unique<EmulatedRuntime>(config), true);
}

std::vector<Stream> streams_of(Rig& rig) {
  return {Stream::host(), Stream::default_of(0), Stream::default_of(1), rig.stream(0), rig.stream(1)};
}

void walk_one_thread(Rig rig, std::uint64_t seed, int steps) {
  rig.runtime->set_limit(256 * MiB);
  Walk walk(rig, streams_of(rig), seed);
  for (int i = 0; i < steps; ++i) {
    walk.step();
    if (const auto wrong = rig.allocator->check()) {
      throw harness::Failure("seed " + std::to_string(seed) + ", step " + std::to_string(i) + ": " + *wrong);
    }
  }
  CHECK(walk.refused() > 0); // memory pressure occurred
  walk.finish();
  rig.allocator->empty_cache();
  rig.check();
  CHECK_EQ(rig.reserved(), 0);
  CHECK_EQ(rig.runtime->managed_bytes(), std::size_t{0});
}

void walk_threads(Rig rig, std::uint64_t seed, int steps) {
  rig.runtime->set_limit(512 * MiB);
  const std::vector<Stream> streams = streams_of(rig);
  std::vector<std::thread> threads;
  std::vector<std::string> failures(4);
  for (std::size_t i = 0; i < failures.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        Walk walk(rig, streams, seed * 100 + i);
        for (int step = 0; step < steps; ++step) {
          walk.step();
          if (step % 500 == 0) {
            rig.check(); // concurrently with the other threads' steps
          }
        }
        walk.finish();
      } catch (const std::exception& error) {
        failures[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& failure : failures) {
    CHECK_EQ(failure, "");
  }
  rig.check();
  CHECK_EQ(rig.allocator->statistics().allocation[0].current, 0);
  rig.allocator->empty_cache();
  CHECK_EQ(rig.reserved(), 0);
}

} // namespace

TEST(one_thread_on_the_recording_runtime) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    walk_one_thread(recording(), seed, 3000);
  }
}

TEST(one_thread_on_the_emulated_runtime) {
  walk_one_thread(emulated_rig(std::nullopt), 5, 3000);
  walk_one_thread(emulated_rig(11), 6, 3000);
}

TEST(four_threads_on_the_recording_runtime) {
  walk_threads(recording(), 7, 4000);
}

TEST(four_threads_on_the_emulated_runtime) {
  walk_threads(emulated_rig(std::nullopt), 8, 3000);
  walk_threads(emulated_rig(12), 9, 3000);
}

HARNESS_MAIN()
