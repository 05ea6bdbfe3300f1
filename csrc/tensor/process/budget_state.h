// What budgets.cpp keeps of the devices' budgets.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>

#include "config/budget_request.h"
#include "config/options.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// The request that applies to a device; nullopt if there is none, and so no budget.
std::optional<BudgetRequest> requested_budget(int device);

/// The allocator's reserved bytes of a home.
std::size_t reserved_at(Location home);

/// A device's memory, with our reserved managed memory counted as free: a budget includes it.
MemoryInfo memory_of(int device);

/// What managed memory with the host as its home leaves of the limit to the budgets.
std::size_t limit_of_devices();

std::optional<std::size_t> budget_in_force(int device);

/// \param pinned of the engine, which the system counts as used
std::optional<std::size_t> host_limit_of(const Options& options, std::size_t pinned);

/// Coarse time, which takes 5 ns: every allocation asks for it.
std::int64_t now_ms() noexcept;

struct Budgets {
  static constexpr int kMaxDevices = 128; ///< the range of c10::DeviceIndex
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  struct OfDevice {
    std::atomic<bool> started{false}; ///< the device has had a managed allocation
    std::atomic<std::int64_t> next_look{kNever}; ///< for an automatic budget, in `now_ms`
    std::optional<BudgetRequest> request; ///< in force
    std::optional<Budget> allowed; ///< what the request and the device's memory allow; the limit may allow less
    std::int64_t changed = 0; ///< when `allowed` last was, in `now_ms`
  };

  std::mutex mutex; // taken before that of process_engine.cpp
  /// Locks the mutex, but not in a forked process: a thread of the parent may have held it.
  std::unique_lock<std::mutex> lock();
  std::array<OfDevice, kMaxDevices> devices;
  std::optional<std::size_t> host_limit; ///< in force
  std::atomic<bool> warned_of_none{false};

  static Budgets& get();

  OfDevice& of(int device) {
    return devices[static_cast<std::size_t>(device)];
  }
  bool is_started(int device) {
    return of(device).started.load(std::memory_order_relaxed);
  }

  // All below require the mutex.

  void apply_engine_options();
  void apply(int device);
  /// Applies the requests of started devices, and the limit.
  /// \param device nullopt: all
  /// \param anew also apply a request that is in force already
  void apply_started(std::optional<int> device, bool anew);

  /// Gives a device what the limit leaves of the budget, also if that is in force already.
  void allow(int device, Budget budget);
  /// Gives the devices what the limit leaves of their budgets, unless that is in force.
  /// \param always for this device also if it is in force
  void share_limit(std::size_t limit, std::optional<int> always = std::nullopt);
  /// What the limit would leave of a budget of the device.
  std::size_t share_of(int device, std::size_t bytes);

  /// See fit_automatic_budget.
  bool fit(int device, std::size_t wanted, bool may_grow);
  void look(int device);

 private:
  /// The sum of what the devices are allowed. In double, as it may exceed 64 bits.
  double allowed_together() const;
};

} // namespace torch_uvm
