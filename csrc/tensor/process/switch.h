// Whether new tensors are managed: a process-wide switch, and scopes that override it for a thread
// and for the threads that run its backward.
#pragma once

#include <memory>
#include <optional>
#include <thread>

#include "allocator/allocator.h"

namespace torch_uvm {

/// What holds for the calling thread: its innermost open scope, else the process-wide switch.
bool managed_enabled();

/// The process-wide switch. At any time; tensors made before stay what they are.
void set_managed_enabled(bool on);
bool managed_enabled_globally();

/// Who gives the calling thread managed memory: what its innermost open scope with a choice says; nullptr: the
/// process's caching allocator.
std::shared_ptr<Allocator> current_allocator();

struct ScopeInfo; // switch.cpp

/// What a scope says of the allocator; nullopt: nothing, so that an outer scope's choice holds.
using AllocatorChoice = std::optional<std::shared_ptr<Allocator>>;

/// Overrides the switch from its construction to `close()` on the thread that made it, and on the
/// threads to which autograd carries that thread's state.
///
/// A plain thread_local would not reach backward threads; c10::ThreadLocalDebugInfo is carried over.
class ManagedScope {
 public:
  explicit ManagedScope(bool on, AllocatorChoice allocator = std::nullopt);
  ~ManagedScope() {
    close();
  }
  ManagedScope(const ManagedScope&) = delete;
  ManagedScope& operator=(const ManagedScope&) = delete;

  /// Ends the scope, wherever its state was carried to. Scopes may be closed in any order and from any
  /// thread. Closing twice does nothing. Closed by another thread, it keeps its allocator until the thread that
  /// made it begins or closes another scope, or ends.
  void close() noexcept;

 private:
  std::shared_ptr<ScopeInfo> info_;
  std::thread::id thread_;
};

} // namespace torch_uvm
