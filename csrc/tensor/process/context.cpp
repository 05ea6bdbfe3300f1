#include "tensor/process/context.h"

#include <pthread.h>

#include "residency/engine/relocation_min.h"
#include "runtime/error.h"

namespace torch_uvm {

struct Context::Made {
  explicit Made(std::unique_ptr<ManagedRuntime> made_runtime, const AllocatorOptions& options)
      : runtime(std::move(made_runtime)),
        allocator(*runtime, std::make_unique<ManagedSegmentSource>(*runtime), options) {}

  std::unique_ptr<ManagedRuntime> runtime;
  CachingManagedAllocator allocator;
};

Context& Context::get() {
  static auto* context = new Context(); // leaked: see the class
  return *context;
}

void Context::set_backend(Backend backend) {
  std::lock_guard lock(mutex_);
  if (!backend_.name.empty() && backend_.name != backend.name) {
    throw InvalidArgument("backend '" + backend.name + "' chosen, but '" + backend_.name + "' is already in place");
  }
  backend_ = std::move(backend);
}

std::string Context::backend_name() const {
  std::lock_guard lock(mutex_);
  return backend_.name.empty() ? "none" : backend_.name;
}

bool Context::in_use() const {
  return made_.load(std::memory_order_acquire) != nullptr;
}

void Context::make_runtime_locked() {
  if (made_.load(std::memory_order_acquire) != nullptr) {
    return;
  }
  if (!backend_.make_runtime) {
    throw RuntimeFailure(
        "torch_uvm has no device to manage memory for: no backend is registered "
        "(set TORCH_UVM_DEVICE=emu to use the emulated accelerator)");
  }
  // `prepare` handlers run in reverse order of registration. This one is registered first, so it runs last: the
  // runtime's handler has completed its writes by then, and all locks are held.
  static std::once_flag copies;
  std::call_once(copies, [] {
    pthread_atfork(
        [] {
          if (Made* made = get().made_.load()) {
            made->allocator.copy_for_child();
          }
        },
        nullptr, nullptr);
  });
  auto made = std::make_unique<Made>(backend_.make_runtime(options_), options_.allocator);
  made->runtime->set_limit(options_.limit);
  made_.store(made.release(), std::memory_order_release);
  // Hold this lock and the allocator's across a fork, so that a child cannot inherit one locked by another thread (in a
  // prototype 2 of 60 children hung).
  pthread_atfork(
      [] {
        get().mutex_.lock();
        get().made_.load()->allocator.before_fork();
      },
      [] {
        get().made_.load()->allocator.after_fork_in_parent();
        get().mutex_.unlock();
      },
      [] {
        forked_.store(true);
        get().made_.load()->allocator.after_fork_in_child();
        get().mutex_.unlock();
      });
}

ManagedRuntime& Context::runtime() {
  if (!in_use()) {
    std::lock_guard lock(mutex_);
    make_runtime_locked();
  }
  return *made_.load(std::memory_order_acquire)->runtime;
}

CachingManagedAllocator& Context::managed_allocator() {
  runtime();
  return made_.load(std::memory_order_acquire)->allocator;
}

CachingManagedAllocator* Context::allocator_in_use() {
  return in_use() ? &managed_allocator() : nullptr;
}

Options Context::options() const {
  std::lock_guard lock(mutex_);
  return options_;
}

void Context::change_options(const std::function<void(Options&)>& change) {
  std::lock_guard lock(mutex_);
  Options changed = options_;
  change(changed);
  Made* made = made_.load(std::memory_order_acquire);
  if (made != nullptr) {
    if (!(changed.emulated == options_.emulated)) {
      throw RuntimeFailure(
          "the emulated accelerator is in use already; configure it before the first tensor is made on it");
    }
    made->runtime->set_limit(changed.limit);
    made->allocator.set_options(changed.allocator);
  }
  options_ = changed;
  set_relocation_min(changed.relocation_min);
  zeroes_allocations_.store(changed.zero_on_alloc, std::memory_order_relaxed);
}

} // namespace torch_uvm
