// The process-wide runtime and managed allocator, created at first use.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "allocator/caching/caching_managed_allocator.h"
#include "config/options.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// A backend creates the runtime, once, from the options at that time.
struct Backend {
  std::string name; ///< "emulated", "cuda"
  std::function<std::unique_ptr<ManagedRuntime>(const Options&)> make_runtime;
};

/// Leaked on purpose, with all it owns: tensors are freed after static destructors have run.
class Context {
 public:
  static Context& get();

  /// Sets the backend. \throws InvalidArgument if a different one is set already
  void set_backend(Backend backend);
  std::string backend_name() const; ///< "none" if there is no backend

  /// Whether the runtime exists. Then the options that it was created from cannot change any more.
  bool in_use() const;

  /// Creates the runtime at the first call. \throws RuntimeFailure if there is no backend
  ManagedRuntime& runtime();
  CachingManagedAllocator& managed_allocator();
  /// nullptr before the first use. A query must not create the runtime, which would freeze its options, and must not
  /// fail if there is no backend.
  CachingManagedAllocator* allocator_in_use();

  Options options() const;
  /// Changes the options. Budgets are only stored: tensor/process/budgets.h applies them.
  /// \throws what `change` throws; RuntimeFailure for an option that the existing runtime was created from. Nothing
  ///         changes then.
  void change_options(const std::function<void(Options&)>& change);

  /// The option zero_on_alloc. One relaxed load, as every allocation reads it.
  bool zeroes_allocations() const {
    return zeroes_allocations_.load(std::memory_order_relaxed);
  }

  /// True in a process that was forked after first use: the managed memory belongs to the parent.
  static bool forked() noexcept {
    return forked_.load(std::memory_order_relaxed);
  }

 private:
  Context() = default;
  void make_runtime_locked();

  struct Made; // runtime and allocator
  mutable std::mutex mutex_; // held while the runtime is created; taken before the locks of the layers below
  Backend backend_;
  Options options_;
  std::atomic<Made*> made_{nullptr};
  static inline std::atomic<bool> forked_{false}; // read by every operator
  std::atomic<bool> zeroes_allocations_{false}; // copy of an option in options_
};

} // namespace torch_uvm
