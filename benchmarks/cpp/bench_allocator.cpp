// The time of allocate + free of a cached size, in C++, with warm caches.
//
//   bench_allocator [--json FILE] [--quick]
//
// The heap holds `live` blocks of mixed sizes with free blocks between them. One thread, or several with one stream
// each, allocates and frees one block repeatedly. Figures are nanoseconds for the pair, as seen by the slowest thread;
// the median of several runs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "idle_runtime.h"
#include "runtime/bytes.h"

namespace {

using namespace bench;

struct Figure {
  std::size_t bytes;
  int threads;
  std::size_t live;
  double ns; ///< median time of a pair
};

double pairs_ns(CachingManagedAllocator& allocator, std::size_t bytes, Stream stream, int pairs) {
  const Location home = Location::device(stream.device);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < pairs; ++i) {
    allocator.free(allocator.allocate(bytes, home, stream));
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / pairs;
}

/// Fills the heap with `live` blocks of the sizes that models use, and frees as many blocks between them.
void populate(CachingManagedAllocator& allocator, std::size_t live, std::vector<Block*>& blocks) {
  std::mt19937_64 random(20);
  const auto size = [&]() -> std::size_t {
    const std::uint64_t roll = random() % 100;
    return roll < 70   ? 512 + random() % (64 * KiB)
           : roll < 90 ? 64 * KiB + random() % MiB
           : roll < 98 ? MiB + random() % (8 * MiB)
                       : 10 * MiB + random() % (64 * MiB);
  };
  std::vector<Block*> holes;
  for (std::size_t i = 0; i < live; ++i) {
    blocks.push_back(allocator.allocate(size(), Location::device(0), Stream::default_of(0)));
    if (i % 4 == 0) {
      holes.push_back(allocator.allocate(size(), Location::device(0), Stream::default_of(0)));
    }
  }
  for (Block* const block : holes) {
    allocator.free(block);
  }
}

/// A populated heap.
struct Heap {
  explicit Heap(std::size_t live) {
    populate(allocator, live, blocks);
  }
  ~Heap() {
    for (Block* const block : blocks) {
      allocator.free(block);
    }
  }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  IdleRuntime runtime;
  CachingManagedAllocator allocator{runtime, std::make_unique<AddressesOnly>()};
  std::vector<Block*> blocks;
};

double measure(Heap& heap, std::size_t bytes, int threads, int runs, int pairs) {
  std::vector<double> figures;
  for (int run = 0; run < runs; ++run) {
    std::vector<double> ns(static_cast<std::size_t>(threads));
    std::vector<std::thread> workers;
    std::atomic<int> ready = 0;
    for (int i = 0; i < threads; ++i) {
      workers.emplace_back([&, i] {
        const Stream stream =
            i == 0 ? Stream::default_of(0) : Stream{0, reinterpret_cast<void*>(static_cast<std::uintptr_t>(i))};
        pairs_ns(heap.allocator, bytes, stream, pairs / 10); // warm up
        ++ready;
        while (ready != threads) {
          std::this_thread::yield();
        }
        ns[static_cast<std::size_t>(i)] = pairs_ns(heap.allocator, bytes, stream, pairs);
      });
    }
    for (std::thread& worker : workers) {
      worker.join();
    }
    figures.push_back(*std::ranges::max_element(ns));
  }
  if (const auto wrong = heap.allocator.check()) {
    throw std::logic_error(*wrong);
  }
  std::ranges::nth_element(figures, figures.begin() + runs / 2);
  return figures[static_cast<std::size_t>(runs / 2)];
}

void write_json(const std::string& path, const std::vector<Figure>& figures) {
  std::ofstream file(path);
  file << "{\"benchmark\": \"allocator\", \"unit\": \"ns for allocate + free, cached\", \"figures\": [";
  for (std::size_t i = 0; i < figures.size(); ++i) {
    const Figure& figure = figures[i];
    file << (i == 0 ? "\n" : ",\n") << "  {\"bytes\": " << figure.bytes << ", \"threads\": " << figure.threads
         << ", \"live_blocks\": " << figure.live << ", \"ns\": " << figure.ns << "}";
  }
  file << "\n]}\n";
  if (!file.flush()) {
    throw std::runtime_error("cannot write " + path);
  }
}

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
  const int runs = quick ? 3 : 7;
  const int pairs = quick ? 20'000 : 200'000;
  const std::vector<std::size_t> lives = {100, 1'000, 10'000, 100'000, 1'000'000};
  const std::vector<std::size_t> sizes = {512, 4 * KiB, 64 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB};
  std::vector<Figure> figures;
  std::printf("allocate + free of a cached size, ns for the pair (median of %d runs); %u cores\n", runs,
              std::thread::hardware_concurrency());
  std::printf("%10s %8s", "live", "threads");
  for (const std::size_t bytes : sizes) {
    std::printf(" %10s", format_bytes(bytes).c_str());
  }
  std::printf("\n");
  for (const std::size_t live : lives) {
    Heap heap(live);
    for (const int threads : {1, 2, 8}) {
      std::printf("%10zu %8d", live, threads);
      for (const std::size_t bytes : sizes) {
        const double ns = measure(heap, bytes, threads, runs, pairs);
        figures.push_back(Figure{bytes, threads, live, ns});
        std::printf(" %10.1f", ns);
        std::fflush(stdout);
      }
      std::printf("\n");
    }
  }
  if (!json.empty()) {
    write_json(json, figures);
  }
  return 0;
}
