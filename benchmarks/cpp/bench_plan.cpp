// Arenas and allocation plans, in C++ and without memory: times with warm caches, and the quality of layouts.
//
//   bench_plan [FILE]
//
// The upstream is the caching allocator. A plan reaches the runtime only through it, so zero upstream calls mean zero
// runtime calls. The allocations of a plan resemble those of training steps (tests/cpp/training_steps.h); all of them
// are freed within the iteration.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "allocator/adaptors/adaptors.h"
#include "allocator/adaptors/caching_allocator.h"
#include "allocator/arena/arena.h"
#include "allocator/plan/allocation_plan.h"
#include "bench_report.h"
#include "idle_runtime.h"
#include "training_steps.h"

namespace {

using namespace bench;
using Clock = std::chrono::steady_clock;

constexpr Location kHome = Location::device(0);

struct Upstream {
  IdleRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<AddressesOnly>()};
  std::shared_ptr<Allocator> caching = std::make_shared<CachingAllocator>(memory);
};

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

// --- arenas

constexpr int kRuns = 31;
constexpr std::size_t kCount = 100'000; // allocations of a thread and run

/// Nanoseconds of an allocation and of a free, as seen by the slowest of some threads that share the arena. With
/// `one_stream` they also share one chain of blocks; otherwise each has its own.
void arena(Report& report, Upstream& upstream, std::size_t bytes, int threads, bool one_stream) {
  Arena arena(upstream.runtime, upstream.caching, {.home = kHome});
  std::vector<double> allocations, frees;
  for (int run = -2; run < kRuns; ++run) { // the first two reserve the blocks
    std::vector<double> made(static_cast<std::size_t>(threads)), freed(static_cast<std::size_t>(threads));
    std::vector<std::thread> workers;
    std::atomic<int> ready = 0;
    for (int i = 0; i < threads; ++i) {
      workers.emplace_back([&, i] {
        const Stream stream{0, reinterpret_cast<void*>(static_cast<std::uintptr_t>(one_stream ? 0 : i))};
        std::vector<Allocation> held(kCount);
        ++ready;
        while (ready != threads) {
          std::this_thread::yield();
        }
        auto start = Clock::now();
        std::ranges::generate(held, [&] { return arena.allocate(bytes, kHome, stream); });
        made[static_cast<std::size_t>(i)] = ms_since(start) * 1e6 / kCount;
        start = Clock::now();
        std::ranges::for_each(held, [&](const Allocation& each) { arena.free(each); });
        freed[static_cast<std::size_t>(i)] = ms_since(start) * 1e6 / kCount;
      });
    }
    std::ranges::for_each(workers, [](std::thread& worker) { worker.join(); });
    arena.reset();
    if (run >= 0) {
      allocations.push_back(*std::ranges::max_element(made));
      frees.push_back(*std::ranges::max_element(freed));
    }
  }
  report.add("arena",
             format_bytes(bytes) + ", " + std::to_string(threads) + " threads, " +
                 (one_stream ? "one stream" : "a stream each"),
             {{"allocate_ns", median(allocations)}, {"free_ns", median(frees)}});
}

// --- plans

constexpr int kIterations = 200;

struct Workload {
  std::string name;
  std::function<std::vector<PlanRequest>(std::size_t layers)> make;
};

const std::vector<Workload> kWorkloads = {
    {"transformer", [](std::size_t layers) { return steps::transformer(layers, 512, 512); }},
    {"convolutional", [](std::size_t blocks) { return steps::convolutional(blocks, 2); }},
    {"ragged", [](std::size_t layers) { return steps::ragged(layers); }},
};

/// The requests of the smallest number of layers that has at least `count` requests.
std::vector<PlanRequest> requests_of(const Workload& workload, std::size_t count) {
  std::size_t layers = 1;
  std::vector<PlanRequest> requests = workload.make(layers);
  while (requests.size() < count) {
    layers = std::max(layers + 1, layers * count / requests.size());
    requests = workload.make(layers);
  }
  return requests;
}

/// Milliseconds of all allocations and frees of an iteration, by the caching allocator and by a plan.
void iteration(Report& report, Upstream& upstream, const Workload& workload) {
  const std::vector<PlanRequest> requests = requests_of(workload, 10'000);
  const std::vector<steps::StepEvent> events = steps::events_of(requests);
  std::vector<Allocation> held(requests.size());
  const auto once = [&](Allocator& allocator) {
    const auto start = Clock::now();
    for (const steps::StepEvent& event : events) {
      const PlanRequest& request = requests[event.request];
      if (event.allocates) {
        held[event.request] = allocator.allocate(request.bytes, kHome, request.stream);
      } else {
        allocator.free(held[event.request]);
      }
    }
    return ms_since(start);
  };
  const auto counting = std::make_shared<CountingAllocator>(upstream.caching);
  AllocationPlan plan(counting, kHome);
  std::vector<double> cached, planned, ends;
  for (int i = 0; i < kIterations; ++i) {
    cached.push_back(once(*upstream.caching));
  }
  long long before = 0;
  for (int i = -2; i < kIterations; ++i) { // iteration -2 is recorded, iteration -1 allocates the segment
    if (i == 0) {
      before = counting->passed().total_allocations;
    }
    const auto start = Clock::now();
    plan.begin_iteration();
    const double took = once(plan);
    plan.end_iteration();
    if (i >= 0) {
      planned.push_back(took);
      ends.push_back(ms_since(start) - took);
    }
  }
  report.add("plan", workload.name,
             {{"requests", static_cast<double>(requests.size())},
              {"caching_ms", median(cached)},
              {"planned_ms", median(planned)},
              {"begin_and_end_ms", median(ends)},
              {"upstream_calls", static_cast<double>(counting->passed().total_allocations - before)},
              {"misses", static_cast<double>(plan.report().misses)}});
}

void layout(Report& report, const Workload& workload, std::size_t count) {
  const std::vector<PlanRequest> requests = requests_of(workload, count);
  const auto start = Clock::now();
  const PlanLayout made = lay_out(requests);
  report.add("layouts", workload.name,
             {{"requests", static_cast<double>(requests.size())},
              {"ms", ms_since(start)},
              {"bytes_to_peak", static_cast<double>(made.bytes) / static_cast<double>(made.peak_live_bytes)}});
}

void measure(Report& report) {
  Upstream upstream;
  arena(report, upstream, 256, 1, true);
  arena(report, upstream, 64 * KiB, 1, true);
  arena(report, upstream, 256, 2, false);
  arena(report, upstream, 256, 2, true);
  for (const Workload& workload : kWorkloads) {
    iteration(report, upstream, workload);
    for (const std::size_t count : {1'000, 10'000, 100'000}) {
      layout(report, workload, count);
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  return run(argc, argv, measure);
}
