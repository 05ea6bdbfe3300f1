// The time of a planned iteration, and the quality and the cost of allocation plans.
//
//   bench_plan [--iterations N] [--json FILE]
//
// The allocations resemble those of training steps (tests/cpp/training_steps.h); all of them are freed within the
// iteration. A plan reaches the runtime only through its upstream, so zero upstream calls mean zero runtime calls.
// Times are medians over iterations, summed over all allocations and frees of an iteration.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocator/adaptors/adaptors.h"
#include "allocator/adaptors/caching_allocator.h"
#include "allocator/plan/allocation_plan.h"
#include "idle_runtime.h"
#include "training_steps.h"

namespace {

using namespace bench;

constexpr Location kHome = Location::device(0);

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

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

/// \return milliseconds
double run_iteration(Allocator& allocator, const std::vector<PlanRequest>& requests,
                     const std::vector<steps::StepEvent>& events, std::vector<Allocation>& held) {
  const auto start = std::chrono::steady_clock::now();
  for (const steps::StepEvent& event : events) {
    if (event.allocates) {
      held[event.request] = allocator.allocate(requests[event.request].bytes, kHome, requests[event.request].stream);
    } else {
      allocator.free(held[event.request]);
    }
  }
  return milliseconds_since(start);
}

struct Followed {
  std::string name;
  std::size_t requests = 0;
  double caching_ms = 0, planned_ms = 0;
  double ends_ms = 0; ///< time of begin_iteration and end_iteration
  long long upstream_calls = 0, misses = 0; ///< total over the planned iterations
};

Followed follow(const Workload& workload, int iterations) {
  const std::vector<PlanRequest> requests = requests_of(workload, 10'000);
  const std::vector<steps::StepEvent> events = steps::events_of(requests);
  std::vector<Allocation> held(requests.size());
  IdleRuntime runtime;
  CachingManagedAllocator memory(runtime, std::make_unique<AddressesOnly>());
  const auto caching = std::make_shared<CachingAllocator>(memory);
  const auto counting = std::make_shared<CountingAllocator>(caching);
  AllocationPlan plan(counting, kHome);
  Followed figure;
  figure.name = workload.name;
  figure.requests = requests.size();
  std::vector<double> cached, planned, ends;
  for (int i = 0; i < iterations; ++i) {
    cached.push_back(run_iteration(*caching, requests, events, held));
  }
  long long before = 0;
  for (int i = -2; i < iterations; ++i) { // iteration -2 is recorded, iteration -1 allocates the segment
    if (i == 0) {
      before = counting->passed().total_allocations;
    }
    auto start = std::chrono::steady_clock::now();
    plan.begin_iteration();
    double at_ends = milliseconds_since(start);
    const double took = run_iteration(plan, requests, events, held);
    start = std::chrono::steady_clock::now();
    plan.end_iteration();
    at_ends += milliseconds_since(start);
    if (i >= 0) {
      planned.push_back(took);
      ends.push_back(at_ends);
    }
  }
  figure.caching_ms = median(cached);
  figure.planned_ms = median(planned);
  figure.ends_ms = median(ends);
  figure.upstream_calls = counting->passed().total_allocations - before;
  figure.misses = plan.report().misses;
  return figure;
}

struct LaidOut {
  std::string name;
  std::size_t requests = 0;
  double ratio = 0; ///< bytes of the plan, divided by the peak of live bytes
  double ms = 0;
};

LaidOut measure_layout(const Workload& workload, std::size_t count) {
  const std::vector<PlanRequest> requests = requests_of(workload, count);
  const auto start = std::chrono::steady_clock::now();
  const PlanLayout layout = lay_out(requests);
  const double ms = milliseconds_since(start);
  return {workload.name, requests.size(),
          static_cast<double>(layout.bytes) / static_cast<double>(layout.peak_live_bytes), ms};
}

void write_json(const std::string& path, const std::vector<Followed>& followed, const std::vector<LaidOut>& laid_out) {
  std::ofstream file(path);
  file << "{\"benchmark\": \"plan\", \"iterations\": [";
  for (std::size_t i = 0; i < followed.size(); ++i) {
    const Followed& f = followed[i];
    file << (i == 0 ? "\n" : ",\n") << "  {\"workload\": \"" << f.name << "\", \"requests\": " << f.requests
         << ", \"caching_ms\": " << f.caching_ms << ", \"planned_ms\": " << f.planned_ms
         << ", \"begin_and_end_ms\": " << f.ends_ms << ", \"upstream_calls\": " << f.upstream_calls
         << ", \"misses\": " << f.misses << "}";
  }
  file << "\n], \"layouts\": [";
  for (std::size_t i = 0; i < laid_out.size(); ++i) {
    const LaidOut& l = laid_out[i];
    file << (i == 0 ? "\n" : ",\n") << "  {\"workload\": \"" << l.name << "\", \"requests\": " << l.requests
         << ", \"bytes_to_peak\": " << l.ratio << ", \"ms\": " << l.ms << "}";
  }
  file << "\n]}\n";
  if (!file.flush()) {
    throw std::runtime_error("cannot write " + path);
  }
}

int run(const std::vector<std::string>& arguments) {
  int iterations = 200;
  std::string json;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    if (arguments[i] == "--iterations" && i + 1 < arguments.size()) {
      iterations = std::max(1, std::stoi(arguments[i + 1]));
    } else if (arguments[i] == "--json" && i + 1 < arguments.size()) {
      json = arguments[i + 1];
    } else {
      throw InvalidArgument("\"" + arguments[i] + "\" is not accepted; [--iterations N] [--json FILE] are");
    }
  }
  std::printf("an iteration's allocations and frees, ms (median of %d)\n", iterations);
  std::printf("%-14s %9s %9s %9s %12s %13s %15s %7s\n", "", "requests", "caching", "planned", "ns for pair",
              "begin + end", "upstream calls", "misses");
  std::vector<Followed> followed;
  for (const Workload& workload : kWorkloads) {
    const Followed& f = followed.emplace_back(follow(workload, iterations));
    std::printf("%-14s %9zu %9.3f %9.3f %12.1f %13.4f %15lld %7lld\n", f.name.c_str(), f.requests, f.caching_ms,
                f.planned_ms, 1e6 * f.planned_ms / static_cast<double>(f.requests), f.ends_ms, f.upstream_calls,
                f.misses);
    std::fflush(stdout);
  }
  std::printf("\nlayouts\n%-14s %9s %16s %9s\n", "", "requests", "bytes / peak", "ms");
  std::vector<LaidOut> laid_out;
  for (const std::size_t count : {std::size_t{1'000}, std::size_t{10'000}}) {
    for (const Workload& workload : kWorkloads) {
      const LaidOut& l = laid_out.emplace_back(measure_layout(workload, count));
      std::printf("%-14s %9zu %16.4f %9.1f\n", l.name.c_str(), l.requests, l.ratio, l.ms);
      std::fflush(stdout);
    }
  }
  if (!json.empty()) {
    write_json(json, followed, laid_out);
  }
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 2;
  }
}
