// The budgets of devices: requests are resolved, the limit is shared, and automatic budgets follow the free memory.
#include "tensor/process/budget_state.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "runtime/host_memory.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

/// Time between two looks at a device's free memory: a look is a driver call of some 50 us.
constexpr std::int64_t kLookEveryMs = 100;

/// An automatic budget grows at the earliest that long after its last change: memory that others use every few seconds
/// is not ours, and each change makes the engine plan anew.
constexpr std::int64_t kGrowAfterMs = 10'000;

/// Without need, an automatic budget changes by 1/16 of it or more: less is not worth a new plan.
constexpr std::size_t kChangeShare = 16;

/// What a budget gets of the limit. If all budgets together exceed the limit, they are reduced in proportion.
std::size_t share_of_limit(std::size_t bytes, double all, std::size_t limit) {
  const double share = static_cast<double>(limit) / all;
  return share >= 1.0 ? bytes : std::min(limit, static_cast<std::size_t>(static_cast<double>(bytes) * share));
}

} // namespace

std::optional<BudgetRequest> requested_budget(int device) {
  const Options options = Context::get().options();
  const auto own = options.device_budgets.find(device);
  return own == options.device_budgets.end() ? options.budget : own->second;
}

std::int64_t now_ms() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

std::size_t reserved_at(Location home) {
  return Context::get().managed_allocator().reserved_bytes(home);
}

MemoryInfo memory_of(int device) {
  MemoryInfo memory = Context::get().runtime().memory_info(device);
  memory.free = std::min(memory.total, memory.free + reserved_at(Location::device(device)));
  return memory;
}

std::size_t limit_of_devices() {
  const std::optional<std::size_t> limit = Context::get().runtime().limit();
  return limit ? *limit - std::min(*limit, reserved_at(Location::host())) : std::numeric_limits<std::size_t>::max();
}

std::optional<std::size_t> budget_in_force(int device) {
  const Engine* const engine = engine_in_use();
  return engine == nullptr ? std::nullopt : engine->budget(device);
}

std::optional<std::size_t> host_limit_of(const Options& options, std::size_t pinned) {
  if (!options.automatic_host_limit) {
    return options.host_limit;
  }
  const std::size_t available =
      Context::get().in_use() ? Context::get().runtime().host_memory_available() : operating_system_memory_available();
  if (available == std::numeric_limits<std::size_t>::max()) {
    return std::nullopt;
  }
  return spare_host_memory(available, operating_system_memory_total()) + pinned;
}

Budgets& Budgets::get() {
  static auto* budgets = new Budgets(); // leaked: memory is allocated until the process exits
  return *budgets;
}

void Budgets::apply_engine_options() {
  const Options options = Context::get().options();
  made_engine().set_staging(options.staging);
  Engine* const engine = engine_in_use();
  const std::optional<std::size_t> wanted =
      host_limit_of(options, engine == nullptr ? 0 : static_cast<std::size_t>(engine->statistics().host_bytes));
  if (wanted != host_limit) {
    made_engine().set_host_limit(wanted);
    host_limit = wanted;
  }
}

std::unique_lock<std::mutex> Budgets::lock() {
  return Context::forked() ? std::unique_lock<std::mutex>() : std::unique_lock(mutex);
}

void Budgets::apply(int device) {
  const std::optional<BudgetRequest> request = requested_budget(device);
  OfDevice& own = of(device);
  own.next_look.store(kNever, std::memory_order_relaxed);
  if (!request || request->kind == BudgetRequest::Kind::kNone) {
    set_budget(device, std::nullopt);
    own.allowed.reset();
  } else if (!Machine::get().one_memory[static_cast<std::size_t>(device)]) { // else there is nothing to move
    apply_engine_options();
    allow(device, resolve_budget(*request, memory_of(device)).value());
    if (request->kind == BudgetRequest::Kind::kAuto) {
      own.next_look.store(now_ms() + kLookEveryMs, std::memory_order_relaxed);
    }
  }
  own.request = request;
}

void Budgets::apply_started(std::optional<int> device, bool anew) {
  if (Context::get().forked()) {
    return; // the devices belong to the parent
  }
  if (engine_in_use() != nullptr) {
    apply_engine_options();
  }
  for (int each = 0; each < kMaxDevices; ++each) {
    if (is_started(each) && device.value_or(each) == each && (anew || requested_budget(each) != of(each).request)) {
      apply(each);
    }
  }
  if (engine_in_use() != nullptr) {
    share_limit(limit_of_devices());
  }
}

void Budgets::allow(int device, Budget budget) {
  OfDevice& own = of(device);
  const std::optional<Budget> before = std::exchange(own.allowed, budget);
  try {
    share_limit(limit_of_devices(), device);
  } catch (...) {
    own.allowed = before;
    throw;
  }
  own.changed = now_ms();
}

double Budgets::allowed_together() const {
  double all = 0.0;
  for (const OfDevice& each : devices) {
    all += each.allowed ? static_cast<double>(each.allowed->bytes) : 0.0;
  }
  return all;
}

std::size_t Budgets::share_of(int device, std::size_t bytes) {
  const std::optional<Budget>& own = of(device).allowed;
  const double others = allowed_together() - (own ? static_cast<double>(own->bytes) : 0.0);
  return share_of_limit(bytes, others + static_cast<double>(bytes), limit_of_devices());
}

void Budgets::share_limit(std::size_t limit, std::optional<int> always) {
  const double all = allowed_together();
  for (int each = 0; each < kMaxDevices; ++each) {
    if (const std::optional<Budget>& allowed = of(each).allowed) {
      const std::size_t bytes = share_of_limit(allowed->bytes, all, limit);
      if (each == always || budget_in_force(each) != bytes) {
        set_budget(each, bytes, std::max(bytes, std::min(allowed->ceiling, limit)));
      }
    }
  }
}

bool Budgets::fit(int device, std::size_t wanted, bool may_grow) {
  const OfDevice& own = of(device);
  if (!own.request || own.request->kind != BudgetRequest::Kind::kAuto || !own.allowed || Context::forked() ||
      engine_in_use()->has_open_captures()) { // a capture forbids waiting for the device
    return false;
  }
  MemoryInfo memory = memory_of(device);
  const std::size_t reserve = memory.free - resolve_budget(*own.request, memory).value().bytes;
  // The reserve is for libraries. Memory is short once they have used half of it.
  const bool is_short = reserved_at(Location::device(device)) + reserve / 2 > memory.free;
  if (is_short || wanted != 0) {
    // The driver gives others the pages of unused segments, which count as free here.
    Context::get().managed_allocator().empty_cache();
    memory = memory_of(device);
  }
  if (wanted > memory.free) {
    return false; // no budget would do
  }
  const auto allowed_with = [&](std::size_t free) {
    return resolve_budget(*own.request, MemoryInfo{free, memory.total}).value();
  };
  const Budget fitting = allowed_with(memory.free - wanted);
  const std::size_t now = own.allowed->bytes, change = std::max<std::size_t>(now / kChangeShare, 1);
  const bool shrinks = fitting.bytes < now && (wanted != 0 || is_short || now - fitting.bytes >= change);
  const bool grows = may_grow && fitting.bytes >= now + change;
  if (!shrinks && !grows) {
    return false;
  }
  const std::optional<std::size_t> before = budget_in_force(device);
  allow(device, fitting);
  return budget_in_force(device) < before;
}

void Budgets::look(int device) {
  OfDevice& own = of(device);
  own.next_look.store(now_ms() + kLookEveryMs, std::memory_order_relaxed);
  fit(device, 0, now_ms() - own.changed >= kGrowAfterMs);
}

} // namespace torch_uvm
