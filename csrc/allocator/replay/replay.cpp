#include "allocator/replay/replay.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "allocator/adaptors/adaptors.h"
#include "allocator/adaptors/caching_allocator.h"
#include "allocator/arena/arena.h"
#include "allocator/plan/allocation_plan.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = ReplayEvent::Kind;

class RuntimeAllocator final : public Allocator {
 public:
  explicit RuntimeAllocator(ManagedRuntime& runtime) : runtime_(runtime) {}

  Allocation allocate(std::size_t bytes, Location home, Stream /*stream*/) override {
    return bytes == 0 ? Allocation{} : Allocation{runtime_.allocate_managed(bytes, home), bytes, nullptr};
  }
  void free(const Allocation& allocation) noexcept override { // waits for all work that may touch the memory
    if (allocation) {
      runtime_.free_managed(allocation.ptr);
    }
  }
  void record_stream(const Allocation& /*allocation*/, Stream /*stream*/) override {}
  std::size_t release() override {
    return 0;
  }
  AllocatorFigures figures() const override {
    return {};
  }
  std::string description() const override {
    return "runtime";
  }

 private:
  ManagedRuntime& runtime_;
};

struct HeldAllocation {
  Allocation allocation;
  Allocator* owner = nullptr; ///< null: freed, or not yet allocated
};

/// The allocations of a replay, by number. Frees those that are live at its end.
struct Held : std::vector<HeldAllocation> {
  using vector::vector;
  ~Held() {
    for (const auto& [allocation, owner] : *this) {
      if (owner != nullptr) {
        owner->free(allocation);
      }
    }
  }
};

constexpr std::array<const char*, 5> kNames = {"none", "caching", "pool", "arena", "plan"};

/// The allocators of a replay.
struct Subject {
  std::shared_ptr<Adaptor> runtime; ///< the lowest upstream: its allocated bytes are the reserved bytes
  std::shared_ptr<Allocator> allocator; ///< the allocator under test
  /// Serves requests outside iterations, and those for homes that `allocator` does not serve.
  std::shared_ptr<Allocator> outside;
  std::function<void()> begin_iteration = [] {}, end_iteration = [] {};
};

Subject make_subject(const std::string& name, ManagedRuntime& runtime, const ReplayOptions& options) {
  Subject subject;
  subject.runtime = std::make_shared<Adaptor>(std::make_shared<RuntimeAllocator>(runtime));
  if (name == "none") {
    subject.allocator = subject.outside = subject.runtime;
    return subject;
  }
  const auto caching = std::make_shared<CachingAllocator>(
      runtime, subject.runtime,
      CachingOptions{.home = options.home, .initial = name == "pool" ? options.initial : 0, .cache = options.cache});
  subject.allocator = subject.outside = caching;
  if (name == "arena") {
    const auto arena = std::make_shared<Arena>(runtime, caching,
                                               ArenaOptions{options.home, std::max<std::size_t>(options.initial, 1)});
    subject.end_iteration = [arena] { arena->reset(); };
    subject.allocator = arena;
  } else if (name == "plan") {
    const auto plan = std::make_shared<AllocationPlan>(caching, options.home);
    subject.begin_iteration = [plan] { plan->begin_iteration(); };
    subject.end_iteration = [plan] { plan->end_iteration(); };
    subject.allocator = subject.outside = plan;
  } else if (name != "caching" && name != "pool") {
    std::string accepted;
    for (const char* const known : kNames) {
      accepted += (accepted.empty() ? "" : ", ") + std::string(known);
    }
    throw InvalidArgument("no allocator '" + name + "' to replay on; accepted: " + accepted);
  }
  return subject;
}

} // namespace

std::vector<std::string> replay_allocators() {
  return {kNames.begin(), kNames.end()};
}

ReplayResult replay(const ReplayLog& log, ManagedRuntime& runtime, const std::string& allocator,
                    const ReplayOptions& options, bool sample) {
  std::vector<Stream> streams;
  std::vector<std::shared_ptr<void>> made; // destroy the streams after the allocators that file blocks under them
  for (Stream stream : log.streams) {
    if (stream.handle != nullptr) {
      stream = runtime.create_stream(stream.device, 0);
      made.emplace_back(nullptr, [&runtime, stream](void*) { runtime.destroy_stream(stream); });
    }
    streams.push_back(stream);
  }
  ReplayResult result;
  std::size_t row = 0;
  try {
    const Subject subject = make_subject(allocator, runtime, options);
    Held held(std::min<std::size_t>(log.allocations, log.events.size()));
    bool inside = false;
    const auto since = [](Clock::time_point begin) {
      return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    const Clock::time_point began = Clock::now();
    Clock::time_point iteration_began = began;
    for (const ReplayEvent& event : log.events) {
      if (event.kind == Kind::kIterationBegins) {
        inside = true;
        iteration_began = Clock::now();
        subject.begin_iteration();
        continue;
      }
      if (event.kind == Kind::kIterationEnds) {
        inside = false;
        subject.end_iteration();
        result.last_iteration_seconds = since(iteration_began);
        continue;
      }
      const bool allocates = event.kind == Kind::kAllocate;
      if (event.allocation >= held.size() || event.stream >= streams.size() || event.kind > Kind::kIterationEnds ||
          (held[event.allocation].owner == nullptr) != allocates) {
        throw InvalidArgument("allocation " + std::to_string(event.allocation) + " on stream " +
                              std::to_string(event.stream) + " is allocated twice, freed twice, or not known");
      }
      auto& [allocation, owner] = held[event.allocation];
      if (allocates) {
        const Stream stream = streams[event.stream];
        const Location home{stream.device};
        Allocator& from = inside && subject.allocator->serves(home) ? *subject.allocator : *subject.outside;
        allocation = from.allocate(event.bytes, home, stream);
        owner = &from;
      } else {
        std::exchange(owner, nullptr)->free(allocation);
      }
      ++row;
      if (sample) {
        result.reserved.push_back(static_cast<std::size_t>(subject.runtime->passed().bytes));
      }
    }
    result.seconds = since(began);
    const PassedThrough passed = subject.runtime->passed();
    result.peak_reserved = static_cast<std::size_t>(passed.peak_bytes);
    result.runtime_allocations = passed.total_allocations;
    result.runtime_frees = passed.total_allocations - passed.allocations;
  } catch (const OutOfMemory& error) {
    result.failure = error.what();
    result.failed_at = row;
  }
  return result;
}

} // namespace torch_uvm
