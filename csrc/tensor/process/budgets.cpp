#include "tensor/process/budgets.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <mutex>

#include "runtime/bytes.h"
#include "runtime/error.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

constexpr std::size_t kMaxDevices = 128; // the range of c10::DeviceIndex

/// A device's memory, with our reserved managed memory counted as free: a budget includes it.
MemoryInfo memory_of(int device) {
  Context& context = Context::get();
  MemoryInfo memory = context.runtime().memory_info(device);
  const Levels ours = context.managed_allocator().levels(Location::device(device));
  memory.free = std::min(memory.total, memory.free + static_cast<std::size_t>(ours.reserved_bytes[0]));
  return memory;
}

std::optional<Budget> budget_for(const BudgetRequest& request, int device) {
  std::optional<Budget> budget = resolve_budget(request, memory_of(device));
  const std::optional<std::size_t> limit = Context::get().runtime().limit();
  if (limit && request.kind == BudgetRequest::Kind::kAuto) {
    budget->bytes = std::min(budget->bytes, *limit);
  }
  return budget;
}

struct Budgets {
  std::mutex mutex; // taken before that of process_engine.cpp
  std::array<std::atomic<bool>, kMaxDevices> started{}; ///< devices that have had a managed allocation
  std::array<std::optional<BudgetRequest>, kMaxDevices> in_force; ///< the request behind each device's budget
  std::optional<std::size_t> host_limit; ///< in force

  static Budgets& get() {
    static auto* budgets = new Budgets(); // leaked: memory is allocated until the process exits
    return *budgets;
  }

  // These require the mutex.

  void apply_engine_options() {
    set_staging(Context::get().options().staging);
    const std::optional<std::size_t> wanted = Context::get().options().host_limit;
    if (wanted != host_limit) {
      set_host_limit(wanted);
      host_limit = wanted;
    }
  }

  void apply(int device) {
    const std::optional<BudgetRequest> request = requested_budget(device);
    std::optional<BudgetRequest>& before = in_force[static_cast<std::size_t>(device)];
    if (!request || request->kind == BudgetRequest::Kind::kNone) {
      set_budget(device, std::nullopt);
      before.reset();
      return;
    }
    if (Machine::get().one_memory[static_cast<std::size_t>(device)]) {
      before = request; // nothing to move: there is no engine
      return;
    }
    apply_engine_options();
    const Budget budget = budget_for(*request, device).value();
    set_budget(device, budget.bytes, budget_for({}, device).value().bytes);
    before = request;
  }

  /// After a request that failed: the devices that it may have changed get their earlier budgets, as far as that works.
  /// \param device nullopt: all
  void restore(std::optional<int> device) noexcept {
    for (int each = 0; each < static_cast<int>(kMaxDevices); ++each) {
      if (device.value_or(each) != each) {
        continue;
      }
      try {
        apply_started(each, true);
      } catch (...) {
        // The error of the request is the one to report.
      }
    }
  }

  /// Applies the requests of started devices.
  /// \param device nullopt: all
  /// \param anew also apply a request that is in force already
  void apply_started(std::optional<int> device, bool anew) {
    if (Context::get().forked()) {
      return; // the devices belong to the parent
    }
    if (engine_in_use() != nullptr) {
      apply_engine_options();
    }
    for (int each = 0; each < static_cast<int>(kMaxDevices); ++each) {
      const auto index = static_cast<std::size_t>(each);
      if (started[index].load(std::memory_order_relaxed) && device.value_or(each) == each &&
          (anew || requested_budget(each) != in_force[index])) {
        apply(each);
      }
    }
  }
};

} // namespace

std::optional<std::string> budget_was_cut(int device) {
  const std::optional<BudgetRequest> request = requested_budget(device);
  const bool sized =
      request && (request->kind == BudgetRequest::Kind::kBytes || request->kind == BudgetRequest::Kind::kShare);
  if (sized && Machine::get().one_memory[static_cast<std::size_t>(device)]) {
    return "torch_uvm: device " + std::to_string(device) +
           " has one memory with the host: a budget has nothing to move there, and none is in force; "
           "torch_uvm.set_limit() limits managed memory";
  }
  const Engine* const engine = engine_in_use();
  const std::optional<std::size_t> in_force = engine == nullptr ? std::nullopt : engine->budget(device);
  if (!in_force || !request || request->kind != BudgetRequest::Kind::kBytes || request->bytes <= *in_force) {
    return std::nullopt;
  }
  return "torch_uvm: the budget of device " + std::to_string(device) + " is " + format_bytes(*in_force) +
         ", all the memory that the device has; " + format_bytes(request->bytes) + " were asked for";
}

std::optional<std::size_t> budget_of(int device) {
  if (device < 0 || device >= static_cast<int>(kMaxDevices)) {
    throw InvalidArgument("a budget of device " + std::to_string(device));
  }
  if (Budgets::get().started[static_cast<std::size_t>(device)].load(std::memory_order_relaxed)) {
    const Engine* const engine = engine_in_use();
    return engine == nullptr ? std::nullopt : engine->budget(device);
  }
  const std::optional<BudgetRequest> request = requested_budget(device);
  if (!request || request->kind == BudgetRequest::Kind::kNone) {
    return std::nullopt;
  }
  if (device < Context::get().runtime().device_count() && Machine::get().one_memory[static_cast<std::size_t>(device)]) {
    return std::nullopt;
  }
  return budget_for(*request, device).value().bytes;
}

void request_budget(std::optional<int> device, const std::optional<BudgetRequest>& request) {
  Budgets& budgets = Budgets::get();
  const std::lock_guard lock(budgets.mutex);
  Context& context = Context::get();
  const Options before = context.options();
  if (device) {
    std::map<int, BudgetRequest> single = before.device_budgets;
    single.insert_or_assign(*device, request.value());
    context.set_budgets(before.budget, std::move(single));
  } else {
    context.set_budgets(request, {});
  }
  try {
    budgets.apply_started(device, true);
  } catch (...) {
    context.set_budgets(before.budget, before.device_budgets);
    budgets.restore(device);
    throw;
  }
}

void request_default_budget() {
  Budgets& budgets = Budgets::get();
  const std::lock_guard lock(budgets.mutex); // a concurrent request may fail and roll its options back
  Context& context = Context::get();
  const Options before = context.options();
  if (!before.budget) {
    context.set_budgets(BudgetRequest(), before.device_budgets);
    budgets.apply_started(std::nullopt, false);
  }
}

std::optional<BudgetRequest> requested_budget(int device) {
  const Options options = Context::get().options();
  const auto own = options.device_budgets.find(device);
  return own == options.device_budgets.end() ? options.budget : own->second;
}

void start_budget(int device) noexcept {
  Budgets& budgets = Budgets::get();
  std::atomic<bool>& started = budgets.started[static_cast<std::size_t>(device)];
  if (started.load(std::memory_order_relaxed)) {
    return;
  }
  try {
    bool begins = false;
    {
      // Do not wait for the mutex: its holder may wait for the GIL, which the caller may hold. If it is taken, the next
      // allocation tries again.
      const std::unique_lock lock(budgets.mutex, std::try_to_lock);
      if (lock && !started.load(std::memory_order_relaxed)) {
        started.store(true, std::memory_order_relaxed);
        budgets.apply(device);
        begins = true;
      }
    }
    if (const std::optional<std::string> less = begins ? budget_was_cut(device) : std::nullopt) {
      TORCH_WARN(*less); // with no lock held: the warning handler may take the GIL
    }
  } catch (const std::exception& error) {
    TORCH_WARN("torch_uvm: device ", device, " has no budget, and pages move when they are touched: ", error.what(),
               "; torch_uvm.set_budget() tries again, and a smaller budget may do");
  }
}

void load_options(std::string_view text) {
  Budgets& budgets = Budgets::get();
  const std::lock_guard lock(budgets.mutex);
  Context::get().load_options(text);
  budgets.apply_started(std::nullopt, false);
}

void set_option(std::string_view key, std::string_view value) {
  Budgets& budgets = Budgets::get();
  const std::lock_guard lock(budgets.mutex);
  Context::get().set_option(key, value);
  budgets.apply_started(std::nullopt, false);
}

} // namespace torch_uvm
