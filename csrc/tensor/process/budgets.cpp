#include "tensor/process/budgets.h"

#include <exception>

#include "runtime/bytes.h"
#include "runtime/error.h"
#include "tensor/process/budget_state.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

bool is_sized(const std::optional<BudgetRequest>& request) {
  return request && (request->kind == BudgetRequest::Kind::kBytes || request->kind == BudgetRequest::Kind::kShare);
}

/// Changes options, and applies the budgets of started devices. If that fails, the options are as before, and the
/// budgets as far as that works.
/// \param device,anew as of Budgets::apply_started
void change_and_apply(const std::function<void(Options&)>& change, std::optional<int> device, bool anew) {
  Budgets& budgets = Budgets::get();
  const std::unique_lock lock = budgets.lock();
  const Options before = Context::get().options();
  Context::get().change_options(change);
  try {
    budgets.apply_started(device, anew);
  } catch (...) {
    Context::get().change_options([&](Options& options) { options = before; });
    for (int each = 0; each < Budgets::kMaxDevices; ++each) {
      try {
        if (device.value_or(each) == each) {
          budgets.apply_started(each, /*anew=*/true);
        }
      } catch (...) {
        // The error of the request is the one to report.
      }
    }
    throw;
  }
}

} // namespace

std::optional<std::string> budget_warning(int device) {
  Budgets& budgets = Budgets::get();
  const std::optional<BudgetRequest> request = requested_budget(device);
  const bool is_none = request && request->kind == BudgetRequest::Kind::kNone && budgets.is_started(device);
  if (!is_sized(request) && !is_none) {
    return std::nullopt;
  }
  const bool one_memory = Machine::get().one_memory[static_cast<std::size_t>(device)];
  if (is_none) {
    if (one_memory || budgets.warned_of_none.exchange(true)) {
      return std::nullopt;
    }
    return "torch_uvm: device " + std::to_string(device) +
           " has no budget: the driver moves pages by faults, which is several times slower than copies once more is "
           "used than fits; \"auto\" or a size is a budget (said once)";
  }
  if (one_memory) {
    return "torch_uvm: device " + std::to_string(device) +
           " has one memory with the host: a budget has nothing to move there, and none is in force; "
           "torch_uvm.set_limit() limits managed memory";
  }
  const std::optional<std::size_t> in_force = budget_in_force(device);
  if (!in_force) {
    return std::nullopt;
  }
  const std::size_t total = Context::get().runtime().device_properties(device).total_memory;
  const std::size_t asked = request->kind == BudgetRequest::Kind::kBytes
                                ? request->bytes
                                : resolve_budget(*request, MemoryInfo{total, total}).value().bytes;
  if (*in_force >= asked) {
    return std::nullopt;
  }
  return "torch_uvm: the budget of device " + std::to_string(device) + " is " + format_bytes(*in_force) +
         ", all that the device's free memory and the limit of managed memory allow; " +
         (request->kind == BudgetRequest::Kind::kShare ? show_budget(*request) : format_bytes(asked)) +
         " were asked for";
}

std::optional<std::size_t> budget_of(int device) {
  if (device < 0 || device >= Budgets::kMaxDevices) {
    throw InvalidArgument("a budget of device " + std::to_string(device));
  }
  if (Budgets::get().is_started(device)) {
    return budget_in_force(device);
  }
  const std::optional<BudgetRequest> request = requested_budget(device);
  if (!request || request->kind == BudgetRequest::Kind::kNone) {
    return std::nullopt;
  }
  if (device < Context::get().runtime().device_count() && Machine::get().one_memory[static_cast<std::size_t>(device)]) {
    return std::nullopt;
  }
  const std::size_t bytes = resolve_budget(*request, memory_of(device)).value().bytes;
  const std::unique_lock lock = Budgets::get().lock();
  return Budgets::get().share_of(device, bytes);
}

void request_budget(std::optional<int> device, const std::optional<BudgetRequest>& request) {
  const auto change = [&](Options& options) {
    if (device) {
      options.device_budgets.insert_or_assign(*device, request.value());
    } else {
      options.budget = request;
      options.device_budgets.clear();
    }
  };
  change_and_apply(change, device, /*anew=*/true);
}

void request_default_budget() {
  Budgets& budgets = Budgets::get();
  const std::unique_lock lock = budgets.lock(); // a concurrent request may fail and roll its options back
  if (!Context::get().options().budget) {
    Context::get().change_options([](Options& options) { options.budget = BudgetRequest(); });
    budgets.apply_started(std::nullopt, false);
  }
}

void start_budget(int device) noexcept {
  Budgets& budgets = Budgets::get();
  Budgets::OfDevice& own = budgets.of(device);
  if (own.started.load(std::memory_order_relaxed)) {
    look_at_budget(device);
    return;
  }
  try {
    bool begins = false;
    {
      // Do not wait for the mutex: its holder may wait for the GIL, which the caller may hold. If it is taken, the next
      // allocation tries again.
      const std::unique_lock lock(budgets.mutex, std::try_to_lock);
      if (lock && !own.started.load(std::memory_order_relaxed)) {
        own.started.store(true, std::memory_order_relaxed);
        budgets.apply(device);
        begins = true;
      }
    }
    if (const std::optional<std::string> warning = begins ? budget_warning(device) : std::nullopt) {
      TORCH_WARN(*warning); // with no lock held: the warning handler may take the GIL
    }
  } catch (const std::exception& error) {
    TORCH_WARN("torch_uvm: device ", device, " has no budget, and pages move when they are touched: ", error.what(),
               "; torch_uvm.set_budget() tries again, and a smaller budget may do");
  }
}

void look_at_budget(int device) noexcept {
  Budgets& budgets = Budgets::get();
  const std::int64_t due = budgets.of(device).next_look.load(std::memory_order_relaxed);
  if (due == Budgets::kNever || now_ms() < due) {
    return;
  }
  try {
    const std::unique_lock lock(budgets.mutex, std::try_to_lock); // see start_budget
    if (lock) {
      budgets.look(device);
    }
  } catch (const std::exception&) {
    // The budget stays, and the next look tries again.
  }
}

bool fit_automatic_budget(int device, std::size_t wanted) noexcept {
  Budgets& budgets = Budgets::get();
  try {
    const std::unique_lock lock(budgets.mutex, std::try_to_lock); // see start_budget
    return lock && budgets.fit(device, wanted, wanted == 0);
  } catch (const std::exception&) {
    return false; // the error of the allocation is the one to report
  }
}

bool leave_limit_to_host(std::size_t wanted) noexcept {
  Budgets& budgets = Budgets::get();
  try {
    const ManagedRuntime& runtime = Context::get().runtime();
    const std::unique_lock lock(budgets.mutex, std::try_to_lock); // see start_budget
    if (!lock || engine_in_use() == nullptr || !runtime.limit() ||
        runtime.managed_bytes() + wanted <= *runtime.limit() || wanted > limit_of_devices()) {
      return false;
    }
    budgets.share_limit(limit_of_devices() - wanted);
    return true;
  } catch (const std::exception&) {
    return false; // the error of the allocation is the one to report
  }
}

std::string explain_kept_budget(int device) noexcept {
  try {
    const std::optional<std::size_t> in_force = budget_in_force(device);
    if (!in_force || !is_sized(requested_budget(device))) {
      return "";
    }
    return "managed memory has " + format_bytes(reserved_at(Location::device(device))) + " of this device, within a " +
           "budget of " + format_bytes(*in_force) + " that was asked for, so it gives nothing back. A smaller one " +
           "leaves more to other memory, and \"auto\" fits itself: torch_uvm.set_budget(...)";
  } catch (const std::exception&) {
    return "";
  }
}

std::optional<std::size_t> host_limit_in_force() {
  Budgets& budgets = Budgets::get();
  const std::unique_lock lock = budgets.lock();
  const Options options = Context::get().options();
  return engine_in_use() != nullptr && options.automatic_host_limit ? budgets.host_limit : host_limit_of(options, 0);
}

void change_options(const std::function<void(Options&)>& change) {
  change_and_apply(change, std::nullopt, /*anew=*/false);
}

} // namespace torch_uvm
