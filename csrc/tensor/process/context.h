// The process's one runtime and one managed allocator, made at first use.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "allocator/caching/caching_managed_allocator.h"
#include "config/options.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// A backend: what makes the runtime, once, from the options of that moment.
struct Backend {
  std::string name; ///< "emulated", "cuda"
  std::function<std::unique_ptr<ManagedRuntime>(const Options&)> make_runtime;
};

/// Leaked on purpose, with all it holds: tensors outlive every static destructor.
class Context {
 public:
  static Context& get();

  /// Chooses the backend. \throws InvalidArgument if another one was chosen before
  void set_backend(Backend backend);
  std::string backend_name() const; ///< "none" before one was chosen

  /// Whether the runtime exists already, so that what it was made from cannot change any more.
  bool in_use() const;

  /// \throws RuntimeFailure where there is no backend
  ManagedRuntime& runtime();
  CachingManagedAllocator& managed_allocator();

  Options options() const;
  // What these say of budgets is what was asked for, no more; tensor/process/budgets.h puts it in force.
  /// All options at once, from the text of TORCH_UVM_CONF. \throws as change_options
  void load_options(std::string_view text);
  /// \throws InvalidArgument as torch_uvm::set_option; RuntimeFailure for an option of the runtime's
  ///         making when it is made already. Nothing changes then.
  void set_option(std::string_view key, std::string_view value);
  void set_emulated(const EmulatedConfig& config); ///< the same, for the emulator's options together
  void set_limit(std::optional<std::size_t> bytes);
  void set_budgets(std::optional<BudgetRequest> all, std::map<int, BudgetRequest> single);

  /// The option zero_on_alloc, for every allocation to ask: one relaxed load.
  bool zeroes_allocations() const {
    return zeroes_allocations_.load(std::memory_order_relaxed);
  }

  /// True in a process forked after first use: its managed memory is the parent's.
  static bool forked() noexcept {
    return forked_.load(std::memory_order_relaxed);
  }

 private:
  Context() = default;
  void change_options(const std::function<void(Options&)>& change);
  void make_runtime_locked();

  struct Made; // runtime and allocator
  mutable std::mutex mutex_; // held while the runtime is made; before every lock below
  Backend backend_;
  Options options_;
  std::atomic<Made*> made_{nullptr};
  static inline std::atomic<bool> forked_{false}; // asked for every operator
  std::atomic<bool> zeroes_allocations_{false}; // of options_
};

} // namespace torch_uvm
