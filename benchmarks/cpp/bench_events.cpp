// The cost of ordering streams: events recorded when needed, compared with one event for each free.
//
//   bench_events [--json FILE] [--call-us MICROSECONDS]
//
// A round allocates a batch of blocks on one stream, frees them, and allocates the same number on the next stream. No
// stream ever becomes idle, so each change of stream has to be ordered. Recording, waiting for and querying an event or
// a stream each occupy the caller for --call-us microseconds (default: 1). That is a stand-in for a driver's calls, not
// a measurement.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "idle_runtime.h"
#include "runtime/bytes.h"

namespace {

using namespace bench;
using Clock = std::chrono::steady_clock;

/// A runtime whose calls take time and whose work never completes.
class BusyRuntime final : public IdleRuntime {
 public:
  explicit BusyRuntime(double call_us) : call_(std::chrono::duration<double, std::micro>(call_us)) {}
  void record_event(Event, Stream) override {
    ++recorded;
    spend();
  }
  void wait_event(Stream, Event) override {
    ++waited;
    spend();
  }
  bool query_stream(Stream) override {
    ++queried;
    spend();
    return false;
  }
  bool query_event(Event) override {
    ++queried;
    spend();
    return false;
  }

  long long recorded = 0, waited = 0, queried = 0;

 private:
  void spend() const {
    for (const auto end = Clock::now() + call_; Clock::now() < end;) {
    }
  }
  const std::chrono::duration<double, std::micro> call_;
};

enum class Way {
  kSameStream, ///< reused by the stream that freed them
  kNeeded, ///< reused by another stream; the allocator decides when to record an event
  kEachFree ///< reused by another stream; an event is recorded at each free and passed with the block
};

const char* name_of(Way way) {
  return way == Way::kSameStream ? "same stream" : way == Way::kNeeded ? "when needed" : "at each free";
}

struct Figure {
  Way way;
  int batch = 0;
  double ns = 0; ///< time of an allocation and a free
  double recorded = 0, waited = 0, queried = 0; ///< calls for each block
};

Figure measure(Way way, int batch, double call_us) {
  constexpr int kBlocks = 4096;
  BusyRuntime runtime(call_us);
  CachingManagedAllocator allocator(runtime, std::make_unique<AddressesOnly>());
  std::vector<Block*> blocks(static_cast<std::size_t>(batch));
  const auto round = [&](std::uintptr_t stream) {
    const Stream on{0, reinterpret_cast<void*>(way == Way::kSameStream ? 1 : 1 + stream % 2)};
    for (Block*& block : blocks) {
      block = allocator.allocate(3 * MiB, Location::device(0), on);
    }
    for (Block* const block : blocks) {
      if (way == Way::kEachFree) {
        const Event event = runtime.create_event(0, false);
        runtime.record_event(event, on);
        allocator.free_after(block, event, on);
      } else {
        allocator.free(block);
      }
    }
  };
  for (std::uintptr_t warm = 0; warm < 4; ++warm) {
    round(warm);
  }
  runtime.recorded = runtime.waited = runtime.queried = 0;
  const int rounds = kBlocks / batch;
  const auto start = Clock::now();
  for (int i = 0; i < rounds; ++i) {
    round(static_cast<std::uintptr_t>(i));
  }
  const std::chrono::duration<double, std::nano> took = Clock::now() - start;
  const double count = static_cast<double>(rounds) * batch;
  if (const auto wrong = allocator.check()) {
    throw std::logic_error(*wrong);
  }
  return {way,
          batch,
          took.count() / count,
          static_cast<double>(runtime.recorded) / count,
          static_cast<double>(runtime.waited) / count,
          static_cast<double>(runtime.queried) / count};
}

} // namespace

int main(int argc, char** argv) {
  try {
    std::string json;
    double call_us = 1;
    for (int i = 1; i < argc; ++i) {
      const std::string name = argv[i];
      if (name == "--json" && i + 1 < argc) {
        json = argv[++i];
      } else if (name == "--call-us" && i + 1 < argc) {
        call_us = std::stod(argv[++i]);
      } else {
        throw InvalidArgument("\"" + name + "\" is not accepted; [--json FILE] [--call-us MICROSECONDS] are");
      }
    }
    std::printf("a block allocated and freed, calls of the runtime at %g us (a stand-in)\n", call_us);
    std::printf("%-14s %7s %10s %10s %10s %10s\n", "events", "batch", "ns", "recorded", "waited", "queried");
    std::vector<Figure> figures;
    for (const int batch : {1, 8, 64}) {
      for (const Way way : {Way::kSameStream, Way::kNeeded, Way::kEachFree}) {
        const Figure& f = figures.emplace_back(measure(way, batch, call_us));
        std::printf("%-14s %7d %10.0f %10.3f %10.3f %10.3f\n", name_of(way), batch, f.ns, f.recorded, f.waited,
                    f.queried);
      }
    }
    if (!json.empty()) {
      std::ofstream file(json);
      file << "{\"benchmark\": \"events\", \"unit\": \"ns for allocate + free, calls for each block\", \"call_us\": "
           << call_us << ", \"figures\": [";
      for (std::size_t i = 0; i < figures.size(); ++i) {
        const Figure& f = figures[i];
        file << (i == 0 ? "\n" : ",\n") << "  {\"events\": \"" << name_of(f.way) << "\", \"batch\": " << f.batch
             << ", \"ns\": " << f.ns << ", \"recorded\": " << f.recorded << ", \"waited\": " << f.waited
             << ", \"queried\": " << f.queried << "}";
      }
      file << "\n]}\n";
      if (!file.flush()) {
        throw std::runtime_error("cannot write " + json);
      }
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 2;
  }
}
