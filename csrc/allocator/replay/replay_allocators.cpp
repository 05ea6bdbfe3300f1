// The allocators available for a replay, by name.
#include <algorithm>
#include <array>
#include <utility>

#include "allocator/adaptors/caching_allocator.h"
#include "allocator/adaptors/limiting_allocator.h"
#include "allocator/adaptors/pool_allocator.h"
#include "allocator/adaptors/runtime_allocator.h"
#include "allocator/arena/arena.h"
#include "allocator/plan/allocation_plan.h"
#include "allocator/replay/replay.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// Fills in a subject whose `runtime` is set. The second argument is the upstream to use.
using Make = void (*)(ReplaySubject&, std::shared_ptr<Allocator>, ManagedRuntime&, const ReplayOptions&);

void make_none(ReplaySubject& subject, std::shared_ptr<Allocator> below, ManagedRuntime&, const ReplayOptions&) {
  subject.allocator = std::move(below);
}

void make_caching(ReplaySubject& subject, std::shared_ptr<Allocator> below, ManagedRuntime& runtime,
                  const ReplayOptions& options) {
  subject.allocator = std::make_shared<CachingAllocator>(runtime, std::move(below), options.cache);
}

void make_event_per_free(ReplaySubject& subject, std::shared_ptr<Allocator> below, ManagedRuntime& runtime,
                         const ReplayOptions& options) {
  make_caching(subject, std::move(below), runtime, options);
  subject.event_per_free = true;
}

void make_pool(ReplaySubject& subject, std::shared_ptr<Allocator> below, ManagedRuntime& runtime,
               const ReplayOptions& options) {
  const PoolOptions pool{options.home, options.initial, std::nullopt, options.cache};
  subject.allocator = std::make_shared<PoolAllocator>(runtime, std::move(below), pool);
}

/// Iterations allocate from an arena, which is reset at their end. Everything else comes from the caching allocator,
/// which is also the arena's upstream.
void make_arena(ReplaySubject& subject, std::shared_ptr<Allocator> below, ManagedRuntime& runtime,
                const ReplayOptions& options) {
  subject.outside = std::make_shared<CachingAllocator>(runtime, std::move(below), options.cache);
  subject.layers = {subject.outside};
  const ArenaOptions how{.home = options.home, .initial = std::max<std::size_t>(options.initial, 1)};
  const auto arena = std::make_shared<Arena>(runtime, subject.outside, how);
  const auto outlived = std::make_shared<Outlived>();
  subject.end_iteration = [arena, outlived] {
    const Outlived now = arena->reset();
    outlived->allocations += now.allocations;
    outlived->bytes += now.bytes;
  };
  subject.details = [outlived] {
    return std::map<std::string, double>{{"outlived_allocations", static_cast<double>(outlived->allocations)},
                                         {"outlived_bytes", static_cast<double>(outlived->bytes)}};
  };
  subject.allocator = arena;
}

/// Iterations allocate by plan once one is made. Misses and everything else come from the caching allocator below.
void make_plan(ReplaySubject& subject, std::shared_ptr<Allocator> below, ManagedRuntime& runtime,
               const ReplayOptions& options) {
  subject.outside = std::make_shared<CachingAllocator>(runtime, std::move(below), options.cache);
  subject.layers = {subject.outside};
  const auto plan = std::make_shared<AllocationPlan>(subject.outside, options.home);
  subject.begin_iteration = [plan] { plan->begin_iteration(); };
  subject.end_iteration = [plan] { plan->end_iteration(); };
  subject.details = [plan] {
    const PlanReport report = plan->report();
    return std::map<std::string, double>{{"plans", static_cast<double>(report.plans)},
                                         {"hits", static_cast<double>(report.hits)},
                                         {"misses", static_cast<double>(report.misses)},
                                         {"outlived_allocations", static_cast<double>(report.outlived)},
                                         {"planned_bytes", static_cast<double>(report.planned_bytes)},
                                         {"planned_live_bytes", static_cast<double>(report.peak_live_bytes)}};
  };
  subject.allocator = plan;
}

constexpr auto kMakers = std::to_array<std::pair<const char*, Make>>({
    {"none", &make_none},
    {"event-per-free", &make_event_per_free},
    {"caching", &make_caching},
    {"pool", &make_pool},
    {"arena", &make_arena},
    {"plan", &make_plan},
});

} // namespace

std::vector<std::string> replay_allocators() {
  std::vector<std::string> names;
  for (const auto& [name, make] : kMakers) {
    names.emplace_back(name);
  }
  return names;
}

ReplaySubject make_subject(const std::string& name, ManagedRuntime& runtime, const ReplayOptions& options) {
  std::string accepted;
  for (const auto& [known, make] : kMakers) {
    if (name == known) {
      ReplaySubject subject;
      subject.home = options.home;
      subject.runtime = std::make_shared<RuntimeAllocator>(runtime);
      make(subject, std::make_shared<LimitingAllocator>(subject.runtime, options.ceiling), runtime, options);
      return subject;
    }
    accepted += (accepted.empty() ? "" : ", ") + std::string(known);
  }
  throw InvalidArgument("no allocator '" + name + "' to replay on; accepted: " + accepted);
}

} // namespace torch_uvm
