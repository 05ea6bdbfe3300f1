#include "tensor/budgets.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <mutex>

#include "tensor/context.h"
#include "tensor/watcher.h"

namespace torch_uvm {
namespace {

constexpr std::size_t kMaxDevices = 128; // as many as c10::DeviceIndex can count

struct Budgets {
  std::mutex mutex; // before the watcher's
  std::array<std::atomic<bool>, kMaxDevices> started{}; ///< devices that have had managed memory
  std::array<std::optional<BudgetRequest>, kMaxDevices> in_force; ///< what each device's budget was made from
  std::optional<std::size_t> host_limit; ///< in force

  static Budgets& get() {
    static auto* budgets = new Budgets(); // leaked: memory is allocated until the process ends
    return *budgets;
  }

  // With the mutex held.

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
      set_budget(device, std::nullopt, false);
      before.reset();
      return;
    }
    apply_engine_options();
    Context& context = Context::get();
    // What managed tensors have on the device is theirs already.
    MemoryInfo memory = context.runtime().memory_info(device);
    const Levels ours = context.managed_allocator().levels(Location::device(device));
    memory.free = std::min(memory.total, memory.free + static_cast<std::size_t>(ours.reserved_bytes[0]));
    const Budget budget = resolve_budget(*request, memory).value();
    set_budget(device, budget.bytes, budget.hard);
    before = request;
  }

  /// \param device nullopt: all
  /// \param anew also where what is asked for is in force already
  void apply_started(std::optional<int> device, bool anew) {
    if (Context::get().forked()) {
      return; // its devices belong to the parent
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
    throw;
  }
}

void request_default_budget() {
  if (!Context::get().options().budget) {
    const std::map<int, BudgetRequest> single = Context::get().options().device_budgets;
    Context::get().set_budgets(BudgetRequest(), single);
    apply_budget_options();
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
    // Not waited for: who holds it may wait for the GIL, which the caller may have. The next allocation tries again.
    const std::unique_lock lock(budgets.mutex, std::try_to_lock);
    if (lock && !started.load(std::memory_order_relaxed)) {
      started.store(true, std::memory_order_relaxed);
      budgets.apply(device);
    }
  } catch (const std::exception& error) {
    TORCH_WARN("torch_uvm: device ", device, " has no budget, and pages move when they are touched: ", error.what(),
               "; torch_uvm.set_budget() tries again, and a smaller budget may do");
  }
}

void apply_budget_options() {
  Budgets& budgets = Budgets::get();
  const std::lock_guard lock(budgets.mutex);
  budgets.apply_started(std::nullopt, false);
}

} // namespace torch_uvm
