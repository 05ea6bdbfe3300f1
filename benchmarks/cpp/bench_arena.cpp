// The time of an arena's allocations, iterations and scopes, in C++, with warm caches.
//
//   bench_arena [--json FILE] [--quick]
//
// Figures are nanoseconds, the median of several runs. The arena runs on addresses without memory and on a runtime
// whose calls do nothing. Threads share one arena. With "one stream" they also share one chain; otherwise each thread
// has its own.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "allocator/adaptors/caching_allocator.h"
#include "allocator/arena/arena.h"
#include "idle_runtime.h"

namespace {

using namespace torch_uvm;
using bench::AddressesOnly;
using bench::IdleRuntime;

constexpr Location kHome = Location::device(0);

/// The upstream of both subjects: the caching allocator over addresses without memory.
struct Upstream {
  IdleRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<AddressesOnly>()};
  std::shared_ptr<Allocator> caching = std::make_shared<CachingAllocator>(memory);
};

struct Cost {
  double allocate = 0, free = 0; ///< ns of one call
};

Stream stream_of(int thread) {
  return Stream{0, reinterpret_cast<void*>(static_cast<std::uintptr_t>(thread))};
}

using Clock = std::chrono::steady_clock;

double ns_since(Clock::time_point start, std::size_t count) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / static_cast<double>(count);
}

/// One thread's share of an iteration.
Cost iterate(Allocator& allocator, std::size_t bytes, Stream stream, std::vector<Allocation>& held) {
  Cost cost;
  auto start = Clock::now();
  for (Allocation& allocation : held) {
    allocation = allocator.allocate(bytes, kHome, stream);
  }
  cost.allocate = ns_since(start, held.size());
  start = Clock::now();
  for (const Allocation& allocation : held) {
    allocator.free(allocation);
  }
  cost.free = ns_since(start, held.size());
  return cost;
}

template <typename Figure>
double median(std::vector<Cost>& costs, Figure figure) {
  const auto middle = costs.begin() + static_cast<std::ptrdiff_t>(costs.size() / 2);
  std::ranges::nth_element(costs, middle, {}, figure);
  return (*middle).*figure;
}

/// Returns the times of the slowest of several threads that allocate and free concurrently; calls `reset` between
/// iterations.
template <typename Reset>
Cost measure(Allocator& allocator, Reset reset, std::size_t bytes, int threads, bool one_stream, int runs,
             std::size_t count) {
  std::vector<Cost> costs;
  for (int run = 0; run < runs + 2; ++run) { // the first two iterations reserve the block
    std::vector<Cost> each(static_cast<std::size_t>(threads));
    std::vector<std::thread> workers;
    std::atomic<int> ready = 0;
    for (int i = 0; i < threads; ++i) {
      workers.emplace_back([&, i] {
        std::vector<Allocation> held(count);
        ++ready;
        while (ready != threads) {
          std::this_thread::yield();
        }
        each[static_cast<std::size_t>(i)] = iterate(allocator, bytes, stream_of(one_stream ? 0 : i), held);
      });
    }
    for (std::thread& worker : workers) {
      worker.join();
    }
    reset();
    if (run >= 2) {
      costs.push_back({std::ranges::max_element(each, {}, &Cost::allocate)->allocate,
                       std::ranges::max_element(each, {}, &Cost::free)->free});
    }
  }
  return {median(costs, &Cost::allocate), median(costs, &Cost::free)};
}

struct Row {
  std::string what;
  double ns;
};

} // namespace

int main(int argc, char** argv) {
  std::string json;
  bool quick = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else {
      std::fprintf(stderr, "%s: \"%s\" is not accepted; [--json FILE] [--quick] are\n", argv[0], argv[i]);
      return 2;
    }
  }
  const int runs = quick ? 5 : 31;
  const std::size_t count = quick ? 20'000 : 100'000;
  Upstream upstream;
  std::vector<Row> rows;
  const auto say = [&](const std::string& what, double ns) {
    rows.push_back({what, ns});
    std::printf("%-58s %8.1f ns\n", what.c_str(), ns);
    std::fflush(stdout);
  };
  const auto arena = [&](const std::string& name, std::size_t bytes, int threads, bool one_stream) {
    Arena arena(upstream.runtime, upstream.caching, {.home = kHome});
    const Cost cost = measure(arena, [&] { arena.reset(); }, bytes, threads, one_stream, runs, count);
    say(name + ", allocate", cost.allocate);
    say(name + ", free", cost.free);
  };
  for (const std::size_t bytes : {std::size_t{256}, 64 * KiB}) {
    arena("arena, " + format_bytes(bytes) + ", 1 thread", bytes, 1, true);
  }
  arena("arena, 256 B, 2 threads, a stream each", 256, 2, false);
  arena("arena, 256 B, 2 threads, one stream", 256, 2, true);
  {
    const Cost cost = measure(*upstream.caching, [] {}, 256, 1, true, runs, count);
    say("caching allocator, 256 B, 1 thread, allocate", cost.allocate);
    say("caching allocator, 256 B, 1 thread, free", cost.free);
  }
  {
    Arena arena(upstream.runtime, upstream.caching, {.home = kHome});
    const auto each = [&](auto body) {
      std::vector<double> figures;
      for (int run = 0; run < runs; ++run) {
        const auto start = Clock::now();
        for (std::size_t i = 0; i < count / 10; ++i) {
          body();
        }
        figures.push_back(ns_since(start, count / 10));
      }
      std::ranges::nth_element(figures, figures.begin() + runs / 2);
      return figures[static_cast<std::size_t>(runs / 2)];
    };
    const auto bump = [&] { arena.free(arena.allocate(256, kHome, stream_of(0))); };
    bump();
    say("arena, an allocation, its free and a reset", each([&] {
          bump();
          arena.reset();
        }));
    say("arena, a push, an allocation, its free and the pop", each([&] {
          arena.push();
          bump();
          arena.pop();
        }));
    // For comparison: alternatives to the lock of an allocation.
    std::mutex mutex;
    std::atomic<std::size_t> top{0}, live{0};
    say("a std::mutex locked and unlocked", each([&] { const std::lock_guard lock(mutex); }));
    say("two atomic additions: a top and a count", each([&] {
          top.fetch_add(256, std::memory_order_relaxed);
          live.fetch_add(1, std::memory_order_relaxed);
        }));
  }
  if (!json.empty()) {
    std::ofstream file(json);
    file << "{\"benchmark\": \"arena\", \"unit\": \"ns\", \"figures\": [";
    for (std::size_t i = 0; i < rows.size(); ++i) {
      file << (i == 0 ? "\n" : ",\n") << "  {\"what\": \"" << rows[i].what << "\", \"ns\": " << rows[i].ns << "}";
    }
    file << "\n]}\n";
    if (!file.flush()) {
      std::fprintf(stderr, "cannot write %s\n", json.c_str());
      return 1;
    }
  }
  return 0;
}
