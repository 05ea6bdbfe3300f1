// The caching allocator, in C++ and without memory: the time of cached sizes, and the waste of ragged sizes.
// Prints a line of JSON for each figure (benchmarks/bench_allocator.py).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "idle_runtime.h"
#include "runtime/bytes.h"

namespace {

using namespace bench;
using Clock = std::chrono::steady_clock;

double ns_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

void print(const char* section, std::size_t bytes, std::initializer_list<std::pair<const char*, double>> figures) {
  std::printf("{\"section\": \"%s\", \"what\": \"%s\"", section, format_bytes(bytes).c_str());
  for (const auto& [name, value] : figures) {
    std::printf(", \"%s\": %.10g", name, value);
  }
  std::printf("}\n");
  std::fflush(stdout);
}

// --- allocate + free of a cached size, with warm caches

constexpr int kRuns = 7;
constexpr int kPairs = 200'000;

double pairs_ns(CachingManagedAllocator& allocator, std::size_t bytes, Stream stream, int pairs) {
  const auto start = Clock::now();
  for (int i = 0; i < pairs; ++i) {
    allocator.free(allocator.allocate(bytes, Location::device(0), stream));
  }
  return ns_since(start) / pairs;
}

/// Holds `live` blocks of the sizes that models use, with free blocks between them.
struct Heap {
  explicit Heap(std::size_t live) {
    std::mt19937_64 random(20);
    const auto allocate = [&] {
      const std::uint64_t roll = random() % 100;
      const std::size_t bytes = roll < 70   ? 512 + random() % (64 * KiB)
                                : roll < 90 ? 64 * KiB + random() % MiB
                                : roll < 98 ? MiB + random() % (8 * MiB)
                                            : 10 * MiB + random() % (64 * MiB);
      return allocator.allocate(bytes, Location::device(0), Stream::default_of(0));
    };
    std::vector<Block*> holes;
    for (std::size_t i = 0; i < live; ++i) {
      blocks.push_back(allocate());
      if (i % 4 == 0) {
        holes.push_back(allocate());
      }
    }
    std::ranges::for_each(holes, [&](Block* hole) { allocator.free(hole); });
  }
  ~Heap() {
    std::ranges::for_each(blocks, [&](Block* block) { allocator.free(block); });
  }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  IdleRuntime runtime;
  CachingManagedAllocator allocator{runtime, std::make_unique<AddressesOnly>()};
  std::vector<Block*> blocks;
};

/// The time of a pair as seen by the slowest of some threads with a stream each; the median of several runs.
double cached_ns(Heap& heap, std::size_t bytes, int threads) {
  std::vector<double> figures;
  for (int run = 0; run < kRuns; ++run) {
    std::vector<double> ns(static_cast<std::size_t>(threads));
    std::vector<std::thread> workers;
    std::atomic<int> ready = 0;
    for (int i = 0; i < threads; ++i) {
      workers.emplace_back([&, i] {
        const Stream stream =
            i == 0 ? Stream::default_of(0) : Stream{0, reinterpret_cast<void*>(static_cast<std::uintptr_t>(i))};
        pairs_ns(heap.allocator, bytes, stream, kPairs / 10); // warm up
        ++ready;
        while (ready != threads) {
          std::this_thread::yield();
        }
        ns[static_cast<std::size_t>(i)] = pairs_ns(heap.allocator, bytes, stream, kPairs);
      });
    }
    std::ranges::for_each(workers, [](std::thread& worker) { worker.join(); });
    figures.push_back(*std::ranges::max_element(ns));
  }
  if (const auto wrong = heap.allocator.check()) {
    throw std::logic_error(*wrong);
  }
  std::ranges::nth_element(figures, figures.begin() + kRuns / 2);
  return figures[kRuns / 2];
}

void cached_sizes() {
  for (const std::size_t live : {100, 1'000, 10'000, 100'000, 1'000'000}) {
    Heap heap(live);
    for (const int threads : {1, 2, 8}) {
      for (const std::size_t bytes : {std::size_t{512}, 4 * KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB}) {
        print("allocator", bytes,
              {{"bytes", static_cast<double>(bytes)},
               {"threads", threads},
               {"live_blocks", static_cast<double>(live)},
               {"ns", cached_ns(heap, bytes, threads)}});
      }
    }
  }
}

// --- ragged sizes with random lifetimes

constexpr int kSteps = 100'000;

struct Live {
  Block* block;
  std::size_t bytes;
};

/// The sizes are those of a convolutional network with a variable number of channels: k*16*7*7, k*7*7, k*7, k and k*32
/// floats, k from 1024 to 8192 in steps of 1024, with equal probability. A step frees random blocks until the next size
/// fits into the live set, then allocates it. The first half of the steps is warm-up. Waste is (reserved - live) /
/// live, where live is the number of requested bytes. The lower bound of the waste follows from the peak of live bytes,
/// which any allocator has to reserve.
void ragged_sizes(std::size_t target) {
  std::vector<std::size_t> sizes;
  for (std::size_t k = 1024; k <= 8192; k += 1024) {
    for (const std::size_t floats : {k * 16 * 7 * 7, k * 7 * 7, k * 7, k, k * 32}) {
      if (floats * sizeof(float) <= target) {
        sizes.push_back(floats * sizeof(float));
      }
    }
  }
  IdleRuntime runtime;
  CachingManagedAllocator allocator(runtime, std::make_unique<AddressesOnly>());
  std::mt19937_64 random(6);
  std::vector<Live> live;
  std::size_t bytes = 0;
  const auto free_one = [&](std::size_t at) {
    allocator.free(live[at].block);
    bytes -= live[at].bytes;
    live[at] = live.back();
    live.pop_back();
  };
  std::vector<double> waste;
  double peak = 0, sum = 0, took = 0;
  long long before = 0, calls = 0;
  for (int step = 0; step < 2 * kSteps; ++step) {
    const std::size_t next = sizes[random() % sizes.size()];
    const auto start = Clock::now();
    while (bytes + next > target) {
      free_one(random() % live.size());
    }
    live.push_back({allocator.allocate(next, Location::device(0), Stream::default_of(0)), next});
    bytes += next;
    const double ns = ns_since(start);
    const Statistics now = allocator.statistics();
    calls = now.num_device_alloc + now.num_device_free;
    if (step < kSteps) {
      before = calls;
      continue;
    }
    took += ns;
    const auto asked = static_cast<double>(bytes);
    waste.push_back(static_cast<double>(allocator.statistics().reserved_bytes[0].current) / asked - 1);
    peak = std::max(peak, asked);
    sum += 1 / asked;
  }
  double mean = 0;
  for (const double value : waste) {
    mean += value / kSteps;
  }
  std::ranges::sort(waste);
  print("ragged", target,
        {{"live_bytes", static_cast<double>(target)},
         {"mean", mean},
         {"median", waste[waste.size() / 2]},
         {"most", waste.back()},
         {"bound", peak * sum / kSteps - 1},
         {"calls_steady", static_cast<double>(calls - before)},
         {"ns", took / kSteps}});
  while (!live.empty()) {
    free_one(live.size() - 1);
  }
  if (const auto wrong = allocator.check()) {
    throw std::logic_error(*wrong);
  }
}

} // namespace

int main() {
  for (const std::size_t mib : {16, 64, 256, 1024, 4096}) {
    ragged_sizes(mib * MiB);
  }
  cached_sizes();
}
