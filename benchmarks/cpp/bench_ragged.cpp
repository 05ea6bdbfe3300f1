// The memory that the allocator reserves for ragged sizes, and whether its calls of the runtime ever stop.
//
//   bench_ragged [--seed N] [--steps N] [--live BYTES,...] [--conf key:value,...] [--json FILE]
//
// The sizes are those of a convolutional network with a variable number of channels: k*16*7*7, k*7*7, k*7, k and k*32
// floats, k from 1024 to 8192 in steps of 1024, with equal probability. A step frees random blocks until the next size
// fits into the live set, then allocates it. The first half of the steps is warm-up. Waste is (reserved - live) / live,
// where live is the number of requested bytes. The lower bound of the waste follows from the peak of live bytes, which
// any allocator has to reserve.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "byte_list.h"
#include "config/options.h"
#include "idle_runtime.h"
#include "runtime/bytes.h"

namespace {

using namespace bench;

std::vector<std::size_t> ragged_sizes() {
  std::vector<std::size_t> sizes;
  for (std::size_t k = 1024; k <= 8192; k += 1024) {
    for (const std::size_t floats : {k * 16 * 7 * 7, k * 7 * 7, k * 7, k, k * 32}) {
      sizes.push_back(floats * sizeof(float));
    }
  }
  return sizes;
}

struct Figure {
  std::size_t live = 0; ///< target of live bytes
  std::size_t blocks = 0;
  double mean = 0, median = 0, p90 = 0, most = 0; ///< waste
  double bound = 0; ///< lower bound of the mean waste of any allocator
  /// the two parts of the mean: free bytes, and bytes of blocks beyond the requested size
  double unused = 0, rounding = 0;
  long long segments = 0;
  long long calls_warming = 0, calls_steady = 0; ///< calls that allocate or free a segment
  double ns = 0; ///< time of an allocation and a free
};

struct Live {
  Block* block;
  std::size_t bytes;
};

Figure measure(std::size_t target, std::uint64_t seed, int steps, const AllocatorOptions& options) {
  IdleRuntime runtime;
  CachingManagedAllocator allocator(runtime, std::make_unique<AddressesOnly>(), options);
  std::mt19937_64 random(seed);
  std::vector<std::size_t> sizes = ragged_sizes();
  std::erase_if(sizes, [=](std::size_t bytes) { return bytes > target; });
  std::vector<Live> live;
  std::size_t bytes = 0;
  const auto calls = [&] {
    const Statistics now = allocator.statistics();
    return now.num_device_alloc + now.num_device_free;
  };
  const auto free_one = [&](std::size_t at) {
    allocator.free(live[at].block);
    bytes -= live[at].bytes;
    live[at] = live.back();
    live.pop_back();
  };
  Figure figure;
  figure.live = target;
  std::vector<double> waste;
  double peak = 0;
  double sum = 0;
  double took = 0;
  for (int step = 0; step < 2 * steps; ++step) {
    if (step == steps) {
      figure.calls_warming = calls();
    }
    const std::size_t next = sizes[random() % sizes.size()];
    const auto start = std::chrono::steady_clock::now();
    while (bytes + next > target) {
      free_one(random() % live.size());
    }
    live.push_back({allocator.allocate(next, Location::device(0), Stream::default_of(0)), next});
    bytes += next;
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    if (step >= steps) {
      took += time.count();
      const Levels now = allocator.levels(std::nullopt);
      const auto asked = static_cast<double>(bytes);
      waste.push_back(static_cast<double>(now.reserved_bytes[0]) / asked - 1);
      figure.rounding += (static_cast<double>(now.allocated_bytes[0]) / asked - 1) / steps;
      figure.unused += static_cast<double>(now.reserved_bytes[0] - now.allocated_bytes[0]) / asked / steps;
      peak = std::max(peak, asked);
      sum += 1 / asked;
    }
  }
  figure.calls_steady = calls() - figure.calls_warming;
  figure.blocks = live.size();
  figure.segments = allocator.levels(std::nullopt).segment[0];
  figure.bound = peak * sum / steps - 1;
  figure.ns = took / steps;
  std::ranges::sort(waste);
  for (const double value : waste) {
    figure.mean += value / steps;
  }
  figure.median = waste[waste.size() / 2];
  figure.p90 = waste[waste.size() * 9 / 10];
  figure.most = waste.back();
  while (!live.empty()) {
    free_one(live.size() - 1);
  }
  if (const auto wrong = allocator.check()) {
    throw std::logic_error(*wrong);
  }
  return figure;
}

void write_json(const std::string& path, std::uint64_t seed, int steps, const std::vector<Figure>& figures) {
  std::ofstream file(path);
  file << "{\"benchmark\": \"ragged\", \"unit\": \"(reserved - live) / live\", \"seed\": " << seed
       << ", \"steps\": " << steps << ", \"figures\": [";
  for (std::size_t i = 0; i < figures.size(); ++i) {
    const Figure& f = figures[i];
    file << (i == 0 ? "\n" : ",\n") << "  {\"live_bytes\": " << f.live << ", \"blocks\": " << f.blocks
         << ", \"mean\": " << f.mean << ", \"median\": " << f.median << ", \"p90\": " << f.p90
         << ", \"most\": " << f.most << ", \"bound\": " << f.bound << ", \"unused\": " << f.unused
         << ", \"rounding\": " << f.rounding << ", \"segments\": " << f.segments
         << ", \"calls_warming\": " << f.calls_warming << ", \"calls_steady\": " << f.calls_steady
         << ", \"ns\": " << f.ns << "}";
  }
  file << "\n]}\n";
  if (!file.flush()) {
    throw std::runtime_error("cannot write " + path);
  }
}

int run(const std::vector<std::string>& arguments) {
  std::uint64_t seed = 6;
  int steps = 100'000;
  std::vector<std::size_t> lives = {16 * MiB, 64 * MiB, 256 * MiB, 1024 * MiB, 4096 * MiB};
  std::string conf;
  std::string json;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& name = arguments[i];
    const std::string value = i + 1 < arguments.size() ? arguments[i + 1] : "";
    if (name == "--seed") {
      seed = std::stoull(value);
    } else if (name == "--steps") {
      steps = std::stoi(value);
    } else if (name == "--live") {
      lives = parse_list(value);
    } else if (name == "--conf") {
      conf = value;
    } else if (name == "--json") {
      json = value;
    } else {
      throw InvalidArgument("\"" + name +
                            "\" is not accepted; [--seed N] [--steps N] [--live BYTES,...] [--conf key:value,...] "
                            "[--json FILE] are");
    }
  }
  const AllocatorOptions options = parse_options(conf).allocator;
  std::printf("ragged sizes, random lifetimes: (reserved - live) / live over %d steps, seed %llu%s%s\n", steps,
              static_cast<unsigned long long>(seed), conf.empty() ? "" : ", ", conf.c_str());
  std::printf("%10s %7s %7s %7s %7s %7s %7s %7s %7s %9s %9s %9s %7s\n", "live", "blocks", "mean", "median", "p90",
              "most", "bound", "unused", "round", "segments", "warm-up", "steady", "ns");
  std::vector<Figure> figures;
  for (const std::size_t live : lives) {
    const Figure& f = figures.emplace_back(measure(live, seed, steps, options));
    std::printf("%10s %7zu %6.1f%% %6.1f%% %6.1f%% %6.1f%% %6.1f%% %6.1f%% %6.1f%% %9lld %9lld %9lld %7.0f\n",
                format_bytes(live).c_str(), f.blocks, 100 * f.mean, 100 * f.median, 100 * f.p90, 100 * f.most,
                100 * f.bound, 100 * f.unused, 100 * f.rounding, f.segments, f.calls_warming, f.calls_steady, f.ns);
    std::fflush(stdout);
  }
  if (!json.empty()) {
    write_json(json, seed, steps, figures);
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
