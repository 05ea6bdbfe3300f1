#include "tensor/process/switch.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/version.h>

#include <atomic>
#include <exception>
#include <string_view>

namespace torch_uvm {

// The state of one scope. It is shared by every thread that the scope was carried to, and keeps the
// scope it is nested in: what was carried to another thread must not depend on the first one's stack.
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
// Threads without any scope, which are nearly all, need not look into the debug info at all.
std::atomic<int> open_scopes{0};
std::atomic<int> open_choices{0}; // of an allocator, by these scopes

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
constexpr std::string_view kKindName = "TORCH_UVM_SCOPE";
const c10::DebugInfoKind kKind(&kKindName);
const c10::DebugInfoKind& kProfiler = c10::DebugInfoKind::PROFILER_STATE;
#else
// An enum until torch 2.12; any value that torch itself does not use is a kind of its own.
constexpr auto kKind = static_cast<c10::DebugInfoKind>(0xE5);
constexpr auto kProfiler = c10::DebugInfoKind::PROFILER_STATE;
#endif

ScopeInfo* innermost() {
  return static_cast<ScopeInfo*>(c10::ThreadLocalDebugInfo::get(kKind));
}

// The profiler's info on top of the stack, taken off for the time of our own pushing and popping: the
// profiler pops nothing but its own from the top, and programs start and stop it where they like between
// the two ends of a scope.
class UnderTheProfiler {
 public:
  UnderTheProfiler() {
    if (c10::ThreadLocalDebugInfo::get(kProfiler) == nullptr) {
      return; // nearly always; looking at the top for it would throw
    }
    try {
      profiler_ = c10::ThreadLocalDebugInfo::_pop(kProfiler);
    } catch (const std::exception&) {
      // Something else is on top: then it is in nobody's way but ours.
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

// The info of a closed scope has no effect. It stays on its thread's stack while an open scope or an info of another
// kind is above it, and, where another thread has closed it, until its own thread begins or closes a scope.
void pop_closed() noexcept {
  const ScopeInfo* top = innermost();
  while (top != nullptr && !top->open.load(std::memory_order_relaxed)) {
    try {
      c10::ThreadLocalDebugInfo::_pop(kKind);
    } catch (const std::exception&) {
      return; // an info of another kind is above it: the next scope tries again
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

bool managed_enabled_globally() {
  return global_switch.load(std::memory_order_relaxed);
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
  // The flag first: from here on the scope has no effect anywhere, whether or not it can be popped.
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
