// Whether new tensors are managed: a process-wide switch, and scopes that override it for a thread and for the threads
// that run its backward.
#pragma once

#include <memory>
#include <optional>
#include <thread>

#include "allocator/allocator.h"

namespace torch_uvm {

/// Whether new tensors of the calling thread are managed: by its innermost open scope, else by the process-wide switch.
bool managed_enabled();

/// Sets the process-wide switch, at any time. Existing tensors are not affected.
void set_managed_enabled(bool on);

/// The calling thread's allocator for managed memory, from its innermost open scope that chooses one; nullptr: the
/// process's caching allocator.
std::shared_ptr<Allocator> current_allocator();

struct ScopeInfo; // switch.cpp

/// A scope's choice of allocator; nullopt: no choice, so the outer scope's applies.
using AllocatorChoice = std::optional<std::shared_ptr<Allocator>>;

/// Overrides the switch from construction to `close()`, on the constructing thread and on the threads to which autograd
/// propagates its state.
///
/// The state is in c10::ThreadLocalDebugInfo: autograd propagates it to backward threads, which a plain thread_local
/// would not reach.
class ManagedScope {
 public:
  explicit ManagedScope(bool on, AllocatorChoice allocator = std::nullopt);
  ~ManagedScope() {
    close();
  }
  ManagedScope(const ManagedScope&) = delete;
  ManagedScope& operator=(const ManagedScope&) = delete;

  /// Ends the scope on all threads that its state was propagated to. Scopes may be closed in any order and from any
  /// thread; closing twice does nothing. If another thread closes the scope, its allocator is kept alive until the
  /// constructing thread opens or closes another scope, or ends.
  void close() noexcept;

 private:
  std::shared_ptr<ScopeInfo> info_;
  std::thread::id thread_;
};

} // namespace torch_uvm
