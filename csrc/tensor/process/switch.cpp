#include "tensor/process/switch.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/version.h>

#include <atomic>
#include <exception>
#include <string_view>

namespace torch_uvm {

// The state of one scope, shared by all threads that it was propagated to. It owns its outer scope, because on another
// thread it must not depend on the stack of the first one.
struct ScopeInfo : c10::DebugInfoBase, std::enable_shared_from_this<ScopeInfo> {
  ScopeInfo(bool on, AllocatorChoice allocator, std::shared_ptr<ScopeInfo> outer)
      : on(on), allocator(std::move(allocator)), outer(std::move(outer)) {}

  const bool on;
  const AllocatorChoice allocator;
  std::atomic<bool> open{true};
  const std::shared_ptr<ScopeInfo> outer;
};

namespace {

std::atomic<bool> global_switch{false};
// While these are 0, which is the common case, threads need not look into the debug info.
std::atomic<int> open_scopes{0};
std::atomic<int> open_choices{0}; // open scopes that choose an allocator

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
constexpr std::string_view kKindName = "TORCH_UVM_SCOPE";
const c10::DebugInfoKind kKind(&kKindName);
const c10::DebugInfoKind& kProfiler = c10::DebugInfoKind::PROFILER_STATE;
#else
// An enum up to torch 2.12: any value that torch does not use serves as a kind of our own.
constexpr auto kKind = static_cast<c10::DebugInfoKind>(0xE5);
constexpr auto kProfiler = c10::DebugInfoKind::PROFILER_STATE;
#endif

ScopeInfo* innermost() {
  return static_cast<ScopeInfo*>(c10::ThreadLocalDebugInfo::get(kKind));
}

// Pops the profiler's info from the top of the stack while we push or pop ours, and pushes it back afterwards. The
// profiler expects its info on top when it stops, and a program may start and stop it anywhere inside a scope.
class UnderTheProfiler {
 public:
  UnderTheProfiler() {
    if (c10::ThreadLocalDebugInfo::get(kProfiler) == nullptr) {
      return; // the common case; popping would throw
    }
    try {
      profiler_ = c10::ThreadLocalDebugInfo::_pop(kProfiler);
    } catch (const std::exception&) {
      // An info of another kind is on top of the profiler's; pop_closed copes with that.
    }
  }
  ~UnderTheProfiler() {
    if (profiler_ != nullptr) {
      c10::ThreadLocalDebugInfo::_push(kProfiler, std::move(profiler_));
    }
  }
  UnderTheProfiler(const UnderTheProfiler&) = delete;
  UnderTheProfiler& operator=(const UnderTheProfiler&) = delete;

 private:
  std::shared_ptr<c10::DebugInfoBase> profiler_;
};

ScopeInfo* innermost_open() {
  ScopeInfo* info = innermost();
  while (info != nullptr && !info->open.load(std::memory_order_relaxed)) {
    info = info->outer.get();
  }
  return info;
}

// Pops the infos of closed scopes, which have no effect any more. One stays on the stack while an open scope or an info
// of another kind is above it, or, if another thread closed it, until its own thread opens or closes a scope.
void pop_closed() noexcept {
  const ScopeInfo* top = innermost();
  while (top != nullptr && !top->open.load(std::memory_order_relaxed)) {
    try {
      c10::ThreadLocalDebugInfo::_pop(kKind);
    } catch (const std::exception&) {
      return; // an info of another kind is on top: the next scope tries again
    }
    top = innermost();
  }
}

} // namespace

bool managed_enabled() {
  if (open_scopes.load(std::memory_order_relaxed) != 0) {
    if (const ScopeInfo* const info = innermost_open()) {
      return info->on;
    }
  }
  return global_switch.load(std::memory_order_relaxed);
}

void set_managed_enabled(bool on) {
  global_switch.store(on, std::memory_order_relaxed);
}

std::shared_ptr<Allocator> current_allocator() {
  if (open_choices.load(std::memory_order_relaxed) != 0) {
    for (const ScopeInfo* info = innermost(); info != nullptr; info = info->outer.get()) {
      if (info->allocator && info->open.load(std::memory_order_relaxed)) {
        return *info->allocator;
      }
    }
  }
  return nullptr;
}

ManagedScope::ManagedScope(bool on, AllocatorChoice allocator) : thread_(std::this_thread::get_id()) {
  const UnderTheProfiler under;
  pop_closed();
  ScopeInfo* const outer = innermost_open();
  info_ = std::make_shared<ScopeInfo>(on, std::move(allocator), outer == nullptr ? nullptr : outer->shared_from_this());
  c10::ThreadLocalDebugInfo::_push(kKind, info_);
  open_choices.fetch_add(info_->allocator ? 1 : 0, std::memory_order_relaxed);
  open_scopes.fetch_add(1, std::memory_order_relaxed);
}

void ManagedScope::close() noexcept {
  if (info_ == nullptr) {
    return;
  }
  // Clear the flag first: the scope then has no effect on any thread, whether or not it can be popped.
  info_->open.store(false, std::memory_order_relaxed);
  open_scopes.fetch_sub(1, std::memory_order_relaxed);
  open_choices.fetch_sub(info_->allocator ? 1 : 0, std::memory_order_relaxed);
  info_.reset();
  if (thread_ == std::this_thread::get_id()) {
    const UnderTheProfiler under;
    pop_closed();
  }
}

} // namespace torch_uvm
